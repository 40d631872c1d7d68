"""Tokens that people make for themselves: their rights, and every event that ends them."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from starlette.requests import Request

from reconciler.api.security import authenticate
from reconciler.db.engine import reading, transaction
from reconciler.db.schema import allocations, api_tokens, idempotency_keys
from reconciler.db.schema import ssh_keys as ssh_key_table
from reconciler.lifecycle import ssh_access
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.states import Role
from reconciler.records import console_sessions, ssh_keys, terminals, tokens
from reconciler.service.process import adopt_issuer
from reconciler.trust import oidc
from tests.unit.reconciler.api.provider import AUDIENCE, Provider
from tests.unit.reconciler.api.stack import ACT, KEY, NODE, Stack
from tests.unit.reconciler.api.test_launches import PATH, activate, launch
from tests.unit.reconciler.api.test_terminals import with_terminal

pytestmark = pytest.mark.covers("CTRL-10", "CTRL-13")
OWN = "projects/demo/allocations"


def make(stack: Stack, who: str, name: str, **body: Any) -> dict[str, Any]:
    """Make a token as the holder of another token, and a client of its name."""
    answer = stack.client(who).post("tokens", json={"name": name} | body)
    assert answer.status_code == 201, answer.text
    document: dict[str, Any] = answer.json()
    stack.secrets[name] = document.pop("token")
    return document


def opens(stack: Stack, who: str, path: str = OWN) -> int:
    return stack.client(who).get(path).status_code


def shown(stack: Stack, who: str) -> dict[str, bool]:
    """Names of the tokens that a caller sees as its own, and whether each is valid."""
    rows = stack.client(who).get("tokens").json()["items"]
    return {row["name"]: row["valid"] for row in rows}


def change(stack: Stack, id: str, **values: Any) -> None:
    """Set values that no operation sets, as a restored database or another version may hold."""
    with transaction(stack.engine) as conn:
        conn.execute(sa.update(api_tokens).where(api_tokens.c.id == id).values(values))


@pytest.fixture
def line(new: Stack) -> dict[str, str]:
    """member made ci, ci made job, job made step. Their ids."""
    made = {}
    for parent, name in (("member", "ci"), ("ci", "job"), ("job", "step")):
        document = make(new, parent, name)
        made[name], made[parent] = document["id"], document["parent_id"]
    return made


def test_a_member_makes_lists_and_revokes_its_own(new: Stack, line: dict[str, str]) -> None:
    assert [opens(new, who) for who in line] == [200] * 4
    assert shown(new, "member") == dict.fromkeys(("member", "ci", "job", "step"), True)
    assert shown(new, "job") == {"job": True, "step": True}
    revoked = new.client("member").delete(f"tokens/{line['job']}")
    assert revoked.json() == {"id": line["job"], "revoked": True}
    assert {who: opens(new, who) for who in line} == {
        "member": 200, "ci": 200, "job": 401, "step": 401,
    }  # fmt: skip
    assert shown(new, "ci") == {"ci": True, "job": False, "step": False}
    listed = new.client("admin").get("admin/tokens").json()["items"]
    (step,) = [row for row in listed if row["name"] == "step"]
    assert (step["valid"], step["revoked_at"]) == (False, None)
    assert step["issued_by"] == f"member:job#{line['job']}"
    log = new.client("admin").get("admin/audit").json()["items"]
    assert [(row["action"], row["actor"]) for row in log[:2]] == [
        ("token.revoked", f"member:member#{line['member']}"),
        ("token.issued", f"member:job#{line['job']}"),
    ]


def test_the_tokens_of_others_are_not_there(new: Stack, line: dict[str, str]) -> None:
    """Neither those of other holders, nor those that a token was made with."""
    make(new, "stranger", "theirs")
    with reading(new.engine) as conn:
        before = tokens.every(conn)
    ids = {token.name: token.id for token in before}
    others = {"stranger": ("member", "ci", "step"), "member": ("theirs", "admin", "stranger")}
    others |= {"job": ("member", "ci", "theirs"), "ci": ("member",), "node": ("node", "ci")}
    for who, names in others.items():
        for name in names:
            answer = new.client(who).delete(f"tokens/{ids[name]}")
            code = "role_required" if who == "node" else "token_not_found"
            assert answer.json()["code"] == code, (who, name)
    assert new.client("node").get("tokens").status_code == 403
    with reading(new.engine) as conn:
        assert tokens.every(conn) == before


def test_no_token_does_more_than_the_one_that_made_it(new: Stack) -> None:
    member = new.client("member")
    for body, code in (
        ({"project_id": "other"}, "project_not_found"),
        ({"project_id": "none"}, "project_not_found"),
        ({"role": "platform-admin"}, "request_invalid"),
        ({"node_id": "lab-host"}, "request_invalid"),
        ({"parent_id": None}, "request_invalid"),
        ({"ttl_s": 1}, "request_invalid"),
        ({"name": "oidc:alice"}, "request_invalid"),
    ):
        assert member.post("tokens", json={"name": "x"} | body).json()["code"] == code, body
    assert new.client("node").post("tokens", json={"name": "x"}).status_code == 403
    make(new, "member", "mine")
    assert (opens(new, "mine"), opens(new, "mine", "admin/nodes")) == (200, 403)
    assert opens(new, "mine", "projects/other/allocations") == 404
    # An admin's token may be as wide as its parent, or of a single project.
    assert make(new, "admin", "deputy")["role"] == "platform-admin"
    assert make(new, "deputy", "guest", project_id="demo")["role"] == "project-member"
    assert (opens(new, "deputy", "admin/nodes"), opens(new, "guest", "admin/nodes")) == (200, 403)
    absent = new.client("admin").post("tokens", json={"name": "x", "project_id": "none"})
    assert absent.json()["code"] == "project_not_found"


def test_an_address_with_a_slash_more_leads_nowhere(new: Stack) -> None:
    """A redirect would be made from the request's own Host."""
    for path in ("tokens/", "admin/nodes/"):
        assert new.client("admin").get(path, follow_redirects=False).status_code == 404


