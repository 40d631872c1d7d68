"""/etc/fstab: which lines belong to a disk, and how they are put out of force and kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ansible_collections.gpuaas.slice.plugins.module_utils import _host, _usage

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
    """Lines in force that mount one of the devices `names`, a file below one of `points`, or on one
    of them what is not there.

    A line for a device that is there and is none of these belongs to that one: what is mounted over
    its point now does not make it ours.
    """
    return [
        line
        for line in (_host.read(FILE) or "").splitlines()
        if (fields := line.split())
        and not line.lstrip().startswith("#")
        and (
            (name := _device_name(fields[0])) in names
            or _usage.unescape(fields[0]).startswith(tuple(f"{point}/" for point in points))
            or (
                len(fields) > 1
                and _usage.unescape(fields[1]) in points
                and not (name and _host.path(f"/sys/class/block/{name}").exists())
            )
        )
    ]


def disable(lines: Iterable[str], *, backup: str) -> None:
    """Comment the lines out after a copy of the file is safe in `backup`."""
    text = _host.path(FILE).read_text()
    _host.write(backup, text)
    out_of_force = set(lines)
    kept = [f"# {MARKER} {line}" if line in out_of_force else line for line in text.splitlines()]
    _host.write(FILE, "\n".join(kept) + "\n")


def disabled() -> list[str]:
    """Lines that `disable` put out of force, as they were."""
    prefix = f"# {MARKER} "
    rows = (_host.read(FILE) or "").splitlines()
    return [row.removeprefix(prefix) for row in rows if row.startswith(prefix)]


def enable(lines: Iterable[str]) -> None:
    """Put lines back into force that `disable` commented out."""
    back = {f"# {MARKER} {line}": line for line in lines}
    text = _host.path(FILE).read_text()
    _host.write(FILE, "\n".join(back.get(row, row) for row in text.splitlines()) + "\n")


def device_there(line: str) -> bool:
    """Whether what the line mounts exists: a wiped disk has lost its labels and UUIDs."""
    source = line.split(maxsplit=1)[0]
    tag, equals, _value = source.partition("=")
    if not (source.startswith("/dev/") or (equals and tag in _TAGS)):
        return True  # A network or virtual file system.
    name = _device_name(source)
    return bool(name) and _host.path(f"/sys/class/block/{name}").exists()


def _device_name(spec: str) -> str:
    tag, equals, value = spec.partition("=")
    if equals and tag in _TAGS:
        label = _encoded(_usage.unescape(value.strip('"')))
        return _usage.node_name(f"/dev/disk/{_TAGS[tag]}/{label}")
    return _usage.node_name(_usage.unescape(spec))


def _encoded(label: str) -> str:
    """A label as udev writes it into the name of a link."""
    kept = "#+-.:=@_"
    return "".join(
        c if c.isalnum() or c in kept else "".join(f"\\x{byte:02x}" for byte in c.encode())
        for c in label
    )
