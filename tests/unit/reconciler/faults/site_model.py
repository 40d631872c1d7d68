"""Model of hosts, disks and tenants in plain dictionaries. It never reads the records.

Hosts keep the highest fence that they have seen, like real hosts, and refuse every run with a lower
fence. A run that was given up may still be at work; its late acts are judged here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reconciler.model.states import TaskKind

IDLE = "idle"  # available or disabled: without a tenant, and clean
BLOCKED = "cleanup_blocked"
MACHINE = "machine"
BUILDING = (TaskKind.SLICE_VM_PROVISION, TaskKind.BAREMETAL_PROVISION)
WIPING = (TaskKind.SLICE_VM_RELEASE, TaskKind.SLICE_WIPE, TaskKind.BAREMETAL_RELEASE)


@dataclass
class Host:
    """boot: the current boot. seen, passed: the boots of the last recorded discovery and parity.
    recorded: the boot in the records, "" after a reported restart.
    """

    number: int
    boot: str
    recorded: str
    seen: str
    passed: str
    broken: bool = False  # parity would fail now
    hidden: set[str] = field(default_factory=set)  # disks that a discovery would miss now
    missing: set[str] = field(default_factory=set)  # disks that the last discovery missed
    ledger: dict[str, int] = field(default_factory=dict)
    unclean: str = ""
    sliced: bool = True


@dataclass
class Slot:
    """where: the state that the slot must be in; IDLE stands for two."""

    node: str
    disk: str
    wanted: bool = True
    where: str = IDLE


@dataclass
class Tenant:
    """An allocation."""

    state: str
    node: str
    disks: tuple[str, ...]
    slots: tuple[str, ...]


@dataclass
class Run:
    """A run. fences: by slot, or for the machine. reported: its end, as the runner reports it."""

    id: str
    task: str
    kind: str
    node: str
    key: str
    disks: tuple[str, ...]
    slots: tuple[str, ...]
    fences: Mapping[str, int]
    boot: str
    variables: Mapping[str, Any]
    refused: str = ""
    reported: str = ""
    acting: bool = True
    result: dict[str, Any] = field(default_factory=dict)


class SiteModel:
    """owner: the allocation to which each disk is promised, or "". bytes_of: the allocation whose
    bytes are on each disk, or "".
    """

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}
        self.slots: dict[str, Slot] = {}
        self.tenants: dict[str, Tenant] = {}
        self.owner: dict[str, str] = {}
        self.bytes_of: dict[str, str] = {}

    def promise(self, key: str, node: str, disks: tuple[str, ...], slots: tuple[str, ...]) -> None:
        """A launch has succeeded: these disks belong to the tenant from now on."""
        for slot_id in slots:
            assert self.may_be_sold(self.slots[slot_id]) == "", slot_id
            self.slots[slot_id].where = "reserved"
        for disk in disks:
            assert not self.owner.get(disk), f"{disk} of {self.owner[disk]} is given to {key}"
            assert not self.bytes_of.get(disk), f"{disk} is given with {self.bytes_of[disk]} on it"
            self.owner[disk] = key
        self.tenants[key] = Tenant("requested", node, disks, slots)

    def end(self, key: str, state: str) -> None:
        """The allocation has ended. The bytes on its disks stay."""
        self.tenants[key].state = state
        for disk, owner in self.owner.items():
            if owner == key:
                self.owner[disk] = ""

    def may_be_sold(self, slot: Slot) -> str:
        """Why a slot must not be available; "" when it may."""
        host = self.hosts[slot.node]
        whose = self.bytes_of.get(slot.disk) or self.owner.get(slot.disk)
        for wrong, why in (
            (whose, f"{slot.disk} is dirty or owned: {whose}"),
            (slot.where != IDLE, f"it is {slot.where}"),
            (not slot.wanted, "it is wanted disabled"),
            (not host.sliced, "its host is no slice host"),
            (host.seen != host.recorded or not host.recorded, "no discovery under this boot"),
            (host.passed != host.recorded, "no parity under this boot"),
            (slot.disk in host.missing, "the latest discovery speaks against it"),
        ):
            if wrong:
                return why
        return ""

    def begin(self, run: Run) -> None:
        """A run reaches the host, which records its fences or refuses the run."""
        host = self.hosts[run.node]
        if self._stale(run):
            run.refused = "stale_fence"
        elif run.boot and run.boot != host.boot:
            run.refused = "boot_changed"
        else:
            host.ledger.update(run.fences)

    def act(self, run: Run) -> bool:
        """The run has its effect, however late. False when the host refuses the run."""
        if run.refused or not run.acting or self._stale(run):
            return False
        for disk in run.disks:
            other = self.owner.get(disk, "")
            assert other in ("", run.key), f"{run.kind} of {run.key} acts on {disk} of {other}"
            before = self.bytes_of.get(disk, "")
            if run.kind in BUILDING:
                assert before in ("", run.key), f"{run.key} is built on {before}'s {disk}"
                self.bytes_of[disk] = run.key
            elif run.kind in WIPING:
                self.bytes_of[disk] = ""
        return True

    def restart(self, node: str) -> None:
        """The host restarts. Its earlier runs end without a report."""
        host = self.hosts[node]
        first, _, number = host.boot.partition("+")
        host.boot = f"{first}+{int(number or 0) + 1}"

    def _stale(self, run: Run) -> bool:
        ledger = self.hosts[run.node].ledger
        return any(ledger.get(name, 0) > fence for name, fence in run.fences.items())
