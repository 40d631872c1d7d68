"""`gpuaas images import`: conversion and registration together, or nothing."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from reconciler.cli import images
from tests.unit.reconciler.api.stack import Stack
from tests.unit.reconciler.cli.conftest import Gpuaas

DISK = (bytes(510) + b"\x55\xaa").ljust(1 << 20, b"d")


@pytest.fixture
def source(new: Stack, gpuaas: Gpuaas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A qcow2 file, on the machine of a service."""
    gpuaas.at(new)
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(new.settings.state_dir))
    monkeypatch.setenv("GPUAAS_IMAGES_DIR", str(new.settings.images_dir))
    raw, file = tmp_path / "disk.raw", tmp_path / "disk.qcow2"
    raw.write_bytes(DISK)
    words = ["qemu-img", "convert", "-c", "-O", "qcow2", raw, file]
    subprocess.run(words, check=True)
    return file


def imported(gpuaas: Gpuaas, source: Path, *words: str) -> dict[str, object]:
    text = gpuaas("images", "import", str(source), "--name", "u", *words, "--output", "json")
    result: dict[str, object] = json.loads(text or gpuaas.err)
    return result


@pytest.mark.covers("SLICE-2")
def test_an_imported_disk_is_registered_with_its_digest(
    new: Stack, gpuaas: Gpuaas, source: Path
) -> None:
    words = ("--version", "1", "--runtime", "rdma", "--compression", "zstd")
    image = imported(gpuaas, source, *words)
    assert image["digest"] == f"sha256:{hashlib.sha256(DISK).hexdigest()}"
    assert (image["size_bytes"], image["runtime"]) == (len(DISK), ["rdma"])
    (file,) = new.settings.images_dir.iterdir()
    assert image["url"] == file.as_uri()
    assert imported(gpuaas, source, *words)["id"] == image["id"], "the same again changes nothing"
    assert "u" in gpuaas("images", "list")


def test_a_refused_registration_leaves_no_file(new: Stack, gpuaas: Gpuaas, source: Path) -> None:
    imported(gpuaas, source, "--version", "1")
    files = sorted(new.settings.images_dir.iterdir())
    subprocess.run(["qemu-img", "resize", "-q", source, "2M"], check=True)
    assert imported(gpuaas, source, "--version", "1")["code"] == "image_exists"
    assert sorted(new.settings.images_dir.iterdir()) == files, "the first image keeps its file"
    gpuaas.at(new, "member")
    assert imported(gpuaas, source, "--version", "2")["code"] == "role_required"
    assert sorted(new.settings.images_dir.iterdir()) == files


def test_a_refused_registration_leaves_the_file_of_the_same_content_under_another_name(
    new: Stack, gpuaas: Gpuaas, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same content is registered first by another import; a refused import leaves its file."""
    imported(gpuaas, source, "--version", "1")
    subprocess.run(["qemu-img", "resize", "-q", source, "2M"], check=True)
    register = images._register

    def slowly(**body: object) -> None:
        monkeypatch.setattr(images, "_register", register)
        imported(gpuaas, source, "--version", "2")
        register(**body)

    monkeypatch.setattr(images, "_register", slowly)
    gpuaas("images", "import", str(source), "--name", "u", "--version", "1")
    assert "image_exists" in gpuaas.err
    files = {file.as_uri() for file in new.settings.images_dir.iterdir()}
    text = gpuaas("images", "list", "--output", "json")
    assert {row["url"] for row in json.loads(text)} == files and len(files) == 2
