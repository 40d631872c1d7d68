"""A host with a machine on it is not to be restarted, whoever started the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.modules import host_idle as module


def process(tree: Path, pid: int, *arguments: str) -> None:
    folder = tree / "proc" / str(pid)
    folder.mkdir(parents=True)
    (folder / "cmdline").write_text("\0".join(arguments))


@pytest.mark.covers("HOST-1", "CTRL-12")
def test_machines_are_found_without_libvirt(tree: Path) -> None:
    process(tree, 7, "/usr/bin/qemu-img", "convert", "a", "b")
    process(tree, 8, "/bin/sh", "-c", "qemu-system-x86_64")
    assert module.look({}) == {"idle": True}
    process(tree, 9, "/usr/bin/qemu-system-x86_64", "-name", "guest=stranger")
    with pytest.raises(Refusal, match="host_in_use") as caught:
        module.look({})
    assert caught.value.found == "qemu-system-x86_64 9"
