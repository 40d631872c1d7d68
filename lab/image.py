"""Disk image from a root filesystem, built without root, loop devices or mounts.

GRUB for BIOS is written into the image as grub-bios-setup does. Offsets are those of GRUB's
include/grub/i386/pc/boot.h and grub-core/boot/i386/pc/diskboot.S.
"""

from __future__ import annotations

import io
import os
import shlex
import struct
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.command import LabError, run

SECTOR = 512
MIB = 1024 * 1024
# After the partition table: a gap for GRUB's BIOS part, then the ESP, then the root partition.
BIOS_START, BIOS_SIZE = 1 * MIB, 1 * MIB
ESP_START, ESP_SIZE = 2 * MIB, 34 * MIB
ROOT_START = 36 * MIB
TABLE_BACKUP = 1 * MIB

FINISH = "lab-finish.sh"
# Boot loaders that `finish` leaves in the new root, made by the GRUB installed there.
LOADERS = ("lab-boot.efi",)
BIOS_LOADERS = ("lab-boot.img", "lab-core.img")

# boot.img: position of the first sector of core.img, and a jump that trusts odd BIOS drive numbers.
BOOT_KERNEL_SECTOR = 0x5C
BOOT_DRIVE = 0x64
BOOT_DRIVE_CHECK = 0x66
# Code ends here; the disk signature and the (protective) partition table follow.
BOOT_CODE_END = 440
# core.img: its first sector ends with the block list of the rest: start, count, segment.
BLOCK_LIST = SECTOR - 12


@dataclass(frozen=True)
class Layout:
    """Layout of a disk image: GPT, an ESP, an ext4 root and, with `bios`, a BIOS boot partition."""

    size_mib: int
    root_uuid: str
    esp_id: str
    bios: bool = False

    @property
    def root_kib(self) -> int:
        """Return the size of the root partition in KiB."""
        return (self.size_mib * MIB - ROOT_START - TABLE_BACKUP) // 1024

    def table(self) -> str:
        """Return the partition table in sfdisk's format."""
        lines = ["label: gpt"]
        if self.bios:
            # Type of a BIOS boot partition, for which the UEFI specification has no name.
            lines.append(_partition(BIOS_START, BIOS_SIZE, "21686148-6449-6E6F-744E-656564454649"))
        lines.append(_partition(ESP_START, ESP_SIZE, "uefi"))
        lines.append(_partition(ROOT_START, self.root_kib * 1024, "linux"))
        return "\n".join(lines) + "\n"


def _partition(start: int, size: int, kind: str) -> str:
    return f"start={start // SECTOR}, size={size // SECTOR}, type={kind}"


