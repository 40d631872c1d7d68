"""Saved lab hosts: copies of a prepared host's disks, to be loaded and booted again.

A copy holds the host's state outside QEMU's memory: its disks, the UEFI variables, the operator's
key and the known host key. It is no snapshot of a running machine, because QEMU's NVMe device does
not support snapshots. A loaded host boots, so it has another boot id and counts as rebooted.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab import host_image, qmp, state, topology
from lab.command import LabError, run
from lab.distro import host_distro
from lab.paths import lab_folder, saved_folder
from lab.progress import step

FACTS = "saved.json"
KEY_FILES = ("key", "key.pub", "known_hosts")
# Neither the host nor QEMU may have flushed its memory yet, which takes minutes on a slow disk.
FLUSH_LIMIT_S = 300.0
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Image:
    """The host image under the OS disk. A second build of the same recipe is another image."""

    name: str
    path: str
    size: int
    modified_ns: int


@dataclass(frozen=True)
class Saved:
    """A saved lab host.

    `running`: the host was up when it was saved. `notes`: data that the maker needs when loading.
    """

    name: str
    saved_at: str
    running: bool
    image: Image
    topology: str
    lab: state.Lab
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return saved_folder() / self.name


def save(
    name: str,
    *,
    replace: bool = False,
    extras: Mapping[str, Path] | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Saved:
    """Copy the lab host of this folder. A running host is paused meanwhile and then continues.

    The saved disks are as after a loss of power right after `sync`. `extras` are folders that are
    copied along, by name.
    """
    target = _folder(name)
    if target.exists() and not replace:
        raise LabError(f"a lab host is saved as {name} already: delete it first, or use --replace")
    lab = state.load()
    if lab is None:
        raise LabError("there is no lab here: start one with `gpuaas lab up`")
    saved = Saved(
        name=name,
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        running=lab.alive(),
        image=_image(Path(lab.image)),
        topology=_topology(),
        lab=lab,
        notes=dict(notes or {}),
    )
    half = target.with_name(f".{name}.partial")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    with step("saving a lab host"):
        with _still(lab):
            for file in _files(Path(lab.folder)):
                _copy(file, half / file.name)
            for extra, folder in (extras or {}).items():
                shutil.copytree(folder, half / extra, symlinks=True, ignore=_no_sockets)
        (half / FACTS).write_text(json.dumps(asdict(saved), indent=1) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        half.rename(target)
    return saved


def load(name: str) -> Saved:
    """Make the saved host the lab of this folder, replacing the present lab; `up` boots it.

    A folder whose lab host runs is refused.
    """
    saved = entry(name)
    folder = lab_folder()
    current = state.load(folder)
    if current is not None and current.alive():
        raise LabError("the lab is up: `gpuaas lab down` first")
    _require_same_machine(saved)
    with step("loading a lab host"):
        folder.mkdir(parents=True, exist_ok=True)
        # lab.json is removed first and written last, so that a partial copy never counts as a lab.
        (folder / state.FILE).unlink(missing_ok=True)
        for file in _files(saved.folder):
            _copy(file, folder / f"{file.name}.partial")
        for file in _files(saved.folder):
            (folder / f"{file.name}.partial").rename(folder / file.name)
        _moved(saved.lab, folder).save()
    return saved


def restore(saved: Saved, extra: str, folder: Path) -> None:
    """Put back a folder that was copied along, replacing the present folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved.folder / extra, folder, symlinks=True)


def entries() -> list[Saved]:
    """Return all saved hosts, by name."""
    return [entry(file.parent.name) for file in sorted(saved_folder().glob(f"[!.]*/{FACTS}"))]


