"""Benchmark of the clone on a file system of this machine: `python -m tests.bench.clone`.

The copy of image_clone against dd, of the lab's guest image onto a file that is written already, in
turns; keys `native_*` of `clone`. The lab host emulates a processor, so that hashing is slow there
and fast here. Both end with the bytes on the disk. As on a device, chunks of zeros are not copied.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lab import guest_image
from lab.distro import this_distro
from lab.paths import REPOSITORY
from tests.bench import document

sys.path.insert(0, str(REPOSITORY / "build" / "collections"))

from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _image_cache, _image_clone

# As large as a chunk of image_clone.
BLOCK = _image_cache.CHUNK


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.clone")
    parser.add_argument("--image", type=Path, help="raw image; default: the lab's guest image")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "build", help="on a disk")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=document.PATH)
    given = parser.parse_args()
    image = given.image or Path(guest_image.ensure(this_distro()).raw)
    document.add({"clone": measure(image, given.folder, given.runs)}, given.output)
    return 0


def measure(image: Path, folder: Path, runs: int) -> dict[str, Any]:
    """Copy the image in turns by both, and compare the result of image_clone with the image."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = _image_cache.stamp_of(str(image))
    if stamp is None:
        raise FileNotFoundError(image)
    # The host's cache has measured an image before it is cloned; both copies read its page cache.
    with image.open("rb") as source:
        digest, chunks = _image_cache.measure(source.fileno(), stamp.size_bytes)
    index = _image_cache.Index(digest, stamp, BLOCK, chunks)
    seconds: dict[str, list[float]] = {"ours": [], "dd": []}
    with tempfile.TemporaryDirectory(prefix="gpuaas-clone-", dir=folder) as name:
        target = Path(name) / "disk"
        for number in range(runs):
            for who in sorted(seconds, reverse=number % 2 == 0):
                _fill(target, stamp.size_bytes)
                began = time.monotonic()
                _ours(image, index, target) if who == "ours" else _dd(image, target)
                seconds[who].append(time.monotonic() - began)
                same = ["cmp", f"--bytes={stamp.size_bytes}", "--", image, target]
                subprocess.run(same, check=True)
    mib = stamp.size_bytes / 2**20
    rate = {who: round(mib / statistics.median(times), 1) for who, times in seconds.items()}
    return {
        "native_ours_mib_s": rate["ours"],
        "native_dd_mib_s": rate["dd"],
        "native_ratio": round(
            statistics.median(seconds["dd"]) / statistics.median(seconds["ours"]), 3
        ),
        "native_runs": runs,
        "native_zero_share": round(chunks.count("") / len(chunks), 3),
    }


def _fill(target: Path, size: int) -> None:
    """Both overwrite a file whose blocks all hold data."""
    with target.open("wb") as file:
        for _ in range(-(-size // BLOCK)):
            file.write(b"\x5e" * BLOCK)
        file.truncate(size)
        os.fsync(file.fileno())


def _ours(image: Path, index: _image_cache.Index, target: Path) -> None:
    descriptor = os.open(target, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    try:
        progress = _image_clone.Progress("", index.stamp.size_bytes)
        _image_clone.copy(str(image), index, descriptor, progress)
    finally:
        os.close(descriptor)


def _dd(image: Path, target: Path) -> None:
    words = ["dd", f"if={image}", f"of={target}", f"bs={BLOCK}", "oflag=direct", "status=none"]
    subprocess.run([*words, "conv=notrunc,fsync"], check=True)


if __name__ == "__main__":
    raise SystemExit(main())
