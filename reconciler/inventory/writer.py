"""Writes of a pass into NetBox, and nodes that it adds.

Objects of a kind are written together, under the condition that all are as they were read; if
NetBox refuses that, one after the other. No request runs inside a database transaction. Each write
requires the leader's term, so a process that no longer leads stops writing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy import Connection, Engine

from reconciler.db import clock, leader
from reconciler.db import settings as site
from reconciler.db.engine import reading, retrying
from reconciler.inventory.compare import Comparison, NewNode, device_name, kept
from reconciler.inventory.expected import (
    SEAL,
    ExpectedMachine,
    ExpectedNode,
    is_seal,
    read_nodes,
    seal,
)
from reconciler.inventory.netbox import (
    Client,
    Conflict,
    Device,
    IpAddress,
    MacAddress,
    Machine,
    O,
    Tracked,
    Unfinished,
    VmInterface,
    Vrf,
    chunks,
    is_fatal,
    is_own_error,
    shows,
)
from reconciler.inventory.networks import (
    MANAGED,
    Parts,
    address_document,
    interface_document,
    mac_document,
    reread,
    vrf_document,
)
from reconciler.inventory.patches import (
    BLOCKED,
    device_patch,
    foreign_values,
    is_of_twin,
    machine_document,
    machine_patch,
    purpose_of,
)
from reconciler.model.act import Act
from reconciler.model.errors import Problem, Refusal
from reconciler.model.states import NodeMode, NodeState
from reconciler.model.storable import shown
from reconciler.records import nodes as node_records
from reconciler.runs.spec import LauncherAway, RunError

# An object that changes during each of so many attempts is left to the next pass.
_ATTEMPTS = 3
# Objects without an answer, one after the other, that end a pass.
_MOST_SILENCES = 3
_DEVICE, _MACHINE = "dcim.device", "virtualization.virtualmachine"
# The setting that holds journal entries until NetBox has them, and the most that it holds.
_JOURNAL, _MOST_PENDING = "netbox_journal", 1000
# The setting that holds the fingerprints (SEAL) of the last writes, by device: of the one that was
# seen last, and of those that may follow it. Most of a device.
WRITTEN, _MOST_WRITTEN = "netbox_written", 8
_ACT = Act("reconciler", "device in NetBox")
# Returns the change of an object, {} for none, and the names of values that somebody else changed.
Decide = Callable[[Any], tuple[dict[str, Any], list[str]]]
# An object, its name in findings, and the decision.
Write = tuple[Any, str, Decide]


class Writer:
    """The writes of a pass. An object that has changed since it was read is read and decided
    again.
    """

    def __init__(
        self,
        engine: Engine,
        netbox: Client,
        comparison: Comparison,
        done: dict[str, int],
        at: float,
    ) -> None:
        self._engine = engine
        self._netbox = netbox
        self._comparison = comparison
        self._note = comparison.note
        self._done = done
        self._at = str(clock.iso(at))
        # Journal entries, stored before their devices are written, because the answer of either
        # request can be lost. seal: of the values that an entry is about.
        self._pending: dict[str, dict[str, Any]] = {}
        self._stored: dict[str, dict[str, Any]] = {}
        self._written: dict[str, list[str]] = {}
        # Whether NetBox compares the ETags of a list; None until this was tested.
        self._lists: bool | None = None
        # Requests about single objects that were not answered, how many since the last success, and
        # the numbers of devices that may or may not have been written by them.
        self._silences: list[LauncherAway] = []
        self._in_a_row = 0
        self._unknown: set[int] = set()

    def write(self) -> None:
        """Write everything. An object for which NetBox has no answer, for example because a plugin
        fails, must not keep the others from being written; several in a row mean NetBox itself.
        """
        try:
            self._write()
        except Unfinished:
            if not self._silences:
                raise
        if self._silences:
            # A request about a single object follows that about its list.
            raise self._silences[-1]

    def _write(self) -> None:
        work = self._comparison
        self._write_earlier_journal()
        added: dict[str, Device] = {}
        for new in work.new_nodes:
            with self._refusable(f"device {new.id}"):
                node_id = retrying(self._engine, partial(_add_node, new=new))
                added[node_id] = new.device
                self._count("nodes added")
        with reading(self._engine) as conn:
            nodes = read_nodes(conn) if added else []
        work.devices += [(row, added[row.node.id]) for row in nodes if row.node.id in added]
        for expected, device in work.devices:
            self._expect(expected, device)
        self._store()
        self._store_written()
        written = self._write_all([self._device(*row) for row in work.devices], "devices written")
        self._unknown -= written
        for _, device in work.devices:
            if device.id not in written | self._unknown:
                self._pending.pop(self._key(device), None)
        self._write_journal()
        documents = [machine_document(expected, device) for expected, device in work.created]
        made = self._create(Machine, documents, "virtual machines created")
        of_slice = {
            slice_.allocation_id: machine
            for (slice_, _), machine in zip(work.created, made, strict=True)
        }
        changed: list[Write] = [
            (machine, slice_.name, partial(_slice_patch, slice_, device))
            for slice_, machine, device in work.changed
        ]
        self._write_all(changed, "virtual machines changed")
        for parts in work.deleted:
            with self._refusable(parts.slice.name):
                self._delete(parts, "virtual machines deleted", whole=True)
        for parts in work.parts:
            parts.machine = parts.machine or of_slice.get(parts.slice.allocation_id)
        self._write_networks([parts for parts in work.parts if parts.machine is not None])

    def _write_networks(self, work: list[Parts]) -> None:
        """Create what is missing, each kind after those that it refers to."""
        try:
            for parts in self._comparison.ended:
                with self._refusable(parts.slice.name):
                    self._delete(parts, "interface objects deleted", whole=False)
            self._create_vrfs(work)
            work = [parts for parts in work if parts.vrf is not None]
            self._create_parts(work, "interface", VmInterface, interface_document)
            work = [parts for parts in work if parts.interface is not None]
            self._create_parts(work, "mac", MacAddress, mac_document)
            self._create_parts(work, "address", IpAddress, address_document)
            macs = [
                _refer(row.interface, "primary_mac_address", row.mac) for row in work if row.mac
            ]
            self._write_all(macs, "references set")
            primary = [
                _refer(row.machine, "primary_ip4", row.address) for row in work if row.address
            ]
            self._write_all(primary, "references set")
        except RunError as refusal:
            if refusal.code != "netbox_forbidden":
                raise
            self._refused("networks of slices", refusal)

    def _create_vrfs(self, work: Sequence[Parts]) -> None:
        node_ids = sorted({parts.slice.node_id for parts in work if parts.vrf is None})
        made = self._create(Vrf, [vrf_document(node_id) for node_id in node_ids], "VRFs created")
        of_node = dict(zip(node_ids, made, strict=True))
        for parts in work:
            parts.vrf = parts.vrf or of_node.get(parts.slice.node_id)

    def _create_parts(
        self, work: Sequence[Parts], name: str, kind: type[Any], document: Callable[[Parts], Any]
    ) -> None:
        lacking = [parts for parts in work if getattr(parts, name) is None]
        documents = [document(parts) for parts in lacking]
        made = self._create(kind, documents, f"{name} objects created")
        for parts, item in zip(lacking, made, strict=True):
            setattr(parts, name, item)

    def _device(self, expected: ExpectedNode, device: Device) -> Write:
        def patch(device: Device) -> tuple[dict[str, Any], list[str]]:
            if not purpose_of(device):
                return {}, ["tags"]
            if is_of_twin(device, self._written.get(str(device.id)), expected.site):
                return {}, [SEAL]
            changes, foreign = device_patch(expected, device)
            if changes:
                # After a conflict, the old values are those that were read again.
                self._expect(expected, device)
                self._store()
            return changes, foreign

        return device, f"device {device_name(device)}", patch

    def _write_all(self, work: Sequence[Write], counted: str) -> set[int]:
        """Write objects of a kind; returns the ids of those that were written."""
        written: set[int] = set()
        for some in chunks(work):
            written |= self._write_list(some, counted)
            for item, subject, decide in some:
                with self._refusable(subject, item):
                    if item.id not in written and self._write_object(item, decide, counted):
                        written.add(item.id)
        return written

    def _write_list(self, work: Sequence[Write], counted: str) -> set[int]:
        """Write objects together; those that are not in the answer need a request of their own."""
        rows = [(item, decide(item), decide) for item, _, decide in work]
        changes = [(item, patch) for item, (patch, foreign), _ in rows if patch and not foreign]
        if len(changes) < 2:
            return set()
        self._require_term()
        if self._lists is None:
            self._lists = self._netbox.compares_lists(changes[0][0])
        if not self._lists:
            return set()
        try:
            after = self._netbox.patch_all(changes)
        except LauncherAway as silence:
            self._unanswered(silence, [item for item, _ in changes], of_list=True)
            return set()
        except (RunError, Problem) as refusal:
            if is_fatal(refusal):
                raise
            return set()
        taken = [item for item, _, decide in rows
                 if item.id in after and decide(after[item.id]) == ({}, [])]  # fmt: skip
        if taken:
            self._count(counted, len(taken))
        return {item.id for item in taken}

    def _write_object(self, item: Any, decide: Decide, counted: str) -> bool:
        """Write what `decide` says about the object as it is; whether something was written."""
        for _ in range(_ATTEMPTS):
            patch, foreign = decide(item)
            if foreign:
                text = f"somebody has changed {', '.join(foreign)} meanwhile"
                parts = ("the values that this service wrote", text, "look at it in NetBox")
                self._note("foreign_edit", item.name, *parts)
                return False
            if not patch:
                return False
            self._require_term()
            try:
                after = self._netbox.patch(item, patch)
            except Conflict:
                item = self._netbox.read(item)
                continue
            if decide(after) != ({}, []):
                text = "other values in its answer"
                self._note("not_taken", item.name, "NetBox to keep values", text, _CHECK)
                return False
            self._count(counted)
            return True
        text = f"changed during each of {_ATTEMPTS} attempts"
        self._note("busy", item.name, "an object at rest", text, "none: it is tried again")
        return False

    def _create(
        self, kind: type[O], documents: Sequence[Mapping[str, Any]], counted: str
    ) -> list[O | None]:
        """Create objects. An object that is refused, or whose request is not answered, is None in
        the answer and does not stop the others.
        """
        made: list[O | None] = []
        for some in chunks(documents):
            self._require_term()
            try:
                made += self._netbox.create(kind, some)
                self._count(counted, len(some))
            except LauncherAway as silence:
                # They may exist, so a second request could make them twice.
                several = len(some) > 1
                self._unanswered(silence, [], of_list=several)
                if several and is_own_error(silence):
                    made += self._create_each(kind, some, counted)
                else:
                    if not several:
                        self._refused(next(iter(some[0].values())), silence)
                    made += [None] * len(some)
            except RunError as refusal:
                if is_fatal(refusal):
                    raise
                if len(some) == 1:
                    self._refused(next(iter(some[0].values())), refusal)
                    made.append(None)
                    continue
                for document in some:
                    made += self._create(kind, [document], counted)
        return made

    def _create_each(
        self, kind: type[O], documents: Sequence[Mapping[str, Any]], counted: str
    ) -> list[O | None]:
        """Create those that do not exist by a request each, after an error about all."""
        made: list[O | None] = []
        self._require_term()
        existing = list(self._netbox.every(kind, tag=MANAGED))
        for document in documents:
            item = next((row for row in existing if shows(row, document)), None)
            made += [item] if item else self._create(kind, [document], counted)
        return made

    def _delete(self, parts: Parts, counted: str, *, whole: bool) -> None:
        """Delete a virtual machine, or its interface only, unless people added to it. NetBox has no
        condition on the parts of an object, so they are read again just before.
        """
        parts = self._read(parts)
        foreign = foreign_values(parts, interface_only=not whole)
        item = parts.machine if whole else parts.interface
        if whole and parts.machine is not None:
            foreign += self._notes(parts.machine)
        if item is not None and not foreign:
            self._require_term()
            try:
                self._netbox.delete(item)
            except Conflict:
                foreign.append("a change in this moment")
        if foreign:
            self._note(*kept(parts.slice.name, "that it is gone", foreign))
        else:
            self._count(counted)

    def _notes(self, machine: Machine) -> list[str]:
        """Journal entries of people, which would end with the virtual machine."""
        try:
            return ["a journal entry"] if self._netbox.notes(_MACHINE, [machine.id]) else []
        except RunError as refusal:
            if refusal.code != "netbox_forbidden":
                raise
            return ["perhaps journal entries, which the token may not view"]

    def _read(self, parts: Parts) -> Parts:
        """The parts as they are now."""
        names = ("machine", "interface", "mac", "address")
        items = {name: getattr(parts, name) for name in names}
        current = {name: self._netbox.read(item) for name, item in items.items() if item}
        return reread(replace(parts, **current))

    def _key(self, device: Device) -> str:
        return f"{device.id} {self._at}"

    def _expect(self, expected: ExpectedNode, device: Device) -> None:
        self._pending.pop(self._key(device), None)
        if entry := _entry(expected, device, self._at):
            self._pending[self._key(device)] = {"seal": _target(expected), "entry": entry}

    def _store(self) -> None:
        """Keep the entries that a later pass must write if this one cannot."""
        self._pending = dict(list(self._pending.items())[-_MOST_PENDING:])
        if self._pending != self._stored:
            retrying(self._engine, partial(site.store, name=_JOURNAL, value=self._pending))
            self._stored = deepcopy(self._pending)

    def _store_written(self) -> None:
        """Keep the fingerprints that NetBox may have from now on (see `is_of_twin`)."""
        targets = {device.id: _target(expected) for expected, device in self._comparison.devices}
        for number, sealed in self._comparison.seals.items():
            before = list(self._comparison.written.get(str(number), ()))
            # Those after the one that NetBox has may be of requests without an answer.
            before = before[before.index(sealed) :] if sealed in before else [sealed]
            texts = [text for text in (*before, targets.get(number)) if is_seal(text)]
            self._written[str(number)] = list(dict.fromkeys(texts))[-_MOST_WRITTEN:]
        if self._written != self._comparison.written:
            retrying(self._engine, partial(site.store, name=WRITTEN, value=self._written))

    def _write_journal(self, *, last: bool = True) -> None:
        """Write the entries of devices that were written. last: of this pass."""
        keys = [
            key
            for key, row in self._pending.items()
            if row["entry"]["assigned_object_id"] not in self._unknown
        ]
        for key in keys:
            self._pending[key]["seal"] = ""
        self._store()
        for some in chunks(keys):
            self._require_term()
            try:
                self._netbox.add_journal([self._pending[key]["entry"] for key in some])
            except RunError as refusal:
                if isinstance(refusal, LauncherAway):
                    if not is_own_error(refusal):
                        raise
                    # The entries are kept, and the next pass looks whether they exist.
                    self._unanswered(refusal, [])
                elif last:
                    self._refused("journal entries", refusal)
                return
            for key in some:
                del self._pending[key]
            self._store()
            self._count("journal entries", len(some))

    def _write_earlier_journal(self) -> None:
        """Write entries of an earlier pass whose answer was lost: those whose device was written
        and that NetBox does not have.
        """
        with reading(self._engine) as conn:
            self._pending = site.read(conn, _JOURNAL) or {}
        self._stored = deepcopy(self._pending)
        # A device that is no longer ours, or another with its number in a NetBox that was built
        # anew, gets no entry; a refused one would keep the later entries from NetBox.
        seals = self._comparison.seals
        written: dict[str, tuple[int, str]] = {}
        for key, row in self._pending.items():
            number = row["entry"]["assigned_object_id"]
            if number in seals and row["seal"] in ("", seals[number]):
                written[key] = (number, row["entry"]["comments"])
        # A day, by which the clocks may differ, before the first of these entries.
        first = min((key.partition(" ")[2] for key in written), default="")
        after = str(datetime.fromisoformat(first).date() - timedelta(days=1)) if first else ""
        existing: set[tuple[int, str]] = set()
        for some in chunks(sorted({number for number, _ in written.values()})):
            existing |= self._device_notes(some, f"{after}T00:00:00Z")
        missing = {key for key, note in written.items() if note not in existing}
        self._pending = {key: row for key, row in self._pending.items() if key in missing}
        self._write_journal(last=False)

    def _device_notes(self, numbers: Sequence[int], after: str) -> set[tuple[int, str]]:
        try:
            return self._netbox.notes(_DEVICE, numbers, after=after)
        except RunError as refusal:
            if refusal.code != "netbox_forbidden":
                raise
            return set()

    @contextlib.contextmanager
    def _refusable(self, subject: str, item: Tracked | None = None) -> Iterator[None]:
        """A refusal that concerns one object is a finding, and the others are written."""
        try:
            yield
        except LauncherAway as silence:
            self._unanswered(silence, [item])
        except (RunError, Problem) as refusal:
            if is_fatal(refusal):
                raise
            self._refused(subject, refusal)

    def _unanswered(
        self, silence: LauncherAway, items: Sequence[Tracked | None], *, of_list: bool = False
    ) -> None:
        """Go on after a request about these objects, unless NetBox itself does not answer.

        of_list: after an error of NetBox itself, each of several objects gets a request of its own.
        """
        self._unknown |= {item.id for item in items if isinstance(item, Device)}
        if of_list and is_own_error(silence):
            return
        self._silences.append(silence)
        self._in_a_row += 1
        if self._in_a_row >= _MOST_SILENCES:
            raise silence

    def _refused(self, subject: str, refusal: Refusal) -> None:
        code = refusal.code.removeprefix("netbox_")
        self._note(code, subject, refusal.expected, refusal.found, refusal.remedy)

    def _count(self, what: str, count: int = 1) -> None:
        self._done[what] = self._done.get(what, 0) + count
        self._in_a_row = 0

    def _require_term(self) -> None:
        self._netbox.require_time()
        leader.require_of(self._engine)


def _target(expected: ExpectedNode) -> str:
    """Fingerprint of the values that the device of a node is to have."""
    return seal({**expected.fields, BLOCKED: expected.blocked}, expected.site)


_CHECK = "look for rules or scripts in NetBox that change these fields"


def _refer(item: Any, name: str, part: Any) -> Write:
    """Make a part the primary of its owner, if nobody has chosen one."""

    def patch(item: Any) -> tuple[dict[str, Any], list[str]]:
        return ({} if getattr(item, name) else {name: part.id}), []

    return item, f"{type(item).__name__} {item.id}", patch


def _slice_patch(
    expected: ExpectedMachine, device: Device, machine: Machine
) -> tuple[dict[str, Any], list[str]]:
    if not machine.tagged(MANAGED):
        return {}, ["tags"]
    return machine_patch(expected, machine, device)


def _add_node(conn: Connection, new: NewNode) -> str:
    mode = NodeMode.of_new(new.purpose)
    values = {"address": new.address, "region": new.region, "profile": new.profile}
    return node_records.create(conn, _ACT, id=new.id, mode=mode, **values).id


def _entry(expected: ExpectedNode, device: Device, at: str) -> dict[str, Any] | None:
    """A journal entry for changes that a person wants to see: state, mode, blocked slots. Its time
    distinguishes it from an equal entry of another pass.
    """
    changes, before = [], device.custom_fields
    for name in ("gpuaas_state", "gpuaas_mode", "gpuaas_slots_blocked"):
        target = expected.fields[name]
        if before.get(name) not in (None, target):
            changes.append(f"{name.removeprefix('gpuaas_')}: {before.get(name)} -> {target}")
    if not changes:
        return None
    bad = expected.blocked or expected.node.state == NodeState.UNREACHABLE
    return {
        "assigned_object_type": _DEVICE,
        "assigned_object_id": device.id,
        "kind": "warning" if bad else "info",
        # NetBox takes the space from the end of a text.
        "comments": shown(f"{at}: {'; '.join(changes)}. {expected.node.state_reason}").strip(),
    }
