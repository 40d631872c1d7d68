"""Capture of a machine: its facts and the results of all probes in a JSON document.

Each probe runs in a separate session, which is killed at the probe's deadline.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from reconciler.benchmark.harness import compute, disk, facts, gpu, rdma
from reconciler.benchmark.harness.probe import Failed, Reason, Request

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkProcess

    Measure = Callable[[Request], dict[str, Any]]

SCHEMA = 1
# In this order, because the CPU should be cool for its probe, and vLLM causes the highest load.
PROBES: dict[str, tuple[Callable[[Request], float], Measure]] = {
    "cpu": (compute.cpu_deadline_s, compute.measure_cpu),
    "memory": (compute.memory_deadline_s, compute.measure_memory),
    "disk": (disk.deadline_s, disk.measure),
    "rdma": (rdma.deadline_s, rdma.measure),
    "gpu": (gpu.deadline_s, gpu.measure),
    "vllm": (gpu.vllm_deadline_s, gpu.measure_vllm),
}
# A process that waits for a dead device may never die. The capture continues without it.
_GRACE_S = 5.0
# Standard output, where the capture goes.
_OUTPUT = 1


def longest_s(request: Request) -> float:
    """Duration of a capture in which every probe reaches its deadline."""
    return sum(deadline_s(request) for deadline_s, _ in PROBES.values())


def main(arguments: dict[str, Any]) -> NoReturn:
    """Print the capture and exit, or {"refusal"} with exit code 3. Progress: standard error."""
    # SystemExit unwinds through `within`, which kills the probe of a canceled capture.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    request = Request(**arguments)
    usable = len(os.sched_getaffinity(0))
    if request.vcpus in (0, usable):
        document = capture(request)
    else:
        refusal = Failed(
            "vcpus_differ",
            expected=f"{request.vcpus} usable CPUs, as the label says",
            found=str(usable),
            remedy="correct --vcpus, or the machine",
        )
        document = {"refusal": refusal.document}
    sys.stdout.write(json.dumps(document) + "\n")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Not sys.exit, which would wait for a probe that cannot be killed.
    os._exit(3 if "refusal" in document else 0)


def capture(request: Request) -> dict[str, Any]:
    """The document of contracts/benchmark.schema.json."""
    began = _now()
    host = facts.collect()
    detected = "vm" if host["hypervisor"] else "host"
    probes = [_probe(request, name) for name in PROBES]
    return {
        "schema": SCHEMA,
        "label": request.label,
        "kind": detected if request.kind == "auto" else request.kind,
        "tuning": request.tuning,
        "vcpus": host["cpus_usable"],
        "harness": {"digest": request.harness, "python": sys.version.split()[0]},
        "started_at": began,
        "finished_at": _now(),
        "host": host,
        "probes": probes,
    }


def _probe(request: Request, name: str) -> dict[str, Any]:
    deadline_s, measure = PROBES[name]
    limit = round(deadline_s(request))
    sys.stderr.write(f"{name}: at most {limit} s\n")
    began = time.monotonic()
    outcome = within(limit, lambda: measure(request))
    sys.stderr.write(f"{name}: {outcome['status']}\n")
    return {
        "probe": name,
        # Values of a probe without figures, or without a device.
        **{"tool": None, "subject": "", "workload": {}, "metrics": []},
        **outcome,
        "deadline_s": limit,
        "seconds": round(time.monotonic() - began, 3),
    }


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def within(seconds: float, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The document of `work()` with its status, or {"status", "reason"} without figures.

    Exits when nothing reads the capture any more.
    """
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_run_probe, args=(sender, work))
    process.start()
    sender.close()
    outcome: dict[str, Any] | None = None
    died = False
    waiting = select.poll()
    waiting.register(receiver, select.POLLIN)
    # sshd sends no signal to a command without a terminal when the client disconnects.
    waiting.register(_OUTPUT, 0)
    try:
        ready = dict(waiting.poll(seconds * 1000))
        if _OUTPUT in ready:
            sys.exit(1)
        if ready:
            outcome = receiver.recv()
    except EOFError:
        died = True
    finally:
        ended = _end(process)
        receiver.close()
    if outcome is not None:
        return outcome
    if died:
        return _without_figures(
            Failed(
                "probe_died",
                expected="the probe to report",
                found="its process ended without a report",
                remedy="check the kernel log of the machine",
            )
        )
    state = "it was killed" if ended else "it cannot be killed; a device may hang"
    return _without_figures(
        Failed(
            "probe_deadline",
            expected=f"the probe to end within {seconds:g} s",
            found=f"still running; {state}",
            remedy="check the device and the other load of the machine",
        )
    )


def _run_probe(sender: Connection, work: Callable[[], dict[str, Any]]) -> None:
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    # Standard output is for the capture only, and libraries may print.
    os.dup2(2, 1)
    # CUDA would keep compiled kernels below the user's home.
    os.environ["CUDA_CACHE_DISABLE"] = "1"
    try:
        outcome = {"status": "ok", "reason": None, **work()}
    except Reason as reason:
        outcome = _without_figures(reason)
    except Exception as error:
        outcome = _without_figures(
            Failed(
                "probe_crashed",
                expected="the probe to measure, or to report a reason",
                found=f"{type(error).__name__}: {error}",
                remedy="report it with this capture",
            )
        )
    sender.send(outcome)


def _without_figures(reason: Reason) -> dict[str, Any]:
    return {"status": reason.status, "reason": reason.document}


def _end(process: ForkProcess) -> bool:
    """Kill the probe's session and return whether its process has ended."""
    # The probe may not have begun its session yet.
    process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join(_GRACE_S)
    return process.exitcode is not None