def test_a_token_ends_after_ninety_days_unless_asked_otherwise(new: Stack) -> None:
    body = {"role": "platform-admin", "name": "ci"}
    made = new.client("admin").post("admin/tokens", json=body).json()
    lasts = datetime.fromisoformat(made["expires_at"]) - datetime.fromisoformat(made["created_at"])
    assert lasts == timedelta(days=90)
    endless = new.client("admin").post("admin/tokens", json={**body, "name": "c2", "ttl_s": None})
    assert endless.json()["expires_at"] is None


def test_a_token_ends_with_the_one_that_made_it(new: Stack) -> None:
    body = {"role": "project-member", "name": "short", "project_id": "demo", "ttl_s": 600}
    short = new.client("admin").post("admin/tokens", json=body).json()
    new.secrets["short"] = short["token"]
    assert make(new, "short", "child", ttl_s=3600)["expires_at"] == short["expires_at"]
    assert make(new, "child", "brief", ttl_s=60)["expires_at"] < short["expires_at"]


@pytest.mark.parametrize(
    ("which", "values", "left"),
    [
        ("member", {"expires_at": 1.0}, 0),
        ("member", {"revoked_at": 1.0}, 0),
        ("ci", {"expires_at": 1.0}, 1),
        ("job", {"revoked_at": 1.0}, 2),
        # Its project is taken away: it opens the other, and the tokens below it open nothing.
        ("member", {"project_id": "other"}, 0),
        ("ci", {"project_id": "other"}, 1),
        ("step", {"project_id": "other"}, 3),
        ("ci", {"role": "node", "project_id": None, "node_id": "lab-host"}, 1),
        # A circle has no beginning.
        ("member", {"parent_id": "step"}, 0),
    ],
)
def test_whatever_ends_a_token_ends_those_below_it(
    new: Stack, line: dict[str, str], which: str, values: dict[str, Any], left: int
) -> None:
    values = {**values, **({"parent_id": line["step"]} if "parent_id" in values else {})}
    change(new, line[which], **values)
    names = ["member", "ci", "job", "step"]
    assert [opens(new, who) == 200 for who in names] == [at < left for at in range(4)]
    with reading(new.engine) as conn:
        # The gateway asks by id, both for the key of a launch and for a registered key.
        owners = [tokens.owner(conn, line[name], "demo") for name in names]
    assert owners == [line["member"] if at < left else "" for at in range(4)]


