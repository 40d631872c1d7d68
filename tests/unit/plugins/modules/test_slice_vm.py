"""A slice VM as a whole: seed, address, fabric functions and domain, in order and by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _command,
    _host,
    _ledger,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _slice_network,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _cloud_seed,
    _dnsmasq,
    _domain,
    _libvirt,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice._libvirt import State as Life
from ansible_collections.gpuaas.slice.plugins.modules import slice_handover, slice_vm

from tests.unit.plugins.module_utils.slice.test_machine import ONE, SPEC, Host
from tests.unit.plugins.module_utils.slice.test_machine import PARAMS as DOMAIN
from tests.unit.plugins.module_utils.slice.test_machine import host as domain_host

pytestmark = pytest.mark.covers("SLICE-3", "SLICE-4", "SLICE-6")
__all__ = ["domain_host"]

MAC, IP = SPEC["mac"], DOMAIN["ip"]
PARAMS: dict[str, Any] = {
    **DOMAIN,
    "mac": MAC,
    "spec": {name: value for name, value in SPEC.items() if name not in ("mac", "seed_path")},
    "user_data": json.dumps({"users": [{"name": "ada"}]}),
    "tenant_data": None,
    "meta_data": {"instance-id": ONE},
    "network_config": {"version": 2},
    "guest_runtime": {"tuning": True, "probes": {"rdma": 60}},
    "link": "ethernet",
    "vlan": 3001,
    "identities": {},
}
ABSENT = {**PARAMS, "state": "absent", "spec": None, "user_data": None}
OTHER = "33bd713b-6073-4ef7-8a51-2897e902365d"
SEED = _object_names.seed_path(ONE)


@pytest.fixture
def host(domain_host: Host, tree: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """The domain's host with dnsmasq and a program that makes seeds."""
    switch = _command.run

    def run(argv: list[str], **more: Any) -> _command.Result:
        if argv[0] in ("dnsmasq", "conntrack"):
            return _command.Result(0, "", "")
        return switch(argv, **more)

    def make(path: str, content: Mapping[str, str]) -> None:
        assert "net.core.rmem_max" in content["user-data"], "a guest without its tuning"
        mark = b"GPUAAS SEED " + _cloud_seed.digest(content).upper().encode()
        file = tree / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(16 * 2048 + 574) + mark.ljust(128))

    monkeypatch.setattr(_command, "run", run)
    monkeypatch.setattr(_cloud_seed, "make", make)
    monkeypatch.setattr(_slice_network, "dnsmasq_pid", lambda: 77)
    monkeypatch.setattr(_dnsmasq, "reload", lambda: None)
    return domain_host


def drive(params: dict[str, Any], *, check_mode: bool = False) -> _change.Outcome:
    return _change.drive_parts(slice_vm.parts(params), params, check_mode=check_mode)


def traces(tree: Path) -> list[bool]:
    files = (SEED, _dnsmasq.file_of(ONE))
    return [(tree / name.lstrip("/")).exists() for name in files]


def test_one_call_makes_the_whole_vm_and_one_takes_it_apart(host: Host, tree: Path) -> None:
    forecast = drive(PARAMS, check_mode=True)
    made = drive(PARAMS)
    assert (made.failure, made.failed_part) == (None, None)
    domain = ["define_domain", "start_domain", "guard_port", "resume_domain"]
    assert made.done == ["write_seed", "reserve_address", *domain]
    assert [step.name for step in forecast.plan.steps] == made.done
    assert _domain.parse(host.xml)["seed"] == SEED and MAC in host.xml
    assert made.facts["reservation"]["ip"] == IP
    assert (made.facts["domain"]["state"], made.facts["functions"]) == ("running", [])
    assert not drive(PARAMS).changed
    gone = drive(ABSENT)
    assert gone.done[0] == "stop_domain" and gone.done[-2:] == ["remove_reservation", "remove_seed"]
    assert gone.evidence["stop_domain"] == {"shutdown": "graceful"}
    assert (traces(tree), host.life) == ([False, False], None)
    assert not drive(ABSENT).changed


def test_check_mode_leaves_nothing(host: Host, tree: Path) -> None:
    assert drive(PARAMS, check_mode=True).changed
    assert (traces(tree), host.acts) == ([False, False], [])


