"""Conversion of disks by the real qemu-img, and disks that mean harm."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from reconciler.images import bounds, convert
from reconciler.model.errors import Problem

MIB = 1 << 20
# A disk with the mark of a partition table, data at its end and a hole between.
DISK = bytes(510) + b"\x55\xaa" + b"system" + bytes(3 * MIB - 518) + b"d" * MIB
SECRET = b"secret" * 10_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "images"
    path.mkdir()
    return path


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    path = tmp_path / "disk.raw"
    path.write_bytes(DISK)
    return path


def qemu_img(*words: str | Path) -> None:
    subprocess.run(["qemu-img", *words], check=True, stdout=subprocess.DEVNULL)


def refused(source: Path, folder: Path, limit_bytes: int = 64 * MIB, **changes: str) -> Problem:
    """The refusal of a source, which leaves nothing."""
    before = sorted(folder.iterdir())
    with pytest.raises(Problem) as refusal:
        convert.convert(source, folder, limit_bytes=limit_bytes, **changes)  # type: ignore[arg-type]
    assert sorted(folder.iterdir()) == before
    return refusal.value


@pytest.mark.covers("SLICE-2")
@pytest.mark.parametrize(
    "options",
    [
        ("-O", "raw"),
        ("-O", "qcow2", "-o", "compat=0.10"),
        ("-O", "qcow2", "-c"),
        ("-O", "qcow2", "-c", "-o", "compression_type=zstd,extended_l2=on,cluster_size=64k"),
    ],
)
def test_a_disk_becomes_a_raw_file_with_the_digest_of_its_bytes(
    raw: Path, folder: Path, options: tuple[str, ...]
) -> None:
    source = raw.with_name("source")
    qemu_img("convert", *options, raw, source)
    # Root's qemu-img runs as nobody, who may not open this file.
    source.chmod(0o600)
    digest = f"sha256:{hashlib.sha256(source.read_bytes()).hexdigest()}"
    wrong = refused(source, folder, source_digest=f"sha256:{'0' * 64}")
    assert (wrong.code, wrong.found) == ("image_source_invalid", digest)
    image = convert.convert(source, folder, limit_bytes=len(DISK), source_digest=digest)
    assert image.file.read_bytes() == DISK
    assert image.file.name == f"{hashlib.sha256(DISK).hexdigest()}.raw"
    assert (image.digest, image.size_bytes) == (f"sha256:{image.file.stem}", len(DISK))
    assert (image.new, oct(image.file.stat().st_mode & 0o777)) == (True, "0o644")
    assert image.file.stat().st_uid == os.geteuid()
    assert image.file.stat().st_blocks * 512 < 3 * MIB, "zeros are holes"
    assert not convert.convert(source, folder, limit_bytes=len(DISK)).new
    assert [file.name for file in folder.iterdir()] == [image.file.name]


@pytest.mark.parametrize("form", ["raw", "qcow2"])
def test_a_source_that_changes_after_its_digest_was_compared(
    raw: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """The digest does not cover later changes by the owner of the file."""
    source = raw.with_name("source")
    qemu_img("convert", "-O", form, raw, source)
    digest = f"sha256:{hashlib.sha256(source.read_bytes()).hexdigest()}"
    raw.write_bytes(DISK.replace(b"system", b"forged"))
    digest_of = bounds.digest_of

    def late(stream: IO[bytes]) -> str:
        actual = digest_of(stream)
        qemu_img("convert", "-O", form, raw, source)
        return actual

    monkeypatch.setattr(bounds, "digest_of", late)
    image = convert.convert(source, folder, limit_bytes=len(DISK), source_digest=digest)
    assert image.file.read_bytes() == DISK
    assert refused(source, folder, source_digest=digest).code == "image_source_invalid"


def test_a_compressed_file_keeps_the_digest_of_the_raw_bytes(raw: Path, folder: Path) -> None:
    image = convert.convert(raw, folder, limit_bytes=len(DISK), compression="zstd")
    assert (image.file.suffix, image.digest[7:]) == (".zst", hashlib.sha256(DISK).hexdigest())
    words = ["zstd", "-dcq", "--", str(image.file)]
    assert subprocess.run(words, check=True, capture_output=True).stdout == DISK


def test_a_second_import_leaves_the_file_that_is_registered(raw: Path, folder: Path) -> None:
    """It may pack the same bytes otherwise, which hosts would refuse."""
    first = convert.convert(raw, folder, limit_bytes=len(DISK), compression="zstd")
    # As another version of zstd would.
    words = ["zstd", "-q", "-f", "-19", "-o", str(first.file), "--", str(raw)]
    subprocess.run(words, check=True)
    registered = first.file.read_bytes()
    second = convert.convert(raw, folder, limit_bytes=len(DISK), compression="zstd")
    assert (second.new, first.file.read_bytes()) == (False, registered)
    # A file with other content, such as a truncated copy, does not count.
    first.file.write_bytes(registered[:-9])
    convert.convert(raw, folder, limit_bytes=len(DISK), compression="zstd")
    assert convert._content(first.file, len(DISK)) == first.digest


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_an_import_that_is_refused_leaves_the_file_of_another_with_its_content(
    raw: Path, folder: Path, compression: convert.Compression
) -> None:
    """Both run at once. The first has made the file, and its name is taken."""
    options = {"limit_bytes": len(DISK), "compression": compression}
    first = convert.convert(raw, folder, **options)  # type: ignore[arg-type]
    second = convert.convert(raw, folder, **options)  # type: ignore[arg-type]
    first.discard()
    assert second.file.exists()
    second.discard()
    assert second.file.exists(), "the first may be registered after all"


def test_a_file_is_not_removed_while_another_import_takes_it(
    raw: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = convert.convert(raw, folder, limit_bytes=len(DISK))
    looked, identity = threading.Event(), convert._identity

    def slowly(file: Path) -> tuple[int, int]:
        seen = identity(file)
        if threading.current_thread() is discarding:
            looked.set()
            time.sleep(0.5)
        return seen

    monkeypatch.setattr(convert, "_identity", slowly)
    discarding = threading.Thread(target=first.discard)
    discarding.start()
    assert looked.wait(10)
    second = convert.convert(raw, folder, limit_bytes=len(DISK))
    discarding.join(10)
    assert second.file.read_bytes() == DISK


def _backing(source: Path, secret: Path) -> None:
    qemu_img("create", "-q", "-f", "qcow2", "-F", "raw", "-b", secret, source)


def _data_file(source: Path, secret: Path) -> None:
    options = f"data_file={secret},data_file_raw=on"
    qemu_img("create", "-q", "-f", "qcow2", "-o", options, source, str(MIB))
    secret.write_bytes(SECRET)


@pytest.mark.parametrize("way", [_backing, _data_file])
def test_a_disk_that_names_another_file_is_refused(
    tmp_path: Path, folder: Path, way: Callable[[Path, Path], None]
) -> None:
    source, secret = tmp_path / "source", tmp_path / "secret"
    secret.write_bytes(SECRET)
    way(source, secret)
    refusal = refused(source, folder)
    assert refusal.code == "image_needs_another_file"
    assert str(secret) not in str(refusal)


def test_qemu_img_itself_opens_no_backing_file(tmp_path: Path) -> None:
    """The source is changed between the look at its header and its conversion."""
    source, secret, raw = tmp_path / "source", tmp_path / "secret", tmp_path / "raw"
    secret.write_bytes(SECRET.ljust(MIB, b"s"))
    _backing(source, secret)
    with source.open("rb") as disk:
        convert._run_qemu_img(disk, raw, MIB)
    assert raw.read_bytes() == bytes(MIB)


def _header(version: int = 3, size: int = MIB, encrypted: int = 0, features: int = 0) -> bytes:
    front = struct.pack(">4sIQIIQI", convert.QCOW2, version, 0, 0, 16, size, encrypted)
    return (front.ljust(72, b"\0") + struct.pack(">Q", features)).ljust(1024, b"\0")


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (_header(size=1 << 60), "image_too_large"),
        (_header(size=64 * MIB + 512), "image_too_large"),
        (_header(size=1000), "image_source_invalid"),
        (_header(size=0), "image_source_invalid"),
        (_header(), "image_source_invalid"),
        (_header(version=4), "image_source_invalid"),
        (_header(encrypted=2), "image_source_invalid"),
        (_header(features=1 << 1), "image_source_invalid"),
        (_header(features=1 << 5), "image_source_invalid"),
        (_header()[:100], "image_source_invalid"),
        (b"KDMV" + bytes(1020), "image_format_unknown"),
        (b"\x1f\x8b" + bytes(1000), "image_format_unknown"),
        (b"", "image_format_unknown"),
        (DISK + b"x", "image_source_invalid"),
        (DISK.ljust(64 * MIB + 512, b"\0"), "image_too_large"),
    ],
)
def test_bad_disks(tmp_path: Path, folder: Path, content: bytes, code: str) -> None:
    source = tmp_path / "source"
    source.write_bytes(content)
    assert refused(source, folder).code == code


def test_an_empty_qcow2_disk_boots_nothing(tmp_path: Path, folder: Path) -> None:
    qemu_img("create", "-q", "-f", "qcow2", tmp_path / "source", str(MIB))
    assert refused(tmp_path / "source", folder).code == "image_format_unknown"


def test_sources_that_are_no_files(tmp_path: Path, folder: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for source in (tmp_path / "pipe", Path("/dev/zero"), tmp_path / "absent"):
        assert refused(source, folder).code == "image_source_invalid"
    with pytest.raises(Problem, match="images_dir_unusable"):
        convert.convert(tmp_path, tmp_path / "absent", limit_bytes=MIB)


def test_a_full_file_system_and_a_missing_program(
    raw: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = "reconciler.images.convert.shutil.disk_usage"
    with monkeypatch.context() as patch:
        patch.setattr(free, lambda _folder: _Usage(len(DISK) - 1))
        assert refused(raw, folder).code == "image_no_room"
    qemu_img("convert", "-O", "qcow2", raw, raw.with_name("source"))
    monkeypatch.setenv("PATH", str(folder))
    refusal = refused(raw.with_name("source"), folder)
    assert (refusal.code, refusal.remedy) == ("program_missing", "install the package qemu-utils")


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free
