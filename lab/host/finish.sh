#!/bin/sh
# Configuration inside the new root, beyond packages and files. $1 root UUID, $2 ESP volume id.
set -e
cat > /etc/fstab <<TABLE
UUID=$1 / ext4 defaults,noatime 0 1
UUID=$2 /boot/efi vfat umask=0077 0 1
UUID=5e000000-0000-4000-8000-00000000a000 /share0 ext4 defaults,nofail 0 2
UUID=5e000000-0000-4000-8000-00000000a002 /share2 ext4 defaults,nofail 0 2
TABLE
mkdir -p /boot/efi /share0 /share2 /boot/grub/x86_64-efi
rm -f /etc/ssh/ssh_host_*
: > /etc/machine-id
passwd -q -l root
systemctl -q enable systemd-networkd.service ssh.service lab-hostkeys.service lab-userdata.service
# A fresh server does not run dnsmasq on all addresses. The masked units only cost boot time here.
systemctl -q disable dnsmasq.service
systemctl -q mask netplan-ovs-cleanup.service apt-daily.timer apt-daily-upgrade.timer \
  e2scrub_all.timer e2scrub_reap.service man-db.timer mdmonitor-oneshot.timer mdcheck_start.timer \
  mdcheck_continue.timer
# libvirt loads a domain's profile about ten times at each start. By emulation each took four seconds, and takes less
# than one without these.
printf 'Optimize=%s\n' no-expr-simplify no-minimize >> /etc/apparmor/parser.conf

version=$(ls /boot/vmlinuz-* | sort -V | tail -n 1)
version=${version#/boot/vmlinuz-}
. /etc/default/grub
# Boot entry until the first update-grub, which writes no entry while the root is not yet a disk.
cat > /boot/grub/grub.cfg <<CONFIG
set timeout=0
search --no-floppy --fs-uuid --set=root $1
linux /boot/vmlinuz-$version root=UUID=$1 ro $GRUB_CMDLINE_LINUX
initrd /boot/initrd.img-$version
boot
CONFIG
cp /usr/lib/grub/x86_64-efi/*.mod /usr/lib/grub/x86_64-efi/*.lst /boot/grub/x86_64-efi/
# With "configfile" GRUB would find no command outside of this loader. It then takes each "if" of a menu for true, also
# that of a failed boot, and waits 40 seconds.
cat > /lab-early.cfg <<CONFIG
search --no-floppy --fs-uuid --set=root $1
set prefix=(\$root)/boot/grub
normal \$prefix/grub.cfg
CONFIG
grub-mkimage -O x86_64-efi -o /lab-boot.efi -p /boot/grub -c /lab-early.cfg \
  part_gpt ext2 fat search search_fs_uuid linux normal echo boot all_video
rm /lab-early.cfg
