"""UEFI variables that decide what a machine starts and which signatures it accepts.

Read from efivarfs, where a variable is a file of four bytes of attributes and its data.
"""

from __future__ import annotations

import hashlib
import re
import struct
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

FIRMWARE = "/sys/firmware/efi"
FOLDER = f"{FIRMWARE}/efivars"
# BootCurrent is left out: it says how the machine was started this time.
_WATCHED = re.compile(
    r"(?:(?:Boot|Driver|SysPrep|OsRecovery|PlatformRecovery)(?:Order|Next|[0-9A-F]{4})"
    r"|SecureBoot|SetupMode|AuditMode|DeployedMode|VendorKeys|PK|KEK|db|dbx|dbt|dbr"
    r"|(?:Mok|Shim|Sbat)[A-Za-z]{1,40})"
)
_OPTION = re.compile(r"(?:Boot|Driver|SysPrep|OsRecovery|PlatformRecovery)[0-9A-F]{4}")
# Vendors by whose GUID the specification, its image database and shim name their variables.
_VENDORS = (
    "8be4df61-93ca-11d2-aa0d-00e098032b8c",
    "d719b2cb-3d3a-4596-a3bc-dad00e67656f",
    "605dab50-e046-4300-abb6-3dd810dd8b23",
)
_GUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_ACTIVE = 1
# Types of device path nodes: partition, file, NVMe namespace, network card, end.
_PARTITION, _FILE, _NVME, _CARD, _END = (4, 1), (4, 4), (3, 23), (3, 11), (0x7F, 0xFF)
_GUID_SIGNATURE = 2


@dataclass(frozen=True)
class LoadOption:
    """A boot entry. partition: GUID of the partition that it names, or "". namespace: EUI64 of the
    NVMe namespace in the byte order of the path, or "". network: whether it starts from a network.
    """

    active: bool
    description: str
    path: str
    partition: str = ""
    namespace: str = ""
    network: bool = False


def variables() -> tuple[dict[str, bytes], dict[str, str]]:
    """Data of the watched variables by name, and reasons by name for those that cannot be read.

    Raises Refusal without efivarfs, because no variable is then known to be absent.
    """
    if not _host.path(FIRMWARE).is_dir():
        raise _missing("the machine was not started by UEFI")
    names = _host.listed(FOLDER)
    if not names:
        raise _missing("no efivarfs is mounted")
    data, unreadable = {}, {}
    for file in names:
        name, guid = file[:-37], file[-36:]
        if not (_WATCHED.fullmatch(name) and _GUID.fullmatch(guid)):
            continue
        # A variable of another vendor may have the name of one that matters.
        key = name if guid in _VENDORS else f"{name}-{guid}"
        try:
            data[key] = _host.path(f"{FOLDER}/{file}").read_bytes()[4:]
        except OSError as broken:
            unreadable[key] = broken.strerror or "not readable"
    return data, unreadable


def describe(name: str, data: bytes, own_partition: str = "") -> str:
    """Text that distinguishes two values. own_partition: GUID of the host's EFI partition, which
    changes with every installation and is therefore replaced in the text.
    """
    if name in ("BootOrder", "BootNext", "DriverOrder"):
        return ",".join(numbers(data))
    option = load_option(data) if _OPTION.fullmatch(name) else None
    if option is not None:
        path = option.path
        if own_partition and option.partition == own_partition:
            path = path.replace(own_partition, "own")
            data = data.replace(uuid.UUID(own_partition).bytes_le, b"own")
        state = "active" if option.active else "inactive"
        digest = hashlib.sha256(data).hexdigest()[:16]
        return f"{state} {option.description!r} {path} {digest}"
    return data.hex() if len(data) <= 8 else f"sha256:{hashlib.sha256(data).hexdigest()}"


def numbers(data: bytes) -> list[str]:
    """Numbers of an order variable, as they stand in the names of entries."""
    return [f"{number:04X}" for (number,) in struct.iter_unpack("<H", data[: len(data) & ~1])]


def boot_order(data: Mapping[str, bytes]) -> Iterator[tuple[str, LoadOption]]:
    """The entries that the firmware tries, in order; BootNext first, which need not be active."""
    following = numbers(data.get("BootNext", b""))
    for number in dict.fromkeys([*following, *numbers(data.get("BootOrder", b""))]):
        option = load_option(data.get(f"Boot{number}", b""))
        if option is not None and (option.active or number in following):
            yield f"Boot{number}", option


def load_option(data: bytes) -> LoadOption | None:
    """The entry in a Boot#### variable; None when it is no entry."""
    if len(data) < 8:
        return None
    attributes, length = struct.unpack_from("<IH", data)
    end = next((at for at in range(6, len(data) - 1, 2) if data[at : at + 2] == b"\0\0"), -1)
    if end < 0 or end + 2 + length > len(data):
        return None
    nodes = list(_nodes(data[end + 2 : end + 2 + length]))
    return LoadOption(
        active=bool(attributes & _ACTIVE),
        description=_text(data[6:end]),
        path="/".join(_shown(kind, body) for kind, body in nodes),
        partition=next((_partition(body) for kind, body in nodes if kind == _PARTITION), ""),
        namespace=next((body[4:12].hex() for kind, body in nodes if kind == _NVME), ""),
        network=any(kind == _CARD for kind, _body in nodes),
    )


def _nodes(path: bytes) -> Iterator[tuple[tuple[int, int], bytes]]:
    at = 0
    while at + 4 <= len(path):
        kind, sub, length = struct.unpack_from("<BBH", path, at)
        if (kind, sub) == _END or length < 4:
            return
        yield (kind, sub), path[at + 4 : at + length]
        at += length


def _shown(kind: tuple[int, int], body: bytes) -> str:
    if kind == _FILE:
        return f"File({_text(body)})"
    if kind == _PARTITION:
        return f"HD({int.from_bytes(body[:4], 'little')},{_partition(body)})"
    if kind == _NVME:
        return f"NVMe({body[4:12].hex()})"
    text = body.hex() if len(body) <= 16 else f"sha256:{hashlib.sha256(body).hexdigest()[:16]}"
    return f"{kind[0]:02x}{kind[1]:02x}({text})"


def _partition(body: bytes) -> str:
    """GUID of a partition node; its signature in hexadecimal on a disk without GUIDs."""
    if len(body) >= 38 and body[37] == _GUID_SIGNATURE:
        return str(uuid.UUID(bytes_le=body[20:36]))
    return body[20:36].hex()


def _text(data: bytes) -> str:
    return _host.shown(data.decode("utf-16-le", errors="replace").rstrip("\0"))


def _missing(found: str) -> Refusal:
    return Refusal(
        "efi_variables_missing",
        expected=f"the variables of UEFI in {FOLDER}",
        found=found,
        remedy="start the machine by UEFI and mount efivarfs",
    )
