#!/bin/sh
# systemd over an overlay of this machine's files; nothing that it could change is shared with us.
# $1 empty folder for what it changes, the rest SOURCE=PLACE: folders of ours and where it has them.
set -eu
scratch=$1
shift
root=$scratch/root
mount -t tmpfs tmpfs "$scratch"
mkdir "$root" "$scratch/upper" "$scratch/work"
mount -t overlay overlay -o "lowerdir=/,upperdir=$scratch/upper,workdir=$scratch/work" "$root"
for shown; do
  place=${shown#*=}
  mkdir -p "$root$place" "$scratch/of$place/upper" "$scratch/of$place/work"
  mount -t overlay overlay \
    -o "lowerdir=${shown%%=*},upperdir=$scratch/of$place/upper,workdir=$scratch/of$place/work" \
    "$root$place"
done

mount -t proc proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
if [ -e /sys/fs/cgroup/cgroup.procs ]; then
  mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
else
  mount -t tmpfs tmpfs "$root/sys/fs/cgroup"
  mkdir "$root/sys/fs/cgroup/systemd" "$root/sys/fs/cgroup/unified"
  mount -t cgroup -o none,name=systemd cgroup "$root/sys/fs/cgroup/systemd"
  mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup/unified"
fi
for folder in run tmp dev; do mount -t tmpfs -o mode=755 tmpfs "$root/$folder"; done
chmod 1777 "$root/tmp"
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
for device in "null 1 3" "zero 1 5" "full 1 7" "random 1 8" "urandom 1 9" "tty 5 0"; do
  set -- $device
  mknod -m 666 "$root/dev/$1" c "$2" "$3"
done

# A login as root would run the dotfiles of whoever tests, which may wait for a lock.
rm -f "$root"/root/.bashrc "$root"/root/.bash_profile "$root"/root/.bash_login "$root"/root/.profile
: > "$root/etc/fstab"
: > "$root/etc/machine-id"
ln -sf /usr/lib/systemd/system/basic.target "$root/etc/systemd/system/default.target"
# As at the end of an initramfs; a mere chroot would be one to systemd as well.
cd "$root"
mount --move . /
# container: systemd then leaves clocks, modules and devices to the machine around it.
exec chroot . /usr/bin/env -i container=gpuaas-test PATH=/usr/sbin:/usr/bin:/sbin:/bin \
  /lib/systemd/systemd --system
