"""Host facts for parity checks, each read at most once per run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _kernel_arguments
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_files,
    _boot_units,
    _command,
    _host,
    _ledger,
    _object_names,
    _pci,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _block
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import _virtual_functions
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _guards,
    _iptables,
    _nat,
    _slice_network,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _guest_probe
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _libvirt
from ansible_collections.gpuaas.slice.plugins.module_utils.topology import _host_resources

OLD_BASELINE = "gpuaas-slice-host-net-baseline.service"
RSHIM = "rshim.service"


def kept(path: str) -> dict[str, Any]:
    """The settings of a boot service; {} only when the file does not exist."""
    again = "run the playbook that installs the service again"
    return _host.document(path, code="settings_unreadable", remedy=again) or {}


@dataclass(frozen=True)
class Unit:
    """systemd unit: load, active and sub state, start at boot, and result of the last run."""

    load: str
    active: str
    sub: str
    file: str
    result: str


_ABSENT = Unit("not-found", "inactive", "dead", "", "")


@dataclass(frozen=True)
class Request:
    """The module's parameters. api_topology, maas_tags: None when the caller does not know them."""

    profile: Mapping[str, Any]
    slots: Sequence[Mapping[str, Any]] = ()
    intent: str = "slice"
    api_topology: Mapping[str, Any] | None = None
    maas_tags: Sequence[str] | None = None


def _probed(network: Mapping[str, Any]) -> _guest_probe.Finding | Refusal:
    """The guest probe's result, or why it could not be made. It reads nothing of Facts."""
    try:
        target = str(network.get("egress_probe") or "") or _slice_network.gateway()
        # Without a target, which `guest_egress` names, the probe still shows the rest.
        target = target or str(network["address"]).partition("/")[0]
        return _guest_probe.look(_guest_probe.Probe(network, target))
    except Refusal as refusal:
        return refusal
    except Exception as broken:  # all checks that share the probe fail by the same reason
        return Refusal(
            "probe_failed",
            expected=f"a stand-in for a guest on {network['bridge']}",
            found=f"{type(broken).__name__}: {broken}",
            remedy="repair the cause that the system names, then run parity again",
        )


