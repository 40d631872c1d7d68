"""Counters of refused traffic: summed up over reloads, and bounded whatever a host reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _firewall,
    _flows,
    _host_connections,
    _refusals,
)

from reconciler.api import metrics
from reconciler.db import clock
from reconciler.db.engine import reading, transaction
from reconciler.lifecycle import slice_telemetry
from reconciler.model.slice_telemetry import Snapshot
from reconciler.records import allocations
from tests.unit.reconciler.conftest import Site

pytestmark = pytest.mark.covers("SLICE-9")

GUARD = _flows.Guard(
    "23bd713b-6073-4ef7-8a51-2897e902365d",
    "ovsbr0",
    "52:54:00:64:00:0a",
    "10.100.0.10",
    "10.100.0.1/24",
)
SCHEMAS = Path("contracts/runs")


@pytest.fixture
def active(sold: Site) -> str:
    with transaction(sold.engine) as conn:
        return str(sold.active(conn, 2))


def reported(site: Site, allocation_id: str, node_id: str = "n1", **refused: Any) -> dict[str, int]:
    rows = [{"allocation_id": allocation_id, "refused": refused}]
    with transaction(site.engine) as conn:
        document = {"known": True, "detail": "", "found": rows}
        slice_telemetry.record_refused(conn, node_id, document)
        return next(iter(allocations.every(conn))).refused_packets


def test_the_kinds_are_those_of_the_guard() -> None:
    egress = _flows.Egress(denied=("9.9.9.0/24",))
    flows = _flows.rules(GUARD, 1, ["11.0.0.2"], egress)
    kinds = {flow.kind for flow in flows if flow.kind}
    kinds |= {*_firewall.KINDS, _host_connections.KIND, _refusals.RATE}
    assert kinds == slice_telemetry.REFUSED


def test_a_counter_that_begins_again_is_added(sold: Site, active: str) -> None:
    assert reported(sold, active, arp=3) == {"arp": 3}
    assert reported(sold, active, arp=5, vlan=1) == {"arp": 5, "vlan": 1}
    # The guard was loaded again, and counted one more since.
    assert reported(sold, active, arp=1) == {"arp": 6, "vlan": 1}
    assert reported(sold, active, arp=1) == {"arp": 6, "vlan": 1}
    with reading(sold.engine) as conn:
        text = metrics.exposition(sold.engine).decode()
        assert slice_telemetry.refused_by_kind(conn)["arp"] == 6
    assert 'gpuaas_refused_packets{kind="arp"} 6.0' in text
    assert text.count("gpuaas_refused_packets{") == len(slice_telemetry.REFUSED)


def test_a_reading_from_before_the_newest_sample_is_left_out(sold: Site, active: str) -> None:
    """A comparison takes its time, and telemetry has counted on meanwhile."""
    host = {"state": "running", "refused_packets": {"arp": 9}}
    document = {"version": 1, "slices": [{"allocation_id": active, "host": host}]}
    snapshot = Snapshot.read(json.dumps(document).encode())
    assert isinstance(snapshot, Snapshot)
    earlier = {"found": [{"allocation_id": active, "refused": {"arp": 5}}]}
    with transaction(sold.engine) as conn:
        since = clock.read(conn) - 60
        slice_telemetry.record(conn, "n1", snapshot)
        slice_telemetry.record_refused(conn, "n1", earlier, since=since)
        assert allocations.get(conn, active).refused_packets == {"arp": 9}


def test_a_hostile_host_changes_nothing_but_its_own_numbers(sold: Site, active: str) -> None:
    # Another node's host names this allocation, or an allocation that does not exist.
    assert reported(sold, active, "n2", arp=3) == {}
    assert reported(sold, "no-such-id", arp=3) == {}
    # An unknown kind makes no series, and a sum stays a number that every reader keeps.
    assert reported(sold, active, invented=7, arp=2**64) == {"arp": slice_telemetry.MOST_REFUSED}
    assert reported(sold, active, arp=1) == {"arp": slice_telemetry.MOST_REFUSED}


@pytest.mark.parametrize("packets", [-1, 2**64, 1.5, "3", True, None])
def test_a_counter_that_is_none_is_refused_by_the_contract(packets: object) -> None:
    schema = json.loads((SCHEMAS / "result.schema.json").read_text())["$defs"]["refused"]
    kinds = schema["properties"]["found"]["items"]["properties"]["refused"]
    assert not jsonschema.Draft202012Validator(kinds).is_valid({"arp": packets})
    assert jsonschema.Draft202012Validator(kinds).is_valid({"arp": 2**64 - 1})
    assert not jsonschema.Draft202012Validator(kinds).is_valid({"a" * 33: 1})
