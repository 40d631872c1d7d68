"""Cloud-init seed: written once, replaced when its content changes, never shown."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _ledger,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _cloud_seed,
    _domain,
    _libvirt,
)
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


NAME = _object_names.domain_name(PARAMS["allocation_id"])
PATH = _object_names.seed_path(PARAMS["allocation_id"])
DETACH = {**PARAMS, "state": "detached"}
VIRSH = ("virsh", "--connect", "qemu:///system")


def domain_xml(*, seed: bool) -> str:
    machine = _domain.Domain(
        allocation_id=PARAMS["allocation_id"],
        vcpus=1,
        memory_mib=768,
        mac="52:54:00:64:00:0a",
        bridge="ovsbr0",
        disks=("/dev/disk/by-id/nvme-eui.5e0000000000a003",),
        gpus=("0000:43:00.0",),
        seed_path=PATH if seed else "",
    )
    return _domain.render(machine)


def runs(script: Any, *, live: list[bool], state: int = 1) -> None:
    """A domain whose definition names the seed, and what its QEMU has at each look."""
    text = f"Domain: '{NAME}'\n  state.state={state}\n  state.reason=1\n"
    script.on(*VIRSH, "domstats", "--state", "--nowait", out=text)
    for seed in (True, False):
        script.on(*VIRSH, "dumpxml", "--inactive", NAME, out=domain_xml(seed=seed))
    for seed in live:
        script.on(*VIRSH, "dumpxml", NAME, out=domain_xml(seed=seed))
    for mode in ("--config", "--live"):
        script.on(*VIRSH, "detach-disk", NAME, PATH, mode)


def test_after_readiness_it_is_overwritten_and_out_of_the_guest(seeds: Path, script: Any) -> None:
    """QEMU has the file open, so that deleting it alone would leave its content in the guest."""
    drive(PARAMS)
    with (seeds / PATH.lstrip("/")).open("rb") as qemu:
        assert b"GPUAAS SEED" in qemu.read()
        runs(script, live=[True, True, False])
        outcome = drive(DETACH)
        assert outcome.done == ["forget_seed", "destroy_seed", "unplug_seed"]
        assert not (seeds / PATH.lstrip("/")).exists()
        qemu.seek(0)
        assert qemu.read().strip(b"\0") == b""
    evidence = {"destroyed": True, "in_definition": False, "in_guest": False}
    assert (outcome.facts["seed"], outcome.doubts) == (evidence, [])
    assert drive(DETACH).done == []


def test_a_guest_that_keeps_the_disk_keeps_zeros_and_is_a_doubt(
    seeds: Path, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(PARAMS)
    runs(script, live=[True])
    clock = itertools.count(step=20)
    monkeypatch.setattr(_libvirt.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(_libvirt.time, "sleep", lambda _seconds: None)
    outcome = drive(DETACH)
    assert outcome.failure is None
    assert [doubt.code for doubt in outcome.doubts] == ["disk_not_unplugged"]
    assert outcome.facts["seed"] == {"destroyed": True, "in_definition": False, "in_guest": True}
    assert not (seeds / PATH.lstrip("/")).exists()


def test_a_late_run_detaches_none(seeds: Path) -> None:
    _ledger.raise_fence("s1", fence=4)
    with pytest.raises(_change.Refusal) as refusal:
        drive({**DETACH, "slots": [{"slot_id": "s1", "fence": 3}]})
    assert refusal.value.code == "stale_fence"