def overlay_tar(overlays: Sequence[Path], private: frozenset[str]) -> bytes:
    """Pack the folders into a tar file owned by root; only root can read the `private` files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for overlay, file in ((each, f) for each in overlays for f in sorted(each.rglob("*"))):
            if not (file.is_symlink() or file.is_file()):
                continue
            name = file.relative_to(overlay).as_posix()
            entry = tarfile.TarInfo(f"./{name}")
            if file.is_symlink():
                entry.type, entry.linkname = tarfile.SYMTYPE, str(file.readlink())
                tar.addfile(entry)
                continue
            content = file.read_bytes()
            entry.size = len(content)
            executable = bool(file.stat().st_mode & 0o100)
            entry.mode = 0o600 if name in private else 0o755 if executable else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def cut_padding(archive: Path) -> None:
    """Cut a tar file behind its end marker, which is two empty blocks.

    GNU tar reads a pipe in records of 20 blocks and ends after the record with the marker.
    mmdebstrap puts entries in front of tar's output, so its padding can reach into a further
    record. mmdebstrap's `tar-in` writes that record as well, and dies by SIGPIPE if tar has already
    ended, as it does on a busy machine.
    """
    with tarfile.open(archive) as tar:
        for _ in tar:
            pass
        end = tar.offset + 2 * tarfile.BLOCKSIZE
    if archive.stat().st_size > end:
        os.truncate(archive, end)


def write(
    image: Path,
    layout: Layout,
    *,
    rootfs: Path,
    overlays: Sequence[Path],
    finish: Path,
    private: frozenset[str] = frozenset(),
    log: Path,
) -> None:
    """Unpack `rootfs`, add `overlays`, run `finish` inside, and write the result as a disk image.

    `finish` gets the root UUID and the ESP's id, and leaves the boot loaders in /.
    """
    exports = LOADERS + (BIOS_LOADERS if layout.bios else ())
    with tempfile.TemporaryDirectory(prefix="gpuaas-image.") as name:
        stage = Path(name)
        # Without root the hooks run as a mapped user, who may enter this folder and write one file.
        stage.chmod(0o755)
        disk = stage / "disk.raw"
        cut_padding(rootfs)
        run(["truncate", "-s", f"{layout.size_mib}M", disk])
        run(["sfdisk", "-q", disk], stdin=layout.table().encode())
        disk.chmod(0o666)
        (stage / "overlay.tar").write_bytes(overlay_tar(overlays, private))
        run(_finish_command(stage, layout, rootfs, finish, exports), log=log)
        _write_esp(disk, stage / "esp.img", stage / "lab-boot.efi", layout.esp_id)
        if layout.bios:
            _write_bios_boot(disk, stage / "lab-boot.img", stage / "lab-core.img")
        # A rename fails across file systems; the copy keeps holes as holes.
        run(["cp", "--sparse=always", disk, image])
        image.chmod(0o644)


def _finish_command(
    stage: Path, layout: Layout, rootfs: Path, finish: Path, exports: tuple[str, ...]
) -> list[str | Path]:
    make_root = (
        f'mke2fs -q -t ext4 -i 65536 -L cloudimg-rootfs -U {layout.root_uuid} -d "$1"'
        f" -E offset={ROOT_START},lazy_itable_init=1 {stage}/disk.raw {layout.root_kib}k"
    )
    hooks = [
        f"tar-in {shlex.quote(str(stage / 'overlay.tar'))} /",
        f"upload {shlex.quote(str(finish))} /{FINISH}",
        f'chroot "$1" sh /{FINISH} {layout.root_uuid} {layout.esp_id}',
        *(f"download /{export} {shlex.quote(str(stage / export))}" for export in exports),
        f'rm "$1/{FINISH}"' + "".join(f' "$1/{export}"' for export in exports),
        make_root,
    ]
    return [
        "mmdebstrap",
        "--variant=custom",
        "--format=null",
        # No mounts inside the root, because mke2fs would copy /proc and /sys.
        "--skip=update,chroot/mount",
        f"--setup-hook=tar-in {shlex.quote(str(rootfs))} /",
        *(f"--customize-hook={hook}" for hook in hooks),
        "",
        "/dev/null",
    ]


def _write_esp(disk: Path, esp: Path, loader: Path, volume_id: str) -> None:
    run(["truncate", "-s", str(ESP_SIZE), esp])
    run(["mkfs.vfat", "-F", "16", "-n", "UEFI", "-i", volume_id.replace("-", ""), esp])
    quiet = {"MTOOLS_SKIP_CHECK": "1"}
    run(["mmd", "-i", esp, "::/EFI", "::/EFI/BOOT"], env=quiet)
    run(["mcopy", "-i", esp, loader, "::/EFI/BOOT/BOOTX64.EFI"], env=quiet)
    run(["dd", f"if={esp}", f"of={disk}", "bs=1M", f"seek={ESP_START // MIB}",
         "conv=notrunc", "status=none"])  # fmt: skip


def _write_bios_boot(disk: Path, boot: Path, core: Path) -> None:
    sector = BIOS_START // SECTOR
    with disk.open("r+b") as stream:
        current = stream.read(SECTOR)
        stream.seek(0)
        stream.write(boot_sector(boot.read_bytes(), current, sector))
        code = core_image(core.read_bytes(), sector)
        if len(code) > BIOS_SIZE:
            raise LabError(f"core.img has {len(code)} bytes, its partition {BIOS_SIZE}")
        stream.seek(BIOS_START)
        stream.write(code)


def boot_sector(boot_image: bytes, current: bytes, core_sector: int) -> bytes:
    """Return the disk's first sector: boot.img's code for core.img, with `current`'s table."""
    if len(boot_image) != SECTOR or len(current) != SECTOR:
        raise ValueError("boot.img and the first sector of the disk are 512 bytes each")
    sector = bytearray(boot_image)
    struct.pack_into("<Q", sector, BOOT_KERNEL_SECTOR, core_sector)
    sector[BOOT_DRIVE] = 0xFF
    # Two NOPs, as grub-bios-setup does on hard disks.
    sector[BOOT_DRIVE_CHECK : BOOT_DRIVE_CHECK + 2] = b"\x90\x90"
    sector[BOOT_CODE_END:] = current[BOOT_CODE_END:]
    return bytes(sector)


def core_image(core: bytes, core_sector: int) -> bytes:
    """Return core.img, padded to sectors, with the block list of its rest."""
    padded = bytearray(core + bytes(-len(core) % SECTOR))
    _, count, segment = struct.unpack_from("<QHH", padded, BLOCK_LIST)
    expected = len(padded) // SECTOR - 1
    if count != expected:
        raise ValueError(f"core.img says {count} more sectors, it has {expected}")
    struct.pack_into("<QHH", padded, BLOCK_LIST, core_sector + 1, count, segment)
    return bytes(padded)
