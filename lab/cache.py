"""Build cache, keyed by the hash of all inputs, so that a second build is a lookup."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lab.paths import cache_folder


def content_key(inputs: Mapping[str, Any], sources: Iterable[Path] = ()) -> str:
    """Return a short hash of the inputs and of the content of source files and folders."""
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode())
    for source in sources:
        files = sorted(p for p in source.rglob("*") if p.is_file()) if source.is_dir() else [source]
        for file in (f for f in files if "__pycache__" not in f.parts):
            name = file.relative_to(source.parent).as_posix()
            executable = os.access(file, os.X_OK)
            digest.update(f"\0{name}\0{executable}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def ensure(noun: str, key: str, build: Callable[[Path], None]) -> Path:
    """Return the folder `<cache>/<noun>-<key>`; build it first if it is missing.

    The build runs in a temporary folder, which is renamed when it is complete."""
    root = cache_folder()
    target = root / f"{noun}-{key}"
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{noun}.lock").open("w") as lock:
        # The lock keeps two labs that start together from both building for minutes.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        half = root / f".{noun}-{key}.partial"
        if half.exists():
            shutil.rmtree(half)
        half.mkdir()
        build(half)
        half.rename(target)
    return target
