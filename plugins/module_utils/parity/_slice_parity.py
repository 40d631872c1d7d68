"""Table of all parity checks in report order, each with its remedy."""

from __future__ import annotations

from collections.abc import Callable

from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _checks_boot as boot
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _checks_network as network
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import (
    _checks_platform as platform,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _checks_runtime as runtime
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import (
    _slice_remnants,
    _tcp_probe,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.parity._check import (
    Check,
    Remedy,
    Verdict,
    verdict,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.parity._host_facts import Facts

_LIBVIRT_FILES = "qemu.conf and virtlogd.conf in /etc/libvirt"
_BOOTSTRAP = "gpuaas.slice.bootstrap"
_BIND = "gpuaas.slice.bind_topology"
_STORAGE = "gpuaas.slice.transition_storage"
_DISCOVER = "gpuaas.slice.discover"
_CACHE = "gpuaas.slice.cache_image"
_FIRMWARE = "gpuaas.slice.firmware"
_RESTORE = "gpuaas.slice.restore_baremetal"


def _role(name: str, before: str = "", after: str = "") -> Remedy:
    """Remedy by a bootstrap role. before: preparation. after: advice if the role is not enough."""
    return Remedy(f"{before}run playbook {_BOOTSTRAP} (role {name}){after}", _BOOTSTRAP, name)


def _nothing_of(*checks: str) -> Callable[[Facts], Verdict]:
    """On a bare-metal host: nothing of slice mode is left, by the list of `_slice_remnants`."""

    def examine(facts: Facts) -> Verdict:
        items = _slice_remnants.of(facts, *checks)
        problems = [f"{item.name}: {item.found}" for item in items if not item.ok]
        return verdict(problems, ", ".join(f"{item.name}: {item.found}" for item in items))

    return examine


_RSHIM_OWNER = "; if it stays, see whether the card's BMC or another host owns rshim"
_RESTORED = Remedy(f"run playbook {_RESTORE}", _RESTORE)

CHECKS: tuple[Check[Facts], ...] = (
    Check(
        "node_agent",
        platform.node_agent,
        Remedy(
            "enrol again: POST /api/v1/admin/nodes/{node_id}/enrollment-token, run the userdata"
        ),
        baremetal=platform.node_agent,
    ),
    Check(
        "name_resolution",
        platform.name_resolution,
        Remedy(
            f"run playbook {_BOOTSTRAP} with slice_api_names (role api_names), "
            "or have the site's DNS know the name",
            _BOOTSTRAP,
        ),
        baremetal=platform.name_resolution,
        restore=Remedy(
            "enrol again with an API name that this host resolves, or add it to its DNS"
        ),
    ),
    Check(
        "maas_intent",
        platform.maas_intent,
        Remedy("tag the machine in MAAS with the profile that it is meant for"),
        # Unknown tags are a warning. Wrong tags mean the intent of another machine.
        baremetal=platform.maas_intent,
    ),
    Check(
        "firmware_virtualization",
        platform.firmware,
        Remedy(f"run playbook {_FIRMWARE}, approve its plan, power-cycle", _FIRMWARE),
    ),
    Check(
        "kvm",
        platform.kvm,
        Remedy(f"turn virtualization on with playbook {_FIRMWARE}, power-cycle", _FIRMWARE),
    ),
    Check(
        "kernel_cmdline",
        platform.kernel_cmdline,
        _role("boot_configuration", after=" with slice_allow_reboot"),
        baremetal=_nothing_of("kernel_cmdline"),
        restore=_RESTORED,
    ),
    Check(
        "iommu_groups",
        platform.iommu_groups,
        _role("boot_configuration", before="turn the IOMMU on in the firmware and "),
    ),
    Check(
        "vfio_modules",
        platform.vfio_modules,
        _role("boot_configuration"),
        baremetal=_nothing_of("vfio_modules"),
        restore=_RESTORED,
    ),
    Check(
        "vfio_binding",
        platform.vfio_binding,
        Remedy(
            f"approve slots, then run playbook {_BIND} (role vfio_binding)", _BIND, "vfio_binding"
        ),
        baremetal=_nothing_of("slice_mode", "vfio_binding"),
        restore=_RESTORED,
    ),
    Check(
        "gpu_services_quiesced",
        platform.gpu_services_quiesced,
        _role("boot_configuration"),
        baremetal=_nothing_of("gpu_services_quiesced"),
        restore=_RESTORED,
    ),
    Check(
        "nvlink_partitions",
        runtime.nvlink_partitions,
        Remedy(
            "look at the Fabric Manager of gpu.fabric_manager, correct module_ids and nvlink_sets"
            " of the profile, deactivate a partition of no slice (`fmpm -d`)"
        ),
    ),
    Check(
        "fabric_vfs",
        network.fabric_vfs,
        _role("fabric_functions"),
        baremetal=_nothing_of("fabric_vfs"),
        restore=_RESTORED,
    ),
    Check(
        "fabric_isolation",
        network.fabric_isolation,
        _role(
            "fabric_functions",
            before="set fabric.isolation and fabric.vlans in the profile, then ",
            after="; a card that does not report an attribute cannot isolate tenants",
        ),
    ),
    Check(
        "ipoib_netplan",
        network.ipoib_netplan,
        _role("fabric_functions", before=f"render {network.IPOIB} from the site profile: "),
        baremetal=_nothing_of("ipoib_netplan"),
        restore=_RESTORED,
    ),
    Check(
        "fabric_address",
        network.fabric_address,
        _role(
            "fabric_functions",
            before="set fabric_interface and fabric_address of the node, then ",
        ),
    ),
    Check(
        "fabric_route",
        network.fabric_route,
        _role("fabric_functions", before="set fabric.route in the profile, then "),
    ),
    Check(
        "ovs_bridge",
        network.ovs_bridge,
        _role("slice_network"),
        baremetal=_nothing_of("ovs_bridge"),
        restore=_RESTORED,
        begin=Facts.begin_guest,
    ),
    Check(
        "dnsmasq",
        network.dnsmasq,
        _role("slice_network"),
        baremetal=_nothing_of("dnsmasq", "slice_reservations"),
        restore=_RESTORED,
        begin=Facts.begin_guest,
    ),
    Check("dnsmasq_config", network.dnsmasq_config, _role("slice_network")),
    Check(
        "nat",
        network.nat,
        _role("slice_network", after="; rules and services that it names are the site's"),
        baremetal=_nothing_of("nat"),
        restore=_RESTORED,
    ),
    Check(
        "ip_forwarding",
        network.ip_forwarding,
        _role("slice_network"),
        baremetal=_nothing_of("ip_forwarding"),
        restore=_RESTORED,
    ),
    Check(
        "guest_egress",
        network.guest_egress,
        _role("slice_network", after="; if it stays, look at the uplink and at filters in FORWARD"),
        begin=Facts.begin_guest,
    ),
    Check(
        "guest_tcp",
        network.guest_tcp,
        _role(
            "slice_network",
            after=f"; if it stays, look at rules in FORWARD or POSTROUTING that stop TCP to"
            f" {_tcp_probe.SERVICE} by {_tcp_probe.LINK}, the link of parity's own service",
        ),
        begin=Facts.begin_guest,
    ),
    Check(
        "network_service",
        network.network_service,
        _role("slice_network"),
        baremetal=_nothing_of("network_service", "boot_services"),
        restore=_RESTORED,
    ),
    Check(
        "historical_network_service",
        network.historical_network_service,
        _role("slice_network", after=", which migrates the older service away"),
        baremetal=_nothing_of("historical_network_service"),
        restore=_RESTORED,
        soft=True,
    ),
    Check(
        "tmfifo",
        network.tmfifo,
        _role("slice_network", after=_RSHIM_OWNER),
        baremetal=_nothing_of("tmfifo"),
        restore=_RESTORED,
        soft=True,
    ),
    Check(
        "rshim_peer",
        network.rshim_peer,
        _role("slice_network", after=_RSHIM_OWNER),
        soft=True,
    ),
    Check(
        "libvirt",
        runtime.libvirt,
        _role("libvirt_host"),
        baremetal=_nothing_of("libvirt", "slice_files", "slice_limits"),
        restore=Remedy("release or recover the slices of this host first"),
        begin=Facts.begin_libvirt,
    ),
    Check("libvirt_directory", runtime.libvirt_directory, _role("libvirt_host")),
    Check(
        "vm_confined",
        runtime.vm_confined,
        _role(
            "libvirt_host",
            before="enable AppArmor or SELinux in the kernel, ",
            after="; a guest that was started before is confined from its next start",
        ),
    ),
    Check(
        "console_limit",
        runtime.console_limit,
        _role("libvirt_host", before=f"remove the named settings from {_LIBVIRT_FILES}, "),
    ),
    Check("ovmf", runtime.ovmf, _role("slice_packages")),
    Check("cloud_init_tools", runtime.cloud_init_tools, _role("slice_packages")),
    Check("rdma_tools", runtime.rdma_tools, _role("slice_packages")),
    Check(
        "nvme_ownership",
        runtime.nvme_ownership,
        # No role: data on a disk is destroyed only with an approval, never by a repair.
        Remedy(
            f"run playbook {_STORAGE} for the disk, or approve the slot again; "
            "wipe the tenant's data",
            _STORAGE,
        ),
        baremetal=_nothing_of("nvme_ownership"),
        restore=Remedy("release or recover the slices of this host first"),
    ),
    Check(
        "slice_disks",
        runtime.slice_disks,
        Remedy(f"approve slots, then run playbook {_BIND}", _BIND),
        baremetal=_nothing_of("slice_disks"),
        restore=_RESTORED,
    ),
    Check(
        "boot_order",
        boot.boot_order,
        Remedy("put the host's own entry first (`efibootmgr -o`), remove entries of other disks"),
    ),
    Check(
        "image_cache",
        runtime.image_cache,
        Remedy(f"free space on /var, then run playbook {_CACHE}", _CACHE),
    ),
    Check("hugepages", runtime.hugepages, _role("boot_configuration")),
    Check(
        "tuning",
        runtime.tuning,
        _role("host_tuning", after="; a loaded module takes its options at the next boot"),
        baremetal=_nothing_of("tuning"),
        restore=_RESTORED,
    ),
    Check(
        "reboot_required",
        platform.reboot_required,
        _role("boot_configuration", after=" with slice_allow_reboot"),
        baremetal=platform.reboot_required,
        restore=Remedy(f"run playbook {_RESTORE} with slice_allow_reboot", _RESTORE),
    ),
    Check(
        "api_topology",
        platform.api_topology,
        Remedy(f"run playbook {_DISCOVER} through the reconciler, pass its evidence", _DISCOVER),
    ),
)