def entry(name: str) -> Saved:
    """Return the saved host of this name."""
    file = _folder(name) / FACTS
    try:
        facts = json.loads(file.read_text())
        image, lab = Image(**facts.pop("image")), state.Lab(**facts.pop("lab"))
        return Saved(**facts, image=image, lab=lab)
    except FileNotFoundError as error:
        names = ", ".join(path.parent.name for path in sorted(saved_folder().glob(f"*/{FACTS}")))
        raise LabError(f"no lab host is saved as {name}; saved are: {names or 'none'}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise LabError(f"{file} is of another version: `gpuaas lab delete {name}`") from error


def delete(name: str) -> None:
    """Delete a saved host, even if this version cannot read it."""
    folder = _folder(name)
    if not folder.exists():
        entry(name)
    shutil.rmtree(folder)


def size_bytes(saved: Saved) -> int:
    """Return the allocated size in bytes; the disks are sparse."""
    return sum(file.stat().st_blocks * 512 for file in saved.folder.rglob("*") if file.is_file())


def _folder(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise LabError(
            f"expected a name of lower-case letters, digits, '.', '_', '-'; got {name!r}"
        )
    return saved_folder() / name


def _require_same_machine(saved: Saved) -> None:
    remedy = f"`gpuaas lab delete {saved.name}`, prepare a host anew and save that"
    current = host_image.name(host_distro())
    if saved.image.name != current:
        raise LabError(
            f"{saved.name} was saved with host image {saved.image.name}; this checkout's is"
            f" {current}: {remedy}"
        )
    path = Path(saved.image.path)
    if not path.exists() or _image(path) != saved.image:
        raise LabError(
            f"{saved.name} lies over {path}, which is gone or was built again since: {remedy}"
        )
    if saved.topology != _topology():
        raise LabError(f"{saved.name} was saved with other virtual devices: {remedy}")


def _image(path: Path) -> Image:
    try:
        status = path.stat()
    except FileNotFoundError as error:
        raise LabError(f"the image under this lab's disk is gone ({path}): {error}") from error
    return Image(path.parent.name, str(path), status.st_size, status.st_mtime_ns)


def _topology() -> str:
    """Return a digest of the virtual devices, without the parts that differ between starts."""
    machine = topology.Machine(Path("/lab"), Path("/firmware"), accel="tcg", ssh_port=0)
    return hashlib.sha256("\0".join(topology.arguments(machine)).encode()).hexdigest()[:16]


def _files(folder: Path) -> list[Path]:
    """Return the files of a lab that a copy holds."""
    machine = topology.Machine(folder, Path(), accel="tcg", ssh_port=0)
    disks = [machine.os_disk, *(machine.data_disk(disk) for disk in topology.DATA_DISKS)]
    kept = [machine.firmware_variables, *(folder / name for name in KEY_FILES)]
    return [*disks, *(file for file in kept if file.exists())]


def _copy(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    run(["cp", "--sparse=always", "--reflink=auto", "--preserve=mode", source, target])


def _moved(lab: state.Lab, folder: Path) -> state.Lab:
    """Return the lab as it is in another folder, where no QEMU runs."""
    paths = {"folder": folder}
    for name in ("key", "known_hosts", "qmp", "userdata"):
        paths[name] = folder / Path(getattr(lab, name)).name
    texts = {name: str(path) for name, path in paths.items()}
    return state.Lab(**{**asdict(lab), **texts, "pid": 0, "pid_started": -1})


@contextmanager
def _still(lab: state.Lab) -> Iterator[None]:
    """Keep the lab's disks still; a running host first writes all pending data to them."""
    if not lab.alive():
        yield
        return
    run(state.ssh_command(lab, ["sync"]), timeout=FLUSH_LIMIT_S)
    # A stop of the processors also makes QEMU flush its disks, including the overlay's tables.
    qmp.execute(Path(lab.qmp), "stop", timeout=FLUSH_LIMIT_S)
    try:
        yield
    finally:
        qmp.execute(Path(lab.qmp), "cont")
    # The host's clock stood still too, and certificates issued from now on must be valid for it.
    run(state.ssh_command(lab, ["date", "--utc", "--set", f"@{time.time():.0f}"]), timeout=60)


def _no_sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if (Path(folder) / name).is_socket()]
