"""Entries of a disk in /etc/fstab: disabled, kept and enabled again."""

from __future__ import annotations

import io
import stat
from collections.abc import Collection, Iterable

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _usage

shown = _host.shown

FILE = "/etc/fstab"
MARKER = "gpuaas-slice-storage-disabled"
BACKUP = "/etc/fstab.gpuaas-slice-storage-backup-"

_TAGS = {
    "UUID": "by-uuid",
    "PARTUUID": "by-partuuid",
    "LABEL": "by-label",
    "PARTLABEL": "by-partlabel",
    "ID": "by-id",
}


def lines_of(names: Collection[str], points: Collection[str]) -> list[str]:
    """Active lines of these devices or mount points.

    A line matches if it mounts a device of `names`, a file below a mount point of `points`, or an
    absent device on such a mount point. A line for an existing other device belongs to that device,
    and a network share is no device; a mount over their mount point does not change that.
    """
    return [
        shown(line)
        for line in text().split("\n")
        if (fields := line.split())
        and not line.lstrip().startswith("#")
        and (
            (name := _device_name(fields[0])) in names
            or _as_mounted(fields[0]).startswith(tuple(f"{point}/" for point in points))
            or (
                len(fields) > 1
                and _as_mounted(fields[1]) in points
                and _is_device(fields[0])
                and not (name and _host.path(f"/sys/class/block/{name}").exists())
            )
        )
    ]


def text() -> str:
    """The file's content, "" when it does not exist; arbitrary bytes survive a write-back.

    Split at "\\n" only, because mount programs end lines there. An unreadable file is a Refusal.
    """
    return (_host.content(FILE) or b"").decode(errors="surrogateescape")


def disable(lines: Iterable[str], *, backup: str) -> None:
    """Comment the lines out after a copy of the file is safe in `backup`."""
    was, out_of_force = text(), set(lines)
    _host.write(backup, was, mode=0o600)
    kept = [
        f"# {MARKER} {line}" if shown(line) in out_of_force else line for line in was.split("\n")
    ]
    _rewrite("\n".join(kept))


def remove(lines: Iterable[str], *, backup: str) -> None:
    """Delete the lines; the file is then byte for byte the file before they were added."""
    was, unwanted = text(), set(lines)
    _host.write(backup, was, mode=0o600)
    rows = io.StringIO(was, newline="\n")
    _rewrite("".join(row for row in rows if shown(row.removesuffix("\n")) not in unwanted))


def disabled() -> list[str]:
    """Original lines that `disable` commented out."""
    prefix = f"# {MARKER} "
    return [shown(row.removeprefix(prefix)) for row in text().split("\n") if row.startswith(prefix)]


def enable(lines: Iterable[str]) -> None:
    """Restore lines that `disable` commented out."""
    prefix, back = f"# {MARKER} ", set(lines)
    rows = [
        row.removeprefix(prefix)
        if row.startswith(prefix) and shown(row.removeprefix(prefix)) in back
        else row
        for row in text().split("\n")
    ]
    _rewrite("\n".join(rows))


def device_there(line: str) -> bool:
    """Whether the line's device exists; a wiped disk has lost its labels and UUIDs."""
    source = line.split(maxsplit=1)[0]
    if not _is_device(source):
        return True
    name = _device_name(source)
    return bool(name) and _host.path(f"/sys/class/block/{name}").exists()


def _rewrite(content: str) -> None:
    """Replace the file and keep its mode: a site hides the passwords of its network shares."""
    file = _host.path(FILE)
    mode = stat.S_IMODE(file.stat().st_mode) if file.exists() else 0o644
    _host.write(FILE, content, mode=mode)


def _is_device(source: str) -> bool:
    """Whether a source names a device, and not a network or virtual file system."""
    tag, equals, _value = source.partition("=")
    return source.startswith("/dev/") or bool(equals and tag in _TAGS)


def _as_mounted(path: str) -> str:
    """The path in the spelling of `_usage.mounts`, whatever bytes it has."""
    return shown(_usage.unescape(path))


def _device_name(spec: str) -> str:
    """The kernel name of the line's device; "" if it is no device or not a possible path."""
    try:
        return _resolved(spec)
    except (OSError, ValueError):
        return ""


def _resolved(spec: str) -> str:
    tag, equals, value = spec.partition("=")
    if equals and tag in _TAGS:
        label = _encoded(_usage.unescape(value.strip('"')))
        return _usage.node_name(f"/dev/disk/{_TAGS[tag]}/{label}")
    return _usage.node_name(_usage.unescape(spec))


def _encoded(label: str) -> str:
    """A label as udev writes it into the name of a link."""
    kept = "#+-.:=@_"
    return "".join(c if c.isalnum() or c in kept else _bytes_of(c) for c in label)


def _bytes_of(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode(errors="surrogateescape"))
