"""A slice VM as a whole: seed, address, fabric functions and domain, in order and by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _command,
    _ledger,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _slice_network
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _cloud_seed,
    _dnsmasq,
    _domain,
)
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


def test_a_part_that_fails_is_named_and_ends_the_rest(host: Host, tree: Path) -> None:
    """The part before it stays, and the next run goes on from there."""
    taken = tree / _dnsmasq.file_of(OTHER).lstrip("/")
    taken.parent.mkdir(parents=True)
    taken.write_text(f"52:54:00:64:00:99,id:*,{IP},other,12h\n")
    refused = drive(PARAMS)
    assert refused.failure is not None and refused.failure.code == "ip_in_use"
    assert (refused.failed_part, refused.done) == ("reserve_address", ["write_seed"])
    assert refused.changed and host.acts == []
    taken.unlink()
    assert drive(PARAMS).done[0] == "reserve_address"


def test_a_fabric_function_that_is_missing_starts_no_domain(host: Host) -> None:
    missing = [{**slot, "fabric_vf_pci_address": "0000:25:10.6"} for slot in PARAMS["slots"]]
    refused = drive({**PARAMS, "slots": missing})
    assert refused.failure is not None and refused.failure.code == "function_missing"
    assert (refused.failed_part, host.acts) == ("give_functions", [])


@pytest.mark.parametrize("part", ["write_seed", "reserve_address", "give_functions"])
def test_a_claim_that_ends_in_between_stops_the_next_part(
    host: Host, tree: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Each part looks at the fence itself, as a module of its own would."""
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
    assert late.failure is not None and late.failure.code == "stale_fence"
    assert late.failed_part == names[names.index(part) + 1]
    assert host.acts == []


def test_a_handover_that_cannot_open_the_way_keeps_the_seed(host: Host, tree: Path) -> None:
    """Its error is that of the way; a second handover does both."""
    drive(PARAMS)
    params = {"allocation_id": ONE, "ip": IP, "slots": [{"slot_id": "slot-3", "fence": 6}]}
    parts = slice_handover.parts(params)
    assert [part.name for part in parts] == ["open_way", "destroy_seed"]
    refused = _change.drive_parts(parts, params, check_mode=False)
    assert refused.failure is not None and refused.failure.code == "stale_fence"
    assert (refused.failed_part, traces(tree)) == ("open_way", [True, True])
