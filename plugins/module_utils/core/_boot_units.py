"""Boot services of a slice host, without their settings, which depend on the host.

Paths of settings are repeated here, because the code that runs at boot does not import its unit.
"""

from __future__ import annotations

from ansible_collections.gpuaas.slice.plugins.module_utils.core._boot_files import Unit

NETWORK = Unit(
    name="gpuaas-slice-network-baseline",
    description="Network of this slice host: bridge, forwarding, NAT, guards of the guests",
    module="network._bridge",
    settings_path="/etc/gpuaas/network-baseline.json",
    order=(
        # Not after rshim, because it is optional, and an optional part must not delay the guests'
        # network.
        "After=network.target openvswitch-switch.service",
        "Wants=openvswitch-switch.service",
        "Before=dnsmasq.service",
    ),
    # dnsmasq waits for this unit at boot; without --no-block the two would wait for each other.
    after="/usr/bin/systemctl --no-block restart dnsmasq.service",
    patient=True,
    guardian=True,
    start_hook="network._start_hook",
)
FABRIC = Unit(
    name="gpuaas-slice-fabric",
    description="Virtual functions of the fabric cards of this slice host, with their guards",
    module="fabric._virtual_functions",
    settings_path="/etc/gpuaas/fabric.json",
    order=("After=systemd-modules-load.service", "Before=gpuaas-slice-vfio.service"),
    patient=True,
    guardian=True,
)
BINDING = Unit(
    name="gpuaas-slice-vfio",
    description="Bind the approved PCI functions of this slice host to vfio-pci",
    module="boot._vfio_bind",
    settings_path="/etc/gpuaas/vfio-binding.json",
    order=(
        "After=systemd-modules-load.service gpuaas-slice-fabric.service",
        "Before=libvirtd.service",
    ),
)
# Runs before any driver loads. The whole boot waits for it, so its time limit is short. Its files
# are on the root file system. Functions of fabric cards are created later, and wait for BINDING.
CLAIM = Unit(
    name="gpuaas-slice-vfio-claim",
    description="Keep the approved PCI functions of this slice host from its own drivers",
    module="boot._vfio_bind",
    entry="claim",
    settings_path=BINDING.settings_path,
    order=(
        "DefaultDependencies=no",
        "Before=systemd-modules-load.service systemd-udevd.service systemd-udev-trigger.service",
        "Conflicts=shutdown.target",
        "Before=shutdown.target",
    ),
    target="sysinit.target",
    limit_s=60,
    borrowed=True,
)
# It only measures; the guards whose counters it reads are those of NETWORK.
TELEMETRY = Unit(
    name="gpuaas-slice-telemetry",
    description="Telemetry of the slices of this host, and of their guests over virtio-serial",
    module="slice._telemetry",
    settings_path=NETWORK.settings_path,
    order=("After=gpuaas-slice-network-baseline.service",),
    borrowed=True,
    patient=True,
    guardian=True,
)
