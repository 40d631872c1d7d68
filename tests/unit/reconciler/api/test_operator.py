"""The operators' routes: with a token on the main listener, without a token on a local listener."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from sqlalchemy import Connection

from reconciler.api.health import create_operator_app
from reconciler.api.models import Answer
from reconciler.api.security import Admin
from reconciler.db import journal, leader
from reconciler.db.engine import transaction
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.service import listeners, process
from reconciler.settings import Settings
from tests.unit.reconciler.api.stack import Stack, _judge

pytestmark = pytest.mark.covers("CTRL-10")

ROUTES = ("/health", "/status/leader", "/metrics")


def working(stack: Stack) -> None:
    """A process that works and leads."""
    with transaction(stack.engine) as conn:
        leader.record_process(conn, "p1", ["worker", "loops"], host="h1", pid=7, version="1")
        leader.campaign(conn, leader.LOOPS, "p1", 3600)


@pytest.fixture
def local(new: Stack) -> Iterator[httpx.Client]:
    """A program on the same machine, and the listener of a whole site on a real socket."""
    app = create_operator_app(new.settings, new.engine)
    app.state.needed = process.NEEDED
    acts = APIRouter()

    @acts.post("/acts")
    def record(context: Admin) -> Any:
        """Record an act of the caller, as every changing route does."""

        def work(conn: Connection, act: Act) -> Answer:
            journal.audit(conn, act, "test.act", "site", "s")
            return Answer()

        return context.write(work, reason="by hand")

    app.include_router(acts)
    settings = new.settings.model_copy(update={"operator_listen": "127.0.0.1:0"})
    with (
        listeners.serve_operators(settings, app) as address,
        httpx.Client(base_url=f"http://{address}", trust_env=False, timeout=60) as client,
    ):
        yield client


def test_the_main_listener_wants_a_token(new: Stack) -> None:
    working(new)
    for route in ROUTES:
        answers = [new.client(who).get(f"http://test{route}") for who in ("", "member", "admin")]
        assert [answer.status_code for answer in answers] == [401, 403, 200], route


def test_who_is_on_the_machine_needs_none(new: Stack, local: httpx.Client) -> None:
    nobody = local.get("/status/leader")
    assert (nobody.json()["live"], nobody.json()["epoch"]) == (False, 0)
    away = local.get("/health")
    assert (away.status_code, away.json()["code"]) == (503, "process_missing")

    working(new)
    health = local.get("/health").json()
    assert (health["status"], health["processes"]) == ("ok", {"worker": 1, "loops": 1})
    (older,) = health["instances"]
    assert older["version"] == "1" and older["remedy"].startswith("stop it with SIGTERM")
    leads = local.get("/status/leader").json()
    assert leads == health["leader"]
    assert (leads["live"], leads["holder"], leads["host"], leads["pid"]) == (True, "p1", "h1", 7)
    assert "gpuaas_leader 1.0" in local.get("/metrics").text.splitlines()
    assert local.get("/readyz").json()["status"] == "ok"
    for answer in (nobody, away, local.get("/health"), local.get("/healthz")):
        _judge().check(answer)

    # A process that ended in order is forgotten; its lease is not.
    with transaction(new.engine) as conn:
        leader.remove_process(conn, "p1")
    gone = local.get("/status/leader")
    assert (gone.json()["holder"], gone.json()["host"], gone.json()["pid"]) == ("p1", "", None)
    _judge().check(gone)


def test_the_rest_of_the_api_is_not_there(local: httpx.Client) -> None:
    for path in ("/api/v1/admin/nodes", "/api/v1/admin/tokens", "/api/v1/openapi.json"):
        assert local.get(path).status_code == 404


@pytest.mark.covers("ORCH-4")
def test_the_leader_is_released_and_there_is_nobody_to_release(
    new: Stack, local: httpx.Client
) -> None:
    nobody = local.post("/control/leader/release")
    assert (nobody.status_code, nobody.json()["code"]) == (409, "leader_missing")
    working(new)
    released = local.post("/control/leader/release", json={"reason": "drill"}).json()
    assert (released["live"], released["holder"], released["epoch"]) == (False, "p1", 1)
    query = {"action": "leader.released"}
    (row,) = new.client("admin").get("admin/audit", params=query).json()["items"]
    assert (row["actor"], row["reason"]) == ("local-operator", "drill")


def test_acts_are_recorded_as_the_local_operators(new: Stack, local: httpx.Client) -> None:
    answer = local.post("/acts", headers={"Idempotency-Key": "k1", "X-Correlation-Id": "c1"})
    assert answer.status_code == 200, answer.text
    seen = new.client("admin").get("admin/audit", params={"action": "test.act"}).json()["items"]
    (row,) = seen
    assert (row["actor"], row["role"]) == ("local-operator", "platform-admin")
    assert (row["reason"], row["correlation_id"]) == ("by hand", "c1")


@pytest.mark.parametrize(
    "headers",
    [
        # A name that a page's own name server lets point to this machine.
        {"Host": "attacker.example:8008"},
        {"Host": "192.0.2.7:8008"},
        {"Host": "[::1"},
        {"Host": "attacker.example@127.0.0.1:8008 x"},
        {"Host": ""},
        # A page that sends a form here.
        {"Origin": "https://attacker.example"},
        {"Origin": "null"},
    ],
)
def test_a_page_in_a_browser_is_refused(local: httpx.Client, headers: dict[str, str]) -> None:
    for verb, route in (("POST", "/acts"), *(("GET", route) for route in ROUTES)):
        answer = local.request(verb, route, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (403, "origin_refused"), route
    assert local.get("/status/leader", headers={"Host": "localhost:8008"}).status_code == 200
    assert local.get("/status/leader", headers={"Host": "[::1]:8008"}).status_code == 200


@pytest.mark.parametrize(
    "text",
    ["0.0.0.0:8008", "192.0.2.7:8008", "[::]:8008", "localhost:8008", ":8008", "8008", "127.0.0.1"],
)
def test_no_other_address_is_taken(text: str) -> None:
    with pytest.raises(Problem, match="operator_listen_invalid") as refused:
        listeners.operator_address(Settings(operator_listen=text))
    assert refused.value.found == text


def test_which_addresses_are_taken() -> None:
    assert listeners.operator_address(Settings()) is None
    for text, expected in (("127.0.0.1:8008", ("127.0.0.1", 8008)), ("[::1]:8008", ("::1", 8008))):
        assert listeners.operator_address(Settings(operator_listen=text)) == expected
        assert listeners.host_port(expected) == text


def test_off_there_is_no_listener_and_a_taken_port_is_said(new: Stack) -> None:
    app = create_operator_app(new.settings, new.engine)
    with listeners.serve_operators(new.settings, app) as address:
        assert address == ""
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = listeners.host_port(other.getsockname())
        settings = new.settings.model_copy(update={"operator_listen": taken})
        with (
            pytest.raises(Problem, match="operator_listen_unavailable"),
            listeners.serve_operators(settings, app),
        ):
            pass


def test_it_ends_with_the_process(new: Stack) -> None:
    settings = new.settings.model_copy(update={"operator_listen": "127.0.0.1:0"})
    app = create_operator_app(settings, new.engine)
    with listeners.serve_operators(settings, app) as address:
        answer = httpx.get(f"http://{address}/healthz", trust_env=False, timeout=60)
        assert answer.status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{address}/healthz", trust_env=False)
