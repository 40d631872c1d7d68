"""NVMe admin commands through the descriptor of a namespace: Identify and Format NVM.

Linux names and identifies some namespaces by quirk lists. The identity is therefore read from the
device, on the descriptor that is about to be used.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _device

# <linux/nvme_ioctl.h>: _IO('N', 0x40) and _IOWR('N', 0x41, struct nvme_passthru_cmd)
NVME_IOCTL_ID = 0x4E40
NVME_IOCTL_ADMIN_CMD = 0xC0484E41

_FORMAT_NVM, _IDENTIFY = 0x80, 0x06
_CNS_NAMESPACE, _CNS_CONTROLLER, _CNS_ACTIVE_NAMESPACES = 0, 1, 2
_CNS_ALLOCATED_NAMESPACES = 0x10
# Optional Admin Command Support: Format NVM, and Namespace Management.
_OACS_FORMAT, _OACS_NAMESPACES = 0x2, 0x8
# Format NVM Attributes: a format, or a secure erase, covers all namespaces.
_FNA_ALL = 0x3

# Secure Erase Settings of Format NVM. Without such a setting a format erases nothing.
SECURE_ERASE = {"user_data_erase": 1, "crypto_erase": 2}


@dataclass(frozen=True)
class Identity:
    """Identity that the device reports.

    eui, nguid: lower-case hex, "" when all zero. format_setting: the value that a format must
    repeat to keep block size and protection. can_format, can_crypto_erase: from OACS and FNA.
    format_spreads: a format of this namespace would, or may, erase other namespaces as well.
    """

    serial: str
    model: str
    eui: str
    nguid: str
    namespace: int
    format_setting: int
    can_format: bool
    can_crypto_erase: bool
    format_spreads: bool

    def supports(self, method: str) -> bool:
        """Whether the controller can erase only this namespace with this method."""
        if method not in SECURE_ERASE:
            return True
        able = self.can_format and not self.format_spreads
        return able and (method != "crypto_erase" or self.can_crypto_erase)


def identify(descriptor: int) -> Identity:
    """Identify Controller and Namespace; OSError when it is not an NVMe namespace."""
    namespace = _device.call(descriptor, NVME_IOCTL_ID, bytearray(8))
    controller = _identify(descriptor, 0, _CNS_CONTROLLER)
    return parse(
        namespace,
        controller,
        _identify(descriptor, namespace, _CNS_NAMESPACE),
        _identify(descriptor, 0, _CNS_ACTIVE_NAMESPACES),
        _allocated(descriptor, controller),
    )


def parse(
    namespace: int, controller: bytes, described: bytes, active: bytes, allocated: bytes = b""
) -> Identity:
    """Parse the Identify structures of the NVMe base specification.

    allocated: the list of allocated namespaces; empty when it was not read. `active` lacks the
    namespaces that are detached or attached to another controller only.
    """
    oacs, fna = _capabilities(controller)
    flbas, protection = described[26], described[29]
    # CDW10 of Format NVM: LBAF 3:0, metadata 4, protection type 7:5, its place 8, LBAF high 13:12.
    setting = flbas & 0x1F | (protection & 0xF) << 5 | (flbas >> 5 & 3) << 12
    listed = {other for (other,) in struct.iter_unpack("<I", active + allocated)}
    hidden = bool(oacs & _OACS_NAMESPACES) and not allocated
    return Identity(
        serial=_text(controller[4:24]),
        model=_text(controller[24:64]),
        eui=_hex(described[120:128]),
        nguid=_hex(described[104:120]),
        namespace=namespace,
        format_setting=setting,
        can_format=bool(oacs & _OACS_FORMAT),
        can_crypto_erase=bool(fna & 4),
        format_spreads=bool(fna & _FNA_ALL) and (hidden or bool(listed - {0, namespace})),
    )


def format_namespace(descriptor: int, identity: Identity, method: str, *, timeout: int) -> int:
    """Erase the namespace; returns the controller's status, 0 for success. timeout: seconds."""
    setting = identity.format_setting | SECURE_ERASE[method] << 9
    return admin(
        descriptor,
        _FORMAT_NVM,
        namespace=identity.namespace,
        cdw10=setting,
        timeout_ms=timeout * 1000,
    )


def admin(
    descriptor: int,
    opcode: int,
    *,
    namespace: int = 0,
    cdw10: int = 0,
    data: ctypes.Array[ctypes.c_char] | None = None,
    timeout_ms: int = 0,
) -> int:
    """Send an admin command; returns its NVMe status."""
    return command(
        *(descriptor, NVME_IOCTL_ADMIN_CMD, opcode),
        namespace=namespace,
        cdw10=cdw10,
        data=data,
        timeout_ms=timeout_ms,
    )


def command(
    descriptor: int,
    request: int,
    opcode: int,
    *,
    namespace: int = 0,
    cdw10: int = 0,
    cdw11: int = 0,
    data: ctypes.Array[ctypes.c_char] | None = None,
    timeout_ms: int = 0,
) -> int:
    """Send a command by an ioctl of the kernel; returns its NVMe status."""
    address, length = (ctypes.addressof(data), len(data)) if data is not None else (0, 0)
    # opcode, flags, reserved, nsid, cdw2-3, metadata, address, lengths, cdw10-15, timeout, result
    words = struct.pack(
        "<BBHIIIQQIIIIIIIIII",
        *(opcode, 0, 0, namespace, 0, 0, 0, address, 0, length),
        *(cdw10, cdw11, 0, 0, 0, 0, timeout_ms, 0),
    )
    return _device.call(descriptor, request, bytearray(words))


def _allocated(descriptor: int, controller: bytes) -> bytes:
    """The list of allocated namespaces; empty when it is not needed or cannot be read."""
    oacs, fna = _capabilities(controller)
    if not (oacs & _OACS_NAMESPACES and fna & _FNA_ALL):
        return b""
    try:
        return _identify(descriptor, 0, _CNS_ALLOCATED_NAMESPACES)
    except OSError:
        return b""


def _capabilities(controller: bytes) -> tuple[int, int]:
    """OACS and FNA."""
    (oacs,) = struct.unpack_from("<H", controller, 256)
    return oacs, controller[524]


def _identify(descriptor: int, namespace: int, structure: int) -> bytes:
    data = ctypes.create_string_buffer(4096)
    status = admin(descriptor, _IDENTIFY, namespace=namespace, cdw10=structure, data=data)
    if status != 0:
        raise OSError(f"Identify (CNS {structure}) ended with NVMe status {status:#x}")
    return data.raw


def _text(field: bytes) -> str:
    return field.decode("ascii", errors="replace").strip(" \0")


def _hex(field: bytes) -> str:
    return field.hex() if any(field) else ""
