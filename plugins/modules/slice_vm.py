#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""The virtual machine of one allocation, with its seed, address and networks."""

from __future__ import annotations

DOCUMENTATION = r"""
module: slice_vm
short_description: The virtual machine of one allocation with its seed, address and networks
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Writes the cloud-init seed, reserves the address, puts the fabric functions into the tenant's
    network, and defines and starts the domain, in this order. All in one call, because each call is
    a command over SSH. O(state=absent) takes the same apart, the domain first.
  - A failure names its part in RV(part). The parts before it are done and stay; a second run goes
    on from there.
  - The seed is a NoCloud ISO (label C(cidata)) that only root reads. Its documents are data and
    rendered here, never by a template, so no text of a tenant can add a key.
  - The address is a file in the host directory of the slice network's dnsmasq. All reservations are
    checked together by C(dnsmasq --test) first, because one duplicate stops dnsmasq for everyone.
    Removing it has dnsmasq give up the DHCP lease, and drops tracked connections of the address.
  - On Ethernet the virtual functions come into the tenant's VLAN, with spoof check on and trust
    off. The card enforces them; a guest cannot change them. Every value is read back.
    C(gpuaas-slice-fabric.service) restores the VLAN at boot and within seconds. On InfiniBand the
    tenant's network is a partition, which the subnet manager sets; GUIDs and link state are
    verified. Not yet run on hardware. Removed functions return to the VLAN of idle functions.
  - The domain is started paused, its Open vSwitch port is guarded with flows, and only then it
    runs. The guard is kept in C(/var/lib/gpuaas/guards) before the domain starts, and restored
    after a restart of the switch. libvirt's start hook refuses a start without it.
  - The guard lets the guest use its own MAC and IPv4 address only. A guest serves no DHCP, sends
    no IPv6, reaches no other slice, and of the host only DHCP, DNS and ping. The host reaches the
    guest by SSH.
  - The port's limits (O(spec.mgmt_qos)) are set before the guest runs too, read back from the
    switch's database, and gone with the VM.
  - Stopping asks the guest first and takes the power away after O(shutdown_deadline).
  - A restart (O(state=restarted)) does everything that a start does before the domain starts, and
    asks everything that its start asks, before the guest stops. What would be refused is refused
    while the guest runs on, with the same code. libvirt takes the new definition before, too.
  - With O(power_fence) each step is refused after a later run of power began, or the release.
  - Removing leaves no definition, NVRAM, console log, port or flow behind. The disk is not
    touched.
  - Refuses with C(spec_invalid), C(lease_missing), C(stale_fence), C(mac_in_use), C(ip_in_use),
    C(dnsmasq_down), C(function_missing), C(wrong_link), C(function_renamed),
    C(function_link_state), C(function_guarded), C(vlan_invalid), C(domain_differs),
    C(domain_paused), C(domain_crashed), C(domain_busy), C(port_missing), C(qemu_orphan),
    C(domain_not_stopped), C(not_bootstrapped), C(boot_changed),
    C(mgmt_attachment_unsupported), C(fabric_manager_unreachable),
    C(fabric_manager_refused), C(fabric_manager_invalid), C(nvlink_partition_overlap),
    C(nvlink_partition_missing), C(nvlink_partition_unchanged), C(nvlink_record_unreadable).
options:
  allocation_id:
    description: The allocation, a UUID with dashes. Domain and port are named after it.
    type: str
    required: true
  state:
    description: Requested state of the VM. A VM that is C(stopped) keeps its definition, address
      and fabric functions. C(restarted) stops a VM that runs, and starts it.
    type: str
    choices: [running, restarted, stopped, absent]
    default: running
  slots:
    description: >-
      The bundles of its slots with C(slot_id) and C(fence), and C(fabric_vf_pci_address) of those
      with a fabric function. Nothing is made under a fence older than the highest that the host has
      seen.
    type: list
    elements: dict
    default: []
  power_fence:
    description: >-
      Number of this run of power of the allocation. The host refuses a run with a lower number
      than the highest that it has seen. Without it the fences of the slots count alone.
    type: int
  boot_id:
    description: >-
      The boot under which this host passed parity. A run with O(power_fence) does nothing under
      another boot; without this option it does not ask.
    type: str
  bridge:
    description: The Open vSwitch bridge, whose addresses dnsmasq serves.
    type: str
    default: ovsbr0
  bridge_address:
    description: >-
      The bridge's own address with prefix length. Required with O(state=running) and
      O(state=restarted).
    type: str
  mac:
    description: MAC of the management interface, in lower case and quoted. Required unless
      O(state=stopped).
    type: str
  ip:
    description: The guest's IPv4 address. Required unless O(state=stopped).
    type: str
  user_data:
    description:
      - The cloud-config document as JSON. Without it no seed is written, as at each later start.
      - Never shown, neither in results nor in logs.
    type: json
  guest_runtime:
    description:
      - The C(vm.guest_runtime) of the hardware profile. Adds to O(user_data) the readiness probes
        as a unit of the guest, and with C(source=cloud_init) the installation of the named
        versions of NVIDIA's driver, CUDA and the RDMA packages, with a restart.
    type: dict
    default: {}
  tenant_data:
    description:
      - The tenant's own cloud-config document as JSON, merged after the rest. What the rest names
        stays; files, commands and packages are joined.
      - Never shown, neither in results nor in logs.
    type: json
  meta_data:
    description: The meta-data document, with C(instance-id) and C(local-hostname).
    type: dict
    default: {}
  network_config:
    description: The network-config document, version 2. Interfaces are matched by MAC.
    type: dict
    default: {}
  link:
    description: Link type of the fabric.
    type: str
    choices: [infiniband, ethernet]
    default: ethernet
  vlan:
    description: The tenant's VLAN. 0 on InfiniBand, and where one tenant owns the fabric.
    type: int
    default: 0
  identities:
    description: Approved MAC or GUID of a function, by PCI address; others are refused.
    type: dict
    default: {}
  shutdown_deadline:
    description: Seconds that the guest gets to power off by itself.
    type: int
    default: 60
  spec:
    description: Resources of the VM. Required with O(state=running) and O(state=restarted).
    type: dict
    suboptions:
      vcpus: {description: Virtual CPUs., type: int, required: true}
      memory_mib: {description: Memory., type: int, required: true}
      cpus:
        description: Host CPUs, one for each virtual CPU; none lets them float.
        type: list
        elements: int
        default: []
      numa_node:
        description: Where all memory comes from; -1 for anywhere.
        type: int
        default: -1
      cells:
        description: >-
          Parts of the VM by NUMA node of the host, as in the bundle of M(gpuaas.slice.slice_lease).
          Several parts are NUMA nodes of the guest.
        type: list
        elements: dict
        default: []
        suboptions:
          numa_node: {description: NUMA node of the host., type: int, required: true}
          vcpus: {description: Virtual CPUs of this part., type: int, required: true}
          memory_mib: {description: Memory of this part., type: int, required: true}
          cpus: {description: Host CPUs., type: list, elements: int, default: []}
          devices: {description: PCI addresses., type: list, elements: str, default: []}
      layout:
        description: What the guest is shown of the host, and how QEMU's own threads run.
        type: dict
        suboptions:
          threads: {description: Threads of each core., type: int, default: 1}
          topoext: {description: Whether an AMD host shows them., type: bool, default: false}
          emulator_cpus:
            description: Host CPUs for QEMU's own threads; none for those of the guest.
            type: list
            elements: int
            default: []
          switches:
            description: PCI addresses below one switch of the host, a list for each switch.
            type: list
            elements: list
            default: []
          disk_io:
            description: How QEMU reads and writes disks.
            type: str
            choices: [native, io_uring]
            default: native
      firmware: {description: Firmware., type: str, choices: [bios, uefi], default: bios}
      hugepages: {description: Memory from 1 GiB pages., type: bool, default: false}
      nested:
        description: Whether the guest may itself run virtual machines.
        type: bool
        default: false
      gpus: {description: PCI addresses of the GPUs., type: list, elements: str, required: true}
      fabric_vfs:
        description: PCI addresses of the fabric virtual functions.
        type: list
        elements: str
        default: []
      disks:
        description: Paths in /dev/disk/by-id; the first one boots.
        type: list
        elements: str
        required: true
      mgmt_attachment:
        description: >-
          How the management interface reaches the bridge. V(vf_representor) is refused until the
          embedded switch mode exists.
        type: str
        choices: [tap, vf_representor]
        default: tap
      mgmt_qos:
        description: Rate limit of the management interface in both directions; none is no limit.
        type: dict
        suboptions:
          rate_kbps: {description: 1000 bits a second each way., type: int, required: true}
          burst_kb: {description: 1000 bits that may be sent at once., type: int, required: true}
      nvlink_partition:
        description:
          - NVLink partition of the GPUs, on a board with NVSwitches in shared mode; none changes
            nothing. Activated before the start, deactivated after the stop. Needs C(fmpm).
        type: dict
        suboptions:
          modules:
            description: Module of each GPU on the board.
            type: list
            elements: int
            required: true
          address: {description: IPv4 address of the Fabric Manager., type: str}
          socket: {description: Its Unix socket on this host instead., type: str}
      qemu_arguments:
        description: Further QEMU arguments of the hardware profile, never of a tenant.
        type: list
        elements: str
        default: []
requirements:
  - libvirt and QEMU
  - Open vSwitch
  - nftables
  - dnsmasq
  - conntrack
  - iproute2
  - genisoimage, xorriso or mkisofs
seealso:
  - module: gpuaas.slice.slice_vm_info
  - module: gpuaas.slice.slice_lease
  - module: gpuaas.slice.slice_ready
  - module: gpuaas.slice.slice_handover
  - module: gpuaas.slice.sriov_vfs
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Run the VM
  gpuaas.slice.slice_vm:
    allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
    slots: "{{ slice_slots }}"
    bridge_address: 10.100.0.1/24
    mac: "52:54:00:64:00:0a"
    ip: 10.100.0.10
    vlan: 3001
    user_data: "{{ {'users': [{'name': 'ada', 'ssh_authorized_keys': keys}]} | to_json }}"
    meta_data: {instance-id: 23bd713b-6073-4ef7-8a51-2897e902365d, local-hostname: trainer}
    network_config:
      version: 2
      ethernets: {management: {match: {macaddress: "52:54:00:64:00:0a"}, dhcp4: true}}
    spec:
      vcpus: 24
      memory_mib: 65536
      cpus: "{{ lease.bundle.cpus }}"
      numa_node: "{{ lease.bundle.numa_node }}"
      firmware: uefi
      gpus: ["0000:43:00.0"]
      fabric_vfs: ["0000:61:10.1"]
      disks: [/dev/disk/by-id/nvme-eui.5e0000000000a000]

- name: Stop and remove it
  gpuaas.slice.slice_vm:
    allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
    slots: "{{ slice_slots }}"
    mac: "52:54:00:64:00:0a"
    ip: 10.100.0.10
    state: absent
    shutdown_deadline: 120
  register: removed
  # removed.evidence.stop_domain.shutdown is graceful or hard; without that step there was none.
"""

