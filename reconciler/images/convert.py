"""Raw image from a disk: a raw or qcow2 file, or an OCI image that contains either.

A source is hostile by assumption. It does not decide which other file is read, how much memory is
used, or how many bytes are written. A raw file gets its name in the folder when it is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, cast

from reconciler.durable import place, sync
from reconciler.images import bounds, oci
from reconciler.model.errors import Problem

SECTOR = 512
LIMIT_S = 3600
MEMORY = 2 << 30
NOBODY = 65534
QCOW2 = b"QFI\xfb"
# Incompatible features of qcow2: external data file, and those that change how its own bytes are
# read (compression type, extended L2 entries).
EXTERNAL_DATA, READABLE = 0b100, 0b11000
Compression = Literal["none", "zstd"]


@dataclass(frozen=True)
class Converted:
    """A file in the folder of images.

    digest, size_bytes: of its raw bytes. new: the folder did not have it. identity: inode, and time
    of its last change in ns.
    """

    file: Path
    digest: str
    size_bytes: int
    new: bool
    identity: tuple[int, int]

    def discard(self) -> None:
        """Remove the file, unless it was there before or another import has taken it since."""
        with _one_import(self.file.parent):
            if self.new and self.file.exists() and _identity(self.file) == self.identity:
                self.file.unlink()


def _identity(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_ino, status.st_mtime_ns


def convert(
    source: Path,
    folder: Path,
    *,
    limit_bytes: int,
    source_digest: str = "",
    compression: Compression = "none",
) -> Converted:
    """Convert a source into the folder. A refused source leaves nothing there.

    limit_bytes: of the raw image. source_digest: of the file, or of the manifest of an OCI
    image; "" for any.
    """
    with _drafts(folder) as drafts:
        # The owner of the source may change it at any time, so a copy is compared with
        # source_digest and converted.
        raw, disk = drafts / "raw", drafts / "disk"
        if _is_image(source):
            oci.extract(source, disk, limit_bytes, source_digest)
            source, source_digest = disk, ""
        with source.open("rb") as file:
            head = file.read(SECTOR)
            file.seek(0)
            size, is_raw = os.fstat(file.fileno()).st_size, not head.startswith(QCOW2)
            if is_raw:
                _require_bootable(head)
                _require_size(size, limit_bytes, folder)
                bounds.copy_sparse(file, raw, size)
            elif source != disk:
                # Before the copy, which may take minutes.
                _require_size(_virtual_size(head), limit_bytes, folder)
                _require_room(folder, size)
                bounds.copy_sparse(file, disk, size)
        if not is_raw:
            _unpack(disk, raw, limit_bytes, folder, source_digest)
        with raw.open("rb") as image:
            _require_bootable(image.read(SECTOR))
            image.seek(0)
            digest = bounds.digest_of(image)
        if is_raw:
            _require_digest(source_digest, digest)
        return _place(raw, folder, digest, compression)


def _is_image(source: Path) -> bool:
    """Whether a source is an OCI image. Refuses a source that is no file either."""
    try:
        mode = source.stat().st_mode
    except OSError as error:
        expected = "a disk file or an OCI image that this user can read"
        raise bounds.invalid(expected, f"{source}: {error.strerror}") from error
    # The opening of a pipe would wait for a writer, and a device has no end.
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise bounds.invalid("a plain file, or a folder with an OCI image", f"{source}: neither")
    return oci.is_image(source)


def _require_digest(expected: str, actual: str) -> None:
    if expected and actual != expected:
        raise bounds.invalid(f"a source with the digest {expected}", actual)


def _unpack(disk: Path, raw: Path, limit_bytes: int, folder: Path, digest: str) -> None:
    """Convert a qcow2 file of ours, which must have this digest unless it is ""."""
    # qemu-img runs as the user nobody, and may read the file and not write it. Other users cannot
    # reach it in its folder.
    disk.chmod(0o444)
    with disk.open("rb") as file:
        if digest:
            _require_digest(digest, bounds.digest_of(file))
            file.seek(0)
        size = _virtual_size(file.read(SECTOR))
        _require_size(size, limit_bytes, folder)
        _run_qemu_img(file, raw, size)


def _virtual_size(head: bytes) -> int:
    """Size of a qcow2 disk all of whose bytes are in this file."""
    if len(head) < SECTOR:
        raise bounds.invalid("a qcow2 file with a header", f"{len(head)} bytes")
    version, backing, _length, _bits, size, encrypted = struct.unpack_from(">IQIIQI", head, 4)
    features = struct.unpack_from(">Q", head, 72)[0] if version == 3 else 0
    if backing or features & EXTERNAL_DATA:
        raise Problem(
            "image_needs_another_file",
            422,
            expected="a qcow2 file that contains all of its data",
            found="a backing file" if backing else "an external data file",
            remedy="where both files are, run: qemu-img convert -O qcow2 OLD NEW",
        )
    if version not in (2, 3) or encrypted or features & ~READABLE:
        header = f"version {version}, encryption {encrypted}, incompatible features {features:#x}"
        raise bounds.invalid("qcow2 of version 2 or 3, consistent and not encrypted", header)
    return int(size)


def _require_size(size: int, limit_bytes: int, folder: Path) -> None:
    if size > limit_bytes:
        raise bounds.too_large(limit_bytes, f"{size} bytes")
    if size == 0 or size % SECTOR:
        raise bounds.invalid(f"a disk of whole sectors of {SECTOR} bytes", f"{size} bytes")
    _require_room(folder, size)


def _require_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise bounds.no_room(folder, f"{size} bytes free", f"{free} bytes")


def _run_qemu_img(disk: IO[bytes], raw: Path, size: int) -> None:
    """Let qemu-img read the open file, as qcow2 without a backing file and within limits."""
    if not shutil.which("qemu-img"):
        raise Problem(
            "program_missing",
            500,
            expected="qemu-img on this machine",
            found="none on PATH",
            remedy="install the package qemu-utils",
        )
    place = {"driver": "file", "filename": f"/proc/self/fd/{disk.fileno()}", "locking": "off"}
    node = {"driver": "qcow2", "read-only": True, "backing": None, "file": place}
    raw.touch(mode=0o600, exist_ok=False)
    limits = [f"--fsize={size}", f"--as={MEMORY}", f"--cpu={LIMIT_S}", "--core=0"]
    with raw.open("r+b") as target:
        program = ["prlimit", *limits, "--", "qemu-img", "convert", "-q", "-O", "raw", "--"]
        if os.geteuid() == 0:
            # It opens both files again by their descriptors, as nobody.
            os.fchown(target.fileno(), NOBODY, NOBODY)
            ids = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs"]
            program = ["setpriv", *ids, "--", *program]
        try:
            done = subprocess.run(
                [*program, f"json:{json.dumps(node)}", f"/proc/self/fd/{target.fileno()}"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                pass_fds=(disk.fileno(), target.fileno()),
                env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C"},
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise bounds.invalid(f"qemu-img to end within {LIMIT_S} s", "no end") from error
        os.fchown(target.fileno(), os.geteuid(), os.getegid())
    if done.returncode or raw.stat().st_size != size:
        text = " ".join(done.stderr.decode(errors="replace").split())[-300:]
        expected = f"a qcow2 disk of {size} bytes that qemu-img can read"
        raise bounds.invalid(expected, f"exit {done.returncode}: {text}")


def _require_bootable(head: bytes) -> None:
    """A raw file has no mark of its own; a disk has that of a partition table."""
    if head[510:] != b"\x55\xaa":
        raise Problem(
            "image_format_unknown",
            422,
            expected="a disk with a partition table (55 aa at byte 510), raw or as qcow2",
            found=f"first bytes {head[:8].hex(' ')}",
            remedy="unpack the file, or convert it: qemu-img convert -O qcow2 OLD NEW",
        )


def _place(raw: Path, folder: Path, digest: str, compression: Compression) -> Converted:
    """Move the file into the folder, durably, under the name of its digest.

    A file with this content stays, because it may be registered: another version of zstd packs the
    same bytes otherwise, and hosts would refuse the file for its digest.
    """
    file, size = folder / f"{digest.removeprefix('sha256:')}.raw", raw.stat().st_size
    if compression == "zstd":
        packed = raw.with_suffix(".zst")
        words = ["zstd", "-q", "-T0", "-o", str(packed), "--", str(raw)]
        done = subprocess.run(words, capture_output=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            text = " ".join(done.stderr.decode(errors="replace").split())[-300:]
            expected = "room for the packed file of the raw disk"
            raise bounds.no_room(folder, expected, f"zstd: exit {done.returncode}: {text}")
        raw, file = packed, file.with_suffix(".raw.zst")
    raw.chmod(0o644)
    # Before the lock, because it takes long.
    sync(raw)
    with _one_import(folder):
        new = not file.exists()
        if not new and _content(file, size) == digest:
            # From now on the import that placed it does not remove it. It may be another user's.
            with contextlib.suppress(PermissionError):
                os.utime(file)
        else:
            place(raw, file)
        return Converted(file, digest, size, new, _identity(file))


def _content(file: Path, size: int) -> str:
    """Digest of the raw bytes of a file in the folder. A packed file is read to one byte beyond."""
    if file.suffix != ".zst":
        with file.open("rb") as stream:
            return bounds.digest_of(stream)
    words = ["zstd", "-dcq", "--", str(file)]
    pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
    digest, left = hashlib.sha256(), size + 1
    with subprocess.Popen(words, stdout=pipe, stderr=quiet) as unpacking:
        out = cast(IO[bytes], unpacking.stdout)
        while left and (block := out.read(min(left, bounds.BLOCK))):
            digest.update(block)
            left -= len(block)
        unpacking.kill()
    return f"sha256:{digest.hexdigest()}"


@contextmanager
def _one_import(folder: Path) -> Iterator[None]:
    """Keep other imports from placing and removing files in the meantime."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # A network file system may have no such locks.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _drafts(folder: Path) -> Iterator[Path]:
    try:
        drafts = tempfile.TemporaryDirectory(prefix=".import-", dir=folder)
    except OSError as error:
        raise Problem(
            "images_dir_unusable",
            422,
            expected=f"{folder} (GPUAAS_IMAGES_DIR), a folder in which this user may create files",
            found=error.strerror or str(error),
            remedy="create it, or run this as its owner on a machine of the service",
        ) from error
    with drafts as name:
        try:
            yield Path(name)
        except OSError as error:
            if error.errno not in bounds.FULL:
                raise
            raise bounds.no_room(folder, "room for the disk", error.strerror or "") from error
