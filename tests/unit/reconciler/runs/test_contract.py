from __future__ import annotations

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
