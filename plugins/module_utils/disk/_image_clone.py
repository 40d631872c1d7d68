"""Copy of a verified image onto a disk; each chunk is checked before it is written.

Several threads each read, check and write a chunk at a time, so that reading, hashing and writing
overlap; all three release the interpreter's lock. Chunks of zeros are not read: the device is told
to write zeros.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import groupby

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _device, _image_cache
from ansible_collections.gpuaas.slice.plugins.module_utils.disk._disk import Disk

DIRECTORY = f"{_host.STATE_DIRECTORY}/clones"
# Enough to keep a disk busy while chunks are hashed; each thread holds a chunk in memory.
_THREADS = 3
_PROGRESS_S = 1.0


@dataclass(frozen=True)
class Piece:
    """A range of the image; digest "" for zeros."""

    offset: int
    length: int
    digest: str


def pieces(index: _image_cache.Index) -> Iterator[Piece]:
    """The image as chunks to copy and merged ranges of zeros."""
    size, chunk, number = index.stamp.size_bytes, index.chunk_bytes, 0
    for zeros, run in groupby(index.chunks, key=lambda digest: digest == ""):
        digests = list(run)
        if zeros:
            end = min(size, (number + len(digests)) * chunk)
            yield Piece(number * chunk, end - number * chunk, "")
        else:
            for place, digest in enumerate(digests, start=number):
                yield Piece(place * chunk, min(chunk, size - place * chunk), digest)
        number += len(digests)


class Progress:
    """Progress of the copy, written at most once a second to a file that others poll."""

    def __init__(self, path: str, total: int) -> None:
        self._path, self._total, self._done, self._said = path, total, 0, 0.0
        self._lock = threading.Lock()
        if path:
            _host.path(path).parent.mkdir(parents=True, exist_ok=True)

    def add(self, length: int) -> None:
        with self._lock:
            self._done += length
            done, now = self._done, time.monotonic()
            due = now - self._said >= _PROGRESS_S or done == self._total
            if not (self._path and due):
                return
            self._said = now
            place = _host.path(self._path)
            draft = place.with_name(f".{place.name}")
            # Not synced, because the file is only for watchers and a sync would delay the copy.
            draft.write_text(json.dumps({"done": done, "total": self._total}) + "\n")
            draft.replace(place)


def copy(image_path: str, index: _image_cache.Index, descriptor: int, progress: Progress) -> None:
    """Write the image; refuses the first chunk that differs from the verified index, before writing
    it.
    """
    local = threading.local()
    source = os.open(_host.path(image_path), os.O_RDONLY | os.O_CLOEXEC)

    def put(piece: Piece) -> None:
        if piece.digest == "":
            _device.zero(descriptor, piece.offset, _whole_pages(piece.length))
        else:
            if not hasattr(local, "buffer"):
                local.buffer = mmap.mmap(-1, index.chunk_bytes)
            _copy_chunk(source, descriptor, piece, local.buffer)
        progress.add(piece.length)

    try:
        with ThreadPoolExecutor(_THREADS) as threads:
            _all(threads, (threads.submit(put, piece) for piece in pieces(index)))
        os.fsync(descriptor)
    except Refusal:
        # The file has rotted. Its index would vouch for it at every launch from now on.
        _image_cache.distrust(image_path)
        raise
    finally:
        os.close(source)


def finished(slot_id: str) -> dict[str, object] | None:
    """The record of the last complete clone onto a slot's disk."""
    return _host.document(
        f"{DIRECTORY}/{slot_id}.json",
        code="clone_record_unreadable",
        remedy="a tenant's disk may be behind it: remove the file only when the slot is wiped",
    )


def record(slot_id: str, document: dict[str, object]) -> None:
    """Record that the clone is complete, so that a second run does not overwrite the
    tenant's data.
    """
    _host.write(f"{DIRECTORY}/{slot_id}.json", json.dumps(document, sort_keys=True) + "\n", 0o600)


def too_small(disk: Disk, size_bytes: int) -> Refusal:
    return Refusal(
        "disk_too_small",
        expected=f"at least {size_bytes} bytes on {disk.by_id or disk.kernel_name}",
        found=f"{disk.size_bytes} bytes",
        remedy="choose a smaller image or a slot with a bigger disk",
    )


def _copy_chunk(source: int, descriptor: int, piece: Piece, buffer: mmap.mmap) -> None:
    padded = _whole_pages(piece.length)
    with memoryview(buffer) as whole, whole[: piece.length] as view:
        got = 0
        with contextlib.suppress(OSError):
            got = _device.fill(source, view, piece.offset)
        if got != piece.length or _image_cache.chunk_digest(view) != piece.digest:
            raise Refusal(
                "image_digest_mismatch",
                expected=f"the verified bytes at offset {piece.offset} of the cached image",
                found="other bytes: the file changed, or its disk is failing",
                remedy="fetch the image again; the wrong chunk was not written",
            )
        if padded != piece.length:
            whole[piece.length : padded] = bytes(padded - piece.length)
        _device.drain(descriptor, whole[:padded], piece.offset)


def _all(threads: ThreadPoolExecutor, work: Iterator[Future[None]]) -> None:
    """Wait for all; the first failure cancels the work that has not started."""
    try:
        for future in as_completed(list(work)):
            future.result()
    except BaseException:
        threads.shutdown(wait=True, cancel_futures=True)
        raise


def _whole_pages(length: int) -> int:
    return -(-length // _device.ALIGN) * _device.ALIGN
