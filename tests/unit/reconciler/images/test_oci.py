"""Disks in OCI images, as overlays would show them, and images that mean harm."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reconciler.images import bounds, convert
from reconciler.model.errors import Problem

MIB = 1 << 20
DISK = bytes(510) + b"\x55\xaa" + b"system".ljust(MIB - 512, b"\0")
OTHER = DISK.replace(b"system", b"other!")
LAYER = "application/vnd.oci.image.layer.v1.tar"
AMD64 = {"os": "linux", "architecture": "amd64"}
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    "+gzip": gzip.compress,
    "+zstd": lambda text: (
        subprocess.run(["zstd", "-cq"], input=text, check=True, capture_output=True).stdout
    ),
}

Entry = bytes | tarfile.TarInfo


def special(kind: bytes, target: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo()
    entry.type, entry.linkname = kind, target
    return entry


def layer(**entries: Entry) -> bytes:
    """A tar of files and of other entries, in order; `__` in a name stands for `/`."""
    return tar({name.replace("__", "/"): entry for name, entry in entries.items()})


def tar(entries: dict[str, Entry]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in entries.items():
            entry = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo()
            entry.name = name
            if isinstance(content, bytes):
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
            else:
                archive.addfile(entry)
    return buffer.getvalue()


class Image:
    """An OCI layout in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.blobs = folder / "blobs" / "sha256"
        self.blobs.mkdir(parents=True)
        (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def blob(self, content: bytes, **more: Any) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        (self.blobs / digest).write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content), **more}

    def document(self, document: Any, **more: Any) -> dict[str, Any]:
        return self.blob(json.dumps(document).encode(), **more)

    def index(self, *manifests: Any) -> None:
        (self.folder / "index.json").write_text(json.dumps({"manifests": manifests}))

    def layers(self, *layers: bytes, packing: str = "") -> str:
        """Make it an image of layers, the lowest first; returns the digest of the manifest."""
        packed = [self.blob(PACKERS[packing](x), mediaType=LAYER + packing) for x in layers]
        manifest = self.document({"config": {}, "layers": packed})
        self.index(manifest)
        return str(manifest["digest"])

    def archive(self) -> Path:
        file = self.folder.with_suffix(".tar")
        with tarfile.open(file, "w") as archive:
            archive.add(self.folder, arcname=".")
        return file


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path / "image")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "images"
    path.mkdir()
    return path


def disk_of(source: Path, folder: Path, digest: str = "", limit_bytes: int = 2 * MIB) -> bytes:
    made = convert.convert(source, folder, limit_bytes=limit_bytes, source_digest=digest)
    return made.file.read_bytes()


def refused(source: Path, folder: Path, limit_bytes: int = 2 * MIB) -> Problem:
    """The refusal of an image, which leaves nothing in the folder or beside it."""
    with pytest.raises(Problem) as refusal:
        convert.convert(source, folder, limit_bytes=limit_bytes)
    assert list(folder.iterdir()) == []
    assert [file.name for file in folder.parent.iterdir() if "escaped" in file.name] == []
    return refusal.value


@pytest.mark.covers("SLICE-2")
@pytest.mark.parametrize("packing", PACKERS)
def test_a_disk_comes_out_of_a_folder_and_out_of_a_tar(
    image: Image, folder: Path, packing: str
) -> None:
    digest = image.layers(layer(etc__os=b"x"), layer(disk__a=DISK), packing=packing)
    for source in (image.folder, image.archive()):
        assert disk_of(source, folder, digest) == DISK
        with pytest.raises(Problem, match="the manifest sha256:0"):
            disk_of(source, folder, f"sha256:{'0' * 64}")


