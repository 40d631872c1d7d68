"""Root filesystems as tar files of packages only.

Installing packages is slow, so the result is kept apart from the lab's own files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab import cache
from lab.command import run
from lab.distro import Distro
from lab.progress import step

# Documentation is a third of the files, and a lab does not need it.
SLIM = [
    "--dpkgopt=path-exclude=/usr/share/doc/*",
    "--dpkgopt=path-exclude=/usr/share/man/*",
    "--dpkgopt=path-exclude=/usr/share/locale/*",
    "--dpkgopt=path-exclude=/usr/share/info/*",
    "--dpkgopt=force-unsafe-io",
]


@dataclass(frozen=True)
class Recipe:
    """Packages of a root filesystem, and the modules of its initial RAM disk."""

    noun: str
    packages: Sequence[str]
    initramfs_modules: Sequence[str]


def _initramfs_hook(modules: Sequence[str]) -> str:
    # An emulated CPU unpacks lz4 several times faster, and packs it faster at update-initramfs.
    lines = "\\n".join(modules)
    return (
        'sed -i "s/^MODULES=.*/MODULES=list/; s/^COMPRESS=.*/COMPRESS=lz4/"'
        ' "$1/etc/initramfs-tools/initramfs.conf";'
        f' printf "{lines}\\n" >> "$1/etc/initramfs-tools/modules";'
        ' chroot "$1" update-initramfs -u -k all'
    )


def key(recipe: Recipe, distro: Distro) -> str:
    """Return the hash of all inputs of this root filesystem."""
    hook = _initramfs_hook(recipe.initramfs_modules)
    inputs = {"packages": sorted(recipe.packages), "sources": distro.sources, "hook": hook}
    return cache.content_key(inputs, [Path(__file__)])


def ensure(recipe: Recipe, distro: Distro) -> Path:
    """Return the tar file of this recipe, from the cache or newly made."""
    hook = _initramfs_hook(recipe.initramfs_modules)

    def build(folder: Path) -> None:
        log = folder / "mmdebstrap.log"
        with step(f"{recipe.noun} root filesystem"):
            run(
                [
                    "mmdebstrap",
                    "--variant=minbase",
                    '--aptopt=APT::Install-Recommends "false"',
                    f"--include={','.join(recipe.packages)}",
                    *SLIM,
                    f"--customize-hook={hook}",
                    distro.suite,
                    folder / "root.tar",
                    *distro.sources,
                ],
                log=log,
            )

    return cache.ensure(f"{recipe.noun}-rootfs", key(recipe, distro), build) / "root.tar"
