"""NVLink partitions of slices, against a stand-in for the Fabric Manager's program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _object_names
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _nvlink

from tests.unit.plugins import fabric_manager
from tests.unit.plugins.fabric_manager import FabricManager

pytestmark = pytest.mark.covers("SLICE-4")
manager = fabric_manager.manager

ONE = "23bd713b-6073-4ef7-8a51-2897e902365d"
PAIR = _nvlink.Partition((1, 3), address="192.0.2.9")


def refused(manager: FabricManager, *, active: bool = True, modules: Any = (1, 3)) -> Refusal:
    with pytest.raises(Refusal) as caught:
        _nvlink.change(_nvlink.Partition(modules, "192.0.2.9"), active=active)
    return caught.value


def test_it_is_activated_and_deactivated_once(manager: FabricManager) -> None:
    assert _nvlink.change(PAIR, active=True) == {"partition": 3, "modules": [1, 3]}
    assert _nvlink.change(PAIR, active=True)["partition"] == 3
    assert manager.active == [3]
    local = _nvlink.Partition((3, 1), socket="/run/fm.sock")
    for _twice in range(2):
        _nvlink.change(local, active=False)
    assert manager.active == []
    assert [words for words in manager.calls if words != ["-l"]] == [["-a", "3"], ["-d", "3"]]


def test_while_another_partition_has_some_of_its_gpus_nothing_changes(
    manager: FabricManager,
) -> None:
    manager.set(active=[1, 6])
    for active in (True, False):
        refusal = refused(manager, active=active)
        assert (refusal.code, "partition 1 of modules 1, 2, 3, 4") == (
            "nvlink_partition_overlap",
            refusal.found.removesuffix(" is active"),
        )
    assert manager.calls == [["-l"], ["-l"]]


def test_a_board_without_the_partition(manager: FabricManager) -> None:
    assert refused(manager, modules=(1, 2)).code == "nvlink_partition_missing"
    # A failed link takes a partition off the list, and there is nothing to deactivate.
    nothing = _nvlink.change(_nvlink.Partition((1, 2), "192.0.2.9"), active=False)
    assert nothing["partition"] is None


@pytest.mark.parametrize(
    ("operation", "fault", "code"),
    [
        ("-l", "hang", "fabric_manager_unreachable"),
        ("-l", "down", "fabric_manager_unreachable"),
        ("-l", "flood", "fabric_manager_unreachable"),
        ("-a", "hang", "fabric_manager_unreachable"),
        ("-a", "refuse", "fabric_manager_refused"),
        ("-a", "flood", "fabric_manager_refused"),
        ("-a", "lie", "nvlink_partition_unchanged"),
    ],
)
def test_a_fabric_manager_that_fails_is_named(
    manager: FabricManager,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    fault: str,
    code: str,
) -> None:
    faults = {operation: fault}
    manager.set(faults=faults)
    fabric_manager.be_short(monkeypatch, faults)
    refusal = refused(manager)
    assert refusal.code == code
    texts = {"down": "Failed to connect", "refuse": "fmReturn: -8", "flood": "bytes"}
    assert texts.get(fault, "") in refusal.found


@pytest.mark.parametrize(("fault", "left"), [("lie", [3]), ("refuse", [3])])
def test_a_deactivation_without_effect_is_named(
    manager: FabricManager, fault: str, left: list[int]
) -> None:
    manager.set(active=[3], faults={"-d": fault})
    codes = {"lie": "nvlink_partition_unchanged", "refuse": "fabric_manager_refused"}
    assert refused(manager, active=False).code == codes[fault]
    assert manager.active == left


def test_a_host_without_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bash").symlink_to("/bin/bash")
    (tmp_path / "head").symlink_to("/usr/bin/head")
    monkeypatch.setattr(_command, "_PATH", str(tmp_path))
    with pytest.raises(Refusal, match=r"fabric_manager_unreachable.*no program fmpm"):
        _nvlink.listed(PAIR)


def entry(number: int, *modules: Any, **change: Any) -> dict[str, Any]:
    gpus = [{"physicalId": module} for module in modules]
    return {
        "partitionId": number,
        "isActive": 0,
        "numGpus": len(gpus),
        "gpuInfo": gpus,
        **change,
    }


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [entry(0, 1), entry(0, 2)],
        [entry(0, 1), entry(1, 1)],
        [entry(0, 1, 2, isActive=1), entry(1, 2, isActive=1)],
        [entry(0, 1, isActive=2)],
        [entry(0, 1, isActive=True)],
        [entry(0, 1, isActive="1")],
        [entry(-1, 1)],
        [entry(0, 1, 1)],
        [entry(0, 1, numGpus=2)],
        [entry(0, "1")],
        [entry(0)],
        ["x"],
        None,
    ],
)
def test_a_list_that_contradicts_itself_is_refused(
    manager: FabricManager, rows: list[Any] | None
) -> None:
    manager.set(answer=json.dumps({"numPartitions": len(rows or []), "partitionInfo": rows}))
    assert refused(manager).code == "fabric_manager_invalid"


@pytest.mark.parametrize("text", ["<html>", "[]", "7", '{"partitionInfo": []}', "[" * 100_000])
def test_an_answer_that_is_no_list_is_refused(manager: FabricManager, text: str) -> None:
    manager.set(answer=text)
    assert refused(manager).code == "fabric_manager_invalid"


def test_it_is_kept_for_each_slice(tree: Path) -> None:
    assert (_nvlink.saved(ONE), _nvlink.load()) == (None, {})
    _nvlink.save(ONE, PAIR)
    file = tree / _object_names.nvlink_path(ONE).lstrip("/")
    file.with_name(f"{_object_names.PREFIX}else.json").write_text("{}")
    assert (_nvlink.saved(ONE), _nvlink.load()) == (PAIR, {ONE: PAIR})
    for text in ("", "[]", "{}", '{"modules": [1]}', '{"modules": [1, 1], "address": "192.0.2.9"}'):
        file.write_text(text)
        with pytest.raises(Refusal, match="nvlink_record_unreadable"):
            _nvlink.saved(ONE)
    _nvlink.forget(ONE)
    assert _nvlink.saved(ONE) is None
