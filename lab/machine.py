"""Start and stop of a lab host, identified by pid and start time, never by a process name."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path

from lab import disks, host_image, packages, qmp, state, topology, userdata
from lab.command import LabError, run
from lab.distro import host_distro, this_distro
from lab.paths import lab_folder
from lab.progress import step
from lab.qemu import Qemu
from lab.qemu import ensure as ensure_qemu

FIRMWARE = Path("/usr/share/OVMF")
# An emulated host answers after one to two minutes; five times that is a fault.
BOOT_TIMEOUT = 600.0
SHUTDOWN_TIMEOUT = 120.0
ACCELERATOR_VARIABLE = "GPUAAS_LAB_ACCEL"
ACCELERATORS = ("kvm", "tcg")


def up(*, fresh: bool = False, lost_gpus: Collection[int] = ()) -> state.Lab:
    """Boot the lab of this folder and wait for SSH. A running lab is returned as it is."""
    folder = lab_folder()
    existing = state.load(folder)
    if existing is not None and existing.alive():
        if fresh:
            raise LabError("this lab is up: `gpuaas lab down` first, then `up --fresh`")
        return existing
    packages.ensure()
    distro = host_distro()
    qemu = ensure_qemu(this_distro())
    machine = topology.Machine(
        folder,
        FIRMWARE / "OVMF_CODE_4M.fd",
        choose_accelerator(),
        _free_port(existing.ssh_port if existing else None),
        cpus_per_node=int(os.environ.get("GPUAAS_LAB_CPUS_PER_NODE", "1")),
        memory_mib=int(os.environ.get("GPUAAS_LAB_MEMORY_MIB", "6144")),
        lost_gpus=frozenset(lost_gpus),
    )
    if fresh:
        disks.remove(machine, system=True)
    # An existing lab keeps the image that it was made from, even if a newer image can be built.
    image = disks.backing_image(machine, qemu) or host_image.ensure(distro)
    if not image.exists():
        raise LabError(f"the image under this lab's disk is gone ({image}): use `up --fresh`")
    if image.parent.name.rpartition("-")[0] != host_image.noun(distro):
        raise LabError(
            f"this lab's disk was made from {image.parent.name}, which is not {distro.suite}:"
            " use `up --fresh`"
        )
    disks.ensure(machine, qemu, image=image, variables=FIRMWARE / "OVMF_VARS_4M.fd")
    lab = _start(machine, qemu, image)
    lab.save()
    with step(f"lab host boot ({machine.accel})"):
        admit(lab)
    return lab


def choose_accelerator(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> str:
    """Return `kvm` if its vendor module is loaded, usable and allows nesting, else `tcg`.

    The file /dev/kvm proves nothing: some machines have it and cannot run a stock kernel.
    """
    requested = environment.get(ACCELERATOR_VARIABLE, "")
    if requested:
        if requested not in ACCELERATORS:
            raise LabError(
                f"{ACCELERATOR_VARIABLE} is one of {', '.join(ACCELERATORS)}; it is {requested!r}"
            )
        return requested
    for vendor in ("kvm_intel", "kvm_amd"):
        nested = root / "sys/module" / vendor / "parameters/nested"
        # Slice VMs are nested guests. Without nesting only emulation can run them.
        if nested.is_file() and nested.read_text().strip() in ("Y", "1"):
            device = root / "dev/kvm"
            return "kvm" if os.access(device, os.R_OK | os.W_OK) else "tcg"
    return "tcg"


def _free_port(preferred: int | None) -> int:
    for port in (preferred, 0):
        if port is None:
            continue
        with closing(socket.socket()) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise LabError("no free TCP port on 127.0.0.1")


def _start(machine: topology.Machine, qemu: Qemu, image: Path) -> state.Lab:
    for leftover in (machine.pid_file, machine.qmp, machine.userdata):
        leftover.unlink(missing_ok=True)
    log = machine.folder / "qemu.log"
    with log.open("wb") as sink:
        # QEMU must outlive this process, so the shell leaves it in the background and ends.
        subprocess.run(
            ["sh", "-c", '"$@" &', "sh", *qemu.system, *topology.arguments(machine)],
            env={**os.environ, **qemu.environment},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
            check=True,
        )
    deadline = time.monotonic() + 20
    while not machine.pid_file.exists() or not machine.qmp.exists():
        if time.monotonic() > deadline:
            raise LabError(f"QEMU did not start ({log}):\n{log.read_text()[-2000:]}")
        time.sleep(0.1)
    pid = int(machine.pid_file.read_text())
    started = state.process_start(pid)
    if started is None:
        raise LabError(f"QEMU ended at once ({log}):\n{log.read_text()[-2000:]}")
    return state.Lab(
        folder=str(machine.folder),
        pid=pid,
        pid_started=started,
        ssh_port=machine.ssh_port,
        key=str(machine.folder / "key"),
        known_hosts=str(machine.folder / "known_hosts"),
        qmp=str(machine.qmp),
        userdata=str(machine.userdata),
        accel=machine.accel,
        qemu=qemu.version,
        firmware=str(machine.firmware_code),
        gateway=topology.GATEWAY,
        image=str(image),
        devices={
            "os": {"serial": "LABOS", "eui64": f"{topology.OS_EUI:016x}"},
            "data": [
                {**asdict(disk), "serial": disk.serial, "eui64": f"{disk.eui64:016x}"}
                for disk in topology.DATA_DISKS
            ],
            "gpus": [{"id": "1234:11e8", "node": node} for node in topology.GPU_NODES],
            "fabric": [{"id": "8086:10c9", "node": 0, "mac": topology.FABRIC_MAC}],
        },
    )


def admit(lab: state.Lab) -> None:
    """Give the host the operator's key and read its host key, both over the trusted channel."""
    key = Path(lab.key)
    if not key.exists():
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "gpuaas-lab", "-f", key])
    public = key.with_suffix(".pub").read_text().strip()
    script = (
        "#!/bin/sh\nset -e\nmkdir -p -m 700 /root/.ssh\nfile=/root/.ssh/authorized_keys\n"
        f'touch "$file"; chmod 600 "$file"\n'
        f"grep -qxF '{public}' \"$file\" || echo '{public}' >> \"$file\"\n"
        "systemctl start ssh.service\ncat /etc/ssh/ssh_host_ed25519_key.pub\n"
    )
    answer = userdata.deliver(Path(lab.userdata), script, timeout=BOOT_TIMEOUT)
    if answer.exit_code != 0 or not answer.output.startswith("ssh-"):
        raise LabError(f"the lab host did not take the operator's key: {answer.output[-500:]}")
    Path(lab.known_hosts).write_text(f"[127.0.0.1]:{lab.ssh_port} {answer.output.strip()}\n")
    _wait_for_ssh(lab)


