"""Image cache of the host: raw files, each with an index of verified digests.

The sha256 of its raw bytes identifies an image. The pass that computes it also computes the sha256
of every chunk. The index binds both: chunks that match it are the bytes that matched the digest. A
clone can therefore check each chunk *before* it is written, on several cores. Chunks that are all
zeros need neither be read nor hashed.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _device

DIRECTORY = f"{_host.STATE_DIRECTORY}/images"
CHUNK = 4 << 20
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Stamp:
    """File attributes that change on a write or replacement; no program can set ctime."""

    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int


@dataclass(frozen=True)
class Index:
    """digest: `sha256:<hex>` of all bytes. chunks: sha256 of each chunk, "" for a chunk
    of zeros.
    """

    digest: str
    stamp: Stamp
    chunk_bytes: int
    chunks: tuple[str, ...]


def path_of(digest: str) -> str:
    """Path of an image in the cache."""
    return f"{DIRECTORY}/{hexadecimal(digest)}.raw"


def cached() -> list[str]:
    """Digests of the images in the cache; files with other names are no images."""
    stems = [name.removesuffix(".raw") for name in _host.listed(DIRECTORY) if name.endswith(".raw")]
    return [f"sha256:{stem}" for stem in stems if _HEX.fullmatch(stem)]


def hexadecimal(digest: str) -> str:
    """The hex of `sha256:<hex>`; any other form is refused, because the value becomes a
    file name.
    """
    name = digest.removeprefix("sha256:")
    if not _HEX.fullmatch(name):
        raise Refusal(
            "image_digest_invalid",
            expected="sha256: and 64 lower-case hexadecimal digits",
            found=repr(digest),
            remedy="pass the digest from the image catalogue",
        )
    return name


def verified(path: str) -> Index | None:
    """The index of an image file that has not changed since it was verified, else None."""
    text = _host.read(_index_path(path))
    stamp = stamp_of(path)
    if not text or stamp is None:
        return None
    try:
        raw = json.loads(text)
        index = Index(
            digest=str(raw["digest"]),
            stamp=Stamp(**raw["stamp"]),
            chunk_bytes=int(raw["chunk_bytes"]),
            chunks=tuple(raw["chunks"]),
        )
    except (ValueError, TypeError, KeyError):
        return None
    return index if index.stamp == stamp else None


def stamp_of(path: str) -> Stamp | None:
    """The stamp of a file, None when it does not exist."""
    try:
        status = _host.path(path).stat()
    except FileNotFoundError:
        return None
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def verify(path: str, digest: str, size_bytes: int) -> Index:
    """Read the whole file and keep its index, or refuse the file when its digest differs."""
    return _keep_index(path, _checked(path, digest, size_bytes))


def admit(draft: str, path: str, digest: str, size_bytes: int) -> Index:
    """Verify a downloaded file and move it into the cache under its name."""
    index = _checked(draft, digest, size_bytes)
    _host.path(draft).chmod(0o444)
    _host.path(draft).replace(_host.path(path))
    return _keep_index(path, index)


def _checked(path: str, digest: str, size_bytes: int) -> Index:
    before = stamp_of(path)
    if before is None:
        raise missing(path)
    with _host.path(path).open("rb") as source:
        # The index must not outlive the bytes over a loss of power.
        os.fsync(source.fileno())
        measured, chunks = measure(source.fileno(), before.size_bytes)
    if measured != digest or before.size_bytes != size_bytes:
        raise mismatch(path, digest, f"{measured}, {before.size_bytes} bytes", size_bytes)
    return Index(digest, before, CHUNK, chunks)


def _keep_index(path: str, index: Index) -> Index:
    """Write the index with the current stamp: a rename changes ctime, a write also mtime."""
    now = stamp_of(path)
    if now is None or (now.mtime_ns, now.inode) != (index.stamp.mtime_ns, index.stamp.inode):
        raise mismatch(path, index.digest, "a file that changed", index.stamp.size_bytes)
    kept = replace(index, stamp=now)
    _host.write(_index_path(path), json.dumps(asdict(kept)) + "\n", mode=0o600)
    return kept


def files(path: str) -> list[str]:
    """What is there of an image: its index, the image, and drafts of a download that was killed."""
    folder, image = Path(path).parent, Path(path).stem
    names = _host.listed(str(folder))
    return [str(folder / name) for name in names if name.partition(".")[0] == image]


def forget(path: str) -> None:
    """Remove an image; its index goes first, so that it never exists without its image."""
    for file in files(path):
        _host.remove(file)


def distrust(path: str) -> None:
    """Have an image fetched again before its next use."""
    _host.remove(_index_path(path))


def measure(descriptor: int, size: int) -> tuple[str, tuple[str, ...]]:
    """The sha256 of a file and those of its chunks, reading a chunk ahead."""
    whole, chunks = hashlib.sha256(), []
    buffers = [mmap.mmap(-1, CHUNK) for _side in range(2)]
    with ThreadPoolExecutor(1) as reader:
        for view, digest in _ahead(reader, descriptor, size, buffers):
            whole.update(view)
            chunks.append(digest)
    return f"sha256:{whole.hexdigest()}", tuple(chunks)


def chunk_digest(view: memoryview) -> str:
    """The sha256 of a chunk; "" for zeros, which are written without being read."""
    return "" if is_zero(view) else hashlib.sha256(view).hexdigest()


def is_zero(view: memoryview) -> bool:
    """Whether all bytes are zero; most other chunks differ within the first page."""
    head = bytes(view[:4096])
    return not any(head) and bytes(view) == bytes(len(view))


def missing(path: str) -> Refusal:
    return Refusal(
        "image_not_cached",
        expected=f"the image {path} on this host",
        found="no such file",
        remedy="run the cache_image playbook for this node first",
    )


def mismatch(path: str, digest: str, found: str, size_bytes: int) -> Refusal:
    return Refusal(
        "image_digest_mismatch",
        expected=f"{digest}, {size_bytes} bytes, in {path}",
        found=found,
        remedy="correct the image catalogue or the source; the wrong bytes were not used",
    )


def _ahead(
    reader: ThreadPoolExecutor, descriptor: int, size: int, buffers: list[mmap.mmap]
) -> Iterator[tuple[memoryview, str]]:
    """Chunks with their digest; the next is read while the caller works on the current chunk."""

    def load(number: int) -> tuple[memoryview, str]:
        length = min(CHUNK, size - number * CHUNK)
        view = memoryview(buffers[number % 2])[:length]
        if _device.fill(descriptor, view, number * CHUNK) != length:
            raise OSError(f"the file ended inside chunk {number}")
        return view, chunk_digest(view)

    queue = [reader.submit(load, number) for number in range(min(1, -(-size // CHUNK)))]
    for number in range(1, -(-size // CHUNK) + 1):
        ready = queue.pop().result()
        if number * CHUNK < size:
            queue.append(reader.submit(load, number))
        yield ready


def _index_path(path: str) -> str:
    return str(Path(path).with_suffix(".index.json"))
