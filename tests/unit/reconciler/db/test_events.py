"""`contracts/asyncapi.yaml` against the code's topics, and against events that real acts leave."""

from __future__ import annotations

import ast
import copy
from functools import lru_cache
from typing import Any

import pytest
import sqlalchemy as sa
import yaml
from jsonschema import Draft202012Validator

from reconciler.db import clock
from reconciler.db.engine import reading, transaction
from reconciler.lifecycle import host, launch, recovery, slices
from reconciler.model import transitions
from reconciler.model.states import NodeMode, TaskKind
from reconciler.records import leasing, nodes, queue, reports
from reconciler.settings import PROJECT
from tests.unit.reconciler import relay
from tests.unit.reconciler.conftest import Site

pytestmark = pytest.mark.covers("CTRL-1")
Event = dict[str, Any]


@lru_cache
def contract() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((PROJECT / "contracts/asyncapi.yaml").read_text())
    return document


@lru_cache
def channels() -> dict[str, str]:
    """topic → the name of its message. The stream of a task is none (api/test_stream.py)."""
    schemas = {}
    for name, channel in contract()["channels"].items():
        if name == "taskStream":
            continue
        (message,) = channel["messages"].values()
        states = channel.get("parameters", {}).get("state", {}).get("enum", [""])
        for state in states:
            topic = channel["address"].replace("{state}", state)
            assert topic not in schemas
            schemas[topic] = message["$ref"].rpartition("/")[2]
    return schemas


@lru_cache
def validator(message: str) -> Draft202012Validator:
    payload = contract()["components"]["messages"][message]["payload"]
    return Draft202012Validator({**payload, "components": contract()["components"]})


def problems(event: Event) -> list[str]:
    """Violations of the contract by an event as a reader gets it."""
    if event["topic"] not in channels():
        return [f"unknown topic {event['topic']}"]
    return [error.message for error in validator(channels()[event["topic"]]).iter_errors(event)]


def published(engine: sa.Engine) -> list[Event]:
    with reading(engine) as conn:
        rows = relay.pending_events(conn)
    return [
        {name: value for name, value in vars(row).items() if name != "published_at"}
        | {"at": clock.iso(row.at)}
        for row in rows
    ]


def test_topics_are_the_codes() -> None:
    states = {
        f"{entity}.{state.value}" for entity, kind in transitions.ENTITIES.items() for state in kind
    }
    assert set(channels()) == states | literal_topics()


def literal_topics() -> set[str]:
    """Topics that stand in calls which emit an event."""
    topics = set()
    for file in (PROJECT / "reconciler").rglob("*.py"):
        text = file.read_text()
        if "emit" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or len(node.args) < 2:
                continue
            if ast.unparse(node.func).rpartition(".")[2] in ("emit", "emit_report"):
                topic = node.args[1]
                if isinstance(topic, ast.Constant) and "." in str(topic.value):
                    topics.add(str(topic.value))
    assert len(topics) >= 4
    return topics


def test_every_channel_is_sent_on() -> None:
    sent = {
        item["channel"]["$ref"].rpartition("/")[2] for item in contract()["operations"].values()
    }
    assert sent == set(contract()["channels"])


def test_events_of_real_acts_are_in_the_contract(engine: sa.Engine, site: Site) -> None:
    site.node()
    with transaction(engine) as conn:
        active = site.active(conn)
        task = queue.every(conn, allocation_id=active)[0]
        assert task.state == "succeeded"
        launch.release(conn, active, site.act)
        (run,) = leasing.lease(conn, "w", kinds=[TaskKind.SLICE_VM_RELEASE])
        queue.progress(conn, run.id, run.lease_token, {"step": "wipe", "percent": 10})
        queue.wait_for_host(conn, run.id, run.lease_token, "no route", act=site.act)
        proofs = site.proofs(conn, active)
        absence = {"absent": True}
        slices.release_succeeded(conn, active, site.act, proofs=proofs, absence=absence)
        failed = site.failed(conn)
        reports.record_absence(conn, failed, absence, site.act)
        recovery.force_cleanup(conn, failed, site.act, runtime_verified_absent=True)
        withdrawn = site.allocate(conn)
        launch.release(conn, withdrawn, site.act)
        nodes.create(conn, site.act, id="n2", address="10.0.2.16", mode=NodeMode.BAREMETAL)
        host.retire(conn, "n2", site.act)
        host.lost(conn, "n1", site.act)
        host.regained(conn, "n1", site.act)
        host.drain(conn, "n1", site.act)
    events = published(engine)
    wrong = {event["topic"]: reasons for event in events if (reasons := problems(event))}
    assert not wrong
    seen = {event["topic"] for event in events}
    for needed in ("node.discovered", "node.parity", "allocation.absence", "task.progress"):
        assert needed in seen
    assert {topic.partition(".")[0] for topic in seen} >= {"node", "slot", "claim", "task"}
    assert {"allocation.failed", "allocation.released", "node.unreachable"} <= seen
    assert [event["id"] for event in events] == sorted(event["id"] for event in events)


def test_what_is_not_in_the_contract_is_seen(engine: sa.Engine, site: Site) -> None:
    site.node()
    event = next(item for item in published(engine) if item["topic"] == "slot.available")
    assert not problems(event)
    for change in (
        {"topic": "slot.sold"},
        {"id": "7"},
        {"more": 1},
        {"subject_kind": "disk"},
        {"payload": {}},
        {"payload": event["payload"] | {"gpu_pci_address": "0000:00:00.0"}},
    ):
        assert problems(copy.deepcopy(event) | change), change
