# Bootstrap ($1) and restore (profile: $2) of a copy of a machine, played by test_restore_baremetal.py.
everything() {
  # useradd and userdel keep the file as it was before them, with a dash after its name.
  find /etc /usr/local /boot \( -type f -o -type l \) ! -path '/etc/*-' \
    -exec md5sum {} + 2>/dev/null | sort
  find /var/cache -maxdepth 1 -name 'gpuaas*'
  # Services, rules, interfaces, forwarding; not the logs of calls.
  ls /run/machine | grep -vx -e calls -e watch; iptables -t nat -S POSTROUTING
  for bridge in $(ovs-vsctl list-br); do
    echo $bridge; ovs-vsctl --columns=fail_mode find Bridge name=$bridge
    ovs-ofctl dump-flows $bridge
  done
  for table in gpuaas_slice gpuaas_connections; do
    nft --stateless list table inet $table 2>/dev/null
  done
  ip -br address; cat /proc/sys/net/ipv4/ip_forward; stat -c %a /var/lib/libvirt
}
restore() {
  profile=$2
  shift 2
  ansible-playbook -i localhost, -c local playbooks/restore_baremetal.yml "$@"     -e "slice_profile_file=$profile" -e ansible_python_interpreter=/usr/bin/python3 2>&1
}
update-grub
mkdir -m 700 -p /var/lib/libvirt
rm -f /etc/gpuaas/enrolment.env
touch /run/machine/gpu.service.active /run/machine/gpu.service.enabled
touch /run/machine/idle.service.active
mkdir -p /usr/local/lib/systemd/system
touch /usr/local/lib/systemd/system/gpu.service /usr/local/lib/systemd/system/idle.service
everything > /run/machine-before
sh "$1" > /dev/null
everything > /run/machine-between
ls /run/machine
readlink /etc/systemd/system/gpu.service /etc/systemd/system/idle.service
ledger=/var/lib/gpuaas/ledger/slot-0.json
mkdir -p /var/lib/gpuaas/ledger
# Without a holder the mark would not count: this host has no disk eui.1.
cat > $ledger <<'end'
{"slot_id": "slot-0", "fence": 3, "dirty": true, "disk": "eui.1", "allocation_id": "alloc-1"}
end
echo ---; restore "$@"
echo '{"slot_id": "slot-0", "fence": 3}' > $ledger
echo ---; restore "$@" --check
everything | diff /run/machine-between -
# A disk died under its tenant. What the reconciler has written off does not keep the host.
cat > $ledger <<'end'
{"slot_id": "slot-0", "fence": 3, "dirty": true, "disk": "eui.1",
 "allocation_id": "23bd713b-6073-4ef7-8a51-2897e902365d"}
end
cat > /run/machine-written-off <<'end'
{"slice_written_off": [{"slot_id": "slot-0", "fence": 4, "reason": "no disk any more",
 "allocation_id": "23bd713b-6073-4ef7-8a51-2897e902365d"}]}
end
echo ---; restore "$@" --check -e @/run/machine-written-off
everything | diff /run/machine-between -
# An operator's own tuning goes with the rest, whatever a later release has named there.
echo '{"profiles": ["of-a-later-release"]}' > /etc/gpuaas/tuning.json
echo ---; restore "$@" -e @/run/machine-written-off
# A boot: what was built since the last one is what runs now.
sed -i 's/"boot_id": "[^"]*"/"boot_id": "earlier"/' /var/lib/gpuaas/initramfs.json
echo ---; restore "$@"
echo ---; restore "$@"
everything > /run/machine-after
echo ---; diff /run/machine-before /run/machine-after
echo ---; sh "$1" > /dev/null; everything | diff /run/machine-between -
echo ---; diff /run/machine-before /run/machine-between | grep -c '^[<>]'
