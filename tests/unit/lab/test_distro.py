"""Which distribution and mirror the images are made from."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from lab import distro, host_image
from lab.command import LabError
from lab.paths import REPOSITORY

DEB822 = """\
Types: deb
# a comment
URIs: http://mirror.example/debian/
Suites: bookworm bookworm-updates
Components: main

Types: deb-src
URIs: http://sources.example/debian
Suites: bookworm
"""
ONE_LINE = """\
# deb http://old.example/ubuntu noble main
deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/ubuntu noble main universe
deb http://mirror.example/ubuntu noble-updates main
"""


def machine(root: Path, release: str, sources: dict[str, str]) -> Path:
    (root / "etc/apt/sources.list.d").mkdir(parents=True)
    (root / "etc/os-release").write_text(release)
    for name, text in sources.items():
        (root / "etc/apt" / name).write_text(text)
    return root


def test_debian_with_deb822(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        'ID=debian\nVERSION_CODENAME="bookworm"\n',
        {"sources.list.d/debian.sources": DEB822},
    )
    sources = distro.this_distro(root)
    assert (sources.id, sources.suite, sources.mirror) == (
        "debian",
        "bookworm",
        "http://mirror.example/debian",
    )
    assert sources.sources[1].endswith("http://mirror.example/debian bookworm-updates main")


def test_ubuntu_with_one_line_sources(tmp_path: Path) -> None:
    root = machine(tmp_path, "ID=ubuntu\nVERSION_CODENAME=noble\n", {"sources.list": ONE_LINE})
    sources = distro.this_distro(root)
    assert (sources.mirror, sources.components) == ("http://mirror.example/ubuntu", "main universe")


def test_another_distribution_is_refused_by_name(tmp_path: Path) -> None:
    root = machine(tmp_path, "ID=fedora\nVERSION_CODENAME=forty\n", {})
    with pytest.raises(LabError, match=r"debian bookworm, ubuntu noble.*fedora"):
        distro.this_distro(root)


def test_no_source_for_the_suite_is_refused(tmp_path: Path) -> None:
    root = machine(tmp_path, "ID=debian\nVERSION_CODENAME=bookworm\n", {})
    with pytest.raises(LabError, match="no apt source"):
        distro.this_distro(root)


def test_the_lab_host_may_have_another_release(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "ID=debian\nVERSION_CODENAME=bookworm\n",
        {"sources.list.d/debian.sources": DEB822},
    )
    here, other = (
        distro.host_distro({"GPUAAS_LAB_DISTRO": suite}, root) for suite in ("", "trixie")
    )
    assert here == distro.this_distro(root)
    assert (other.suite, other.mirror, other.keyring) == ("trixie", here.mirror, here.keyring)
    assert other.sources[1].endswith("http://mirror.example/debian trixie-updates main")
    # Images of both are kept side by side.
    names = [host_image.name(each) for each in (here, other)]
    assert [name.rpartition("-")[0] for name in names] == ["host-image", "host-image-trixie"]
    assert names[0][-16:] != names[1][-16:]
    with pytest.raises(LabError, match=r"bookworm, trixie on debian; it is 'noble'"):
        distro.host_distro({"GPUAAS_LAB_DISTRO": "noble"}, root)


@pytest.mark.parametrize("target", ["lab-up", "lab-load"])
def test_make_takes_the_release_from_its_argument_or_the_environment(target: str) -> None:
    """Without the argument, the variable of the environment became empty."""
    for words, suite in (([], "trixie"), (["DISTRO=bookworm"], "bookworm")):
        shown = subprocess.run(
            ["make", "-n", target, *words],
            cwd=REPOSITORY,
            env={**os.environ, "GPUAAS_LAB_DISTRO": "trixie"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert f"GPUAAS_LAB_DISTRO={suite} " in shown and "GPUAAS_LAB_DISTRO= " not in shown
