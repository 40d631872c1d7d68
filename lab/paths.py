"""Where the lab keeps things: what can be rebuilt in the cache, what one lab is in its folder."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def cache_folder() -> Path:
    """${GPUAAS_CACHE:-${XDG_CACHE_HOME:-~/.cache}}/gpuaas."""
    base = os.environ.get("GPUAAS_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gpuaas"


def lab_folder() -> Path:
    """The folder of one lab (disks, keys, sockets, logs); several labs by GPUAAS_LAB_DIR."""
    override = os.environ.get("GPUAAS_LAB_DIR")
    return Path(override).resolve() if override else REPOSITORY / "build" / "lab"


def saved_folder() -> Path:
    """Where saved lab hosts lie, each in a folder of its name; GPUAAS_LAB_SAVED moves it."""
    override = os.environ.get("GPUAAS_LAB_SAVED")
    return Path(override).resolve() if override else REPOSITORY / "build" / "saved"
