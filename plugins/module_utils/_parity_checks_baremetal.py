"""Parity of a bare-metal host: nothing of slice mode is left, judged by the list of _remnants."""

from __future__ import annotations

from collections.abc import Callable

from ansible_collections.gpuaas.slice.plugins.module_utils import _remnants
from ansible_collections.gpuaas.slice.plugins.module_utils._parity import Verdict, verdict
from ansible_collections.gpuaas.slice.plugins.module_utils._parity_facts import Facts


def _nothing_of(*checks: str) -> Callable[[Facts], Verdict]:
    def examine(facts: Facts) -> Verdict:
        items = _remnants.of(facts, *checks)
        problems = [f"{item.name}: {item.found}" for item in items if not item.ok]
        return verdict(problems, ", ".join(f"{item.name}: {item.found}" for item in items))

    return examine


kernel_cmdline = _nothing_of("kernel_cmdline")
vfio_modules = _nothing_of("vfio_modules")
vfio_binding = _nothing_of("slice_mode", "vfio_binding")
gpu_services = _nothing_of("gpu_services_quiesced")
fabric_vfs = _nothing_of("fabric_vfs")
ipoib_netplan = _nothing_of("ipoib_netplan")
ovs_bridge = _nothing_of("ovs_bridge")
dnsmasq = _nothing_of("dnsmasq", "slice_reservations")
nat = _nothing_of("nat")
ip_forwarding = _nothing_of("ip_forwarding")
network_service = _nothing_of("network_service", "boot_services")
historical_network_service = _nothing_of("historical_network_service")
tmfifo = _nothing_of("tmfifo")
libvirt = _nothing_of("libvirt")
nvme_ownership = _nothing_of("nvme_ownership")
tuning = _nothing_of("tuning")
