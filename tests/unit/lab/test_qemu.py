"""Choice of QEMU for the lab, and the faults that are mended in its own copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import qemu
from lab.command import LabError
from lab.distro import Distro


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("QEMU emulator version 7.2.17 (Debian 1:7.2+dfsg-7+deb12u13)", (7, 2)),
        ("QEMU emulator version 8.2.2 (Debian 1:8.2.2+ds-0ubuntu1.7)", (8, 2)),
        ("QEMU emulator version 11.1.3", (11, 1)),
    ],
)
def test_versions(text: str, version: tuple[int, int]) -> None:
    assert qemu.parse_version(text) == version


def test_an_unknown_answer_is_quoted() -> None:
    with pytest.raises(LabError, match="what"):
        qemu.parse_version("what?")


def test_the_faults_of_a_known_build_are_taken_out(tmp_path: Path) -> None:
    program = tmp_path / "qemu-system-x86_64"
    program.write_bytes(b"a" + b"b".join(wrong for wrong, _mended in qemu._MENDS) + b"c")
    assert not qemu._is_mended(program)
    qemu._mend(program)
    assert qemu._is_mended(program)
    assert program.read_bytes() == b"a" + b"b".join(mended for _wrong, mended in qemu._MENDS) + b"c"
    assert all(len(wrong) == len(mended) for wrong, mended in qemu._MENDS)


@pytest.mark.parametrize(
    "code", [(), (0, 0, 1, 2), (0, 1)], ids=["none", "one of them twice", "not all"]
)
def test_another_program_stays_as_it_is(tmp_path: Path, code: tuple[int, ...]) -> None:
    program = tmp_path / "qemu-system-x86_64"
    before = b"code" + b"".join(qemu._MENDS[number][0] for number in code)
    program.write_bytes(before)
    qemu._mend(program)
    assert program.read_bytes() == before and not qemu._is_mended(program)


# Stands for the dynamic loader: the program needs a library of each folder that packages use.
LOADER = """#!/bin/sh
for name in libc.so.6 libpixman-1.so.0; do
  found=
  for folder in $(echo "$2" | tr : " "); do [ -e "$folder/$name" ] && found=yes; done
  [ "$found" ] || { echo "$name: cannot open shared object file" >&2; exit 127; }
done
echo "QEMU emulator version 10.0.2 (Debian)"
"""


def test_the_private_tree_brings_all_its_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "lib64/ld-linux-x86-64.so.2": LOADER,
        "lib/x86_64-linux-gnu/libc.so.6": "",
        "usr/lib/x86_64-linux-gnu/libpixman-1.so.0": "",
        "usr/bin/qemu-system-x86_64": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "lib64/ld-linux-x86-64.so.2").chmod(0o755)
    monkeypatch.setattr(qemu, "_tree", lambda _distro, _release: tmp_path)
    debian = Distro("debian", "bookworm", "main", "http://mirror", "keyring")
    assert qemu._private(debian).version == "10.0.2"
    (tmp_path / "lib/x86_64-linux-gnu/libc.so.6").unlink()
    with pytest.raises(LabError, match="cannot open shared object"):
        qemu._private(debian)
