"""Planned unmounts of a disk, and the remounts when the plan is abandoned."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any
from urllib.parse import quote, unquote

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _usage

# How long a bcache device takes to go after its stop.
_STOP_S = 10.0


def steps(mounts: Sequence[_usage.Mount], owner: str) -> list[_change.Step]:
    """Unmount these mounts, the last mounted first; each step keeps the data for its remount.

    place, origin: exact bytes of mount point and source, because their printable forms lose bytes.
    """
    return [
        _change.Step(
            "unmount",
            mount.point,
            before={
                "of": owner,
                "devt": mount.devt,
                "source": mount.source,
                "type": mount.type,
                "root": mount.root,
                "options": mount.options,
                "place": _kept(mount.place),
                "origin": _kept(mount.origin),
            },
        )
        for mount in reversed(mounts)
    ]


def covered(mounts: Sequence[_usage.Mount], table: Sequence[_usage.Mount]) -> list[Refusal]:
    """Mounts that another mount covers; `umount` would take the upper mount instead."""
    numbers = {mount.devt for mount in mounts}
    hidden = {
        mount.point: upper
        for mount in mounts
        if (upper := _usage.uppermost(table, mount.place)) and upper.devt not in numbers
    }
    return [_covered(point, upper) for point, upper in sorted(hidden.items())]


def unmount(step: _change.Step) -> None:
    """Unmount the step's mount. Refused when another mount is uppermost now; a busy mount stays."""
    table = _usage.mounts()
    upper = _usage.uppermost(table, _exact(step.before["place"]))
    if upper is None:
        return
    if upper.devt != step.before["devt"]:
        raise _covered(step.subject, upper)
    _command.run(["umount", "--", upper.place])


def again(done: Sequence[_change.Step], *, spare: Collection[str]) -> tuple[list[str], list[str]]:
    """Mount again after these steps: restored mount points, and failures with reasons.

    spare: owners whose disk is already erased.
    """
    back, left = [], []
    for step in reversed(done):
        if step.name != "unmount" or step.before["of"] in spare:
            continue
        try:
            _mount(step.before)
            back.append(step.subject)
        except (OSError, Refusal) as problem:
            why = problem.found if isinstance(problem, Refusal) else str(problem)
            left.append(f"{step.subject} ({why})")
    return back, left


def _mount(was: dict[str, Any]) -> None:
    if was["root"] != "/":
        raise Refusal(
            "mount_unknown",
            expected="a whole filesystem",
            found=f"it was {was['root']} of {was['source']}",
            remedy="mount it by hand",
        )
    how = ["-t", was["type"], *(["-o", was["options"]] if was["options"] else [])]
    _command.run(["mount", *how, "--", _exact(was["origin"]), _exact(was["place"])])


def _kept(name: str) -> str:
    """A JSON-safe form of arbitrary bytes in a name; `_exact` reverses it."""
    return quote(name, errors="surrogateescape")


def _exact(kept: str) -> str:
    return unquote(kept, errors="surrogateescape")


def _covered(point: str, upper: _usage.Mount) -> Refusal:
    return Refusal(
        "mount_covered",
        expected=f"nothing mounted over the disk's mount on {point}",
        found=f"{upper.type} {upper.source}",
        remedy="unmount that first, or restart the machine; nothing is taken away by force",
    )


def stop_device(name: str) -> None:
    """Stop an md array, a device-mapper device or a bcache device, unless it is in use.

    The kernel refuses to stop the first two in use, but not a bcache device.
    """
    if name.startswith("bcache"):
        if _usage.is_claimed(name):
            raise Refusal(
                "disk_in_use",
                expected=f"/dev/{name} without users",
                found="the kernel holds it, such as for a mount",
                remedy="stop its users; nothing is taken away by force",
            )
        folder = _host.path(f"/sys/class/block/{name}")
        (folder / "bcache/stop").write_text("1\n")
        until = time.monotonic() + _STOP_S
        while folder.exists() and time.monotonic() < until:
            time.sleep(0.1)
        return
    if name.startswith("md"):
        _command.run(["mdadm", "--stop", f"/dev/{name}"])
        return
    mapped = _host.read(f"/sys/class/block/{name}/dm/name") or name
    _command.run(["dmsetup", "remove", "--", mapped])
