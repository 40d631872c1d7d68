"""What differs between captures, metric by metric, against the first of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Capture = Mapping[str, Any]
Record = dict[str, Any]

# Smaller differences are not worth a decision, whatever the spread.
SAME_PERCENT = 1.0
# When overlapping samples spread more than this, "no difference" would be a guess.
NOISY_PERCENT = 10.0

# What the seed's prototype lost from bare metal to a one-GPU slice VM, in percent.
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
    """{"captures": labels, "rows": one per metric, "notes"}; the first capture is the baseline.

    A row: {"metric", "unit", "better", "reference_percent", "cells"}. A cell, one per capture:
    {"value", "delta_percent", "direction", "note"}, where value is None without a measurement and
    delta_percent None without a comparable one. direction: `baseline`, `better`, `worse`, `same`,
    `unclear` (the samples are too noisy to say), `incomparable` or `missing`.
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
    found = [_metrics(each).get(name) for each in captures]
    _, shown = next(each for each in found if each)
    cells = [_first(captures[0], name, found[0])]
    cells += [
        _cell(name, captures[index], found[0], each) for index, each in enumerate(found) if index
    ]
    return {"metric": name, "unit": shown["unit"], "better": shown["better"], "cells": cells}


def _first(capture: Capture, name: str, found: tuple[Record, Record] | None) -> Record:
    if found is None:
        return _missing(capture, name)
    return _said(found[1]["median"], None, "baseline", _spread(found[1]))


def _cell(
    name: str,
    capture: Capture,
    first: tuple[Record, Record] | None,
    found: tuple[Record, Record] | None,
) -> Record:
    if found is None:
        return _missing(capture, name)
    probe, metric = found
    if first is None:
        return _said(metric["median"], None, "incomparable", "the baseline has no figure")
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
        return _said(metric["median"], None, "incomparable", note)
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
    return _said(metric["median"], round(delta, 2), direction(base, metric), note)


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
    """The probe that would have measured it says why not; metrics are named after their probe."""
    probe = next(each for each in capture["probes"] if each["probe"] == name.partition(".")[0])
    reason = probe["reason"]
    note = f"{probe['status']}: {reason['code']}" if reason else "not measured"
    return _said(None, None, "missing", note)


def _said(value: float | None, delta: float | None, direction: str, note: str) -> Record:
    return {"value": value, "delta_percent": delta, "direction": direction, "note": note}


def _notes(baseline: Capture, capture: Capture) -> list[str]:
    """What a reader must know before believing a difference."""
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
