"""Comparison of captures, metric by metric, its text, and the gate for tuning profiles. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reconciler.benchmark.harness.main import PROBES
from reconciler.model.errors import Problem
from reconciler.model.storable import shown

Capture = Mapping[str, Any]
Record = dict[str, Any]

# Differences below this are ignored, with any spread.
SAME_PERCENT = 1.0
# Overlapping samples with a larger spread do not prove that there is no difference. With a single
# sample (vLLM), a difference below 10 % proves nothing.
NOISY_PERCENT = 10.0

# Loss of the prototype from bare metal to a slice VM with a GPU, in percent.
REFERENCE = {"gpu.fp64": -2.1, "gpu.hbm_copy": 0.0, "rdma.write": -43.0, "vllm.throughput": -17.0}

_SETTINGS = (
    "hugepages",
    "kernel_arguments",
    "memlock_bytes",
    "sysctls",
    "tuned_profile",
    "transparent_hugepages",
)
OFF = "off"
SIGNS = {"better": "\u25b2", "worse": "\u25bc", "same": "=", "unclear": "?"}


def compare(captures: Sequence[Capture]) -> Record:
    """{"captures": labels, "rows": by metric, "notes"}; the first capture is the baseline.

    A row: {"metric", "unit", "better", "reference_percent", "cells"}. A cell per capture: {"value",
    "delta_percent", "direction", "note"}. value is None without a measurement, and delta_percent is
    None without a comparable measurement. direction: `baseline`, `better`, `worse`, `same`,
    `unclear` (samples too noisy or too few), `incomparable` or `missing`.
    """
    baseline = captures[0]
    # Probe and metric by the metric's name, for each capture.
    figures: list[dict[str, tuple[Record, Record]]] = [
        {
            metric["metric"]: (probe, metric)
            for probe in each["probes"]
            for metric in probe["metrics"]
        }
        for each in captures
    ]
    slices = baseline["kind"] == "host" and any(each["kind"] == "vm" for each in captures)
    rows = []
    for name in dict.fromkeys(name for each in figures for name in each):
        _, metric = next(each[name] for each in figures if name in each)
        pairs = [each.get(name) for each in figures]
        rows.append(
            {
                "metric": name,
                "unit": metric["unit"],
                "better": metric["better"],
                "cells": [
                    _missing(capture, name) if pair is None else _cell(pairs[0], pair)
                    for capture, pair in zip(captures, pairs, strict=True)
                ],
                "reference_percent": REFERENCE.get(name) if slices else None,
            }
        )
    return {
        "captures": [
            {name: each[name] for name in ("label", "kind", "tuning", "vcpus", "started_at")}
            | {"hostname": each["host"]["hostname"]}
            for each in captures
        ],
        "rows": rows,
        "notes": [note for each in captures[1:] for note in _notes(baseline, each)],
    }


def _cell(first: tuple[Record, Record] | None, pair: tuple[Record, Record]) -> Record:
    """A cell with a figure. first: probe and metric of the baseline."""
    probe, metric = pair
    value, spread = metric["median"], metric["spread_percent"]
    remarks = [f"spread {spread:.0f} %"] if spread > NOISY_PERCENT else []
    if first is pair:
        return _as_cell(value, None, "baseline", *remarks)
    if first is None:
        return _as_cell(value, None, "incomparable", "the baseline has no figure")
    base_probe, base = first
    tool, base_tool = probe["tool"], base_probe["tool"]
    differing = [
        noun
        for noun, differs in (
            ("unit", base["unit"] != metric["unit"]),
            ("direction", base["better"] != metric["better"]),
            ("tool", base_tool["name"] != tool["name"]),
            ("workload", base_probe["workload"] != probe["workload"]),
        )
        if differs
    ]
    if differing:
        return _as_cell(value, None, "incomparable", f"other {' and '.join(differing)}")
    if base["workers"] != metric["workers"]:
        remarks.append(f"{metric['workers']} CPUs instead of {base['workers']}")
    if base_tool["version"] != tool["version"]:
        remarks.append(f"{tool['name']} {tool['version']} instead of {base_tool['version']}")
    delta = 100 * (value - base["median"]) / base["median"]
    ours, theirs = base["samples"], metric["samples"]
    if min(ours) <= max(theirs) and min(theirs) <= max(ours):
        noisy = max(base["spread_percent"], spread) > NOISY_PERCENT
        direction = "unclear" if noisy else "same"
    elif abs(delta) < SAME_PERCENT:
        direction = "same"
    elif min(len(ours), len(theirs)) == 1 and abs(delta) < NOISY_PERCENT:
        direction = "unclear"
        remarks.append("a single sample shows no spread")
    else:
        direction = "better" if (delta > 0) == (metric["better"] == "higher") else "worse"
    return _as_cell(value, round(delta, 2), direction, *remarks)


def _missing(capture: Capture, name: str) -> Record:
    """A cell with the reason of the probe, whose name is the first part of the metric's name."""
    probes = {each["probe"]: each for each in capture["probes"]}
    # A machine may name a metric after no probe.
    probe = probes.get(name.partition(".")[0], {"reason": None})
    reason = probe["reason"]
    note = f"{probe['status']}: {reason['code']}" if reason else "not measured"
    return _as_cell(None, None, "missing", note)


