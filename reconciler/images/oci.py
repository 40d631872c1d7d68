"""Disk in an OCI image: layout as a folder or a tar file, disk in the folder /disk of its layers.

The form is that of KubeVirt's container disks. Of the layers only that one file is read, as a
stream. Nothing is unpacked, so links, devices and names that leave the tree lead nowhere.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from reconciler.images import bounds
from reconciler.trust import downloads

# Largest JSON document, and most entries of an archive.
DOCUMENT, ENTRIES = 4 << 20, 100_000
# Of an extended header. That of a file has a dozen, with its extended attributes.
RECORDS = 1000
# Longest name (PATH_MAX of Linux), and most names in the folder of the disk, in all layers. The
# folder has a single file, but layers may also name folders and removed files.
NAME, NAMES = 4096, 1000
# Each layer is read whole, so their number is that of what container engines make.
LAYERS = 128
# Bytes of the layers beside the disk.
OVERHEAD = 64 << 20
FOLDER = "disk"
PLATFORM = {"os": "linux", "architecture": "amd64"}
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MEMBER = re.compile(r"(?:\./)?(index\.json|blobs/sha256/[0-9a-f]{64})")
_LAYER = re.compile(r"application/vnd\.[a-z0-9.]+\.tar(?:[+.](gzip|zstd))?")
# Types of tar entries that describe the next entry.
HEADERS = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"


def is_image(source: Path) -> bool:
    """Whether a source has the form of an OCI image: a folder, or a tar file."""
    if source.is_dir():
        return True
    with source.open("rb") as file:
        return file.read(512)[257:262] == b"ustar"


def extract(source: Path, target: Path, limit_bytes: int, manifest_digest: str = "") -> None:
    """Write the disk of an image to a new file.

    manifest_digest: the digest that its manifest must have, or "" for any.
    """
    try:
        layout = _Layout(source)
        search = _Search(layout, target, limit_bytes)
        layers = _items(layout.manifest(manifest_digest), "layers")
        if len(layers) > LAYERS:
            raise bounds.invalid(f"at most {LAYERS} layers", f"{len(layers)} layers")
        for layer in reversed(layers):
            if search.through(layer):
                break
    except (OSError, EOFError, ValueError, RecursionError, zlib.error, tarfile.TarError) as error:
        if isinstance(error, OSError) and error.errno in bounds.FULL:
            raise
        reason = f"{type(error).__name__}: {error}"
        raise bounds.invalid("an OCI image that can be read", reason[:300]) from error
    if not target.exists():
        expected = f"a disk in the folder /{FOLDER} of the image's layers"
        raise bounds.invalid(expected, "none; a root file system without a disk boots nothing")


class _Layout:
    """Documents and blobs of an image. A blob has the size and the digest of its descriptor."""

    def __init__(self, source: Path) -> None:
        self._source = source.absolute()
        # Place and size of each file of a tar.
        self._places: dict[str, tuple[int, int]] | None = None
        if not source.is_dir():
            with source.open("rb") as file:
                archive = _Tar(file, os.fstat(file.fileno()).st_size)
                self._places = {
                    match[1]: (archive.at, entry.size)
                    for entry in archive
                    if entry.isreg() and (match := _MEMBER.fullmatch(entry.name))
                }

    def manifest(self, digest: str) -> dict[str, Any]:
        """The only manifest for this platform; an index may name a further index."""
        with self._open("index.json") as file:
            document = _document(file.read(DOCUMENT + 1))
        for _level in range(2):
            fitting = [each for each in _items(document, "manifests") if _is_ours(each)]
            if len(fitting) != 1:
                expected = f"one image for {'/'.join(PLATFORM.values())} in the source"
                raise bounds.invalid(expected, f"{len(fitting)} images")
            with self.blob(fitting[0]) as blob:
                text = blob.read(DOCUMENT + 1)
            document = _document(text)
            if "manifests" not in document:
                break
        actual = str(fitting[0]["digest"])
        if digest and digest != actual:
            raise bounds.invalid(f"the manifest {digest}", actual)
        return document

    @contextmanager
    def blob(self, descriptor: dict[str, Any]) -> Iterator[_Blob]:
        """A blob, whose bytes are compared with its digest when the caller has read it."""
        digest = str(descriptor.get("digest"))
        match = _DIGEST.fullmatch(digest)
        if match is None:
            raise bounds.invalid("sha256 digests of blobs", digest[:100])
        with self._open(f"blobs/sha256/{match[1]}") as file:
            blob = _Blob(file)
            yield blob
            while blob.read(bounds.BLOCK):
                pass
        actual = f"sha256:{blob.digest.hexdigest()}"
        if (actual, blob.size) != (digest, descriptor.get("size")):
            expected = f"{digest} with {descriptor.get('size')!r} bytes"
            raise bounds.invalid(expected, f"{actual} with {blob.size} bytes")

    def _open(self, name: str) -> IO[bytes]:
        file: IO[bytes] | None = None
        if self._places is None:
            file = downloads.open_file(self._source, (self._source / name).as_uri())
        elif name in self._places:
            file = io.BufferedReader(_Slice(self._source, *self._places[name]))
        if file is None:
            raise bounds.invalid(f"the file {name} in the layout of an OCI image", "none")
        return file


class _Blob:
    """Content of a blob, hashed as it is read, because its file may change at any time."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest, self.size = file, hashlib.sha256(), 0

    def read(self, size: int, /) -> bytes:
        part = self._file.read(size)
        self.digest.update(part)
        self.size += len(part)
        return part


