"""Tickets for terminals, and recordings, as the API gives them."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from reconciler.db.engine import transaction
from reconciler.db.schema import allocations, terminal_recordings
from reconciler.lifecycle import retention
from reconciler.model.act import Act
from reconciler.records import ssh_sessions, terminals
from reconciler.trust.ca import gateway_ca, open_trust
from tests.unit.reconciler.api.refusals import refused
from tests.unit.reconciler.api.stack import ACT, KEY, Stack
from tests.unit.reconciler.api.test_baremetal import BODY as WHOLE
from tests.unit.reconciler.api.test_launches import PATH, activate, launch

pytestmark = pytest.mark.covers("SLICE-10", "P8")


def with_terminal(stack: Stack) -> str:
    """An active slice with a terminal, of a site with a gateway."""
    address = {"member_address": "ssh.example:2222"}
    stack.settings = stack.settings.model_copy(update=address)
    gateway_ca(open_trust(stack.settings.state_dir))
    made = str(launch(stack, "terminal", terminal=True).json()["id"])
    activate(stack, made)
    with_keys(stack, made, [KEY])
    return made


def with_keys(stack: Stack, allocation: str, keys: list[str]) -> None:
    document = {"username": "tenant", "host_keys": keys}
    with transaction(stack.engine) as conn:
        change = sa.update(allocations).where(allocations.c.id == allocation)
        conn.execute(change.values(connection=document))


def recorded(stack: Stack, allocation: str, actor: str = ACT.actor, way: str = "web") -> str:
    """A session of the allocation with a recording. Tokens of an owner follow its name."""
    person = {"owner": actor.partition("#")[0], "fingerprint": "", "address": "192.0.2.1"}
    with transaction(stack.engine) as conn:
        session = ssh_sessions.open_session(
            conn, Act(actor), allocation_id=allocation, project_id="demo", way=way, **person
        )
        terminals.append(conn, session, "demo", "{}\n")
    return session


def test_a_ticket_is_only_for_what_can_open(
    selling: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = with_terminal(selling)
    member, at = selling.client("member"), f"{PATH}/{made}/terminal"
    assert member.get(f"{PATH}/{made}").json()["terminal"] is True
    answer = member.post(at)
    assert answer.status_code == 201 and answer.headers["Cache-Control"] == "no-store"
    # The unused tickets of a member take no place from another.
    monkeypatch.setattr(terminals, "TICKETS", 1)
    assert selling.client("admin").post(at).status_code == 201
    assert refused(selling, lambda: member.post(at))["code"] == "too_many_tickets"
    monkeypatch.undo()
    with_keys(selling, made, [])
    assert refused(selling, lambda: member.post(at))["code"] == "host_keys_unknown"
    with transaction(selling.engine) as conn:
        conn.execute(sa.update(allocations).values(parameters={}))
    assert refused(selling, lambda: member.post(at))["code"] == "terminal_off"
    whole = WHOLE | {"terminal": True}
    denied = member.post(PATH, json=whole, headers={"Idempotency-Key": "whole"}).json()
    assert (denied["code"], "terminal" in denied["expected"]) == ("field_without_effect", True)


def test_a_person_pushes_out_recordings_of_its_own_only(
    selling: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminals, "PERSON_LIMIT", 5)
    allocation = with_terminal(selling)
    mine = [
        recorded(selling, allocation, actor, way)
        for actor, way in (
            *(("member:a#1", "web"), ("member:b#1", "web"), ("member:b#2", "web")),
            # Gateways may invent these.
            *(("member:a#1", "terminal"), ("member:a#1", "terminal")),
        )
    ]
    with transaction(selling.engine) as conn:
        assert retention.recordings(conn, age_s=86_400) == 2
        query = sa.select(terminal_recordings.c.session_id).distinct()
        assert set(conn.execute(query).scalars()) == {mine[0], mine[2], mine[4]}


def test_members_end_no_recording_that_an_operator_wants(selling: Stack) -> None:
    selling.settings = selling.settings.model_copy(update={"keep_recordings_days": 3})
    member, admin = selling.client("member"), selling.client("admin")
    at = "projects/demo/terminal-recording"
    state = {"project_id": "demo", "enabled": False, "required": False, "kept_days": 3}
    assert member.get(at).json() == state
    on = {"enabled": True}
    assert member.put(at, json=on).json() == state | on
    assert member.put(at, json={"enabled": False}).json() == state
    member.put(at, json=on)
    # Also when a member was first.
    required = state | on | {"required": True}
    assert admin.put(at, json=on).json() == required
    assert member.put(at, json=on).json() == required
    denied = refused(selling, lambda: member.put(at, json={"enabled": False}))
    assert (denied["code"], member.get(at).json()) == ("recording_required", required)
    assert admin.put(at, json={"enabled": False}).json() == state
    assert member.put(at, json=on).json() == state | on
    assert member.put(at, json={"enabled": False}).json() == state