RETURN = r"""
domain:
  description: The domain after the run.
  returned: when its part was reached
  type: dict
  sample:
    name: gpuaas-slice-23bd713b60734ef78a512897e902365d
    state: running
    off_by_guest: false
    port: gs23bd713b6073
    ofport: 3
    flows: 24
    qos: {rate_kbps: 1000000, burst_kb: 100000, shaper: linux-htb, shaped_bps: 1000000000, rows: 1}
    pid: 4711
seed:
  description: Path of the seed, and whether it exists.
  returned: when its part was reached
  type: dict
  sample:
    path: /var/lib/gpuaas/seeds/gpuaas-slice-23bd713b60734ef78a512897e902365d.iso
    present: true
reservation:
  description: The address after the run; strings are empty where there is nothing.
  returned: when its part was reached
  type: dict
  sample:
    mac: "52:54:00:64:00:0a"
    ip: 10.100.0.10
    lease_ip: ""
    connections: 0
functions:
  description: The functions as the kernel shows them; VLAN, spoof check and trust on Ethernet only.
  returned: when their part was reached
  type: list
  elements: dict
  sample:
    - address: "0000:25:10.0"
      pf: "0000:25:00.0"
      index: 0
      link: ethernet
      identity: "02:1d:77:0e:5b:90"
      link_state: auto
      vlan: 3001
      spoof_check: true
      trust: false
part:
  description: The part that failed, such as C(reserve_address).
  returned: failure
  type: str
  sample: start_domain
"""

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _tuning_profiles
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _pci
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import _slice_fabric
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _nvlink
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _cloud_seed,
    _guest_runtime,
    _machine,
    _power_fence,
    _reservation,
)

