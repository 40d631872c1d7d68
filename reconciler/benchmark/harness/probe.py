"""Parts of every probe: the request, reasons for no figures, metrics, and tools."""

from __future__ import annotations

import math
import os
import shutil
import statistics
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import re
    from collections.abc import Mapping, Sequence

# Not every login has these folders on its PATH.
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


@dataclass(frozen=True)
class Request:
    """Labels, targets and sizes of a capture. Captures with different sizes are not comparable.

    label: name of the capture. tuning: `off`, or the active profiles.
    kind: `host` or `vm`; `auto` detects a VM by its CPU.
    vcpus: required number of usable CPUs; 0 accepts any number.
    harness: digest of the sent modules.
    fio_target, rdma_peer: if empty, the probe is skipped.
    """

    label: str
    kind: str
    tuning: str = "off"
    vcpus: int = 0
    harness: str = ""
    fio_target: str = ""
    rdma_peer: str = ""
    rdma_device: str = ""
    vllm_model: str = "facebook/opt-125m"
    repetitions: int = 5
    # About a second of a core at 3 GHz.
    cpu_steps: int = 8_000_000
    # Two buffers of this size must exceed the last-level cache: 300 MiB per socket of a Xeon 8570.
    memory_bytes: int = 512 << 20
    # Duration of a run of fio or ib_write_bw.
    seconds: int = 10


class Reason(Exception):
    """Reason for a probe without figures. `status` is the status of the probe in the capture.

    code: snake_case, part of the contract. expected, found, remedy: plain text.
    """

    status = "failed"

    def __init__(self, code: str, *, expected: str, found: str, remedy: str) -> None:
        super().__init__(f"{code}: expected {expected}; found {found}; {remedy}")
        self.code = code
        texts = {"expected": expected, "found": found, "remedy": remedy}
        # The schema limits the length of a text.
        self.document = {"code": code, **{name: text[:2000] for name, text in texts.items()}}


class Failed(Reason):
    """The tool and the device are present, and the measurement did not succeed."""


class Unavailable(Reason):
    """The tool or the device is missing."""

    status = "unavailable"


class Skipped(Reason):
    """The probe was not requested. It needs a target that a person must name."""

    status = "skipped"


def metric(
    name: str, unit: str, samples: Sequence[float], *, better: str = "higher", workers: int = 1
) -> dict[str, Any]:
    """A metric of a capture: median, and spread between the extremes in percent of the median.

    better: `higher` or `lower`. workers: number of CPUs used. Raises Failed `measurement_invalid`
    for a sample that is not a positive number.
    """
    if not samples or not all(math.isfinite(sample) and sample > 0 for sample in samples):
        raise Failed(
            "measurement_invalid",
            expected=f"positive figures for {name}",
            found=", ".join(map(str, samples)) or "none",
            remedy="check the output of the tool on the machine",
        )
    middle = statistics.median(samples)
    # Six significant digits, more than the precision of any probe.
    rounded = [float(f"{value:.6g}") for value in (middle, *samples)]
    return {
        "metric": name,
        "unit": unit,
        "better": better,
        "workers": workers,
        "median": rounded[0],
        "spread_percent": round(100 * (max(samples) - min(samples)) / middle, 2),
        "samples": rounded[1:],
    }


def ensure_result(right: bool, *, expected: str, found: str, remedy: str) -> None:
    """Failed `result_wrong` for a device that miscalculates."""
    if not right:
        raise Failed("result_wrong", expected=expected, found=found, remedy=remedy)


def ensure_name(name: str, pattern: re.Pattern[str], *, expected: str, remedy: str) -> None:
    """Failed `name_invalid` for a name that a tool could take for an option."""
    if not pattern.fullmatch(name):
        raise Failed("name_invalid", expected=expected, found=repr(name), remedy=remedy)


def last_figure(text: str, pattern: re.Pattern[str], *, expected: str, remedy: str) -> float:
    """The figure of the last match in a tool's output; Failed `output_unreadable`."""
    figures = pattern.findall(text)
    if not figures:
        raise Failed("output_unreadable", expected=expected, found=repr(text[-300:]), remedy=remedy)
    return float(figures[-1])


def find_tool(name: str, package: str) -> str:
    """The path of a tool; Unavailable `tool_missing` with the name of its package."""
    path = shutil.which(name, path=_path())
    if path is None:
        raise Unavailable(
            "tool_missing",
            expected=f"the program {name} on this machine",
            found="no such program",
            remedy=f"install {package} on all machines of the comparison",
        )
    return path


def run_tool(
    argv: Sequence[str],
    *,
    timeout: float,
    extra: Mapping[str, str] | None = None,
    ok: Sequence[int] = (0,),
) -> str:
    """Run a tool without input and return its standard output, or else its standard error.

    timeout: seconds. extra: additional environment. ok: exit codes of success. Raises Failed
    `tool_timeout` or `tool_failed`.
    """
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env={**os.environ, "PATH": _path(), "LC_ALL": "C.UTF-8", **(extra or {})},
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise Failed(
            "tool_timeout",
            expected=f"{argv[0]} to end within {timeout:g} s",
            found="still running; it was killed",
            remedy="run it by hand on the machine",
        ) from late
    if done.returncode not in ok:
        output = (done.stderr.strip() or done.stdout.strip() or "no output")[-1500:]
        raise Failed(
            "tool_failed",
            expected=f"{argv[0]} to exit with {' or '.join(map(str, ok))}",
            found=f"exit {done.returncode}: {output}",
            remedy="see the output of the program",
        )
    return done.stdout if done.stdout.strip() else done.stderr


def tool_version(path: str, *, ok: Sequence[int] = (0,)) -> str:
    """The first line of a tool's version output."""
    output = run_tool([path, "--version"], timeout=60, ok=ok).strip()
    return (output.splitlines() or ["unknown"])[0][:200]


def _path() -> str:
    return f"{os.environ.get('PATH', '/usr/local/bin:/usr/bin:/bin')}:{_SBIN}"
