"""May a tuning profile become the default? Captures with it against captures without it. Pure."""

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

    The matrix is every kind of machine and number of CPUs that any capture has, and for each kind
    every number in counts, as nobody misses a capture that was never made. A cell:
    {"kind", "vcpus", "verdict", "better", "worse", "open"}; its verdict is `better`, `same`,
    `worse`, `incomplete` (a probe without figures, figures too noisy to say, or two captures that
    differ in more than the tuning, or not in it) or `missing` (no capture with or without the
    profile). A profile passes when it is worse nowhere, proven
    everywhere and better somewhere. waived: probes that need not have figures.
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
                expected="one capture for each kind, number of CPUs and tuning",
                found=f"{cells[cell]['label']} and {each['label']}, both {cell}",
                remedy="choose one of them; choosing the better one is not a measurement",
            )
        cells[cell] = each
    return cells


def _profile(
    cells: dict[Cell, Capture],
    places: Sequence[tuple[str, int]],
    tuning: str,
    waived: frozenset[str],
) -> Record:
    found = [_place(cells, kind, vcpus, tuning, waived) for kind, vcpus in places]
    verdicts = {cell["verdict"] for cell in found}
    return {
        "tuning": tuning,
        "passes": verdicts <= {"better", "same"} and "better" in verdicts,
        "cells": found,
    }


def _place(
    cells: dict[Cell, Capture], kind: str, vcpus: int, tuning: str, waived: frozenset[str]
) -> Record:
    place = {"kind": kind, "vcpus": vcpus}
    pair = [cells.get((kind, vcpus, each)) for each in (OFF, tuning)]
    absent = [each for each, there in zip((OFF, tuning), pair, strict=True) if there is None]
    both = [each for each in pair if each is not None]
    if absent:
        open_points = [f"no capture with tuning {name}" for name in absent]
        return place | {"verdict": "missing", "better": [], "worse": [], "open": open_points}
    compared = compare(both)
    rows = compared["rows"]
    told: dict[str, list[str]] = {}
    for row in rows:
        told.setdefault(row["cells"][1]["direction"], []).append(row["metric"])
    unsaid = [name for way in ("unclear", "incomparable", "missing") for name in told.get(way, [])]
    unmeasured = [name for name in PROBES if any(_empty(each, name) for each in both)]
    open_points = [
        name
        for name in dict.fromkeys([*unmeasured, *unsaid])
        if name.partition(".")[0] not in waived
    ]
    # What a reader of a comparison must know, a gate must not overlook.
    open_points += compared["notes"]
    better, worse = told.get("better", []), told.get("worse", [])
    verdict = "worse" if worse else "incomplete" if open_points else "better" if better else "same"
    return place | {"verdict": verdict, "better": better, "worse": worse, "open": open_points}


def _empty(capture: Capture, name: str) -> bool:
    probes: list[dict[str, Any]] = capture["probes"]
    return all(not probe["metrics"] for probe in probes if probe["probe"] == name)