class _Search:
    """Search for the disk through the layers, the topmost first, as an overlay would show it."""

    def __init__(self, layout: _Layout, target: Path, limit_bytes: int) -> None:
        self._layout, self._target, self._limit_bytes = layout, target, limit_bytes
        self._left = limit_bytes + OVERHEAD
        # Names that an upper layer has or removes.
        self._hidden: set[str] = set()

    def through(self, descriptor: dict[str, Any]) -> bool:
        """Search a layer; whether no lower layer is to be searched."""
        media = str(descriptor.get("mediaType"))
        match = _LAYER.fullmatch(media)
        if match is None:
            raise bounds.invalid("layers that are tar, plain or in gzip or zstd", media[:100])
        names: set[str] = set()
        folder, compression = self._target.parent, match[1] or ""
        with self._layout.blob(descriptor) as blob, _unpacked(blob, compression, folder) as plain:
            archive = _Tar(plain, self._left)
            for entry in archive:
                name = entry.name.removeprefix("./").strip("/")
                if name.partition("/")[0] in (FOLDER, _WHITEOUT + FOLDER):
                    names.add(name)
                    if len(names) + len(self._hidden) > NAMES:
                        expected = f"at most {NAMES} names in the folder /{FOLDER} of the layers"
                        raise bounds.invalid(expected, "more")
                    if name not in self._hidden:
                        self._take(archive, entry, name)
        self._left -= archive.at
        gone = {name.replace(_WHITEOUT, "") for name in names if _WHITEOUT in name}
        self._hidden |= names | gone
        return self._target.exists() or bool({_WHITEOUT + FOLDER, f"{FOLDER}/{_OPAQUE}"} & names)

    def _take(self, archive: _Tar, entry: tarfile.TarInfo, name: str) -> None:
        if entry.isdir() or name.rpartition("/")[2].startswith(_WHITEOUT):
            return
        if not entry.isreg() or name.count("/") != 1 or self._target.exists():
            expected = f"a single plain file in the folder /{FOLDER} of a layer"
            reason = "a further file" if self._target.exists() else f"type {entry.type!r}"
            raise bounds.invalid(expected, f"{name[:100]!r}: {reason}")
        bounds.copy_sparse(archive, self._target, self._limit_bytes)


