"""Location of the files of this version: contracts, hardware profiles, scripts for hosts.

A wheel has them beside the code, in the folder that `pyproject.toml` names. A checkout has them in
the root folders where they are edited.
"""

from __future__ import annotations

import sys
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_CARRIED = _PACKAGE / "_shipped"
INSTALLED = _CARRIED.is_dir()
PROJECT = _CARRIED if INSTALLED else _PACKAGE.parent
# Single-file programs for hosts, which a checkout has from `make scripts`.
SCRIPTS = (PROJECT if INSTALLED else PROJECT / "build") / "scripts"

# Default state folder of an installed service; its units and packaging/gpuaas.env use the same.
STATE = Path("/var/lib/gpuaas") if INSTALLED else PROJECT / "build" / "reconciler"
# In the environment that the program is installed in, such as /opt/gpuaas.
COLLECTIONS = (Path(sys.prefix) / "share" if INSTALLED else PROJECT / "build") / "collections"
