"""Canary data that a tenant leaves on a disk, and the byte-by-byte search for it afterwards."""

from __future__ import annotations

import mmap
from pathlib import Path

COPIES = 64


def writer(mark: str) -> str:
    """Return a guest script that writes `mark` into files all over its filesystem, then syncs."""
    return f"""
import os
folder = "/var/tmp/canary"
os.makedirs(folder, exist_ok=True)
for number in range({COPIES}):
    with open(f"{{folder}}/{{number}}", "w") as file:
        file.write(("{mark}" + "\\n") * 1000)
        file.flush()
        os.fsync(file.fileno())
os.sync()
print("written")
"""


def count(disk: Path, mark: str) -> int:
    """Count the occurrences of `mark` on the disk image; every byte is searched."""
    needle, hits, position = mark.encode(), 0, 0
    with disk.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        while (position := data.find(needle, position)) >= 0:
            hits += 1
            position += len(needle)
    return hits