def test_a_qcow2_disk_in_a_layer_is_converted(image: Image, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(DISK)
    words = ["qemu-img", "convert", "-O", "qcow2", tmp_path / "raw", tmp_path / "qcow2"]
    subprocess.run(words, check=True)
    image.layers(layer(disk__a=(tmp_path / "qcow2").read_bytes()))
    assert disk_of(image.folder, folder) == DISK


def test_the_upper_layer_decides(image: Image, folder: Path) -> None:
    image.layers(layer(disk__a=OTHER), layer(**{"disk/.wh.a": b"", "disk/b": DISK}))
    assert disk_of(image.folder, folder) == DISK
    image.layers(layer(disk__a=OTHER), layer(disk__a=DISK), layer(etc__x=b""))
    assert disk_of(image.folder, folder) == DISK


@pytest.mark.parametrize("name", ["disk/.wh.a", "disk/.wh..wh..opq", ".wh.disk"])
def test_a_removed_disk_stays_removed(image: Image, folder: Path, name: str) -> None:
    image.layers(layer(disk__a=OTHER), tar({name: b""}))
    assert "none" in refused(image.folder, folder).found


def test_the_image_of_this_platform_is_taken(image: Image, folder: Path) -> None:
    image.layers(layer(disk__a=DISK))
    (ours,) = json.loads((image.folder / "index.json").read_text())["manifests"]
    attestation = image.document({"layers": []}, platform={"architecture": "unknown"})
    arm = image.document({"layers": []}, platform={"os": "linux", "architecture": "arm64"})
    nested = image.document({"manifests": [attestation, arm, ours | {"platform": AMD64}]})
    image.index(nested)
    assert disk_of(image.folder, folder) == DISK
    empty = folder / "empty"
    empty.mkdir()
    image.index(ours, ours)
    assert refused(image.folder, empty).found == "2 images"
    image.index(image.document({"manifests": [nested]}))
    assert refused(image.folder, empty).code == "image_source_invalid"


@pytest.mark.parametrize(
    "entries",
    [
        {"disk/a": special(tarfile.SYMTYPE, "/etc/passwd")},
        {"disk/a": special(tarfile.LNKTYPE, "../../escaped")},
        {"disk/a": special(tarfile.CHRTYPE)},
        {"disk/a": special(tarfile.BLKTYPE)},
        {"disk/a": special(tarfile.FIFOTYPE)},
        {"disk": special(tarfile.SYMTYPE, "/etc"), "disk/passwd": DISK},
        {"disk/../../escaped": DISK},
        {"disk/sub/a": DISK},
        {"disk/a": DISK, "disk/b": OTHER},
        {"../escaped": DISK},
        {"/escaped": DISK},
    ],
)
def test_links_devices_and_ways_out_of_the_tree(
    image: Image, folder: Path, entries: dict[str, Entry]
) -> None:
    image.layers(tar(entries))
    assert refused(image.folder, folder).code == "image_source_invalid"


def test_a_layout_whose_files_are_links(image: Image, folder: Path, tmp_path: Path) -> None:
    digest = image.layers(layer(disk__a=DISK)).removeprefix("sha256:")
    for file in (image.blobs / digest, image.folder / "index.json"):
        file.rename(tmp_path / "moved")
        file.symlink_to(tmp_path / "moved")
        assert refused(image.folder, folder).found == "none"
        (tmp_path / "moved").rename(file)
    image.blobs.rename(tmp_path / "blobs")
    image.blobs.symlink_to(tmp_path / "blobs")
    assert refused(image.folder, folder).found == "none"


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("name", ["disk/a", "etc/a"])
def test_a_compression_bomb_is_not_unpacked(
    image: Image, folder: Path, packing: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reconciler.images.oci.OVERHEAD", MIB)
    image.layers(tar({name: bytes(8 * MIB)}), packing=packing)
    assert refused(image.folder, folder).code == "image_too_large"


def _header_of_a_gibibyte() -> bytes:
    entry = tarfile.TarInfo("pax")
    entry.type, entry.size = tarfile.XHDTYPE, 1 << 30
    return entry.tobuf() + bytes(4 * MIB)


def _sparse_map() -> bytes:
    """A GNU sparse file whose map of its holes fills the rest of the layer."""
    pax = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "disk/a"}
    entry = tarfile.TarInfo("disk/a")
    entry.size, entry.pax_headers = 1 << 40, pax
    return entry.tobuf(tarfile.PAX_FORMAT) + b"99999999999\n" + b"1\n" * MIB


def _header_of_many_records() -> bytes:
    """Before a disk. A mebibyte of them would take a while, and a layer may have many headers."""
    records = b"5 a=\n" * 1001
    entry = tarfile.TarInfo("pax")
    entry.type, entry.size = tarfile.XHDTYPE, len(records)
    return entry.tobuf() + records + bytes(-len(records) % 512) + layer(disk__a=DISK)


def _long_name() -> bytes:
    """A layer of a few hundred kilobytes may have thousands of them, a mebibyte each."""
    folder = special(tarfile.DIRTYPE)
    return tar({"disk/a": DISK, f"disk/{'b' * 4096}": folder})


def _many_names() -> bytes:
    folders = {f"disk/b{number}": special(tarfile.DIRTYPE) for number in range(1000)}
    return tar({"disk/a": DISK, **folders})


@pytest.mark.parametrize(
    "forged",
    [
        _header_of_a_gibibyte,
        _sparse_map,
        _header_of_many_records,
        _long_name,
        _many_names,
    ],
)
def test_headers_that_ask_for_memory(
    image: Image, folder: Path, forged: Callable[[], bytes]
) -> None:
    image.layers(forged(), packing="+gzip")
    assert refused(image.folder, folder).code == "image_source_invalid"


def _other_bytes(image: Image) -> None:
    for blob in image.blobs.iterdir():
        blob.write_bytes(blob.read_bytes()[:-1] + b"!")


def _manifest(document: Any) -> Callable[[Image], None]:
    return lambda image: image.index(image.document(document))


def _index(text: str) -> Callable[[Image], None]:
    return lambda image: (image.folder / "index.json").write_text(text) and None


def _layer(**more: Any) -> Callable[[Image], None]:
    def change(image: Image) -> None:
        blob = image.blob(layer(disk__a=DISK), mediaType=LAYER)
        image.index(image.document({"layers": [blob | more]}))

    return change


@pytest.mark.parametrize(
    "change",
    [
        _other_bytes,
        _index("{"),
        _index("[]"),
        _index("[" * 100_000),
        _index("{}"),
        _index('{"manifests": [1]}'),
        _index('{"manifests": [{"digest": "sha256:../../../../etc/passwd", "size": 1}]}'),
        _index('{"manifests": [{"digest": ["a"], "platform": 1}]}'),
        _index(" " * (5 * MIB)),
        _manifest({"layers": 1}),
        _manifest([]),
        _layer(size=1),
        _layer(digest="sha512:0"),
        _layer(mediaType=f"{LAYER}+encrypted"),
        _layer(mediaType=f"{LAYER}+gzip"),
        _layer(mediaType=f"{LAYER}+zstd"),
        lambda image: (image.folder / "index.json").unlink(),
    ],
)
def test_broken_images(image: Image, folder: Path, change: Callable[[Image], None]) -> None:
    image.layers(layer(disk__a=DISK))
    change(image)
    for source in (image.folder, image.archive()):
        assert refused(source, folder).code == "image_source_invalid"


def test_a_layer_that_changes_while_it_is_read(
    image: Image, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = image.layers(layer(disk__a=DISK))
    copy_sparse = bounds.copy_sparse

    def late(*given: Any) -> None:
        (blob,) = [blob for blob in image.blobs.iterdir() if blob.stat().st_size > MIB]
        with blob.open("r+b") as file:
            file.seek(MIB // 2)
            file.write(b"forged")
        copy_sparse(*given)

    monkeypatch.setattr(bounds, "copy_sparse", late)
    with pytest.raises(Problem, match="image_source_invalid"):
        disk_of(image.folder, folder, digest)
    assert list(folder.iterdir()) == []


def test_layers_are_counted_before_they_are_read(image: Image, folder: Path) -> None:
    image.layers(*[layer(disk__a=DISK)] * 129)
    assert refused(image.folder, folder).found == "129 layers"


def test_a_file_system_that_fills_up_is_not_the_fault_of_the_image(
    image: Image, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image.layers(layer(disk__a=DISK))

    def full(*_given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(bounds, "copy_sparse", full)
        refusal = refused(image.folder, folder)
    assert (refusal.code, refusal.expected) == ("image_no_room", f"room for the disk in {folder}")
    # zstd says so itself.
    (folder.parent / "zstd").write_text("#!/bin/sh\necho No space left >&2\nexit 1\n")
    (folder.parent / "zstd").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder.parent}:{os.environ['PATH']}")
    with pytest.raises(Problem, match=r"image_no_room.*No space left"):
        convert.convert(image.folder, folder, limit_bytes=2 * MIB, compression="zstd")
    assert list(folder.iterdir()) == []


def test_no_file_descriptor_stays_open(image: Image, folder: Path) -> None:
    image.layers(layer(disk__a=DISK), packing="+zstd")
    source = image.archive()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        disk_of(source, folder)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
