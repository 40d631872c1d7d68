"""Slots as typed: by file, by candidate, by index."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.reconciler.api.stack import NODE, Stack, bundle
from tests.unit.reconciler.api.test_allocations import failed
from tests.unit.reconciler.api.test_slots import grow
from tests.unit.reconciler.cli.conftest import Gpuaas

pytestmark = pytest.mark.covers("CTRL-3")

REASON = ("--reason", "first two")


def test_approve_candidates(prepared: Stack, gpuaas: Gpuaas) -> None:
    words = ("slots", "approve", NODE, "--from-candidates", "1,3", *REASON)
    gpuaas.at(prepared)(*words)
    assert gpuaas.status == 0, gpuaas.err
    assert [line.split()[2] for line in gpuaas.out.splitlines()[1:]] == ["disabled"] * 2
    gpuaas("slots", "approve", NODE, "--from-candidates", "9", *REASON)
    assert (gpuaas.status, "candidate_not_found" in gpuaas.err) == (1, True)


def test_approve_a_file(prepared: Stack, gpuaas: Gpuaas, tmp_path: Path) -> None:
    file = tmp_path / "slots.json"
    file.write_text(json.dumps(bundle(0)))
    gpuaas.at(prepared)("slots", "approve", NODE, str(file), *REASON)
    assert (gpuaas.status, "mounted_child" in gpuaas.err) == (1, True)
    file.write_text(json.dumps([bundle(1)]))
    gpuaas("slots", "approve", NODE, str(file), *REASON)
    assert gpuaas.status == 0, gpuaas.err
    file.write_text("{")
    gpuaas("slots", "approve", NODE, str(file), *REASON)
    assert "file_invalid" in gpuaas.err
    gpuaas("slots", "approve", NODE, *REASON)
    assert gpuaas.status == 2


def test_what_keeps_a_gate_closed(prepared: Stack, gpuaas: Gpuaas) -> None:
    gpuaas.at(prepared)("slots", "approve", NODE, "--from-candidates", "1", *REASON)
    gpuaas("slots", "show", NODE, "1", "--output", "json")
    codes = [item["code"] for item in json.loads(gpuaas.out)["gate"]]
    gpuaas("slots", "show", NODE, "1")
    assert gpuaas.status == 0, gpuaas.err
    assert codes and all(code in gpuaas.out for code in codes)
    gpuaas("slots", "enable", NODE, "1", "--reason", "why")
    assert (gpuaas.status, f"`gpuaas slots show {NODE} 1`" in gpuaas.err) == (0, True)
    gpuaas("slots", "show", NODE, "1")
    assert f"gate closed by {len(codes)}" in gpuaas.err


def test_a_long_past_is_told_in_short_and_whole_as_json(prepared: Stack, gpuaas: Gpuaas) -> None:
    gpuaas.at(prepared)("slots", "approve", NODE, "--from-candidates", "1", *REASON)
    gpuaas("slots", "list", NODE, "--output", "json")
    grow(prepared, json.loads(gpuaas.out)[0]["id"], proven=23, changes=24)
    gpuaas("slots", "show", NODE, "1")
    assert (gpuaas.status, "more than 20 proofs" in gpuaas.err) == (0, True), gpuaas.err
    gpuaas("slots", "show", NODE, "1", "--output", "json")
    document = json.loads(gpuaas.out)
    changes, proofs = ([row["id"] for row in document[name]] for name in ("history", "proofs"))
    assert (changes, len(changes)) == (sorted(changes), 25)
    assert len(proofs) == len(set(proofs)) == 23
    assert not {"history_next", "proofs_next"} & set(document)


def test_an_open_gate(selling: Stack, gpuaas: Gpuaas) -> None:
    gpuaas.at(selling)("slots", "show", NODE, "1")
    assert "gate open" in gpuaas.err
    assert "available" in gpuaas.out, "its record and its history"


def test_switch_by_index(selling: Stack, gpuaas: Gpuaas) -> None:
    gpuaas.at(selling)("slots", "disable", NODE, "3", "--reason", "fan")
    assert "disabled" in gpuaas.out
    slots = json.loads(gpuaas("slots", "list", NODE, "--output", "json"))
    assert [slot["status"] for slot in slots] == ["available", "disabled"]
    gpuaas("slots", "enable", NODE, slots[1]["id"], "--reason", "why")
    assert ("available" in gpuaas.out, gpuaas.err) == (True, "")
    gpuaas("slots", "disable", NODE, "0", "--reason", "why")
    assert "slot_not_found" in gpuaas.err
    gpuaas("slots", "repair", NODE, "1")
    assert "slot_not_blocked" in gpuaas.err
    gpuaas("slots", "withdraw", NODE, "1", "--reason", "why")
    assert "slot_in_use" in gpuaas.err


@pytest.mark.covers("CTRL-7")
def test_blocked_slots_of_the_site_name_the_allocations_that_left_them(
    selling: Stack, gpuaas: Gpuaas
) -> None:
    allocation = failed(selling)
    (slot,) = json.loads(gpuaas.at(selling)("slots", "list", "--blocked", "-o", "json"))
    assert (slot["node_id"], slot["status"]) == (NODE, "cleanup_blocked")
    assert slot["allocation_id"] == allocation
    assert len(json.loads(gpuaas("slots", "list", "-o", "json"))) == 2
    (same,) = json.loads(gpuaas("slots", "list", NODE, "--blocked", "-o", "json"))
    assert same["id"] == slot["id"]
    assert allocation in gpuaas("slots", "list")


@pytest.mark.covers("CTRL-6")
@pytest.mark.parametrize(
    "words",
    [
        *(("slots", act, NODE, "1") for act in ("disable", "enable", "withdraw")),
        ("nodes", "scheduling", NODE, "off"),
        ("scheduling", "off"),
    ],
)
def test_what_is_sold_is_changed_for_a_reason(gpuaas: Gpuaas, words: tuple[str, ...]) -> None:
    gpuaas(*words)
    assert (gpuaas.status, "--reason" in gpuaas.err) == (2, True)
