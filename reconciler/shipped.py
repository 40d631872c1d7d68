"""Location of the files of this version: collection, contracts, profiles, scripts for hosts.

A wheel has them beside the code, in the folder that `pyproject.toml` names. A checkout has them in
the root folders where they are edited.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_CARRIED = _PACKAGE / "_shipped"
INSTALLED = _CARRIED.is_dir()
PROJECT = _CARRIED if INSTALLED else _PACKAGE.parent
# Single-file programs for hosts, which a checkout has from `make scripts`.
SCRIPTS = (PROJECT if INSTALLED else PROJECT / "build") / "scripts"

# Default state folder of an installed service; its units and packaging/gpuaas.env use the same.
STATE = Path("/var/lib/gpuaas") if INSTALLED else PROJECT / "build" / "reconciler"
# A checkout has it from scripts/collection-path.
COLLECTIONS = (PROJECT if INSTALLED else PROJECT / "build") / "collections"
# The collection gpuaas.slice below such a path.
COLLECTION = Path("ansible_collections", "gpuaas", "slice")