_GUEST = _tuning_profiles.DEFINITIONS[_tuning_profiles.NETWORK]
_Facts = Mapping[str, Any]


def parts(params: _change.Params) -> tuple[_change.Part, ...]:
    """A guest never sees the network of another tenant, or of idle functions: the domain comes last
    and goes first.
    """
    late = [_change.Part("fence_power", _power_fence.SUBJECT, _fenced)]
    fence = [] if params.get("power_fence") is None else late
    stop = _change.Part("stop_domain", _machine.SUBJECT, _stopped)
    if params["state"] == "stopped":
        return (*fence, stop)
    if params["state"] == "absent":
        return (
            _change.Part("remove_domain", _machine.SUBJECT, _absent),
            _change.Part("take_functions", _slice_fabric.SUBJECT, _absent),
            _change.Part("release_address", _reservation.SUBJECT, _absent),
            _change.Part("remove_seed", _cloud_seed.SUBJECT, _absent),
        )
    seed = _change.Part("write_seed", _cloud_seed.SUBJECT, _seeded)
    # Parts before the stop refuse what the start would, and change nothing for a guest that runs.
    prepare = _change.Part("prepare_domain", _machine.SUBJECT, _prepared)
    return (
        *fence,
        # Only the first start of a slice has a seed.
        *([] if params.get("user_data") is None else [seed]),
        _change.Part("reserve_address", _reservation.SUBJECT, _present),
        # A restart of the host has taken the functions out of the tenant's network.
        _change.Part("give_functions", _slice_fabric.SUBJECT, _present),
        *((prepare, stop) if params["state"] == "restarted" else ()),
        _change.Part("start_domain", _machine.SUBJECT, _running),
    )