def test_an_admins_tokens_follow_its_role(new: Stack) -> None:
    deputy = make(new, "admin", "deputy")["id"]
    for name, project in (("all", None), ("demo", "demo"), ("other", "other")):
        make(new, "deputy", f"of-{name}", project_id=project)
    change(new, deputy, role="project-member", project_id="demo")
    assert opens(new, "deputy", "admin/nodes") == 403
    assert opens(new, "of-all", "admin/nodes") == opens(new, "of-all") == 401
    assert opens(new, "of-other", "projects/other/allocations") == 401
    assert opens(new, "of-demo") == 200


def test_a_session_ends_with_the_token_above_its_own(new: Stack, line: dict[str, str]) -> None:
    with transaction(new.engine) as conn:
        act = Act("x", "logged in")
        secret = console_sessions.start(conn, act, address="", agent="", token_id=line["step"])
        assert console_sessions.token_of(conn, secret) is not None
        tokens.revoke(conn, line["ci"], ACT)
        assert console_sessions.token_of(conn, secret) is None


def test_how_many_tokens_somebody_may_have(new: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted for the first token of the line, so that a chain of tokens has no more; and with
    recently revoked tokens, so that the table cannot be filled.
    """
    monkeypatch.setattr(tokens, "MOST", 3)
    first = make(new, "member", "a")["id"]
    make(new, "a", "b")
    last = make(new, "b", "c")["id"]
    for who in ("member", "a", "c"):
        answer = new.client(who).post("tokens", json={"name": "d"})
        assert (answer.status_code, answer.json()["code"]) == (409, "too_many_tokens"), who
    make(new, "stranger", "theirs")
    assert new.client("c").delete(f"tokens/{last}").status_code == 200
    assert new.client("a").post("tokens", json={"name": "d"}).json()["code"] == "too_many_tokens"
    change(new, last, created_at=time.time() - 2 * tokens.MOST_WITHIN_S)
    make(new, "a", "d")
    # A valid token counts however old it is.
    change(new, first, created_at=time.time() - 2 * tokens.MOST_WITHIN_S)
    assert new.client("a").post("tokens", json={"name": "e"}).json()["code"] == "too_many_tokens"


def test_many_tokens_make_no_more_requests(new: Stack, line: dict[str, str]) -> None:
    application: Any = new.client("member").app
    for who in ("member", "step"):
        assert opens(new, who) == 200
    owner = line["member"]
    assert set(application.state.rates._paid) == {owner, f"acts of {owner}"}


def test_many_tokens_make_no_more_logins(
    new: Stack, line: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_sessions, "PACE", 2)
    ids = {
        row["name"]: row["id"] for row in new.client("admin").get("admin/tokens").json()["items"]
    }
    words = {"act": Act("x", "logged in"), "address": "", "agent": ""}
    with transaction(new.engine) as conn:
        for name in ("job", "member", "stranger"):
            console_sessions.start(conn, token_id=ids[name], **words)
        for name in ("step", "member"):
            with pytest.raises(Problem, match="rate_exceeded"):
                console_sessions.start(conn, token_id=ids[name], **words)


def test_the_secret_is_stored_nowhere(new: Stack) -> None:
    sent = {"json": {"name": "once"}, "headers": {"Idempotency-Key": "k"}}
    first = new.client("member").post("tokens", **sent)
    assert first.headers["Cache-Control"] == "no-store"
    with reading(new.engine) as conn:
        (remembered,) = conn.execute(sa.select(idempotency_keys.c.body)).scalars()
    assert remembered["name"] == "once" and "token" not in remembered
    for path in ("tokens", "admin/tokens", "admin/audit"):
        assert first.json()["token"] not in new.client("admin").get(path).text


@pytest.fixture
def alice(new: Stack, process: Provider) -> Stack:
    """alice and bob are people of the provider, with tokens of an hour."""
    oidc.verifier.cache_clear()
    changed = {"oidc_issuer": process.url, "oidc_audience": AUDIENCE}
    changed |= {"oidc_admin_group": "admins", "oidc_project_prefix": "in-"}
    new.settings = new.settings.model_copy(update=changed)
    for name in ("alice", "bob"):
        new.secrets[name] = process.token(groups=["in-demo", "in-other", "in-none"], sub=name)
    return new


def test_a_person_of_the_provider_has_tokens_that_end_soon(alice: Stack, process: Provider) -> None:
    refused = alice.client("alice").post("tokens", json={"name": "x"})
    assert (refused.status_code, refused.json()["code"]) == (422, "token_owner_invalid")
    unknown = alice.client("alice").post("tokens", json={"name": "x", "project_id": "none"})
    assert unknown.json()["code"] == "project_not_found"
    # A group may name a project that is not there.
    assert opens(alice, "alice", "projects/none/allocations") == 404
    made = make(alice, "alice", "laptop", project_id="demo")
    make(alice, "laptop", "script")
    assert made["parent_id"] is None
    with reading(alice.engine) as conn:
        record = tokens.authenticate(conn, alice.secrets["laptop"])
    assert record is not None and record.expires_at is not None
    assert record.expires_at <= time.time() + 3600
    assert (opens(alice, "laptop"), opens(alice, "script")) == (200, 200)
    assert opens(alice, "laptop", "projects/other/allocations") == 404
    assert shown(alice, "alice") == {"laptop": True, "script": True}
    assert shown(alice, "bob") == {}
    assert alice.client("bob").delete(f"tokens/{made['id']}").json()["code"] == "token_not_found"
    # Of a login for a day, half a day.
    day = {"iat": int(time.time()), "exp": int(time.time()) + 80_000}
    alice.secrets["alice"] = process.token(groups=["in-demo"], sub="alice", **day)
    make(alice, "alice", "long")
    with reading(alice.engine) as conn:
        record = tokens.authenticate(conn, alice.secrets["long"])
    assert record is not None and record.expires_at is not None
    assert record.expires_at <= time.time() + ssh_access.PROVIDER_S


def test_an_operator_ends_the_tokens_of_a_person(alice: Stack, process: Provider) -> None:
    for who in ("alice", "bob"):
        make(alice, who, f"of-{who}", project_id="demo")
    make(alice, "of-alice", "below")
    # Tokens issued as an operator are not theirs.
    alice.secrets["operator"] = process.token(groups=["admins"], sub="alice")
    node = {"role": "node", "name": "issued", "node_id": NODE}
    alice.client("operator").post("admin/tokens", json=node)
    body = {"actor": "member:oidc:alice", "reason": "left"}
    ended = alice.client("admin").post("admin/console-sessions/end", json=body)
    assert ended.json()["tokens"] == 1
    assert [opens(alice, who) for who in ("of-alice", "below", "of-bob")] == [401, 401, 200]
    issued = alice.client("admin").get("admin/tokens").json()["items"]
    assert [row["valid"] for row in issued if row["name"] == "issued"] == [True]


def test_another_issuer_ends_the_tokens_and_keys_of_all_persons(alice: Stack) -> None:
    adopt_issuer(alice.settings, alice.engine)
    for who in ("alice", "bob"):
        make(alice, who, f"of-{who}", project_id="demo")
    make(alice, "of-alice", "below")
    mine = {"public_key": KEY}
    assert alice.client("bob").post("projects/demo/ssh-keys", json=mine).status_code == 201
    names = ("of-alice", "below", "of-bob", "member")
    # The same provider at the next start.
    adopt_issuer(alice.settings, alice.engine)
    with reading(alice.engine) as conn:
        assert len(ssh_keys.of_person(conn, ["member:oidc:bob"])) == 1
    assert [opens(alice, who) for who in names] == [200] * 4
    other = alice.settings.model_copy(update={"oidc_issuer": "https://login.example"})
    adopt_issuer(other, alice.engine)
    assert [opens(alice, who) for who in names] == [401, 401, 401, 200]
    with reading(alice.engine) as conn:
        assert ssh_keys.of_person(conn, ["member:oidc:bob"]) == []


def test_the_limit_holds_for_all_tokens_of_a_person(
    alice: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "MOST", 2)
    make(alice, "alice", "a", project_id="demo")
    make(alice, "a", "b")
    for who in ("alice", "b"):
        answer = alice.client(who).post("tokens", json={"name": "c", "project_id": "demo"})
        assert answer.json()["code"] == "too_many_tokens"
    make(alice, "bob", "theirs", project_id="demo")


def test_persons_of_one_name_share_nothing_and_each_has_one_owner(
    selling: Stack, process: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    oidc.verifier.cache_clear()
    changed = {"oidc_issuer": process.url, "oidc_audience": AUDIENCE, "oidc_name_claim": "name"}
    changed |= {"oidc_project_prefix": "in-"}
    selling.settings = selling.settings.model_copy(update=changed)
    people = ("first", "second")
    opened = with_terminal(selling)
    monkeypatch.setattr(terminals, "TICKETS", 1)
    ways, ids = [], {}
    for who in people:
        selling.secrets[who] = process.token(groups=["in-demo"], sub=who, name="Sam")
        ids[who] = make(selling, who, f"{who}-laptop", project_id="demo")["id"]
        bare = ssh_keys.bare(KEY)
        registered, launched = (f"{bare[:-8]}{letter}{who[:3]}{bare[-4:]}" for letter in "rl")
        mine = {"public_key": registered}
        assert selling.client(who).post("projects/demo/ssh-keys", json=mine).status_code == 201
        ways.append((opened, registered))
        if who == "first":
            ways.append((launch(selling, who, by=who, ssh_keys=[launched]).json()["id"], launched))
            activate(selling, ways[-1][0])

    def owners() -> list[str]:
        with reading(selling.engine) as conn:
            grants = [ssh_access.authorise(conn, *way) for way in ways]
        assert {grant.actor for grant in grants} == {"member:oidc:Sam"}
        return [grant.owner for grant in grants]

    with reading(selling.engine) as conn:
        first, second = (tokens.owner(conn, ids[who], "demo") for who in people)
    assert first != second
    assert owners() == [first, first, second]
    # A person's tickets are counted together over all tokens, and apart from other people's.
    at = f"{PATH}/{opened}/terminal"
    answers = [
        selling.client(who).post(at).status_code
        for who in ("first", "first-laptop", "second", "second-laptop")
    ]
    assert answers == [201, 429, 201, 429]
    # Rows from before owners were recorded.
    with transaction(selling.engine) as conn:
        for table in (allocations, ssh_key_table):
            conn.execute(sa.update(table).values(owner=""))
    assert len(set(owners())) == 3


def test_a_stream_ends_with_the_rights_that_opened_it(new: Stack) -> None:
    headers = [(b"authorization", f"Bearer {new.secrets['member']}".encode())]
    request = Request({"type": "http", "app": new.client().app, "headers": headers})
    caller = authenticate(request)
    assert caller is not None and caller.still(request)
    change(new, caller.token_id, project_id="other")
    assert not caller.still(request)


def test_a_former_admin_keeps_no_token_of_the_site(new: Stack) -> None:
    with transaction(new.engine) as conn:
        words: dict[str, Any] = {"parent_id": None, "owner": "oidc:x", "until": None, "ttl_s": 600}
        _, wide = tokens.issue_own(
            conn, ACT, role=Role.PLATFORM_ADMIN, name="wide", project_id=None, **words
        )
        _, kept = tokens.issue_own(
            conn, ACT, role=Role.PROJECT_MEMBER, name="kept", project_id="demo", **words
        )
        tokens.end_lost(conn, "oidc:x", {"demo"}, ACT)
        assert tokens.authenticate(conn, wide) is None
        assert tokens.authenticate(conn, kept) is not None


def test_a_caller_without_an_end_of_its_own_gets_none(new: Stack) -> None:
    """A claim of the provider that has no end is believed for no time."""
    with transaction(new.engine) as conn:
        names: dict[str, Any] = {"role": "project-member", "name": "x", "project_id": "demo"}
        record, secret = tokens.issue_own(
            conn, ACT, parent_id=None, owner="oidc:x", until=0.0, ttl_s=600, **names
        )
        assert tokens.authenticate(conn, secret) is None
        with pytest.raises(Problem, match="token_not_found"):
            tokens.revoke_own(conn, record.id, ACT, holder="oidc:y")
