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

# Debian 12 has 7.2; these packages are unpacked, never installed. Its backports have 10.0.2, from
# before the fix of QEMU's issue 3040: since then, when a device is switched on or off, a processor
# may look up an access by a number of the old memory map in the new one. With 11.1 the emulated
# host panics or restarts now and then while guests start. Debian 13 is for a mirror without them.
TREE_RELEASES = ("bookworm", "trixie")
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

# Instructions of Debian's 10.0.2, each with those that replace them.
#
# helper_vmrun (target/i386/tcg/sysemu/svm_helper.c) notes the vector of an interrupt that a
# hypervisor injects as a pending exception, delivers it, and leaves the note. If something makes
# the processor leave its loop before the guest's next exit, the vector is delivered once more,
# whatever the guest's interrupt flag says: guests hang or restart, or their host panics. With one
# thread for all processors each guest hangs at its start. The delivery does not read the note.
#
# helper_write_crN (misc_helper.c) raises an interrupt of a guest that writes CR8 without the lock
# that tcg_handle_interrupt requires, and QEMU aborts. UEFI writes CR8. The processor's own thread
# may do it.
#
# cpu_clear_ignne (fpu_helper.c) clears a flag of the first processor, from the thread of any that
# loads the state of its FPU. The first processor changes other bits of that word meanwhile, and
# loses the change: its hypervisor's guest goes on in the host, which panics. Only a system that
# takes FPU errors by interrupt, as DOS does, sets the flag.
_MENDS = (
    (
        bytes.fromhex("4489abe033000089b310d7ffffc783e43300000000000048c783e8330000ffffffff"),
        bytes.fromhex("4489abe0330000660f1f440000c783e43300000000000048c783e8330000ffffffff"),
    ),
    (
        bytes.fromhex("84c075244c8d05dbcb4600488d0dbe564a00ba5f000000"),
        bytes.fromhex("84c0eb244c8d05dbcb4600488d0dbe564a00ba5f000000"),
    ),
    (
        bytes.fromhex("81a0742c00007fffffff4883c408"),
        bytes.fromhex("662e0f1f8400000000004883c408"),
    ),
)


@dataclass(frozen=True)
class Qemu:
    """Start commands of a QEMU installation."""

    version: str
    system: list[str]
    img: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    # Whether the faults of `_MENDS` are taken out of it.
    mended: bool = False


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
    for release in TREE_RELEASES[:-1]:
        # Without that release's backports, mmdebstrap says so within seconds. Any other failure
        # must not lead to another QEMU unnoticed.
        try:
            tree = _tree(distro, release)
        except LabError:
            continue
        return _in_tree(tree)
    return _in_tree(_tree(distro, TREE_RELEASES[-1]))


def _tree(distro: Distro, release: str) -> Path:
    """Unpack the packages of a release with its backports, or take them from the cache."""
    backports = f"{release}-backports"
    sources = [f"deb {distro.mirror} {suite} main" for suite in (release, backports)]
    mends = [mended.hex() for _wrong, mended in _MENDS]
    key = cache.content_key({"packages": TREE_PACKAGES, "sources": sources, "mends": mends})

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
                    release,
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
            _mend(folder / "tree/usr/bin/qemu-system-x86_64")

    return cache.ensure("qemu", key, build) / "tree"


def _mend(program: Path) -> None:
    """Mend the unpacked program. Another build, without these instructions, stays."""
    code = program.read_bytes()
    if all(code.count(wrong) == 1 for wrong, _mended in _MENDS):
        for wrong, mended in _MENDS:
            code = code.replace(wrong, mended)
        program.write_bytes(code)


def _is_mended(program: Path) -> bool:
    code = program.read_bytes()
    return all(mended in code for _wrong, mended in _MENDS)


def _in_tree(tree: Path) -> Qemu:
    loader = next(
        (p for p in (tree / "lib64", tree / "usr/lib64") if (p / "ld-linux-x86-64.so.2").exists()),
        None,
    )
    if loader is None:
        raise LabError(f"{tree} holds no dynamic loader: remove this folder and build again")
    modules = tree / "usr/lib/x86_64-linux-gnu"
    # The tree's own loader starts QEMU with the tree's libraries. Debian 12 has some in /lib, which
    # is /usr/lib in an installed system and a folder of its own in unpacked packages.
    libraries = f"{tree / 'lib/x86_64-linux-gnu'}:{modules}"
    start = [str(loader / "ld-linux-x86-64.so.2"), "--library-path", libraries]
    data = ["share/qemu", "share/seabios", "lib/ipxe/qemu"]
    program = tree / "usr/bin/qemu-system-x86_64"
    system = [*start, str(program)]
    environment = {"QEMU_MODULE_DIR": str(modules / "qemu")}
    version = run([*system, "--version"], env=environment).decode().split()[3]
    for folder in data:
        system += ["-L", str(tree / "usr" / folder)]
    img = [*start, str(tree / "usr/bin/qemu-img")]
    return Qemu(version, system, img, environment, _is_mended(program))
