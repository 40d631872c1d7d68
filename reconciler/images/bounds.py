"""Bounds of an import: its refusals, and a sparse copy up to a limit."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import IO, Protocol

from reconciler.model.errors import Problem

BLOCK = 1 << 20
# Errors of a file system without room.
FULL = (errno.ENOSPC, errno.EDQUOT)


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int, /) -> bytes: ...


def invalid(expected: str, found: str) -> Problem:
    """Problem `image_source_invalid`."""
    return Problem(
        "image_source_invalid",
        422,
        expected=expected,
        found=found,
        remedy="correct the source, or fetch it again; nothing was kept",
    )


def too_large(limit_bytes: int, found: str) -> Problem:
    """Problem `image_too_large`."""
    return Problem(
        "image_too_large",
        422,
        expected=f"a raw image of at most {limit_bytes} bytes",
        found=found,
        remedy="if the source is meant to be as large as that, raise --max-gib",
    )


def no_room(folder: Path, expected: str, found: str) -> Problem:
    """Problem `image_no_room`."""
    return Problem(
        "image_no_room",
        507,
        expected=f"{expected} in {folder}",
        found=found,
        remedy="remove files that no image names, or use a larger file system",
    )


def copy_sparse(source: Readable, target: Path, limit_bytes: int) -> None:
    """Copy all bytes to a new file, with holes for zeros. No byte beyond the limit is written."""
    done = 0
    with target.open("xb") as sink:
        while block := source.read(BLOCK):
            done += len(block)
            if done > limit_bytes:
                raise too_large(limit_bytes, "more; the rest was not read")
            if block.count(0) == len(block):
                sink.seek(len(block), os.SEEK_CUR)
            else:
                sink.write(block)
        sink.truncate(done)


def digest_of(stream: IO[bytes]) -> str:
    """`sha256:` and the digest of the rest of a stream."""
    digest = hashlib.sha256()
    while block := stream.read(BLOCK):
        digest.update(block)
    return f"sha256:{digest.hexdigest()}"
