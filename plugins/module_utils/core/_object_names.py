"""Names of a slice's objects on its host, and validation of the values in them.

Every name contains the allocation id, so that traces of a slice can be found without a record.
"""

from __future__ import annotations

import re
import uuid

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

SEEDS = f"{_host.STATE_DIRECTORY}/seeds"
CHANNELS = f"{_host.STATE_DIRECTORY}/channels"
# Part of the names of a slice's domain, its files and its QEMU.
PREFIX = "gpuaas-slice-"
# libvirt's hook of all slices, in the folder of several, because the site may have its own
# /etc/libvirt/hooks/qemu.
START_HOOK = "/etc/libvirt/hooks/qemu.d/gpuaas-slice"
# Folder and suffix of a file, whose name is the domain's; virtlogd numbers rotated console logs.
_FILES = {
    "seed": (SEEDS, ".iso"),
    "nvram": ("/var/lib/libvirt/qemu/nvram", "_VARS.fd"),
    "console": ("/var/log/libvirt/qemu", "-console.log"),
    "guard": (f"{_host.STATE_DIRECTORY}/guards", ".json"),
    "fabric_guard": (f"{_host.STATE_DIRECTORY}/fabric-guards", ".json"),
    "channel": (CHANNELS, ".sock"),
    "ingress": (f"{_host.STATE_DIRECTORY}/ingress", ".json"),
    "nvlink": (f"{_host.STATE_DIRECTORY}/nvlink", ".json"),
}

_ID = re.compile(PREFIX + "".join(f"([0-9a-f]{{{size}}})" for size in (8, 4, 4, 4, 12)))
_PORT = re.compile(r"gs([0-9a-f]{12})")
_PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")
# dnsmasq distinguishes fields by their form: a name like `12h` would be taken for a lease time.
RESERVED_HOSTNAME = re.compile(r"[0-9]+[smhdw]?|infinite|ignore")
_HOSTNAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_MAC = re.compile(r"[0-9a-f][02468ace](:[0-9a-f]{2}){5}")


def hexadecimal(allocation_id: str) -> str:
    """The allocation id without dashes; anything but a canonical UUID is refused."""
    try:
        canonical = str(uuid.UUID(allocation_id)) == allocation_id
    except ValueError:
        canonical = False
    if not canonical:
        raise invalid("allocation_id", "a lower-case UUID with dashes", allocation_id)
    return allocation_id.replace("-", "")


def owner(text: str) -> str:
    """The allocation id in a text that contains a domain's name; "" without an id."""
    digits = _ID.search(text)
    return "-".join(digits.groups()) if digits else ""


def domain_name(allocation_id: str) -> str:
    return f"{PREFIX}{hexadecimal(allocation_id)}"


def port_name(allocation_id: str) -> str:
    """The OVS port; the kernel allows 15 characters."""
    return f"gs{hexadecimal(allocation_id)[:12]}"


def port_owner(name: str) -> str:
    """The first digits of the allocation id in a port's name; "" for a port of no slice."""
    digits = _PORT.fullmatch(name)
    return digits[1] if digits else ""


def cookie(allocation_id: str) -> str:
    """Cookie of the flows of a slice's port: 64 bits, never 0, because they include the UUID's
    version.
    """
    return f"0x{int(hexadecimal(allocation_id)[:16], 16):x}"


def cookie_owner(flow_cookie: str) -> str:
    """The first digits of the allocation id in a cookie."""
    return f"{int(flow_cookie, 16):016x}"


def seed_path(allocation_id: str) -> str:
    return _path("seed", allocation_id)


def seed_drafts(allocation_id: str) -> list[str]:
    """Folders with the content of a seed, which killed runs have left."""
    seed = seed_path(allocation_id)
    return [path for path in files("seed") if path != seed and owner(path) == allocation_id]


def nvram_path(allocation_id: str) -> str:
    return _path("nvram", allocation_id)


def console_path(allocation_id: str) -> str:
    return _path("console", allocation_id)


def guard_path(allocation_id: str) -> str:
    return _path("guard", allocation_id)


def fabric_guard_path(allocation_id: str) -> str:
    return _path("fabric_guard", allocation_id)


def ingress_path(allocation_id: str) -> str:
    return _path("ingress", allocation_id)


def nvlink_path(allocation_id: str) -> str:
    return _path("nvlink", allocation_id)


def channel_path(allocation_id: str, channel: str) -> str:
    """Socket of a virtio-serial channel between a slice VM and its host."""
    return f"{CHANNELS}/{domain_name(allocation_id)}-{channel}.sock"


def console_files(allocation_id: str) -> list[str]:
    """The current console log, and its older parts that virtlogd rotated."""
    return [path for path in files("console") if owner(path) == allocation_id]


def channel_files(allocation_id: str) -> list[str]:
    """Sockets of channels; libvirt removes them with the VM, unless the host crashed."""
    return [path for path in files("channel") if owner(path) == allocation_id]


def files(kind: str) -> list[str]:
    """Files of every slice on this host. kind: a key of `_FILES`; seeds with their drafts."""
    folder, end = _FILES[kind]
    pattern = f"{PREFIX}*{end}" + ("*" if kind == "console" else "")
    names = _host.matching(folder, pattern)
    if kind == "seed":
        names += _host.matching(folder, f".{PREFIX}*")
    return sorted(f"{folder}/{name}" for name in names)


def qemu_logs() -> list[str]:
    """QEMU's own logs of every slice, with their rotated parts. They outlive the slice."""
    folder, _end = _FILES["console"]
    return [f"{folder}/{name}" for name in _host.matching(folder, f"{PREFIX}{'?' * 32}.log*")]


def _path(kind: str, allocation_id: str) -> str:
    folder, end = _FILES[kind]
    return f"{folder}/{domain_name(allocation_id)}{end}"


def check_mac(mac: str) -> str:
    """A unicast MAC in lower case."""
    match("mac", _MAC, mac, "a unicast MAC such as 52:54:00:64:00:0a")
    return mac


def check_pci(address: str) -> str:
    match("pci address", _PCI, address, "an address such as 0000:43:00.0")
    return address


def check_hostname(field: str, name: str) -> str:
    """A guest's host name: a lower-case DNS label that dnsmasq does not read as another field.

    The API and the run contract have the same rule (`reserved_hostname`).
    """
    if RESERVED_HOSTNAME.fullmatch(name):
        raise invalid(field, "a name that is no number, duration or word of dnsmasq", name)
    match(field, _HOSTNAME, name, "a lower-case DNS label")
    return name


def match(field: str, pattern: re.Pattern[str], value: str, expected: str) -> None:
    if not pattern.fullmatch(value):
        raise invalid(field, expected, value)


def invalid(field: str, expected: str, found: str) -> Refusal:
    return Refusal(
        "spec_invalid",
        expected=f"{field}: {expected}",
        found=repr(found),
        remedy="pass the values of the approved slot bundle and the hardware profile unchanged",
    )
