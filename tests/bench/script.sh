#!/bin/sh
# Peer of provision_slice: the script that an engineer would write for the same steps on the same host.
# Usage: script.sh NAME IMAGE SHA256 DISK MAC IP GPU VF KEY. Prints the seconds and the bytes of dd.
set -eu
name=$1 image=$2 sha=$3 disk=$4 mac=$5 ip=$6 gpu=$7 vf=$8 key=$9

pci() { # 0000:23:00.0 -> attributes of a libvirt address
  echo "$1" | sed -E 's/^(....):(..):(..)\.(.)$/domain="0x\1" bus="0x\2" slot="0x\3" function="0x\4"/'
}

# Plan: the devices are present, bound and unused.
test -b "$disk"; ! findmnt -rn -S "$disk" >/dev/null
for device in "$gpu" "$vf"; do readlink "/sys/bus/pci/devices/$device/driver" | grep -q vfio-pci; done
ovs-vsctl br-exists ovsbr0

# Image: digest, then clone.
echo "$sha  $image" | sha256sum -c --quiet
began=$(date +%s.%N)
dd if="$image" of="$disk" bs=4M oflag=direct conv=fsync status=none
echo "dd_seconds $(echo "$(date +%s.%N) $began" | awk '{print $1-$2}')"

# Address, seed, domain.
mkdir -p /var/lib/gpuaas/dnsmasq/hosts.d
echo "$mac,$ip,bench,infinite" > "/var/lib/gpuaas/dnsmasq/hosts.d/$name"
dnsmasq --test 2>/dev/null; systemctl kill -s HUP dnsmasq
work=$(mktemp -d)
printf '#cloud-config\nhostname: bench\nusers: [{name: tenant, shell: /bin/bash, sudo: "ALL=(ALL) NOPASSWD:ALL", ssh_authorized_keys: ["%s"]}]\n' "$key" > "$work/user-data"
printf 'instance-id: %s\nlocal-hostname: bench\n' "$name" > "$work/meta-data"
printf 'version: 2\nethernets: {m: {match: {macaddress: "%s"}, dhcp4: true}}\n' "$mac" > "$work/network-config"
genisoimage -quiet -V cidata -J -r -o "/var/lib/libvirt/images/$name.iso" "$work"
cat > "$work/domain.xml" <<XML
<domain type="kvm"><name>$name</name><memory unit="MiB">768</memory><vcpu>1</vcpu>
<os><type arch="x86_64" machine="q35">hvm</type></os><features><acpi/><apic/></features><cpu mode="host-passthrough"/>
<on_poweroff>destroy</on_poweroff><on_reboot>restart</on_reboot><devices>
<disk type="block" device="disk"><driver name="qemu" type="raw" cache="none" io="native"/><source dev="$disk"/><target dev="vda" bus="virtio"/><boot order="1"/></disk>
<disk type="file" device="disk"><driver name="qemu" type="raw"/><source file="/var/lib/libvirt/images/$name.iso"/><target dev="vdb" bus="virtio"/><readonly/></disk>
<interface type="bridge"><mac address="$mac"/><source bridge="ovsbr0"/><virtualport type="openvswitch"/><model type="virtio"/></interface>
<hostdev mode="subsystem" type="pci" managed="no"><source><address $(pci "$gpu")/></source></hostdev>
<hostdev mode="subsystem" type="pci" managed="no"><source><address $(pci "$vf")/></source></hostdev>
<serial type="file"><source path="/var/log/libvirt/qemu/$name-console.log"/><target port="0"/></serial>
<memballoon model="none"/><rng model="virtio"><backend model="random">/dev/urandom</backend></rng></devices></domain>
XML
virsh -q define "$work/domain.xml"
virsh -q start "$name"

# Readiness: the DHCP lease, then SSH.
until grep -q "$ip" /var/lib/misc/dnsmasq.leases; do sleep 1; done
until bash -c "exec 3<>/dev/tcp/$ip/22 && read -r -t 5 line <&3 && [ \"\${line#SSH-}\" != \"\$line\" ]" 2>/dev/null; do sleep 1; done
echo ready
