"""Recipes of images for slices: their packages, and a package that no source has."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab import image, rootfs, slice_image
from lab.command import LabError
from lab.distro import Distro
from lab.slice_image import Runtime
from reconciler.lifecycle import guest_pool
from reconciler.model.hardware import baked_runtime
from reconciler.shipped import PROJECT

DEBIAN = Distro("debian", "bookworm", "main", "http://mirror.example", "/keyring.gpg")
H200 = Runtime("580-server-open", rdma=True, nvlink=False)
# The end of mmdebstrap's log, as an error of the builder quotes it.
LOG = """\
mmdebstrap --variant=minbase … ended with 25:
E: Unable to locate package nvidia-driver-580-server-open
E: Package 'cuda-toolkit-12-8' has no installation candidate
E: apt-get install failed"""


def test_an_image_has_what_the_shipped_profile_asks_of_a_baked_one() -> None:
    profile = yaml.safe_load((PROJECT / "profiles" / "xe9680l-h200.yml").read_text())
    profile["vm"]["guest_runtime"]["source"] = "baked"
    assert H200.labels == sorted(baked_runtime(profile))
    assert Runtime().labels == []


def test_the_recipe_asks_for_driver_headers_and_rdma(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, Distro]] = []

    def ensure(recipe: Any, distro: Distro) -> Path:
        calls.append((recipe, distro))
        raise LabError(LOG)

    monkeypatch.setattr(rootfs, "ensure", ensure)
    runtime = Runtime("580-server-open", "12-8", rdma=True)
    repository = "deb [signed-by=/k.gpg] https://cuda.example /"
    with pytest.raises(LabError) as refusal:
        slice_image.build("gpu", DEBIAN, runtime, tmp_path, [repository])
    text = str(refusal.value)
    assert "found no cuda-toolkit-12-8, nvidia-driver-580-server-open; add" in text
    assert repository in text
    assert list(tmp_path.iterdir()) == []
    ((recipe, distro),) = calls
    assert distro.sources[-1] == repository
    assert {"linux-headers-amd64", "cloud-init", "rdma-core"} < set(recipe.packages)


def test_an_image_is_finished_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rootfs-5").mkdir()
    monkeypatch.setattr(rootfs, "ensure", lambda *_: tmp_path / "rootfs-5" / "root.tar")

    def write(draft: Path, layout: Any, *, finish: Path, **more: Any) -> None:
        subprocess.run(["sh", "-n", finish], check=True)
        # Commands of a launch run in the last stage of cloud-init, and sources of packages need
        # Jinja.
        for gone in ("mask", "jinja2", "/spare"):
            assert gone not in finish.read_text()
        assert "NVreg_NvLinkDisable=1" in finish.read_text()
        draft.write_bytes(b"disk")

    monkeypatch.setattr(image, "write", write)
    made = slice_image.build("gpu", DEBIAN, H200, tmp_path / "images")
    assert Path(made.file).read_bytes() == b"disk"
    labels = "--runtime driver-580-server-open --runtime nvlink-disabled --runtime rdma"
    assert made.register.endswith(labels)
    assert made.digest in made.register
    assert [file.name for file in (tmp_path / "images").iterdir()] == [Path(made.file).name]


def test_the_program_of_workers_is_baked_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rootfs-5").mkdir()
    monkeypatch.setattr(rootfs, "ensure", lambda *_: tmp_path / "rootfs-5" / "root.tar")

    def build(command: list[Any], *, log: Path) -> None:
        program, folder, *_ = command
        assert os.access(program, os.X_OK) and log.parent == tmp_path
        (folder / "opt/gpuaas/bin").mkdir(parents=True)
        (folder / "opt/gpuaas/bin/gpuaas").write_text("#!/opt/gpuaas/bin/python\n")
        (folder / "opt/gpuaas/bin/gpuaas").chmod(0o755)
        (folder / "opt/gpuaas/bin/python").symlink_to("/usr/bin/python3")

    def write(draft: Path, _layout: Any, *, overlays: list[Path], **_more: Any) -> None:
        with tarfile.open(fileobj=io.BytesIO(image.overlay_tar(overlays, frozenset()))) as tar:
            entries = {entry.name: entry for entry in tar}
        assert entries[f".{guest_pool.PROGRAM}"].mode == 0o755
        python = entries["./opt/gpuaas/bin/python"]
        assert python.issym() and python.linkname == "/usr/bin/python3"
        assert "./etc/ssh/sshd_config.d/50-slice.conf" in entries
        draft.write_bytes(b"disk")

    monkeypatch.setattr(slice_image, "run", build)
    monkeypatch.setattr(image, "write", write)
    made = slice_image.build("base", DEBIAN, Runtime(), tmp_path, worker=True)
    assert made.runtime == [guest_pool.KIT] and made.register.endswith("--runtime worker-kit")
