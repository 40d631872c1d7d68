"""Benchmark of the product against named peers on a lab host: `python -m tests.bench`.

provision: seconds from the API call to an active allocation, against tests/bench/script.sh, which
does the same steps by hand until SSH answers. An allocation is active later: its GPU has computed,
and its seed is gone. overhead_s is without the clone and the boot, which lasts from the start of
QEMU until the last probe of the guest has passed.
ssh_round_trips are the modules of the launch that ran on the host, as its journal has them: with
Ansible's pipelining each is a single command over SSH. Other tasks of the host meanwhile, such as a
verification after the release before, do not count.
clone: image_clone against dd of the same bytes to the same disk, both measured inside these runs.
parity: the playbook in wall time, against the same questions as single Ansible tasks. Both sides
leave out the questions that the profile calls not applicable.

The ratios hide differences. The script takes no lease, writes no ledger, guards no port and pins no
CPU, so it is the leaner side of `provision`. The peers play on a bridge that is open to every port,
which the product never allows. image_clone checks every chunk's digest while it copies and tells
the device where zeros are; dd copies all bytes, and its digest is checked before, outside its
timing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from lab.demo import host_steps, slice_steps
from lab.demo.stage import INVENTORY, Stage
from lab.paths import REPOSITORY
from tests.bench import document
from tests.lab.byhand import hanging_guardian

RUNS = int(os.environ.get("BENCH_RUNS", "3"))
HERE = Path(__file__).parent
SCRIPT_NAME = "bench-peer"
# Chunk size of image_clone.
CHUNK = 4 * 2**20
DEVICES = ("gpu_pci_address", "fabric_vf_pci_address")


def main(output: Path = document.PATH) -> int:
    console = Console(stderr=True)
    # Drift detection would find the script's VM on the slot's devices and block the slot, so it is
    # off.
    settings = {"GPUAAS_DRIFT_INTERVAL_S": "0"}
    stage = Stage(REPOSITORY / "build" / "bench", console=console, settings=settings)
    stage.folder.mkdir(parents=True, exist_ok=True)
    try:
        for step in (
            host_steps.host,
            host_steps.enrol,
            host_steps.bootstrap,
            host_steps.discover,
            host_steps.transition,
            host_steps.approve,
            host_steps.bind,
            host_steps.parity,
        ):
            console.print(f"[bold cyan]==>[/] prepare: {step.__name__}")
            step(stage)
        # Each part is saved as soon as it is done, because a later part may fail.
        document.add({"parity": parity(stage)}, output)
        document.add(provision(stage), output)
    finally:
        stage.close()
    return 0


def provision(stage: Stage) -> dict[str, Any]:
    """Run product and script in turns on the same slot, so that both meet the same machine."""
    ours, script, clone, dd, overhead, trips = [], [], [], [], [], []
    size = stage.facts["image"].size / 2**20
    plan: dict[str, Any] = {}

    def product() -> None:
        since = stage.on_host("date", "+%s").strip()
        began = time.monotonic()
        evidence = slice_steps.provision(stage)
        ours.append(time.monotonic() - began)
        modules = modules_of(stage, since, stage.facts["allocation"]["task_ids"][0])
        waits = float(evidence["image"]["seconds"]) + boot_seconds(stage, evidence, modules)
        overhead.append(ours[-1] - waits)
        trips.append(len(modules))
        clone.append(size / float(evidence["image"]["seconds"]))
        plan.update(evidence["plan"])
        slice_steps.release(stage)

    def peer() -> None:
        seconds, wrote = by_hand(stage, plan)
        script.append(seconds)
        dd.append(size / wrote)

    for number in range(RUNS):
        # The script needs the first plan; after that the two alternate in going first.
        for work in (product, peer) if number % 2 == 0 else (peer, product):
            name = f"provision {number + 1} of {RUNS}: {work.__name__}"
            stage.console.print(f"[bold cyan]==>[/] {name}")
            work()
    return {
        "provision": {
            **_spread("ours_s", ours),
            **_spread("script_s", script),
            "ratio": round(statistics.median(ours) / statistics.median(script), 3),
            "overhead_s": round(statistics.median(overhead), 2),
            "ssh_round_trips": max(trips),
        },
        "clone": {
            **_spread("ours_mib_s", clone),
            **_spread("dd_mib_s", dd),
            "ratio": round(statistics.median(clone) / statistics.median(dd), 3),
            "zero_share": zero_share(stage.facts["image"].zst),
        },
    }


def modules_of(stage: Stage, since: str, task_id: str) -> list[tuple[float, str]]:
    """The modules of a task that began on the host since then: seconds of its own clock, and the
    line of its journal.
    """
    journal = stage.on_host("journalctl", "-q", "-o", "short-unix", f"--since=@{since}")
    # A module writes a line when it starts, with the tag of its run (`RunSpec.log_tag`).
    lines = (line for line in journal.splitlines() if "Invoked with " in line)
    mine = (line.partition(" ") for line in lines if f"run={task_id}-" in line)
    return [(float(at), line) for at, _, line in mine]


def boot_seconds(stage: Stage, evidence: dict[str, Any], modules: list[tuple[float, str]]) -> float:
    """From the start of the guest's QEMU, as libvirt has logged it, to its last probe."""
    log = f"/var/log/libvirt/qemu/{evidence['domain']['name']}.log"
    started = stage.on_host("head", "-n", "1", log).partition(": ")[0]
    (waiting,) = (at for at, line in modules if "slice_ready" in line)
    # Each probe of the guest names the seconds until it passed.
    ready = max(float(probe["seconds"]) for probe in evidence["readiness"]["probes"])
    return waiting + ready - datetime.fromisoformat(started).timestamp()