def test_a_later_start_writes_no_seed(host: Host, tree: Path) -> None:
    drive(PARAMS)
    handed = {"allocation_id": ONE, "slots": PARAMS["slots"], "state": "stopped"}
    assert drive({**PARAMS, **handed}).done[0] == "stop_domain"
    (tree / SEED.lstrip("/")).unlink()
    again = drive({**PARAMS, "user_data": None})
    assert again.failure is None and "write_seed" not in again.done
    assert (traces(tree), _domain.parse(host.xml)["seed"]) == ([False, True], "")


RESTART = {**PARAMS, "user_data": None, "state": "restarted"}


def test_a_restart_takes_the_new_definition_before_it_stops_the_guest(host: Host) -> None:
    drive(PARAMS)
    host.acts.clear()
    assert drive(RESTART).failure is None
    assert host.acts == ["define", "shut_down", "start", "resume"], "without its seed"
    host.acts.clear()
    larger = {**RESTART, "spec": {**RESTART["spec"], "memory_mib": 1024}}
    done = drive(larger)
    assert (done.failure, host.acts[:2]) == (None, ["define", "shut_down"])
    assert done.evidence["stop_domain"] == {"shutdown": "graceful"}
    assert (done.facts["domain"]["state"], _domain.parse(host.xml)["memory_mib"]) == (
        "running",
        1024,
    )
    # A stopped guest is started.
    drive({**PARAMS, "state": "stopped"})
    assert "stop_domain" not in drive(larger).done and host.life == Life("running")


