"""Idempotency keys under either name of their header."""

from __future__ import annotations

import pytest

from reconciler.api.http import idempotency_key as key
from reconciler.model.errors import Problem
from tests.unit.reconciler.api.stack import IMAGE, NODE, Stack


def test_both_headers_mean_the_same() -> None:
    assert key({}) == ""
    assert key({"Idempotency-Key": "a"}) == key({"X-Idempotency-Key": "a"}) == "a"
    assert key({"Idempotency-Key": "a", "X-Idempotency-Key": "a"}) == "a"


@pytest.mark.parametrize(
    "headers",
    [
        {"Idempotency-Key": "a", "X-Idempotency-Key": "b"},
        {"Idempotency-Key": "a b"},
        {"Idempotency-Key": "a" * 256},
        # Of a client whose variable was empty: without a word it would be done twice.
        {"Idempotency-Key": ""},
    ],
)
def test_unclear_keys_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(Problem, match="idempotency_key_invalid"):
        key(headers)


@pytest.mark.covers("I21")
def test_a_repeated_act_is_done_once(new: Stack) -> None:
    admin = new.client("admin")
    first = admin.post("admin/projects", json={"name": "p"}, headers={"Idempotency-Key": "k"})
    again = admin.post("admin/projects", json={"name": "p"}, headers={"X-Idempotency-Key": "k"})
    assert (first.status_code, again.json()) == (201, first.json())
    # The same key on another route, or a request without a key, is another act.
    image = admin.post("admin/images", json=IMAGE, headers={"Idempotency-Key": "k"})
    assert image.status_code == 201
    assert admin.post("admin/projects", json={"name": "p"}).json()["code"] == "project_exists"


def test_secrets_are_not_remembered(new: Stack) -> None:
    admin, header = new.client("admin"), {"Idempotency-Key": "k"}
    path = f"admin/nodes/{NODE}/enrollment-token"
    secret = admin.post(path, headers=header).json()["token"]
    assert admin.post(path, headers=header).json()["issued"]["expires_at"]
    database = (new.settings.state_dir / "reconciler.db").read_bytes()
    journal = (new.settings.state_dir / "reconciler.db-wal").read_bytes()
    assert secret.encode() not in database + journal
