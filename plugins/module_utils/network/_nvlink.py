"""NVLink partitions of the GPUs of slices, which the Fabric Manager of a board activates.

On a board with NVSwitches, GPUs compute with NVLink only while the partition of exactly these GPUs
is active. NVIDIA's program `fmpm` talks to the Fabric Manager, which runs where the site runs it
and names a GPU by its module on the board. Not run on hardware.

The partition of a slice is kept in a file. libvirt's start hook activates it whoever starts the
domain, and a release deactivates it. While one partition is active, none that shares a GPU with it
is activated or deactivated, so the GPUs of two tenants are never joined.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _command,
    _host,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

_ANSWER_S, _CHANGE_S = 15.0, 60.0
# Longest answer in bytes, of the largest board many times over. More ends the program.
_LONGEST = 1 << 20
_BOUNDED = f'"$@" 2>/dev/null | head -c {_LONGEST + 1}'
_NO_PROGRAM = 127
# Argument of modules: the partition of a slice.
OPTION: dict[str, Any] = {
    "type": "dict",
    "options": {
        "modules": {"type": "list", "elements": "int", "required": True},
        "address": {"type": "str"},
        "socket": {"type": "str"},
    },
}
_LOOK = "look at the Fabric Manager (shared mode is FABRIC_MODE=1) and at `fmpm -l` on this host"


@dataclass(frozen=True)
class Partition:
    """GPUs of a slice by module, and where the Fabric Manager answers: address or socket."""

    modules: tuple[int, ...]
    address: str = ""
    socket: str = ""

    @property
    def text(self) -> str:
        return names(self.modules)


@dataclass(frozen=True)
class Row:
    """A partition as the Fabric Manager lists it."""

    id: int
    modules: frozenset[int]
    active: bool

    @property
    def text(self) -> str:
        return f"partition {self.id} of {names(self.modules)}"


def names(modules: Iterable[int]) -> str:
    return f"modules {', '.join(map(str, sorted(modules)))}"


def partition(options: Mapping[str, Any]) -> Partition:
    """The partition in options of `slice_vm`, or in the file of a slice."""
    modules = options.get("modules")
    if not isinstance(modules, list) or not all(map(_is_number, modules)):
        modules = []
    address, socket = str(options.get("address") or ""), str(options.get("socket") or "")
    if not modules or len(set(modules)) < len(modules) or bool(address) == bool(socket):
        expected = "modules without a repetition, and either address or socket"
        raise _object_names.invalid("nvlink_partition", expected, str(dict(options)))
    return Partition(tuple(modules), address, socket)


def save(allocation_id: str, partition: Partition) -> None:
    text = json.dumps(dataclasses.asdict(partition), indent=2, sort_keys=True) + "\n"
    _host.write(_object_names.nvlink_path(allocation_id), text, 0o600)


def forget(allocation_id: str) -> None:
    _host.remove(_object_names.nvlink_path(allocation_id))


def saved(allocation_id: str) -> Partition | None:
    """The kept partition of a slice; None when it has none."""
    path, code = _object_names.nvlink_path(allocation_id), "nvlink_record_unreadable"
    remedy = "deactivate the slice's partition with `fmpm -d`, then remove the file"
    document = _host.document(path, code=code, remedy=remedy)
    if document is None:
        return None
    try:
        return partition(document)
    except Refusal as invalid:
        expected = f"the partition of a slice in {path}"
        raise Refusal(code, expected=expected, found=invalid.found, remedy=remedy) from invalid


def load() -> dict[str, Partition]:
    """Kept partitions by allocation."""
    owners = map(_object_names.owner, _object_names.files("nvlink"))
    return {owner: kept for owner in owners if owner and (kept := saved(owner)) is not None}


def listed(manager: Partition) -> list[Row]:
    """Every partition of the board; refused when the answer contradicts itself."""
    text = _ask(manager, "-l", timeout=_ANSWER_S)
    try:
        document = json.loads(text)
        rows = [_row(entry) for entry in document["partitionInfo"]]
        if not rows:
            raise ValueError("no partition, as outside of shared mode")
        if not len(rows) == document["numPartitions"] == len({row.id for row in rows}):
            raise ValueError(f"{len(rows)} partitions of {document['numPartitions']}")
        if len({row.modules for row in rows}) < len(rows):
            raise ValueError("two partitions of the same GPUs")
        active = [module for row in rows if row.active for module in row.modules]
        if len(set(active)) < len(active):
            raise ValueError("active partitions that share a GPU")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as problem:
        raise Refusal(
            "fabric_manager_invalid",
            expected="partitions with GPUs, each listed once, from `fmpm -l`",
            found=_host.shown(str(problem))[:300] or type(problem).__name__,
            remedy=_LOOK,
        ) from problem
    return rows


def find(partition: Partition) -> Row | None:
    """The slice's partition; None when the board has no such partition.

    Refused while another active partition has some of them.
    """
    rows, modules = listed(partition), frozenset(partition.modules)
    for row in rows:
        if row.active and row.modules != modules and row.modules & modules:
            raise Refusal(
                "nvlink_partition_overlap",
                expected=f"no active partition with some of {partition.text}",
                found=f"{row.text} is active",
                remedy="release the slice that has these GPUs; if there is none, deactivate it with"
                f" `fmpm -d {row.id}`",
            )
    return next((row for row in rows if row.modules == modules), None)


def refusals(options: Mapping[str, Any]) -> list[Refusal]:
    """Reasons against a start with the partition in these options, as far as they show before."""
    try:
        require(partition(options))
        return []
    except Refusal as refusal:
        return [refusal]


def require(partition: Partition) -> Row:
    """The slice's partition, as `find`; refused when the board has no such partition."""
    row = find(partition)
    if row is None:
        raise Refusal(
            "nvlink_partition_missing",
            expected=f"a partition of {partition.text} in `fmpm -l`",
            found="none; `fmpm --list-unsupported-partitions` names those with a failed link",
            remedy="compare gpu.module_ids and gpu.nvlink_sets of the profile with the board",
        )
    return row


