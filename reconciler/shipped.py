"""Where the files are that this version comes with: contracts, hardware profiles, scripts of hosts.

A wheel carries them beside the code, in the folder that `pyproject.toml` names; a checkout has them
where they are written.
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

# Where an installed service keeps things unless it is told otherwise: its units and
# packaging/gpuaas.env say the same.
STATE = Path("/var/lib/gpuaas") if INSTALLED else PROJECT / "build" / "reconciler"
# In the environment that the program is installed in, such as /opt/gpuaas.
COLLECTIONS = (Path(sys.prefix) / "share" if INSTALLED else PROJECT / "build") / "collections"
