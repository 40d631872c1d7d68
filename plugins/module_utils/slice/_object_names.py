"""Names of a slice's objects on its host, and validation of the values in them.

Every name carries the allocation id, so what a slice left behind can be found without a record.
"""

from __future__ import annotations

import re
import uuid
from pathlib import PurePosixPath

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

SEEDS = f"{_host.STATE_DIRECTORY}/seeds"

_PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")
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


def domain_name(allocation_id: str) -> str:
    return f"gpuaas-slice-{hexadecimal(allocation_id)}"


def port_name(allocation_id: str) -> str:
    """The OVS port; the kernel allows 15 characters."""
    return f"gs{hexadecimal(allocation_id)[:12]}"


def seed_path(allocation_id: str) -> str:
    return f"{SEEDS}/{domain_name(allocation_id)}.iso"


def nvram_path(allocation_id: str) -> str:
    return f"/var/lib/libvirt/qemu/nvram/{domain_name(allocation_id)}_VARS.fd"


def console_path(allocation_id: str) -> str:
    return f"/var/log/libvirt/qemu/{domain_name(allocation_id)}-console.log"


def console_files(allocation_id: str) -> list[str]:
    """The console's log as it is there, with the older parts that virtlogd has put aside."""
    path = PurePosixPath(console_path(allocation_id))
    folder = _host.path(str(path.parent))
    return sorted(str(path.parent / file.name) for file in folder.glob(f"{path.name}*"))


def check_mac(mac: str) -> str:
    """A unicast MAC in lower case."""
    match("mac", _MAC, mac, "a unicast MAC such as 52:54:00:64:00:0a")
    return mac


def check_pci(address: str) -> str:
    match("pci address", _PCI, address, "an address such as 0000:43:00.0")
    return address


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
