"""A root filesystem is built again when anything changed that makes it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lab import cache, distro, rootfs


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The builder's own file, to be changed; nothing is built."""
    copy = tmp_path / "rootfs.py"
    shutil.copy(rootfs.__file__, copy)
    monkeypatch.setattr(rootfs, "__file__", str(copy))
    monkeypatch.setattr(cache, "ensure", lambda noun, key, _build: Path(f"{noun}-{key}"))
    return copy


def test_a_change_of_recipe_or_builder_builds_anew(builder: Path) -> None:
    here = distro.Distro("debian", "bookworm", "main", "http://mirror/", "keyring.gpg")

    def folder(**changes: Any) -> Path:
        recipe = {"noun": "host", "packages": ["udev"], "initramfs_modules": ["nvme"]}
        return rootfs.ensure(rootfs.Recipe(**(recipe | changes)), here)

    first = folder()
    assert folder() == first
    assert folder(packages=["udev", "kmod"]) != first
    assert folder(initramfs_modules=["ext4"]) != first
    builder.write_text(builder.read_text().replace("--variant=minbase", "--variant=apt"))
    assert folder() != first
