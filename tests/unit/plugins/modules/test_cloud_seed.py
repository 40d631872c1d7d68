"""Cloud-init seed: written once, replaced when its content changes, never shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _cloud_seed
from ansible_collections.gpuaas.slice.plugins.modules import cloud_seed as module

PARAMS: dict[str, Any] = {
    "allocation_id": "23bd713b-6073-4ef7-8a51-2897e902365d",
    "state": "present",
    "user_data": json.dumps({"users": [{"name": "ada", "passwd": "canary-secret"}]}),
    "meta_data": {"instance-id": "i"},
    "network_config": {"version": 2},
}


@pytest.fixture
def seeds(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def make(path: str, content: dict[str, str]) -> None:
        file = tree / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        mark = b"GPUAAS SEED " + _cloud_seed.digest(content).upper().encode()
        file.write_bytes(bytes(16 * 2048 + 574) + mark.ljust(128))

    monkeypatch.setattr(_cloud_seed, "make", make)
    return tree


def drive(params: dict[str, Any], *, check_mode: bool = False) -> _change.Outcome:
    subject = _change.Subject(module.observe, module.plan, module.apply, module.facts)
    return _change.drive(subject, params, check_mode=check_mode)


def test_write_change_and_remove(seeds: Path) -> None:
    assert drive(PARAMS, check_mode=True).changed
    assert drive(PARAMS).done == ["write_seed"]
    assert drive(PARAMS).done == []
    assert drive({**PARAMS, "meta_data": {"instance-id": "j"}}).done == ["write_seed"]
    assert drive({**PARAMS, "state": "absent"}).done == ["remove_seed"]
    assert drive({**PARAMS, "state": "absent"}).done == []


def test_nothing_of_the_content_is_in_the_result(seeds: Path) -> None:
    assert "canary-secret" not in json.dumps(drive(PARAMS).document())


@pytest.mark.parametrize("text", ["canary-secret", "[1]", '"canary-secret"'])
def test_what_is_no_document_is_refused_without_being_quoted(seeds: Path, text: str) -> None:
    with pytest.raises(_change.Refusal) as refusal:
        drive({**PARAMS, "user_data": text})
    assert refusal.value.code == "spec_invalid"
    assert "canary" not in str(refusal.value)


def test_a_late_run_writes_none(seeds: Path) -> None:
    late = {**PARAMS, "slots": [{"slot_id": "s1", "fence": 3}]}
    _ledger.raise_fence("s1", fence=4)
    with pytest.raises(_change.Refusal) as refusal:
        drive(late)
    assert refusal.value.code == "stale_fence"
    assert drive(PARAMS).done == ["write_seed"]
    assert drive({**late, "state": "absent"}).done == ["remove_seed"]
