"""The first token, and the database behind it."""

from __future__ import annotations

import json
import stat

import pytest

from reconciler.db.engine import reading
from reconciler.records import tokens
from tests.unit.reconciler.api.stack import NODE, Stack
from tests.unit.reconciler.cli.conftest import Gpuaas


def test_the_first_token(new: Stack, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(new.settings.state_dir))
    gpuaas("token", "create", "--role", "platform-admin", "--name", "me", "--days", "1")
    with reading(new.engine) as conn:
        record = tokens.authenticate(conn, gpuaas.out.strip())
    gpuaas("token", "create", "--role", "node", "--node", NODE, "--name", "n", "-o", "json")
    assert (json.loads(gpuaas.out)["node_id"], gpuaas.status) == (NODE, 0), gpuaas.err
    with reading(new.engine) as conn:
        assert tokens.authenticate(conn, json.loads(gpuaas.out)["token"]) is not None
    assert (record.role, record.name, record.project_id) == ("platform-admin", "me", None)
    assert record.expires_at - record.created_at == pytest.approx(86_400, abs=60)

    gpuaas(
        "token", "create", "--role", "project-member", "--name", "m", "--project", "demo", "--save"
    )
    file = new.settings.state_dir / "token"
    assert (gpuaas.out, stat.S_IMODE(file.stat().st_mode)) == ("", 0o600)
    with reading(new.engine) as conn:
        member = tokens.authenticate(conn, file.read_text().strip())
    assert member.project_id == "demo"
    assert member.expires_at - member.created_at == pytest.approx(90 * 86_400, abs=60)


def test_tokens_belong_to_somebody(
    new: Stack, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(new.settings.state_dir))
    gpuaas("token", "create", "--role", "project-member", "--name", "m")
    assert (gpuaas.status, "token_owner_invalid" in gpuaas.err) == (1, True)
    gpuaas("token", "create", "--role", "node", "--name", "m", "--node", "none")
    assert (gpuaas.status, "node_not_found" in gpuaas.err) == (1, True)


@pytest.mark.covers("CTRL-10", "I20")
@pytest.mark.parametrize("name", ["oidc:alice", "a\nadmin:root", "a#b", "", "x" * 65])
def test_a_name_that_looks_like_another_actor_is_refused(
    new: Stack, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(new.settings.state_dir))
    with reading(new.engine) as conn:
        before = tokens.every(conn)
    gpuaas("token", "create", "--role", "platform-admin", "--name", name)
    assert (gpuaas.status, "request_invalid" in gpuaas.err) == (1, True)
    with reading(new.engine) as conn:
        assert tokens.every(conn) == before


@pytest.mark.covers("CTRL-10")
def test_a_leaked_token_is_found_and_revoked(
    new: Stack, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = json.loads(gpuaas.at(new)("token", "list", "--output", "json"))
    (leaked,) = [row["id"] for row in document if row["name"] == "member"]
    gpuaas("token", "revoke", leaked)
    assert gpuaas.status == 0, gpuaas.err
    gpuaas.at(new, "member")("projects", "list")
    assert (gpuaas.status, "unauthenticated" in gpuaas.err) == (1, True)
    assert "ask the operators" in gpuaas.err
    gpuaas.at(new)("token", "revoke", "none")
    assert (gpuaas.status, "token_not_found" in gpuaas.err) == (1, True)


@pytest.mark.covers("CTRL-10")
def test_a_member_makes_its_own(new: Stack, gpuaas: Gpuaas) -> None:
    new.secrets["ci"] = gpuaas.at(new, "member")("token", "own", "create", "--name", "ci").strip()
    words = ("token", "own", "create", "--name", "short", "--days", "1", "-o", "json")
    short = json.loads(gpuaas.at(new, "member")(*words))
    assert short["token"] and short["expires_at"]
    gpuaas("token", "own", "revoke", short["id"])
    rows = json.loads(gpuaas.at(new, "member")("token", "own", "list", "--output", "json"))
    rows = [row for row in rows if row["id"] != short["id"]]
    ids = {row["name"]: row["id"] for row in rows}
    assert [row["parent_id"] for row in rows] == [ids["member"], None]
    gpuaas.at(new, "ci")("token", "own", "revoke", ids["member"])
    assert (gpuaas.status, "token_not_found" in gpuaas.err) == (1, True)
    gpuaas.at(new, "member")("token", "own", "revoke", ids["ci"])
    assert gpuaas.status == 0, gpuaas.err
    gpuaas.at(new, "ci")("projects", "list")
    assert (gpuaas.status, "unauthenticated" in gpuaas.err) == (1, True)


def test_a_members_token_by_the_projects_name(
    new: Stack, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = json.loads(gpuaas.at(new)("projects", "add", "team-a", "--output", "json"))["id"]
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(new.settings.state_dir))
    words = ("token", "create", "--role", "project-member", "--name", "m", "--project")
    gpuaas(*words, "team-a")
    with reading(new.engine) as conn:
        member = tokens.authenticate(conn, gpuaas.out.strip())
    assert member.project_id == key
    gpuaas(*words, "nobody")
    assert (gpuaas.status, "project_not_found" in gpuaas.err) == (1, True)


def test_migrate(new: Stack, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(new.settings.state_dir))
    gpuaas("migrate")
    assert (gpuaas.status, "database at" in gpuaas.err) == (0, True)
