"""Files that the modules of a launch do not load, because it would take longer than their work.

On an emulated host each of their files takes 10 ms, and some of the standard library take more.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _source_closure

pytestmark = pytest.mark.covers("SLICE-4")

PLUGINS = _source_closure.PACKAGE.rpartition(".")[0]
UTILS = _source_closure.PACKAGE


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        # The HTTP client, on a host that has the image.
        ("modules.image_cache", ("http.client", "ssl", "email")),
        # The renderer of seeds, in the module that detaches a seed.
        ("modules.slice_handover", (f"{UTILS}.slice._guest_runtime",)),
        # Boot services, in the start hook, for which libvirt waits.
        ("module_utils.network._start_hook", (f"{UTILS}.core._boot_files",)),
        ("modules.slice_ready", (f"{UTILS}.slice._domain", "xml")),
    ],
)
def test_a_launch_loads_no_more_than_it_needs(module: str, absent: tuple[str, ...]) -> None:
    # Files that Ansible itself loads do not count.
    code = "import ansible.module_utils.basic, sys\nbefore = set(sys.modules)\n"
    code += f"import {PLUGINS}.{module}\nprint(*(set(sys.modules) - before))"
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **path},
        capture_output=True,
        text=True,
        check=True,
    )
    names = loaded.stdout.split()
    assert f"{PLUGINS}.{module}" in names
    assert [name for name in absent if name in names] == []
