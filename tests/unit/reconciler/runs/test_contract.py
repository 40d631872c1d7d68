"""Run contract: results that break their schema are refused, with the field."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import pytest

from reconciler.runs import contract
from reconciler.runs.contract import ContractError


def test_an_unknown_playbook_is_named() -> None:
    with pytest.raises(ContractError) as caught:
        contract.check_vars("wipe_everything", {})
    assert (caught.value.code, caught.value.field) == ("unknown_playbook", "playbook")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"schema": 2}, "schema"),
        ({"ok": "yes"}, "ok"),
        ({"playbook": "x y"}, "playbook"),
        ({"surprise": 1}, "(document)"),
        ({"ok": False, "error": {"code": "Stale Fence"}}, "error"),
        ({"evidence": {"rebooted": True}}, "evidence"),
        ({"evidence": {"rebooted": "no", "identity": {}}}, "evidence.rebooted"),
    ],
)
def test_a_result_that_breaks_its_schema_names_the_field(
    change: dict[str, object], field: str
) -> None:
    identity = {"boot_id": "b", "machine_id": "m", "host_key": "k"}
    good = {
        "schema": 1,
        "playbook": "bootstrap",
        "ok": True,
        "step": "",
        "error": {},
        "evidence": {"rebooted": True, "identity": identity},
    }
    assert contract.check_result(good) is good
    with pytest.raises(ContractError) as caught:
        contract.check_result(good | change)
    assert caught.value.code == "result_invalid"
    assert caught.value.field.startswith(field)


@pytest.mark.covers("CTRL-9")
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"step": "a\0b"}, "step"),
        ({"evidence": {"told": ["x", {"serial": "half \ud800"}]}}, "evidence.told.1.serial"),
        ({"evidence": {"name\0": 1}}, "evidence.name\ufffd"),
        ({"evidence": {"seconds": float("nan")}}, "evidence.seconds"),
        ({"evidence": {"seconds": float("inf")}}, "evidence.seconds"),
    ],
)
def test_what_a_database_does_not_take_is_no_result(change: dict[str, object], field: str) -> None:
    good = {
        "schema": 1,
        "playbook": "a_test",
        "ok": True,
        "step": "",
        "error": {},
        "evidence": {"told": "\x1b[2J \u00e9 \U0001f600", "seconds": 1.5},
    }
    assert contract.check_result(good) is good
    with pytest.raises(ContractError) as caught:
        contract.check_result(good | change)
    assert (caught.value.code, caught.value.field) == ("outcome_unreadable", field)
    str(caught.value).encode()


@pytest.mark.covers("CTRL-9")
@pytest.mark.parametrize("levels", [90, 101, 900])
def test_a_document_without_end_is_no_result(levels: int) -> None:
    nested: object = 1
    for number in range(levels):
        nested = {"a": nested} if number % 2 else [nested]
    result = {"schema": 1, "playbook": "a_test", "ok": True, "step": "", "error": {}}
    result["evidence"] = {"told": nested}
    if levels < 100:
        assert contract.check_result(result) is result
        return
    with pytest.raises(ContractError) as caught:
        contract.check_result(result)
    assert caught.value.code == "outcome_unreadable"
    assert caught.value.field.startswith("evidence.told.")


# Of four megabytes, each of these took hours, or gigabytes.
_MANY = 5_000
FULL: dict[str, dict[str, object]] = {
    "entries of a wrong type": {"gpu": [0] * _MANY},
    "entries that cannot be sorted": {
        "candidate_summary": {"blockers": [item for n in range(_MANY) for item in (n, f"a{n}")]}
    },
    "entries of a dictionary": {
        "bootstrap": {"vfio_modules": dict.fromkeys(map(str, range(_MANY)))}
    },
    "a long name above many values": {"k" * 1_000_000: [0] * 10 * _MANY},
}


@pytest.mark.covers("HOST-13", "P1")
@pytest.mark.parametrize("document", FULL.values(), ids=FULL)
def test_a_report_filled_by_a_hostile_host_is_refused_at_once(document: dict[str, object]) -> None:
    result = {"schema": 1, "playbook": "discover", "ok": True, "step": "", "error": {}}
    result["evidence"] = {"discovery": document}
    began = time.process_time()
    with pytest.raises(ContractError, match="result_invalid"):
        contract.check_result(result)
    assert time.process_time() - began < 1
    tracemalloc.start()
    with pytest.raises(ContractError):
        contract.check_result(result)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held < 8 << 20


@pytest.mark.parametrize("name", ["../discovery", "../parity", "result"])
def test_every_list_and_number_of_a_report_has_a_limit(name: str) -> None:
    """A number of any length fits no column, and its sum or its share is no number of Python."""

    def unbounded(node: Any) -> list[str]:
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        kinds = str(node.get("type")) if isinstance(node, dict) else ""
        bare = "array" in kinds and "maxItems" not in node
        bare |= ("integer" in kinds or "number" in kinds) and "maximum" not in node
        return [json.dumps(node)] * bare + [row for value in inner for row in unbounded(value)]

    assert unbounded(contract.schema(name)) == []


def test_a_trailing_newline_does_not_slip_through_a_pattern() -> None:
    with pytest.raises(ContractError):
        contract.check_result(
            {
                "schema": 1,
                "playbook": "cache_image\n",
                "ok": True,
                "step": "",
                "error": {},
                "evidence": {},
            }
        )
