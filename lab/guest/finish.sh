#!/bin/sh
# Configuration inside the new root of any image of slices, beyond packages and files. $1 root UUID, $2 ESP volume id.
set -e
echo "UUID=$1 / ext4 defaults,noatime 0 1" > /etc/fstab
rm -f /etc/ssh/ssh_host_*
: > /etc/machine-id
passwd -q -l root
systemctl -q enable systemd-networkd.service ssh.service
version=$(ls /boot/vmlinuz-* | sort -V | tail -n 1)
version=${version#/boot/vmlinuz-}
. /etc/default/grub
mkdir -p /boot/grub/x86_64-efi /boot/grub/i386-pc
cat > /boot/grub/grub.cfg <<CONFIG
set timeout=0
search --no-floppy --fs-uuid --set=root $1
linux /boot/vmlinuz-$version root=UUID=$1 ro $GRUB_CMDLINE_LINUX $GRUB_CMDLINE_LINUX_DEFAULT
initrd /boot/initrd.img-$version
boot
CONFIG
cat > /lab-early.cfg <<CONFIG
search --no-floppy --fs-uuid --set=root $1
set prefix=(\$root)/boot/grub
configfile \$prefix/grub.cfg
CONFIG
for platform in x86_64-efi i386-pc; do
  cp /usr/lib/grub/$platform/*.mod /usr/lib/grub/$platform/*.lst /boot/grub/$platform/
done
common="part_gpt ext2 search search_fs_uuid linux normal configfile echo boot"
grub-mkimage -O x86_64-efi -o /lab-boot.efi -p /boot/grub -c /lab-early.cfg $common fat all_video
grub-mkimage -O i386-pc -o /lab-core.img -p /boot/grub -c /lab-early.cfg $common biosdisk
cp /usr/lib/grub/i386-pc/boot.img /lab-boot.img
rm /lab-early.cfg
