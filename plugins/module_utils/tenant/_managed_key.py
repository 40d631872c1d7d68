"""Managed line in a tenant's authorized_keys, in a home that the tenant controls.

No file is opened by a path below the home. Each step goes from a descriptor to the next name and
follows no link, and each opened file must be the tenant's own. The tenant may change the home
meanwhile; the code still reads and writes only the tenant's own files.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

FILE = "authorized_keys"
FOLDER = ".ssh"
# More than any tenant's keys need; a larger file is not read into memory.
LARGEST = 1 << 20
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_KEY = re.compile(r"[a-z0-9][a-z0-9@.-]{6,60} AAAA[A-Za-z0-9+/]{20,2000}={0,2}")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class KeyFile:
    """content: of the file, b"" when it does not exist. mode, gid: of the file, None when it does
    not exist.
    """

    content: bytes = b""
    mode: int | None = None
    gid: int | None = None


def marker(instance_id: str) -> str:
    """The comment that identifies the line of an application's instance."""
    if not _UUID.fullmatch(instance_id):
        raise _invalid("instance_id", "a UUID with dashes", instance_id)
    return f"gpuaas-managed:{instance_id}"


def line(instance_id: str, public_key: str, expires_at: int) -> bytes:
    """The key, for commands only, until its expiry.

    The expiry is in the host's own time, which every sshd understands; UTC needs OpenSSH 9.1.
    """
    if not _KEY.fullmatch(public_key):
        raise _invalid("public_key", "type and base64 of a public key", public_key)
    end = time.strftime("%Y%m%d%H%M", time.localtime(expires_at))
    return f'restrict,expiry-time="{end}" {public_key} {marker(instance_id)}'.encode()


def ours(content: bytes, instance_id: str) -> list[bytes]:
    """The lines with the instance's marker, without their newlines."""
    return [row.rstrip(b"\r\n") for row in _rows(content) if _is_ours(row, instance_id)]


def replaced(content: bytes, instance_id: str, line: bytes | None) -> bytes:
    """The content with this line as the instance's only line; all other bytes stay unchanged."""
    if ours(content, instance_id) == ([] if line is None else [line]):
        return content
    kept = b"".join(row for row in _rows(content) if not _is_ours(row, instance_id))
    if line is None:
        return kept
    if kept and not kept.endswith(b"\n"):
        kept += b"\n"
    return kept + line + b"\n"


@contextlib.contextmanager
def folder(home: str, uid: int, *, make_for: int | None = None) -> Iterator[int | None]:
    """A descriptor of the tenant's ~/.ssh, None when it does not exist.

    make_for: create a missing directory, for this group.
    """
    with contextlib.ExitStack() as held:
        top = _opened(str(_host.path(home)), home, uid)
        if top is None:
            yield None
            return
        held.callback(os.close, top)
        descriptor = _opened(FOLDER, f"{home}/{FOLDER}", uid, at=top)
        if descriptor is None and make_for is not None:
            descriptor = _made(top, home, uid, make_for)
        if descriptor is not None:
            held.callback(os.close, descriptor)
        yield descriptor


def read(at: int, home: str, uid: int) -> KeyFile:
    """The tenant's file below this descriptor; Refusal unless it is a regular file of the
    tenant.
    """
    where = f"{home}/{FOLDER}/{FILE}"
    try:
        # A pipe in its place must not block until a process writes into it.
        descriptor = os.open(FILE, _READ | os.O_NONBLOCK, dir_fd=at)
    except FileNotFoundError:
        return KeyFile()
    except OSError as error:
        raise unsafe(where, error.strerror or str(error)) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise unsafe(where, "no ordinary file")
        if status.st_uid != uid:
            raise unsafe(where, f"a file of uid {status.st_uid}")
        with os.fdopen(descriptor, "rb", closefd=False) as handle:
            content = handle.read(LARGEST + 1)
    finally:
        os.close(descriptor)
    if len(content) > LARGEST:
        raise unsafe(where, f"more than {LARGEST} bytes")
    # Neither set-id nor sticky bits, because the file contains only keys.
    return KeyFile(content, stat.S_IMODE(status.st_mode) & 0o777, status.st_gid)


def write(at: int, content: bytes, *, uid: int, gid: int, mode: int) -> None:
    """Replace the file with the content atomically, with the tenant as owner."""
    name = f".{FILE}.gpuaas-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, 0o600, dir_fd=at)
        try:
            with os.fdopen(descriptor, "wb") as handle:
                handle.write(content)
                handle.flush()
                os.fchmod(descriptor, mode)
                os.fchown(descriptor, uid, gid)
                os.fsync(descriptor)
            os.rename(name, FILE, src_dir_fd=at, dst_dir_fd=at)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=at)
            raise
        os.fsync(at)
    except OSError as error:
        raise Refusal(
            "keys_not_written",
            expected=f"{FILE} written whole",
            found=error.strerror or str(error),
            remedy="look at the space and the quota of the tenant's home; reconcile again",
        ) from error


def unsafe(where: str, found: str) -> Refusal:
    return Refusal(
        "home_unsafe",
        expected=f"{where}, the tenant's own and no link",
        found=found,
        remedy="have the tenant restore it (mkdir -m 700 ~/.ssh); nothing was changed",
    )


def _rows(content: bytes) -> list[bytes]:
    # Split lines as sshd does: bytes.splitlines accepts other line ends too.
    return [row for row in re.split(rb"(?<=\n)", content) if row]


def _is_ours(row: bytes, instance_id: str) -> bool:
    return row.rstrip().endswith(b" " + marker(instance_id).encode())


def _opened(name: str, where: str, uid: int, *, at: int | None = None) -> int | None:
    try:
        descriptor = os.open(name, _READ | os.O_DIRECTORY, dir_fd=at)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unsafe(where, error.strerror or str(error)) from error
    owner = os.fstat(descriptor).st_uid
    if owner != uid:
        os.close(descriptor)
        raise unsafe(where, f"a folder of uid {owner}")
    return descriptor


def _made(top: int, home: str, uid: int, gid: int) -> int:
    """A new ~/.ssh for the tenant.

    Between the two calls the tenant may put another folder there. Only an empty folder of root's is
    given to the tenant.
    """
    where = f"{home}/{FOLDER}"
    try:
        os.mkdir(FOLDER, 0o700, dir_fd=top)
        descriptor = os.open(FOLDER, _READ | os.O_DIRECTORY, dir_fd=top)
    except OSError as error:
        raise unsafe(where, error.strerror or str(error)) from error
    with os.scandir(descriptor) as inside:
        empty = next(inside, None) is None
    if os.fstat(descriptor).st_uid != os.geteuid() or not empty:
        os.close(descriptor)
        raise unsafe(where, "changed while it was made")
    os.fchown(descriptor, uid, gid)
    return descriptor


def _invalid(name: str, expected: str, found: str) -> Refusal:
    return Refusal(
        "managed_key_invalid",
        expected=f"{name}: {expected}",
        found=repr(found)[:120],
        remedy="pass the values that the reconciler shows",
    )
