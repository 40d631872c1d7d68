"""Comparison of captures with a baseline, metric by metric. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Capture = Mapping[str, Any]
Record = dict[str, Any]

# Differences below this are ignored, with any spread.
SAME_PERCENT = 1.0
# Overlapping samples with a larger spread do not prove that there is no difference.
NOISY_PERCENT = 10.0

# Loss of the prototype from bare metal to a slice VM with a GPU, in percent.
REFERENCE = {
    "gpu.fp64": -2.1,
    "gpu.hbm_copy": 0.0,
    "rdma.write": -43.0,
    "vllm.throughput": -17.0,
}

_SETTINGS = (
    "hugepages",
    "kernel_arguments",
    "memlock_bytes",
    "sysctls",
    "tuned_profile",
    "transparent_hugepages",
)


def compare(captures: Sequence[Capture]) -> Record:
    """{"captures": labels, "rows": by metric, "notes"}; the first capture is the baseline.

    A row: {"metric", "unit", "better", "reference_percent", "cells"}. A cell per capture: {"value",
    "delta_percent", "direction", "note"}. value is None without a measurement, and delta_percent is
    None without a comparable measurement. direction: `baseline`, `better`, `worse`, `same`,
    `unclear` (samples too noisy), `incomparable` or `missing`.
    """
    baseline = captures[0]
    names = list(dict.fromkeys(name for each in captures for name in _metrics(each)))
    slices = baseline["kind"] == "host" and any(each["kind"] == "vm" for each in captures)
    return {
        "captures": [
            {name: each[name] for name in ("label", "kind", "tuning", "vcpus", "started_at")}
            | {"hostname": each["host"]["hostname"]}
            for each in captures
        ],
        "rows": [
            _row(name, captures) | {"reference_percent": REFERENCE.get(name) if slices else None}
            for name in names
        ],
        "notes": [note for each in captures[1:] for note in _notes(baseline, each)],
    }


def _metrics(capture: Capture) -> dict[str, tuple[Record, Record]]:
    """Probe and metric by the metric's name."""
    return {
        metric["metric"]: (probe, metric)
        for probe in capture["probes"]
        for metric in probe["metrics"]
    }


def _row(name: str, captures: Sequence[Capture]) -> Record:
    pairs = [_metrics(each).get(name) for each in captures]
    _, shown = next(pair for pair in pairs if pair)
    cells = [_baseline_cell(captures[0], name, pairs[0])]
    cells += [
        _cell(name, captures[index], pairs[0], pair) for index, pair in enumerate(pairs) if index
    ]
    return {"metric": name, "unit": shown["unit"], "better": shown["better"], "cells": cells}


def _baseline_cell(capture: Capture, name: str, pair: tuple[Record, Record] | None) -> Record:
    if pair is None:
        return _missing(capture, name)
    return _as_cell(pair[1]["median"], None, "baseline", _spread(pair[1]))


def _cell(
    name: str,
    capture: Capture,
    first: tuple[Record, Record] | None,
    pair: tuple[Record, Record] | None,
) -> Record:
    if pair is None:
        return _missing(capture, name)
    probe, metric = pair
    if first is None:
        return _as_cell(metric["median"], None, "incomparable", "the baseline has no figure")
    base_probe, base = first
    differing = [
        noun
        for noun, ours, theirs in (
            ("unit", base["unit"], metric["unit"]),
            ("direction", base["better"], metric["better"]),
            ("tool", base_probe["tool"]["name"], probe["tool"]["name"]),
            ("workload", base_probe["workload"], probe["workload"]),
        )
        if ours != theirs
    ]
    if differing:
        note = f"other {' and '.join(differing)}"
        return _as_cell(metric["median"], None, "incomparable", note)
    delta = 100 * (metric["median"] - base["median"]) / base["median"]
    remarks = [_spread(metric)]
    if base["workers"] != metric["workers"]:
        remarks.append(f"{metric['workers']} CPUs instead of {base['workers']}")
    if base_probe["tool"]["version"] != probe["tool"]["version"]:
        remarks.append(
            f"{probe['tool']['name']} {probe['tool']['version']}"
            f" instead of {base_probe['tool']['version']}"
        )
    note = ", ".join(filter(None, remarks))
    return _as_cell(metric["median"], round(delta, 2), direction(base, metric), note)


def direction(base: Record, metric: Record) -> str:
    """`better`, `worse`, `same` or `unclear`, for two metrics that are comparable."""
    delta = 100 * (metric["median"] - base["median"]) / base["median"]
    if _overlap(base["samples"], metric["samples"]):
        noisy = max(base["spread_percent"], metric["spread_percent"]) > NOISY_PERCENT
        return "unclear" if noisy else "same"
    if abs(delta) < SAME_PERCENT:
        return "same"
    return "better" if (delta > 0) == (metric["better"] == "higher") else "worse"


def _overlap(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    return min(ours) <= max(theirs) and min(theirs) <= max(ours)


def _spread(metric: Record) -> str:
    spread = metric["spread_percent"]
    return f"spread {spread:.0f} %" if spread > NOISY_PERCENT else ""


def _missing(capture: Capture, name: str) -> Record:
    """A cell with the reason of the probe, whose name is the first part of the metric's name."""
    probe = next(each for each in capture["probes"] if each["probe"] == name.partition(".")[0])
    reason = probe["reason"]
    note = f"{probe['status']}: {reason['code']}" if reason else "not measured"
    return _as_cell(None, None, "missing", note)


def _as_cell(value: float | None, delta: float | None, direction: str, note: str) -> Record:
    return {"value": value, "delta_percent": delta, "direction": direction, "note": note}


def _notes(baseline: Capture, capture: Capture) -> list[str]:
    """Differences in the conditions of two captures, which a reader must know."""
    label = capture["label"]
    notes = []
    if baseline["harness"]["digest"] != capture["harness"]["digest"]:
        notes.append(f"{label}: measured by another version of the harness")
    models = [each["host"]["cpu_model"] for each in (baseline, capture)]
    if models[0] != models[1]:
        notes.append(f"{label}: CPU {models[1]!r} instead of {models[0]!r}")
    settings = [[each["host"][name] for name in _SETTINGS] for each in (baseline, capture)]
    alike = baseline["kind"] == capture["kind"] == "host" and settings[0] == settings[1]
    if alike and baseline["tuning"] != capture["tuning"]:
        notes.append(
            f"{label}: tuning {capture['tuning']!r} instead of {baseline['tuning']!r} by its label,"
            " and no setting of the machine differs"
        )
    return notes