class _Slice(io.RawIOBase):
    """Part of a file."""

    def __init__(self, file: Path, offset: int, size: int) -> None:
        self._file = file.open("rb", buffering=0)
        self._offset, self._size, self._at = offset, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence] + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = max(0, min(len(buffer), self._size - self._at))
        part = os.pread(self._file.fileno(), length, self._offset + self._at)
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Tar:
    """Entries of a tar that is read forwards only, up to a limit.

    tarfile parses a header; but its own reader believes the sizes in headers, and takes minutes for
    the map of a sparse file.
    """

    def __init__(self, stream: bounds.Readable, limit_bytes: int) -> None:
        self._stream, self._limit_bytes = stream, limit_bytes
        # Bytes read, and bytes left of the entry's content.
        self.at, self._left = 0, 0

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        """Each file, link, folder or device; `read` gives the content of the last."""
        longer: dict[str, str] = {}
        for _number in range(ENTRIES):
            block = self._raw(tarfile.BLOCKSIZE)
            if not any(block):
                return
            entry = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            kind = entry.type
            if kind not in HEADERS:
                entry.size = int(longer.get("size", entry.size))
            if kind == tarfile.GNUTYPE_SPARSE or entry.size < 0:
                raise ValueError(f"{entry.name[:100]!r}: a sparse file, or a negative size")
            supported = kind in tarfile.SUPPORTED_TYPES and kind not in HEADERS
            self._left = 0 if supported and not entry.isreg() else entry.size
            padding = -self._left % tarfile.BLOCKSIZE
            if kind in HEADERS:
                if entry.size > bounds.BLOCK:
                    raise ValueError(f"a header of {entry.size} bytes")
                longer |= _extended(kind, self.read(entry.size))
            else:
                entry.name = longer.get("path", entry.name)
                if len(entry.name) > NAME:
                    raise ValueError(f"a name of {len(entry.name)} characters")
                yield entry
                longer = {}
            while self.read(bounds.BLOCK):
                pass
            self._raw(padding)
        raise ValueError(f"more than {ENTRIES} entries")

    def read(self, size: int) -> bytes:
        part = self._raw(min(size, self._left))
        self._left -= len(part)
        if self._left and not part:
            raise EOFError("the end of the archive within an entry")
        return part

    def _raw(self, size: int) -> bytes:
        part = self._stream.read(size)
        self.at += len(part)
        if self.at > self._limit_bytes:
            raise bounds.too_large(self._limit_bytes, "layers that unpack to more")
        return part


def _extended(kind: bytes, content: bytes) -> dict[str, str]:
    """Name and size of the next entry, in the two ways in which they may be longer."""
    if kind == tarfile.GNUTYPE_LONGNAME:
        return {"path": content.rstrip(b"\0").decode(errors="surrogateescape")}
    records: dict[str, str] = {}
    at = count = 0
    while at < len(content) and kind == tarfile.XHDTYPE:
        # A length has no more digits than that of the largest header.
        length = int(content[at : at + 8].partition(b" ")[0])
        record = content[at : at + length].decode(errors="surrogateescape")
        name, _, value = record.partition(" ")[2].partition("=")
        if length < 5 or name.startswith("GNU.sparse"):
            raise ValueError(f"a record {record[:100]!r} of an extended header")
        count += 1
        if count > RECORDS:
            raise ValueError(f"more than {RECORDS} records in an extended header")
        records[name] = value.removesuffix("\n")
        at += length
    return {name: records[name] for name in ("path", "size") if name in records}


@contextmanager
def _unpacked(blob: _Blob, compression: str, folder: Path) -> Iterator[bounds.Readable]:
    if compression == "gzip":
        with gzip.GzipFile(fileobj=cast("IO[bytes]", blob)) as plain:
            yield plain
    elif compression == "zstd":
        # The program reads a file of its own, because a blob may be part of a file.
        with tempfile.TemporaryFile(dir=folder) as packed:
            while part := blob.read(bounds.BLOCK):
                packed.write(part)
            packed.seek(0)
            words = ["zstd", "-d", "-c", "-q"]
            with subprocess.Popen(
                words, stdin=packed, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            ) as program:
                try:
                    yield cast("IO[bytes]", program.stdout)
                finally:
                    program.kill()
    else:
        yield blob


def _document(text: bytes) -> dict[str, Any]:
    """A JSON object. text: of a longer document, one byte more than it may have."""
    if len(text) > DOCUMENT:
        raise bounds.invalid(f"JSON documents of at most {DOCUMENT} bytes", "a larger one")
    document = json.loads(text)
    if not isinstance(document, dict):
        raise bounds.invalid("JSON objects", type(document).__name__)
    return document


def _items(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of descriptors in a document."""
    items = document.get(name)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise bounds.invalid(f"a list {name} of descriptors", type(items).__name__)
    return items


def _is_ours(descriptor: dict[str, Any]) -> bool:
    """Whether a manifest is for this platform, or for none that it names."""
    platform = descriptor.get("platform") or PLATFORM
    return isinstance(platform, dict) and PLATFORM.items() <= platform.items()
