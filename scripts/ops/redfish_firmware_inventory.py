#!/usr/bin/env python3
"""Firmware, users and boot settings of a machine through its BMC, as JSON. See --help.

Needs this checkout and Python 3.11, and no installed package.
"""

import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
COLLECTIONS = ROOT / "build" / "collections"

if not (COLLECTIONS / "ansible_collections/gpuaas/slice/plugins").exists():
    subprocess.run([ROOT / "scripts" / "collection-path"], check=True, stdout=subprocess.DEVNULL)
sys.path.insert(0, str(COLLECTIONS))

runpy.run_module(
    "ansible_collections.gpuaas.slice.plugins.module_utils.firmware._redfish_inventory",
    run_name="__main__",
)