def _absent(params: _change.Params, _facts: _Facts) -> _change.Params:
    return {**params, "state": "absent"}


def _fenced(params: _change.Params, _facts: _Facts) -> _change.Params:
    """With the power fence in each slot, where every part checks it before each step."""
    if params.get("power_fence") is None:
        return params
    slots = [{**slot, "power_fence": params["power_fence"]} for slot in params["slots"]]
    return {**params, "slots": slots}


def _present(params: _change.Params, facts: _Facts) -> _change.Params:
    return {**_fenced(params, facts), "state": "present"}


def _seeded(params: _change.Params, facts: _Facts) -> _change.Params:
    runtime = params["guest_runtime"] or {}
    data = _guest_runtime.cloud_config(runtime, _GUEST.sysctl, _GUEST.memlock)
    return {**_present(params, facts), "runtime_data": data}


def _stopped(params: _change.Params, facts: _Facts) -> _change.Params:
    return {**_fenced(params, facts), "state": "stopped"}


def _prepared(params: _change.Params, facts: _Facts) -> _change.Params:
    return {**_running(params, facts), "state": "prepared"}


def _running(params: _change.Params, facts: _Facts) -> _change.Params:
    seed = facts.get("seed", {}).get("path", "")
    spec = {**params["spec"], "mac": params["mac"], "seed_path": seed}
    return {**_fenced(params, facts), "state": "running", "spec": spec}