def _as_cell(value: float | None, delta: float | None, direction: str, *notes: str) -> Record:
    note = ", ".join(notes)
    return {"value": value, "delta_percent": delta, "direction": direction, "note": note}


def _notes(baseline: Capture, capture: Capture) -> list[str]:
    """Differences in the conditions of two captures, which a reader must know."""
    label, tuning, base_tuning = capture["label"], capture["tuning"], baseline["tuning"]
    host, base_host = capture["host"], baseline["host"]
    notes = []
    if baseline["harness"]["digest"] != capture["harness"]["digest"]:
        notes.append(f"{label}: measured by another version of the harness")
    if base_host["cpu_model"] != host["cpu_model"]:
        notes.append(f"{label}: CPU {host['cpu_model']!r} instead of {base_host['cpu_model']!r}")
    alike = baseline["kind"] == capture["kind"] == "host"
    alike = alike and all(base_host[name] == host[name] for name in _SETTINGS)
    if alike and base_tuning != tuning:
        notes.append(
            f"{label}: tuning {tuning!r} instead of {base_tuning!r} by its label,"
            " and no setting of the machine differs"
        )
    return notes


def gate(
    captures: Sequence[Capture], waived: Sequence[str] = (), counts: Sequence[int] = ()
) -> list[Record]:
    """A verdict per tuning profile: {"tuning", "passes", "cells"}.

    The matrix has a cell for each kind of machine and number of CPUs of any capture. Each kind also
    has a cell for every number in counts, so that a missing capture is noticed. A cell: {"kind",
    "vcpus", "verdict", "better", "worse", "open"}. Its verdict is

    - `better`, `same` or `worse`,
    - `incomplete`: a probe without figures, figures that are too noisy, or captures that differ in
      more than the tuning, or not in the tuning,
    - `missing`: no capture with the profile, or none without it.

    A profile passes if every cell is `better` or `same`, and at least one cell is `better`.
    waived: probes that need not have figures.
    """
    cells: dict[tuple[str, int, str], Capture] = {}
    for each in captures:
        cell = (each["kind"], each["vcpus"], each["tuning"])
        if cell in cells:
            raise Problem(
                "capture_twice",
                422,
                expected="a single capture for each kind, number of CPUs and tuning",
                found=f"{cells[cell]['label']} and {each['label']}, both {cell}",
                remedy="use either capture, chosen without regard to its figures",
            )
        cells[cell] = each
    places = {(kind, vcpus) for kind, vcpus, _ in cells}
    places |= {(kind, vcpus) for kind, _, _ in cells for vcpus in counts}
    verdicts = []
    for tuning in sorted({tuning for _, _, tuning in cells} - {OFF}):
        matrix = []
        for kind, vcpus in sorted(places):
            pair = {name: cells.get((kind, vcpus, name)) for name in (OFF, tuning)}
            matrix.append({"kind": kind, "vcpus": vcpus} | _verdict(pair, waived))
        reached = {cell["verdict"] for cell in matrix}
        passes = reached <= {"better", "same"} and "better" in reached
        verdicts.append({"tuning": tuning, "passes": passes, "cells": matrix})
    return verdicts


def _verdict(pair: Mapping[str, Capture | None], waived: Sequence[str]) -> Record:
    """Verdict of a cell. pair: the captures by tuning, first the one without the profile."""
    captures = [capture for capture in pair.values() if capture is not None]
    if len(captures) < len(pair):
        absent = [f"no capture with tuning {name}" for name, each in pair.items() if each is None]
        return {"verdict": "missing", "better": [], "worse": [], "open": absent}
    compared = compare(captures)
    metrics: dict[str, list[str]] = {}
    for row in compared["rows"]:
        metrics.setdefault(row["cells"][1]["direction"], []).append(row["metric"])
    better, worse = metrics.get("better", []), metrics.get("worse", [])
    empty = {
        each["probe"] for capture in captures for each in capture["probes"] if not each["metrics"]
    }
    undecided = [name for name in PROBES if name in empty]
    for direction in ("unclear", "incomparable", "missing"):
        undecided += metrics.get(direction, [])
    open_points = [name for name in undecided if name.partition(".")[0] not in waived]
    # Different conditions of the two captures keep the cell open as well.
    open_points += compared["notes"]
    verdict = "worse" if worse else "incomplete" if open_points else "better" if better else "same"
    return {"verdict": verdict, "better": better, "worse": worse, "open": open_points}


def figure(value: float) -> str:
    """Three digits, or a whole number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(delta: float) -> str:
    """Percentage with sign and a decimal, never -0.0."""
    return f"{round(delta, 1) + 0.0:+.1f} %"


def cell_text(value: Record) -> str:
    """Text of a cell of a comparison: `98.2  -1.8 % worse (note)`."""
    parts = [] if value["value"] is None else [figure(value["value"])]
    if value["delta_percent"] is not None:
        parts.append(f"{percent(value['delta_percent'])} {value['direction']}")
    elif value["direction"] != "baseline":
        parts.append(value["direction"])
    if value["note"]:
        parts.append(f"({value['note']})")
    return shown(" ".join(parts))