def change(partition: Partition, *, active: bool) -> dict[str, Any]:
    """Activate or deactivate the slice's partition and read it back; returns evidence."""
    row = require(partition) if active else find(partition)
    if row is not None and row.active != active:
        _ask(partition, "-a" if active else "-d", str(row.id), timeout=_CHANGE_S)
        left = find(partition)
        if left is None or left.active != active:
            raise Refusal(
                "nvlink_partition_unchanged",
                expected=f"{row.text} {'active' if active else 'inactive'}",
                found="the Fabric Manager confirmed the change, and lists it otherwise",
                remedy=_LOOK,
            )
    return {"partition": row.id if row else None, "modules": list(partition.modules)}


def _row(entry: Mapping[str, Any]) -> Row:
    modules = [gpu["physicalId"] for gpu in entry["gpuInfo"]]
    id_, active = entry["partitionId"], entry["isActive"]
    numbers = all(map(_is_number, (id_, active, *modules)))
    if not numbers or active > 1 or not entry["numGpus"] == len(modules) == len(set(modules)) > 0:
        raise ValueError(f"partition {str(entry)[:200]}")
    return Row(id_, frozenset(modules), active == 1)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _ask(manager: Partition, *words: str, timeout: float) -> str:
    """Output of `fmpm`, which prints the reason of a failure there too."""
    where = ["--hostname", manager.address]
    if manager.socket:
        where = ["--unix-domain-socket", manager.socket]
    argv = ["bash", "-o", "pipefail", "-c", _BOUNDED, "fmpm", "fmpm", *where, *words]
    code = "fabric_manager_unreachable" if words == ("-l",) else "fabric_manager_refused"
    try:
        answer = _command.run(argv, ok=range(256), timeout=timeout)
    except Refusal as late:
        code, shown = "fabric_manager_unreachable", f"{late.code}: {late.found}"
    else:
        if answer.rc == 0:
            return answer.out
        shown = f"exit {answer.rc}: {_host.shown(' '.join(answer.out.split()))[:300]}"
        if answer.rc == _NO_PROGRAM:
            shown = "no program fmpm on this host"
        elif len(answer.out) > _LONGEST:
            shown = f"more than {_LONGEST} bytes"
    at = manager.socket or manager.address
    raise Refusal(
        code,
        expected=f"`fmpm {' '.join(words)}` answered by the Fabric Manager at {at}",
        found=shown,
        remedy=_LOOK,
    )