def by_hand(stage: Stage, plan: dict[str, Any]) -> tuple[float, float]:
    """Run the script once; return seconds until the VM answers, and seconds of its dd."""
    image = stage.facts["image"]
    key = (stage.folder / "tenant_key.pub").read_text().strip()
    path = f"/var/lib/gpuaas/images/{image.sha256}.raw"
    words = [SCRIPT_NAME, path, image.sha256, plan["disks"][0], plan["mac"], plan["ip"]]
    words += [plan["gpus"][0], plan["fabric_vfs"][0], f"'{key}'"]
    script = (HERE / "script.sh").read_text()
    with open_bridge(stage):
        began = time.monotonic()
        try:
            output = stage.on_host("sh", "-s", *words, stdin=script, limit_s=1200)
            seconds = time.monotonic() - began
        finally:
            undo(stage, plan)
    return seconds, float(output.split("dd_seconds ")[1].split()[0])


def undo(stage: Stage, plan: dict[str, Any]) -> None:
    """Remove all that the script left, so that the slot is as after the product's own release."""
    words = [SCRIPT_NAME, plan["disks"][0], plan["mac"], plan["ip"]]
    stage.on_host("sh", "-s", *words, stdin=(HERE / "undo.sh").read_text(), limit_s=600)


@contextmanager
def open_bridge(stage: Stage) -> Iterator[None]:
    """Let every port of the bridge send anywhere, as on a host without guards."""
    bridge = stage.profile()["network"]["bridge"]
    with hanging_guardian(stage):
        stage.on_host("ovs-ofctl", "add-flow", bridge, "priority=1000,actions=NORMAL")
        stage.on_host("nft", "delete", "table", "inet", "gpuaas_slice")
        yield


def zero_share(image: Path) -> float:
    """Return the share of zero chunks in the unpacked image; image_clone does not copy them."""
    zeros = chunks = 0
    with subprocess.Popen(["zstd", "-dcq", str(image)], stdout=subprocess.PIPE) as unpack:
        if unpack.stdout is None:
            raise RuntimeError("zstd has no output")
        while chunk := unpack.stdout.read(CHUNK):
            chunks += 1
            zeros += not chunk.strip(b"\0")
    return round(zeros / chunks, 3)


def parity(stage: Stage) -> dict[str, Any]:
    """Return wall time and SSH round trips of a full parity run, and of its peer."""
    ours, tasks, trips, peer_trips = [], [], set(), set()
    profile, slots = stage.profile(), stage.bundles()
    variables = {"slice_profile": profile, "slice_slots": slots, "slice_intent": "slice"}
    peer = {
        "not_applicable": profile["not_applicable"],
        "disks": [slot["nvme_device"] for slot in slots],
        "devices": [slot[key] for slot in slots for key in DEVICES],
    }
    for _ in range(RUNS):
        seconds, count = _playbook(stage, REPOSITORY / "playbooks" / "parity.yml", variables)
        ours.append(seconds)
        trips.add(count)
        with open_bridge(stage):
            seconds, count = _playbook(stage, HERE / "parity_tasks.yml", peer)
        tasks.append(seconds)
        peer_trips.add(count)
    checks = stage.api().get(stage.path("/parity"))["document"]["checks"]
    return {
        **_spread("ours_s", ours),
        **_spread("tasks_s", tasks),
        "speedup": round(statistics.median(tasks) / statistics.median(ours), 1),
        "ssh_round_trips": max(trips),
        "tasks_ssh_round_trips": max(peer_trips),
        "checks": len(checks),
        "checks_run": sum(check["detail"] != "not_applicable" for check in checks),
    }


def _playbook(stage: Stage, playbook: Path, variables: dict[str, Any]) -> tuple[float, int]:
    """Return the seconds of an ansible-playbook run, and the number of its ssh calls."""
    count = stage.folder / "ssh-calls"
    count.write_text("")
    wrapper = stage.folder / "counting-ssh"
    wrapper.write_text(f'#!/bin/sh\necho call >> "{count}"\nexec ssh "$@"\n')
    wrapper.chmod(0o755)
    file = stage.folder / "variables.json"
    file.write_text(json.dumps(variables))
    environment = {**stage.ansible_environment(), "ANSIBLE_SSH_EXECUTABLE": str(wrapper)}
    words = [sys.executable, "-m", "ansible", "playbook", "-i", str(INVENTORY)]
    began = time.monotonic()
    done = subprocess.run(
        [*words, "-e", f"@{file}", str(playbook)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{playbook.name}:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    return time.monotonic() - began, len(count.read_text().split())


def _spread(name: str, values: list[float]) -> dict[str, Any]:
    return {
        name: round(statistics.median(values), 2),
        f"{name}_runs": len(values),
        f"{name}_min": round(min(values), 2),
        f"{name}_max": round(max(values), 2),
    }


if __name__ == "__main__":
    sys.exit(main())