def _wait_for_ssh(lab: state.Lab) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            run(state.ssh_command(lab, ["true"]), timeout=60)
        except LabError:
            if time.monotonic() > deadline or not lab.alive():
                raise
            time.sleep(2)
        else:
            return


def down(*, timeout: float = SHUTDOWN_TIMEOUT) -> bool:
    """Shut the host down in order; cut its power after a time limit. False if it was not up."""
    lab = state.load()
    if lab is None or not lab.alive():
        return False
    with step("lab host shutdown"):
        qmp.execute(Path(lab.qmp), "system_powerdown")
        if not _gone(lab, timeout):
            power_cut()
    return True


def power_cut(*, restart: bool = False) -> None:
    """Cut the power as if the cable were pulled: the host cannot write anything more.

    With `restart` the power comes back at once, on the same ports.
    """
    lab = state.running()
    qmp.execute(Path(lab.qmp), "system_reset" if restart else "quit")
    if not restart and not _gone(lab, 30):
        raise LabError(f"QEMU (pid {lab.pid}) did not end on QMP quit; see {lab.folder}/qemu.log")


@contextmanager
def forgetful_gpus() -> Iterator[None]:
    """Let no GPU of the lab host keep what is written to its memory. With a mask of 0 all of its
    transfers use address 0 of its guest, which no guest uses.
    """
    try:
        _set_dma_mask(0)
        yield
    finally:
        _set_dma_mask(topology.EDU_DMA_MASK)


def _set_dma_mask(mask: int) -> None:
    qemu = Path(state.running().qmp)
    for index in range(len(topology.GPU_NODES)):
        place = {"path": f"/machine/peripheral/gpu{index}", "property": "dma_mask"}
        qmp.execute(qemu, "qom-set", {**place, "value": mask})


def reset_disks() -> None:
    """Recreate the data disks as new; the lab must be down."""
    lab = state.load()
    if lab is None:
        raise LabError("there is no lab here: start one with `gpuaas lab up`")
    if lab.alive():
        raise LabError("the lab is up: `gpuaas lab down` first")
    machine = topology.Machine(Path(lab.folder), Path(lab.firmware), lab.accel, lab.ssh_port)
    disks.remove(machine, system=False)
    qemu = ensure_qemu(this_distro())
    disks.ensure(machine, qemu, image=Path(lab.image), variables=FIRMWARE / "OVMF_VARS_4M.fd")


def _gone(lab: state.Lab, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while lab.alive():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.3)
    return True