def _strings(*, required: bool = False) -> dict[str, Any]:
    spec: dict[str, Any] = {"type": "list", "elements": "str"}
    return {**spec, "required": True} if required else {**spec, "default": []}


CELL: dict[str, Any] = {
    "numa_node": {"type": "int", "required": True},
    "vcpus": {"type": "int", "required": True},
    "memory_mib": {"type": "int", "required": True},
    "cpus": {"type": "list", "elements": "int", "default": []},
    "devices": {"type": "list", "elements": "str", "default": []},
}
LAYOUT: dict[str, Any] = {
    "threads": {"type": "int", "default": 1},
    "topoext": {"type": "bool", "default": False},
    "emulator_cpus": {"type": "list", "elements": "int", "default": []},
    "switches": {"type": "list", "elements": "list", "default": []},
    "disk_io": {"type": "str", "choices": ["native", "io_uring"], "default": "native"},
}
SPEC: dict[str, Any] = {
    "vcpus": {"type": "int", "required": True},
    "memory_mib": {"type": "int", "required": True},
    "cpus": {"type": "list", "elements": "int", "default": []},
    "numa_node": {"type": "int", "default": -1},
    "cells": {"type": "list", "elements": "dict", "default": [], "options": CELL},
    "layout": {"type": "dict", "options": LAYOUT},
    "firmware": {"type": "str", "choices": ["bios", "uefi"], "default": "bios"},
    "hugepages": {"type": "bool", "default": False},
    "nested": {"type": "bool", "default": False},
    "gpus": _strings(required=True),
    "fabric_vfs": _strings(),
    "disks": _strings(required=True),
    "mgmt_attachment": {"type": "str", "choices": ["tap", "vf_representor"], "default": "tap"},
    "mgmt_qos": {
        "type": "dict",
        "options": {
            "rate_kbps": {"type": "int", "required": True},
            "burst_kb": {"type": "int", "required": True},
        },
    },
    "nvlink_partition": _nvlink.OPTION,
    "qemu_arguments": _strings(),
}
OPTIONS: dict[str, Any] = {
    "allocation_id": {"type": "str", "required": True},
    "state": {
        "type": "str",
        "choices": ["running", "restarted", "stopped", "absent"],
        "default": "running",
    },
    "slots": {"type": "list", "elements": "dict", "default": []},
    "power_fence": {"type": "int"},
    "boot_id": {"type": "str"},
    "bridge": {"type": "str", "default": "ovsbr0"},
    "bridge_address": {"type": "str"},
    "mac": {"type": "str"},
    "ip": {"type": "str"},
    "user_data": {"type": "json", "no_log": True},
    "guest_runtime": {"type": "dict", "default": {}},
    "tenant_data": {"type": "json", "no_log": True},
    "meta_data": {"type": "dict", "default": {}},
    "network_config": {"type": "dict", "default": {}},
    "link": {"type": "str", "choices": [*_pci.LINKS], "default": _pci.ETHERNET},
    "vlan": {"type": "int", "default": 0},
    "identities": {"type": "dict", "default": {}},
    "shutdown_deadline": {"type": "int", "default": 60},
    "spec": {"type": "dict", "options": SPEC},
}


def main() -> None:
    module = AnsibleModule(
        argument_spec=OPTIONS,
        required_if=[
            ("state", "running", ("spec", "mac", "ip", "bridge_address")),
            ("state", "restarted", ("spec", "mac", "ip", "bridge_address")),
            ("state", "absent", ("mac", "ip")),
        ],
        supports_check_mode=True,
    )
    # Ansible hides every single value of a dictionary, also where it is a part of the path of the
    # seed. Nothing here shows the content, so hiding the whole text is enough.
    texts = (module.params[name] for name in ("user_data", "tenant_data"))
    module.no_log_values = {text for text in texts if text and text != "{}"}
    _change.run_parts(module, parts(module.params))


if __name__ == "__main__":
    main()
