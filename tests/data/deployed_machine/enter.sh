#!/bin/sh
# Inside `unshare --mount --net`: folders that bootstrap writes become copies that vanish with us, and
# programs that would act on the machine become stand-ins. $1: scratch folder, $2: the stand-in; the rest is run.
set -eu
scratch=$1 program=$2
shift 2
mount --make-rprivate /
mount -t tmpfs scratch "$scratch"
for folder in etc var/lib var/cache usr/local boot; do
  mkdir -p "$scratch/$folder/upper" "$scratch/$folder/work"
  mount -t overlay overlay -o "lowerdir=/$folder,upperdir=$scratch/$folder/upper,workdir=$scratch/$folder/work" "/$folder"
done
mkdir -p "$scratch/modules/vfio" "$scratch/modules/vfio_pci" "$scratch/modules/vfio_iommu_type1"
mount -t sysfs sysfs /sys
mount --bind "$scratch/modules" /sys/module
cp "$program" "$scratch/program"
for name in systemctl dpkg-query iptables update-grub update-initramfs modprobe dnsmasq apt-get; do
  cp "$program" "/usr/local/sbin/$name"
done
for name in ovs-vsctl ovs-ofctl ovs-appctl nft iptables-restore; do
  cp "$(dirname "$0")/../../standin/switch.py" "/usr/local/sbin/$name"
done
mount -t tmpfs run /run
mkdir /run/machine
ip link set lo up
exec "$@"
