"""Gate for tuning profiles: captures with a profile compared with captures without it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reconciler.benchmark.compare import Capture, Record, compare
from reconciler.model.errors import Problem

OFF = "off"
PROBES = ("cpu", "memory", "disk", "rdma", "gpu", "vllm")

Cell = tuple[str, int, str]


def gate(
    captures: Sequence[Capture], waived: Sequence[str] = (), counts: Sequence[int] = ()
) -> list[Record]:
    """A verdict per tuning profile: {"tuning", "passes", "cells"}.

    The matrix has a cell for each kind of machine and number of CPUs of any capture, and for each
    kind every number in counts, so that a missing capture is noticed. A cell: {"kind", "vcpus",
    "verdict", "better", "worse", "open"}. Its verdict is

    - `better`, `same` or `worse`,
    - `incomplete`: a probe without figures, figures that are too noisy, or captures that differ in
      more than the tuning, or not in the tuning,
    - `missing`: no capture with the profile, or none without it.

    A profile passes if every cell is `better` or `same`, and at least one cell is `better`.
    waived: probes that need not have figures.
    """
    cells = _cells(captures)
    places = sorted(
        {(kind, vcpus) for kind, vcpus, _ in cells}
        | {(kind, vcpus) for kind, _, _ in cells for vcpus in counts}
    )
    tunings = sorted({tuning for _, _, tuning in cells} - {OFF})
    return [_profile(cells, places, tuning, frozenset(waived)) for tuning in tunings]


def _cells(captures: Sequence[Capture]) -> dict[Cell, Capture]:
    cells: dict[Cell, Capture] = {}
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
    return cells


def _profile(
    cells: dict[Cell, Capture],
    places: Sequence[tuple[str, int]],
    tuning: str,
    waived: frozenset[str],
) -> Record:
    matrix = [_place(cells, kind, vcpus, tuning, waived) for kind, vcpus in places]
    verdicts = {cell["verdict"] for cell in matrix}
    return {
        "tuning": tuning,
        "passes": verdicts <= {"better", "same"} and "better" in verdicts,
        "cells": matrix,
    }


def _place(
    cells: dict[Cell, Capture], kind: str, vcpus: int, tuning: str, waived: frozenset[str]
) -> Record:
    place = {"kind": kind, "vcpus": vcpus}
    pair = [cells.get((kind, vcpus, each)) for each in (OFF, tuning)]
    absent = [name for name, capture in zip((OFF, tuning), pair, strict=True) if capture is None]
    both = [each for each in pair if each is not None]
    if absent:
        open_points = [f"no capture with tuning {name}" for name in absent]
        return place | {"verdict": "missing", "better": [], "worse": [], "open": open_points}
    compared = compare(both)
    rows = compared["rows"]
    metrics: dict[str, list[str]] = {}
    for row in rows:
        metrics.setdefault(row["cells"][1]["direction"], []).append(row["metric"])
    undecided = [
        name
        for direction in ("unclear", "incomparable", "missing")
        for name in metrics.get(direction, [])
    ]
    unmeasured = [name for name in PROBES if any(_empty(each, name) for each in both)]
    open_points = [
        name
        for name in dict.fromkeys([*unmeasured, *undecided])
        if name.partition(".")[0] not in waived
    ]
    # Different conditions of the two captures keep the cell open as well.
    open_points += compared["notes"]
    better, worse = metrics.get("better", []), metrics.get("worse", [])
    verdict = "worse" if worse else "incomplete" if open_points else "better" if better else "same"
    return place | {"verdict": verdict, "better": better, "worse": worse, "open": open_points}


def _empty(capture: Capture, name: str) -> bool:
    probes: list[dict[str, Any]] = capture["probes"]
    return all(not probe["metrics"] for probe in probes if probe["probe"] == name)