class Facts:
    """Facts of the host. All of them are lazy, so a check that does not apply costs nothing."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.profile = request.profile
        self.network: Mapping[str, Any] = request.profile["network"]
        self.slots = request.slots
        self._cards: dict[str, _virtual_functions.Card] = {}

    @cached_property
    def interfaces(self) -> dict[str, _slice_network.Interface]:
        return _slice_network.interfaces()

    @cached_property
    def nat_rules(self) -> list[str]:
        return _iptables.listed("POSTROUTING", "nat")

    @cached_property
    def boot_params(self) -> dict[str, Any]:
        return _host_resources.boot_params(self.profile, self.request.intent)

    @cached_property
    def boot(self) -> _kernel_arguments.State:
        """The boot configuration, and its part that is in force."""
        return _kernel_arguments.observe(self.boot_params)

    @cached_property
    def kernel(self) -> _host_resources.Kernel:
        return _host_resources.kernel(self.boot_params, self.boot)

    @cached_property
    def devices(self) -> dict[str, _pci.Device]:
        return {device.address: device for device in _pci.devices()}

    @cached_property
    def disks(self) -> list[_block.Disk]:
        return _block.disks()

    def usage(self, disk: _block.Disk) -> _block.Usage:
        """The use of one of `disks`. Raises a Refusal for this disk if it cannot be read."""
        return self._usages.get(disk.kernel_name) or _block.usage(disk)

    @cached_property
    def _usages(self) -> dict[str, _block.Usage]:
        """Use of all disks from one scan. {} when a disk cannot be read; each disk is then read by
        itself.
        """
        try:
            return _block.usages(self.disks)
        except OSError:
            return {}

    @cached_property
    def qemu_pids(self) -> list[int]:
        """QEMU processes of slices."""
        return sorted(_libvirt.processes(_object_names.PREFIX))

    @cached_property
    def enrolment(self) -> dict[str, str]:
        """The settings in /etc/gpuaas/enrolment.env; {} when the host is not enrolled."""
        rows = (_host.kept("/etc/gpuaas/enrolment.env") or "").splitlines()
        pairs = (row.partition("=") for row in rows if "=" in row and not row.startswith("#"))
        return {key.strip(): value.strip().strip("'\"") for key, _sep, value in pairs}

    def begin_guest(self) -> None:
        """Start the guest probe beside the checks that do not wait for it: it is expensive, mostly
        waits, and all checks share one run.
        """
        _begun = self._guest

    @property
    def guest(self) -> _guest_probe.Finding:
        """The guest probe's result. Raises the Refusal of a probe that could not be made."""
        finding = self._guest.result()
        if isinstance(finding, Refusal):
            raise finding
        return finding

    @property
    def guest_problem(self) -> str:
        """The reason why no guest probe could be created, or ""."""
        finding = self._guest.result()
        return str(finding) if isinstance(finding, Refusal) else ""

    @cached_property
    def _guest(self) -> Future[_guest_probe.Finding | Refusal]:
        return ThreadPoolExecutor(1).submit(_probed, self.network)

    def begin_libvirt(self) -> None:
        """Ask libvirt beside the checks of other things: its daemon, which stops when it is idle,
        may have to start first.
        """
        _begun = self._libvirt

    @property
    def libvirt_version(self) -> str:
        """What virsh prints about libvirt and its hypervisor. Raises the Refusal of virsh."""
        return self._libvirt.result().out

    @cached_property
    def _libvirt(self) -> Future[_command.Result]:
        argv = ["virsh", "-q", "-c", "qemu:///system", "version"]
        return ThreadPoolExecutor(1).submit(_command.run, argv, timeout=120)

    @property
    def networks(self) -> dict[str, list[str]]:
        """The site's rule for destinations of guests as bootstrap applied it; {} before."""
        recorded = _guards.recorded()
        return recorded and {
            name: [str(network) for network in _nat.valid(recorded.get(name) or ())]
            for name in _baseline_files.EGRESS
        }

    @cached_property
    def passthrough(self) -> list[str]:
        """PCI addresses that the approved slots give to guests."""
        keys = ("gpu_pci_address", "fabric_vf_pci_address")
        return [str(slot[key]) for slot in self.slots for key in keys if slot.get(key)]

    @cached_property
    def dead_gpus(self) -> list[str]:
        """GPUs of approved slots that are missing or silent. Only their own slots are blocked."""
        gpus = self._approved("gpu_pci_address")
        return [gpu for gpu in gpus if gpu not in self.devices or gpu in self.silent]

    @cached_property
    def silent(self) -> set[str]:
        """Devices of `passthrough` that are there and do not answer."""
        return _pci.silent({*self.passthrough} & self.devices.keys())

    @cached_property
    def missing_devices(self) -> list[str]:
        """Disks (by-id path) and fabric functions of approved slots that are not there."""
        return [*self._missing_disks, *self._missing_functions]

    @cached_property
    def spared(self) -> set[str]:
        """Devices that are lost and block their own slots only. Without any other device of their
        kind, the fault is the host's.
        """
        kinds = {
            "gpu_pci_address": self.dead_gpus,
            "nvme_device": self._missing_disks,
            "fabric_vf_pci_address": self._missing_functions,
        }
        return {
            device
            for kind, lost in kinds.items()
            if len(lost) < len(self._approved(kind))
            for device in lost
        }

    @cached_property
    def _missing_disks(self) -> list[str]:
        present = {disk.by_id for disk in self.disks}
        return [path for path in self._approved("nvme_device") if path not in present]

    @cached_property
    def _missing_functions(self) -> list[str]:
        functions = self._approved("fabric_vf_pci_address")
        return [function for function in functions if function not in self.devices]

    def _approved(self, kind: str) -> list[str]:
        """Devices of a kind that the approved slots have."""
        return [str(slot[kind]) for slot in self.slots if slot.get(kind)]

    def card(self, address: str) -> _virtual_functions.Card:
        """A fabric card with its functions."""
        if address not in self._cards:
            self._cards[address] = _virtual_functions.card_at(address)
        return self._cards[address]

    @cached_property
    def reset_gpus(self) -> list[str]:
        """GPUs of approved slots with standing evidence of a reset since their last use.

        A ledger entry that cannot be read proves nothing about its GPU, and stops no other check.
        """
        proven = []
        for slot in self.slots:
            gpu = str(slot.get("gpu_pci_address") or "")
            with contextlib.suppress(Refusal):
                if gpu and _ledger.standing_gpu(str(slot["slot_id"]), gpu):
                    proven.append(gpu)
        return proven

    def unit(self, name: str) -> Unit:
        return self._units.get(name, _ABSENT)

    def not_at_boot(self, service: _boot_files.Unit) -> list[str]:
        """Reasons why the next boot would not run this service as installed; [] if it would."""
        name, unit = service.service, self.unit(service.service)
        if unit.load != "loaded":
            return [f"{name} is {unit.load or 'unknown'}"]
        problems = _boot_files.edited(service)
        if unit.file != "enabled":
            why = f"{name} is {unit.file or 'not enabled'}: it would not start at boot"
            problems.insert(0, why)
        return problems

    @cached_property
    def _units(self) -> dict[str, Unit]:
        ours = (_boot_units.FABRIC, _boot_units.BINDING, _boot_units.CLAIM)
        names = [_boot_units.NETWORK.service, OLD_BASELINE, *(unit.service for unit in ours)]
        names += [RSHIM] if self.network.get("tmfifo") else []
        names += self.profile.get("gpu_services", [])
        keys = "Id,LoadState,ActiveState,SubState,UnitFileState,Result"
        out = _command.run(["systemctl", "show", f"--property={keys}", "--", *names]).out
        units: dict[str, Unit] = {}
        # One block per unit in the order of the query, because an alias would answer with another
        # Id.
        for name, block in zip(names, out.split("\n\n"), strict=False):
            values = dict(row.partition("=")[::2] for row in block.splitlines())
            units[name] = Unit(
                load=values.get("LoadState", ""),
                active=values.get("ActiveState", ""),
                sub=values.get("SubState", ""),
                file=values.get("UnitFileState", ""),
                result=values.get("Result", ""),
            )
        return units
