"""Benchmark captures of the lab host and of a slice VM on it, as an operator makes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.demo.stage import Stage
from reconciler.benchmark import document
from tests.lab import byhand

Capture = dict[str, Any]

SCRIPT = "gpuaas_benchmark_capture.sh"


def of_host(stage: Stage, file: Path, *words: str) -> Capture:
    """Capture the host with the lab's key; a virtual host needs an explicit declaration."""
    key = ["--ssh-key", stage.host().key]
    return _made(stage, file, *byhand.way(stage), *key, "--kind", "host", *words)


def of_guest(stage: Stage, allocation: dict[str, Any], file: Path, *words: str) -> Capture:
    """Capture the guest with the tenant's key; the reconciler supplies address, user and route."""
    key = str(stage.folder / "tenant_key")
    return _made(stage, file, "--allocation", allocation["id"], "--ssh-key", key, *words)


def probes(capture: Capture) -> dict[str, Capture]:
    return {probe["probe"]: probe for probe in capture["probes"]}


def compared(stage: Stage, files: list[Path], picture: Path) -> dict[str, Capture]:
    """Return the differences of the second capture by metric; the chart must name each metric."""
    assert stage.service is not None
    words = ["--output", "json", "host", "benchmark", "compare", *map(str, files)]
    comparison = json.loads(stage.service.cli(*words, "--svg", str(picture)))
    assert [capture["label"] for capture in comparison["captures"]] == [file.stem for file in files]
    rows = {row["metric"]: row["cells"][1] for row in comparison["rows"]}
    text = picture.read_text()
    assert text.startswith("<svg")
    assert all(metric in text for metric in rows)
    return rows


def writes(stage: Stage, device: str) -> list[str]:
    """Return the kernel's counts of a disk's written and discarded requests and sectors."""
    fields = stage.on_host("cat", f"/sys/class/block/{Path(device).name}/stat").split()
    return [*fields[4:7], *fields[11:14]]


def _made(stage: Stage, file: Path, *words: str) -> Capture:
    words = (*words, "--label", file.stem, "--output", str(file), "--quick")
    done = byhand.script(stage, SCRIPT, *words)
    assert done.returncode == 0, done.stderr
    # The loader refuses any document that violates the contract.
    capture = document.load(file)
    assert capture["label"] == file.stem
    return capture
