"""Choice of QEMU for the lab: the machine's own if new enough, else a private unpacked copy."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from lab import cache
from lab.command import LabError, run
from lab.distro import Distro
from lab.progress import step

# `igb`, the SR-IOV card, appeared in QEMU 8.0.
NEEDED = (8, 0)

# Debian 12 has 7.2; these packages are unpacked, never installed.
TREE_RELEASE = "trixie"
TREE_PACKAGES = [
    "qemu-system-x86",
    "qemu-utils",
    "qemu-system-data",
    "seabios",
    "ipxe-qemu",
    "libc6",
    "libc-bin",
    "bash",
    "coreutils",
]


@dataclass(frozen=True)
class Qemu:
    """Start commands of a QEMU installation."""

    version: str
    system: list[str]
    img: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def parse_version(text: str) -> tuple[int, int]:
    """Parse (major, minor) out of `qemu-system-x86_64 --version`."""
    match = re.search(r"version (\d+)\.(\d+)", text)
    if not match:
        raise LabError(f"QEMU did not say its version; it said: {text[:80]!r}")
    return int(match[1]), int(match[2])


def ensure(distro: Distro) -> Qemu:
    """Return the machine's own QEMU, or the private tree, which is built on first use."""
    installed = shutil.which("qemu-system-x86_64")
    if installed:
        text = run([installed, "--version"]).decode()
        if parse_version(text) >= NEEDED:
            return Qemu(text.split()[3], [installed], ["qemu-img"])
    if distro.id != "debian":
        raise LabError(
            f"the lab needs QEMU {NEEDED[0]}.{NEEDED[1]} or newer: install qemu-system-x86"
        )
    return _private(distro)


def _private(distro: Distro) -> Qemu:
    backports = f"{TREE_RELEASE}-backports"
    sources = [f"deb {distro.mirror} {suite} main" for suite in (TREE_RELEASE, backports)]
    key = cache.content_key({"packages": TREE_PACKAGES, "sources": sources})

    def build(folder: Path) -> None:
        with step("private QEMU"):
            tar = folder / "tree.tar"
            run(
                [
                    "mmdebstrap",
                    "--variant=extract",
                    '--aptopt=APT::Install-Recommends "false"',
                    f'--aptopt=APT::Default-Release "{backports}"',
                    f"--include={','.join(TREE_PACKAGES)}",
                    TREE_RELEASE,
                    tar,
                    *sources,
                ],
                log=folder / "mmdebstrap.log",
            )
            (folder / "tree").mkdir()
            # A tar file in between, because without root mmdebstrap's folders would belong to
            # subuids.
            run(["tar", "-C", folder / "tree", "--exclude=./dev/*", "--no-same-owner", "-xf", tar])
            tar.unlink()

    return _in_tree(cache.ensure("qemu", key, build) / "tree")


def _in_tree(tree: Path) -> Qemu:
    loader = next(
        (p for p in (tree / "lib64", tree / "usr/lib64") if (p / "ld-linux-x86-64.so.2").exists()),
        None,
    )
    if loader is None:
        raise LabError(f"{tree} holds no dynamic loader: remove this folder and build again")
    libraries = tree / "usr/lib/x86_64-linux-gnu"
    # The tree's own loader starts QEMU, so that the tree does not touch the machine's libraries.
    start = [str(loader / "ld-linux-x86-64.so.2"), "--library-path", str(libraries)]
    data = ["share/qemu", "share/seabios", "lib/ipxe/qemu"]
    system = [*start, str(tree / "usr/bin/qemu-system-x86_64")]
    environment = {"QEMU_MODULE_DIR": str(libraries / "qemu")}
    version = run([*system, "--version"], env=environment).decode().split()[3]
    for folder in data:
        system += ["-L", str(tree / "usr" / folder)]
    return Qemu(version, system, [*start, str(tree / "usr/bin/qemu-img")], environment)
