"""Entry point of `make demo`: all steps of the main job, a table, and build/demo.json."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial

from rich.console import Console

from lab.demo import host_steps, interruption, pair_steps, pictures, slice_steps
from lab.demo.report import Evidence, Report, Step
from lab.demo.stage import Stage
from lab.paths import REPOSITORY

# Name, title and function of a step.
PlannedStep = tuple[str, str, Callable[[Stage], Evidence]]
STEPS: tuple[PlannedStep, ...] = (
    ("host", "build and boot a lab host", host_steps.host),
    ("enrol", "start the reconciler, certify the host's SSH key", host_steps.enrol),
    ("bootstrap", "make it a slice host, with a real reboot", host_steps.bootstrap),
    ("discover", "find candidates", host_steps.discover),
    ("transition", "take three disks from host storage", host_steps.transition),
    ("approve", "approve three slots", host_steps.approve),
    ("bind", "bind their devices to vfio-pci", host_steps.bind),
    ("parity", "prove the host; the slots become available", host_steps.parity),
    (
        "provision",
        "a tenant gets a VM with two GPUs, and launches a second VM beside it",
        pair_steps.provision,
    ),
    ("login", "log in and let both GPU stand-ins compute", slice_steps.login),
    ("isolation", "send packets from each VM to the other, in vain", pair_steps.isolation),
    ("telemetry", "read what its host and its guest measure", slice_steps.telemetry),
    ("power", "restart the second VM, and leave the first alone", pair_steps.power),
    ("reboot", "restart the host under both, which start again", pair_steps.reboot),
    ("release", "end the first VM and wipe its disks", slice_steps.release),
    ("wipe_proof", "search disks and GPUs for what the tenant wrote", slice_steps.wipe_proof),
    ("blocked", "a third VM fails its readiness gate", slice_steps.blocked),
    ("recover", "one command brings the slot back", slice_steps.recover),
)
# Evidence that the table shows for each step; build/demo.json holds all evidence.
SUMMARIES: dict[str, Callable[[Evidence], object]] = {
    "host": lambda e: f"{e['accelerator']}, kernel {e['kernel']}, {len(e['devices']['gpus'])} GPUs",
    "enrol": lambda e: e["host_said"][0],
    "bootstrap": lambda e: (
        f"rebooted: {e['rebooted']}; {' '.join(e['kernel_command_line'].split()[-2:])}"
    ),
    "discover": lambda e: ", ".join(
        f"{value} {name}" for name, value in e["candidate_summary"].items() if value != []
    ),
    "transition": lambda e: f"{len(e['applied'])} disks proven; {e['manifest']}",
    "approve": lambda e: f"{len(e['approved'])} slots {e['status'][0]}",
    "bind": lambda e: ", ".join(f"{d['address']} {d['driver']}" for d in e["bound"]),
    "parity": lambda e: (
        f"{len(e['checks'])} checks, failures={e['failures']}; slots {e['slots'][0]}"
    ),
    "provision": lambda e: "{mac} has {actual_ip}, {lease_state}".format(**e["readiness"]),
    "login": lambda e: (
        f"BAR, DMA and interrupt of {len(e['gpu']['gpus'])} GPUs ok"
        if e["gpu"]["ok"]
        else "a GPU is not right"
    ),
    "isolation": lambda e: f"{len(e['attempts'])} VMs sent packets, none arrived",
    "telemetry": lambda e: f"of the guest: {', '.join(sorted(e['guest']))}",
    "power": lambda e: f"{e['restarted']} has booted again, the other VM has not",
    "reboot": lambda e: f"{len(e['slices'])} VMs have booted again after their host",
    "release": lambda e: f"{e['shutdown']} shutdown, nothing left, slots {', '.join(e['slots'])}",
    "wipe_proof": lambda e: (
        f"{len(e['proofs'])} disks by {e['proofs'][0]['method']};"
        f" {e['canary_copies_on_disk']} canaries left"
    ),
    "blocked": lambda e: f"{e['error']['code']}: slot {e['slot']}",
    "recover": lambda e: ", ".join(
        f"slot {slot['status']}, {slot['health_state']}" for slot in e["inventory_after"].values()
    ),
}


def main() -> int:
    console = Console(stderr=True)
    firmware = os.environ.get("SLICE_FIRMWARE", "bios")
    if firmware not in ("bios", "uefi"):
        console.print(f"SLICE_FIRMWARE: expected bios or uefi; found {firmware}", style="red")
        return 2
    # Two slots on the first NUMA node need a processor each.
    os.environ.setdefault("GPUAAS_LAB_CPUS_PER_NODE", "2")
    folder = REPOSITORY / "build" / "demo"
    stage = Stage(folder, firmware=firmware, console=console, slots=(0, 1, 3))
    report = Report(REPOSITORY / "build" / "demo.json", console)
    if not play(stage, report):
        return interruption.EXIT_CODE
    console.print(report.table(_summary))
    console.print("[bold]build/demo.json[/] holds the evidence of each step")
    console.print("[bold]build/demo/*.png[/] are pictures of the console during them")
    return 0 if report.ok else 1


def play(stage: Stage, report: Report, steps: Iterable[PlannedStep] = STEPS) -> bool:
    """Play the steps in order, then clean up. Return False if a signal interrupted them."""
    try:
        with interruption.raised():
            stage.folder.mkdir(parents=True, exist_ok=True)
            for name, title, work in steps:
                report.run(name, title, partial(_with_pictures, stage, name, work))
            stage.close()
    except interruption.Interrupted:
        # First try an orderly stop. Processes that survive it are ended below.
        with contextlib.suppress(Exception):
            stage.close()
        interruption.end_descendants()
        report.say("interrupted: the service, its runs and the lab host have been ended")
        return False
    except BaseException:
        stage.close()
        raise
    return True


def _with_pictures(stage: Stage, name: str, work: Callable[[Stage], Evidence]) -> Evidence:
    evidence = work(stage)
    taken = pictures.after(stage, name)
    return {**evidence, "pictures": taken} if taken else evidence


def _summary(step: Step) -> str:
    if not step.ok:
        return str(step.evidence["error"])[:300]
    return str(SUMMARIES[step.name](step.evidence))


if __name__ == "__main__":
    sys.exit(main())