def a_function_missing(host: Host, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {
        "slots": [{**slot, "fabric_vf_pci_address": "0000:25:10.6"} for slot in PARAMS["slots"]]
    }


def an_attachment_of_a_later_profile(host: Host, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"spec": {**RESTART["spec"], "mgmt_attachment": "vf_representor"}}


def a_definition_that_libvirt_refuses(host: Host, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    def refuse(_xml: str) -> None:
        raise Refusal("command_failed", expected="a", found="b", remedy="c")

    patch.setattr(_libvirt, "define", refuse)
    return {"spec": {**RESTART["spec"], "qemu_arguments": ["-device", "edu"]}}


def a_network_without_its_record(host: Host, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    _host.write(_object_names.START_HOOK, "")
    _host.remove(_baseline_files.SETTINGS)
    return {}


def a_lease_that_is_gone(host: Host, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    _ledger.release("slot-3", fence=7)
    return {}


@pytest.mark.parametrize(
    ("plant", "code"),
    [
        (a_function_missing, "function_missing"),
        (an_attachment_of_a_later_profile, "mgmt_attachment_unsupported"),
        (a_definition_that_libvirt_refuses, "command_failed"),
        (a_network_without_its_record, "not_bootstrapped"),
        (a_lease_that_is_gone, "lease_missing"),
    ],
)
def test_a_restart_is_refused_as_its_start_would_be_while_the_guest_runs(
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[Host, pytest.MonkeyPatch], dict[str, Any]],
    code: str,
) -> None:
    drive(PARAMS)
    changed = plant(host, monkeypatch)
    refused = drive({**RESTART, **changed})
    assert refused.failure.code == code
    assert host.life == Life("running") and "shut_down" not in host.acts
    assert refused.facts.get("domain", {"state": "running"})["state"] == "running"
    # A start says the same.
    host.life = Life("shut off")
    same = drive({**RESTART, **changed, "state": "running"}).failure
    assert same.code == code


@pytest.mark.covers("I9", "I10")
def test_a_run_of_power_that_has_a_successor_does_nothing(host: Host) -> None:
    drive(PARAMS)
    host.acts.clear()
    first, second = ({**RESTART, "power_fence": number, "boot_id": None} for number in (4, 5))
    assert drive({**second, "state": "stopped"}).done[:2] == ["fence_power", "stop_domain"]
    for state in ("running", "restarted", "stopped"):
        late = drive({**first, "state": state})
        assert late.failure.code == "stale_fence"
        assert (late.failed_part, late.changed, host.acts) == ("fence_power", False, ["shut_down"])
    # The same run may be played twice.
    assert not drive({**second, "state": "stopped"}).changed
    assert drive({**second, "state": "running"}).failure is None


@pytest.mark.covers("I9", "I10")
@pytest.mark.parametrize("step", ["define", "shut_down", "start_paused"])
def test_a_run_of_power_does_no_further_step_once_its_successor_has_begun(
    host: Host, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The run hangs in libvirt, for example while it waits for a guest's shutdown."""
    drive(PARAMS)
    host.acts.clear()
    host.stubborn = True
    done = getattr(_libvirt, step)

    def and_begin(*words: Any, **options: Any) -> Any:
        result = done(*words, **options)
        _ledger.raise_power_fence("slot-3", fence=7, power_fence=5)
        return result

    monkeypatch.setattr(_libvirt, step, and_begin)
    late = drive({**RESTART, "power_fence": 4, "boot_id": None})
    assert late.failure.code == "stale_fence"
    # A guest that it has just started is destroyed, because a stop may have found it off.
    last = {"start_paused": "destroy"}.get(step, step)
    assert host.acts[-1] == last, "no power is taken from a guest that ran, and none resumed"


@pytest.mark.covers("I9", "I10")
def test_a_late_start_leaves_the_guest_that_its_successor_runs(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = _libvirt.start_paused

    def and_resume(name: str, *, timeout: float) -> None:
        start(name, timeout=timeout)
        _ledger.raise_power_fence("slot-3", fence=7, power_fence=5)
        host.life = Life("running")

    monkeypatch.setattr(_libvirt, "start_paused", and_resume)
    late = drive({**PARAMS, "power_fence": 4, "boot_id": None})
    assert late.failure.code == "stale_fence"
    assert (host.life, "destroy" in host.acts) == (Life("running"), False)


@pytest.mark.covers("I16")
def test_a_run_of_power_that_a_restart_of_the_host_has_overtaken_starts_nothing(
    host: Host, tree: Path
) -> None:
    drive(PARAMS)
    host.life, host.acts = Life("shut off"), []
    boot = tree / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True, exist_ok=True)
    boot.write_text("0b0f3b4e-4f0e-4d6a-8f0c-2f6d1f1f7a51\n")
    overtaken = {**RESTART, "state": "running", "power_fence": 4, "boot_id": OTHER}
    refused = drive(overtaken)
    assert refused.failure.code == "boot_changed"
    assert host.acts == []


def test_a_part_that_fails_is_named_and_ends_the_rest(host: Host, tree: Path) -> None:
    """The part before it stays, and the next run goes on from there."""
    taken = tree / _dnsmasq.file_of(OTHER).lstrip("/")
    taken.parent.mkdir(parents=True)
    taken.write_text(f"52:54:00:64:00:99,id:*,{IP},other,12h\n")
    refused = drive(PARAMS)
    assert refused.failure.code == "ip_in_use"
    assert (refused.failed_part, refused.done) == ("reserve_address", ["write_seed"])
    assert refused.changed and host.acts == []
    taken.unlink()
    assert drive(PARAMS).done[0] == "reserve_address"


def test_a_fabric_function_that_is_missing_starts_no_domain(host: Host) -> None:
    missing = [{**slot, "fabric_vf_pci_address": "0000:25:10.6"} for slot in PARAMS["slots"]]
    refused = drive({**PARAMS, "slots": missing})
    assert refused.failure.code == "function_missing"
    assert (refused.failed_part, host.acts) == ("give_functions", [])


@pytest.mark.parametrize("part", ["write_seed", "reserve_address", "give_functions"])
def test_a_claim_that_ends_in_between_stops_the_next_part(
    host: Host, tree: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Each part checks the fence itself, as a separate module would."""
    (driven,) = (entry for entry in slice_vm.parts(PARAMS) if entry.name == part)
    drive_one = _change.drive

    def and_end(subject: _change.Subject, params: Any, *, check_mode: bool) -> _change.Outcome:
        outcome = drive_one(subject, params, check_mode=check_mode)
        if subject is driven.subject:
            _ledger.raise_fence("slot-3", fence=8)
        return outcome

    monkeypatch.setattr(_change, "drive", and_end)
    late = drive(PARAMS)
    names = [entry.name for entry in slice_vm.parts(PARAMS)]
    assert late.failure.code == "stale_fence"
    assert late.failed_part == names[names.index(part) + 1]
    assert host.acts == []


def test_a_handover_that_cannot_open_the_way_keeps_the_seed(host: Host, tree: Path) -> None:
    """It fails with the error of `open_way`; a second handover does both."""
    drive(PARAMS)
    params = {"allocation_id": ONE, "ip": IP, "slots": [{"slot_id": "slot-3", "fence": 6}]}
    parts = slice_handover.parts(params)
    assert [part.name for part in parts] == ["open_way", "destroy_seed"]
    refused = _change.drive_parts(parts, params, check_mode=False)
    assert refused.failure.code == "stale_fence"
    assert (refused.failed_part, traces(tree)) == ("open_way", [True, True])
