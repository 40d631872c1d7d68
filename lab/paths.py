"""Folders of the lab: a cache of rebuildable files, and a folder per lab."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def cache_folder() -> Path:
    """Return ${GPUAAS_CACHE:-${XDG_CACHE_HOME:-~/.cache}}/gpuaas."""
    base = os.environ.get("GPUAAS_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gpuaas"


def lab_folder() -> Path:
    """Return the folder of a lab (disks, keys, sockets, logs); GPUAAS_LAB_DIR selects it."""
    override = os.environ.get("GPUAAS_LAB_DIR")
    return Path(override).resolve() if override else REPOSITORY / "build" / "lab"


def saved_folder() -> Path:
    """Return the folder of saved lab hosts, a subfolder each; GPUAAS_LAB_SAVED moves it."""
    override = os.environ.get("GPUAAS_LAB_SAVED")
    return Path(override).resolve() if override else REPOSITORY / "build" / "saved"
