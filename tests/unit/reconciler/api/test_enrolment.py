"""A host trades its one-time token for a certificate."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from pydantic import ValidationError

from reconciler.db import clock
from reconciler.db.engine import transaction
from reconciler.db.schema import enrolment_tokens, node_certificates, nodes
from reconciler.records import tokens
from reconciler.settings import Settings, refused
from reconciler.trust import ca, enrolment, keygen
from reconciler.trust.keygen import TrustError
from reconciler.work import worker
from tests.unit.reconciler.api.stack import ACT, NODE, Stack, discovery

pytestmark = pytest.mark.covers("HOST-13")

PATH = f"nodes/{NODE}/enrol"


def body(stack: Stack) -> dict[str, Any]:
    token = stack.client("admin").post(f"admin/nodes/{NODE}/enrollment-token").json()["token"]
    return {**discovery()["identity"], "token": token, "node_id": NODE, "hostname": "lab"}


def test_enrolment(new: Stack) -> None:
    admin = new.client("admin")
    answer = admin.post(f"admin/nodes/{NODE}/enrollment-token")
    assert answer.status_code == 201
    issued = answer.json()
    assert set(issued) >= {"token", "expires_at", "userdata"}
    assert issued["token"] in issued["userdata"]
    assert "http://198.51.100.1:8080" in issued["userdata"]

    sent = {**discovery()["identity"], "token": issued["token"], "node_id": NODE, "hostname": "x"}
    response = new.client().post(PATH, json=sent)
    assert response.status_code == 200, response.text
    assert set(response.json()) == {"certificate", "user_ca", "principals", "preflight"}
    # The preflight checks come from the profile of the node.
    preflight = response.json()["preflight"]
    assert preflight["environment"]["GPUAAS_SLICE_GPU_IDS"] == "1234:11e8"
    assert preflight["script"].startswith("#!/bin/sh")
    node = admin.get(f"admin/nodes/{NODE}").json()
    assert (node["state"], node["machine_id"]) == ("bootstrapping", sent["machine_id"])
    assert node["certificates"][0]["certificate"] == response.json()["certificate"]
    assert node["certificates"][0]["principals"] == [NODE]
    log = admin.get("admin/audit", params={"action": "node.certificate.enrolled"}).json()["items"]
    assert (log[0]["actor"], log[0]["reason"]) == (f"node:{NODE}", "node certificate enrolled")


@pytest.mark.covers("HOST-7")
def test_a_place_on_the_fabric_is_learned_once_and_never_over_an_operators(new: Stack) -> None:
    admin = new.client("admin")
    fabric = {"fabric_interface": "ibp65s0", "fabric_address": "10.20.0.7/16"}
    assert new.client().post(PATH, json=body(new) | fabric).status_code == 200
    node = admin.get(f"admin/nodes/{NODE}").json()
    assert {name: node[name] for name in fabric} == fabric
    log = admin.get("admin/audit", params={"action": "node.fabric.learned"}).json()["items"]
    assert [row["actor"] for row in log] == [f"node:{NODE}"]

    admin.patch(f"admin/nodes/{NODE}", json={"fabric_address": "10.20.0.8/16"})
    assert new.client().post(PATH, json=body(new) | fabric).status_code == 200
    assert admin.get(f"admin/nodes/{NODE}").json()["fabric_address"] == "10.20.0.8/16"
    hostile = body(new) | {"fabric_interface": "ib0;reboot", "fabric_address": "10.20.0.7/16"}
    assert new.client().post(PATH, json=hostile).status_code == 422


def test_a_pinned_ca_goes_into_the_userdata(
    new: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["openssl", "req", "-x509", "-newkey", "ed25519", "-nodes", "-subj", "/CN=private"]
    files = ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "ca.pem")]
    subprocess.run([*words, *files], check=True, capture_output=True)
    monkeypatch.setattr(new.settings, "enrolment_ca_file", tmp_path / "ca.pem")
    issue = f"admin/nodes/{NODE}/enrollment-token"
    refused = new.client("admin").post(issue)
    assert (refused.status_code, refused.json()["code"]) == (422, "enrolment_pin_without_tls")
    monkeypatch.setattr(new.settings, "public_url", "https://api.example.org")
    issued = new.client("admin").post(issue).json()
    assert (tmp_path / "ca.pem").read_text() in issued["userdata"]


@pytest.mark.parametrize("listen", ["127.0.0.1:8080", "0.0.0.0:8080", "[::]:8080"])
def test_no_userdata_with_an_address_that_only_this_machine_has(new: Stack, listen: str) -> None:
    new.settings = new.settings.model_copy(update={"public_url": "", "listen": listen})
    refused = new.client("admin").post(f"admin/nodes/{NODE}/enrollment-token")
    assert (refused.status_code, refused.json()["code"]) == (409, "public_url_missing")
    address = {"public_url": f"http://{listen}"}
    new.settings = new.settings.model_copy(update=address)
    meant = new.client("admin").post(f"admin/nodes/{NODE}/enrollment-token")
    assert f"http://{listen}" in meant.json()["userdata"], "said outright, it is meant"


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("http://198.51.100.1:8080", 409),
        ("http://127.0.0.1.example.org:8080", 409),
        ("http://localhost.example.org:8080", 409),
        ("HTTP://198.51.100.1:8080", 409),
        ("http://[2001:db8::1]:8080", 409),
        ("http://localhost:8080", 201),
        ("http://[::1]:8080", 201),
        ("https://gpuaas.example", 201),
    ],
)
def test_no_userdata_with_plain_http(new: Stack, url: str, status: int) -> None:
    """The machine carries out the answer as root."""
    changes = {"public_url": url, "enrolment_insecure": False}
    new.settings = new.settings.model_copy(update=changes)
    answer = new.client("admin").post(f"admin/nodes/{NODE}/enrollment-token")
    assert answer.status_code == status
    if status == 201:
        assert answer.headers["Cache-Control"] == "no-store"
    else:
        assert answer.json()["code"] == "enrolment_without_tls"
        assert "enrol_" not in answer.text


def test_a_token_is_judged_before_anything_is_written(new: Stack) -> None:
    sent = body(new)
    trust = new.settings.state_dir / "trust"
    forged = new.client().post(PATH, json=sent | {"token": "enrol_" + "0" * 43})
    assert (forged.status_code, forged.json()["code"]) == (401, "token_invalid")
    assert not trust.exists()
    assert new.client().post(PATH, json=sent).status_code == 200
    before = (trust / "known_hosts").stat().st_ino
    # Another transaction holds the lock under which SQLite writes: a write would wait for it.
    with transaction(new.engine) as conn:
        tokens.end_enrolments(conn)
        assert new.client().post(PATH, json=sent).status_code == 401
        unknown = new.client().post(f"nodes/{NODE}/userdata", json={"ticket": "ticket_unknown"})
        assert unknown.status_code == 401
    assert (trust / "known_hosts").stat().st_ino == before


@pytest.mark.covers("P7")
def test_a_token_is_good_once(new: Stack) -> None:
    sent = body(new)
    with ThreadPoolExecutor(4) as pool:
        codes = [
            answer.status_code
            for answer in pool.map(lambda _: new.client().post(PATH, json=sent), range(4))
        ]
    assert sorted(codes) == [200, 401, 401, 401]


@pytest.mark.covers("P7")
def test_an_expired_token_or_ticket_opens_nothing(new: Stack) -> None:
    sent = body(new)
    with transaction(new.engine) as conn:
        ticket = tokens.issue_ticket(conn, NODE, "abc123", ["testclient"], ACT)
        conn.execute(sa.update(enrolment_tokens).values(expires_at=clock.now() - 1))
    assert new.client().post(PATH, json=sent).status_code == 401
    answer = new.client().post(f"nodes/{NODE}/userdata", json={"ticket": ticket})
    assert (answer.status_code, answer.json()["code"]) == (401, "token_invalid")


@pytest.mark.covers("P7")
def test_a_token_ends_with_the_issue_of_the_next(new: Stack) -> None:
    """A script with the first token may be in the wrong hands."""
    first, second = body(new), body(new)
    answers = [new.client().post(PATH, json=sent).status_code for sent in (first, second)]
    assert answers == [401, 200]


@pytest.mark.covers("P7")
def test_a_token_belongs_to_its_node(new: Stack) -> None:
    sent = body(new) | {"node_id": "other"}
    answer = new.client().post("nodes/other/enrol", json=sent)
    assert (answer.status_code, answer.json()["code"]) == (401, "token_invalid")
    mixed = new.client().post(PATH, json=sent)
    assert (mixed.status_code, mixed.json()["code"]) == (422, "enrolment_invalid")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host_key", "ssh-ed25519 x; reboot"),
        ("hostname", "$(reboot)"),
        ("boot_id", "{{ x }}"),
        ("fabric_address", "10.20.0.256/16"),
        ("fabric_address", "10.20.0.7"),
        ("fabric_address", "10.20.0.7/255.255.0.0"),
        ("fabric_address", "10.20.0.7/16\n"),
        ("fabric_address", "fe80::1/64"),
    ],
)
def test_hostile_hosts_get_nothing(new: Stack, field: str, value: str) -> None:
    sent = body(new)
    answer = new.client().post(PATH, json=sent | {field: value})
    assert answer.status_code == 422
    assert sent["token"] not in answer.text
    assert new.client().post(PATH, json=sent).status_code == 200


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("", ""),
        ("192.0.2.7", "192.0.2.7"),
        ("2001:DB8:0:0::7", "2001:db8::7"),
        ("192.0.2.256", None),
        ("192.0.2.7/24", None),
        ("fe80::1%eth0", None),
        ("gpuaas.example", None),
    ],
)
def test_the_public_address_is_one_that_every_machine_can_use(
    text: str, address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUAAS_PUBLIC_ADDRESS", text)
    if address is None:
        with pytest.raises(ValidationError) as caught:
            Settings()
        assert [name for name, _rule in refused(caught.value)] == ["GPUAAS_PUBLIC_ADDRESS"]
        return
    names = Settings(public_url="https://gpuaas.example").api_names
    assert names == ({"gpuaas.example": address} if address else {})


def keys(folder: Path, *names: str) -> list[str]:
    """Public host keys, made by ssh-keygen."""
    for name in names:
        keygen.new_key(folder / name, name)
    return [keygen.public_key((folder / f"{name}.pub").read_text()) for name in names]


def revoked(stack: Stack) -> list[str]:
    """Host keys that ssh-keygen finds revoked for the node in the known_hosts file."""
    path = ca.known_hosts(ca.open_trust(stack.settings.state_dir))
    lines = keygen.run("-F", NODE, "-f", str(path)).splitlines()
    marked = [line for line in lines if line.startswith("@revoked ")]
    assert sum("REVOKED" in line for line in lines) == len(marked)
    return [line.split(maxsplit=2)[2] for line in marked]


def test_another_host_key_revokes_the_one_before(new: Stack, tmp_path: Path) -> None:
    first, second = keys(tmp_path, "first", "second")
    assert new.client().post(PATH, json=body(new) | {"host_key": first}).status_code == 200
    assert new.client().post(PATH, json=body(new) | {"host_key": first}).status_code == 200
    assert revoked(new) == []
    assert new.client().post(PATH, json=body(new) | {"host_key": second}).status_code == 200
    assert revoked(new) == [first]
    admin = new.client("admin")
    certificates = admin.get(f"admin/nodes/{NODE}").json()["certificates"]
    given_up = {row["public_key"]: row["revoked_at"] is not None for row in certificates}
    assert given_up == {first: True, second: False}
    log = admin.get("admin/audit", params={"action": "node.certificate.revoked"}).json()["items"]
    assert len(log[0]["detail"]["serials"]) == 2

    back = new.client().post(PATH, json=body(new) | {"host_key": first})
    assert (back.status_code, back.json()["code"]) == (409, "host_key_not_accepted")
    assert revoked(new) == [first]


def test_a_launch_makes_up_for_a_revocation_that_was_cut_short(
    new: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service was killed between the records and the file."""
    first, second = keys(tmp_path, "first", "second")
    new.client().post(PATH, json=body(new) | {"host_key": first})
    with monkeypatch.context() as patched:
        patched.setattr(ca, "revoke_host", lambda *_: None)
        new.client().post(PATH, json=body(new) | {"host_key": second})
    assert revoked(new) == []
    worker._site(new.engine, new.settings, 60)
    assert revoked(new) == [first]


def test_a_host_cannot_take_its_neighbours_key(new: Stack, tmp_path: Path) -> None:
    """It would be revoked for both as soon as the host enrols with another."""
    theirs, own_key = keys(tmp_path, "theirs", "own")
    assert new.client().post(PATH, json=body(new) | {"host_key": theirs}).status_code == 200
    admin = new.client("admin")
    other = {"id": "other", "address": "192.0.2.8", "profile": "lab"}
    assert admin.post("admin/nodes", json=other).status_code == 201
    token = admin.post("admin/nodes/other/enrollment-token").json()["token"]
    sent = body(new) | {"node_id": "other", "token": token, "host_key": theirs}
    answer = new.client().post("nodes/other/enrol", json=sent)
    assert (answer.status_code, answer.json()["code"]) == (409, "host_key_not_accepted")
    # Its own replaces no key but its own.
    answer = new.client().post("nodes/other/enrol", json=sent | {"host_key": own_key})
    assert (answer.status_code, revoked(new)) == (200, [])


@pytest.mark.parametrize("upgraded", [False, True])
@pytest.mark.parametrize("tail", ["=", "=="])
def test_a_host_key_is_revoked_however_it_is_spelled(
    new: Stack, tmp_path: Path, tail: str, upgraded: bool
) -> None:
    """ssh reads a single spelling. upgraded: an earlier version has recorded another."""
    first, second = keys(tmp_path, "first", "second")
    sent = first if upgraded else f"{first}{tail}"
    assert new.client().post(PATH, json=body(new) | {"host_key": sent}).status_code == 200
    if upgraded:
        with transaction(new.engine) as conn:
            conn.execute(sa.update(node_certificates).values(public_key=f"{first}{tail}"))
    assert new.client().post(PATH, json=body(new) | {"host_key": second}).status_code == 200
    assert revoked(new) == [first]


def test_a_token_survives_a_certificate_that_could_not_be_made(
    new: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = body(new)

    def refuse(*_arguments: object, **_more: object) -> None:
        raise TrustError("keygen_failed", expected="a certificate", found="none", remedy="retry")

    with monkeypatch.context() as patched:
        patched.setattr(enrolment, "answer", refuse)
        assert new.client().post(PATH, json=sent).json()["code"] == "keygen_failed"
    assert new.client().post(PATH, json=sent).status_code == 200


@pytest.mark.parametrize("enrolled", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_a_retired_node_enrols_no_more(new: Stack, *, enrolled: bool, known: bool) -> None:
    """known: with the identity that it enrolled with before."""
    admin = new.client("admin")
    if enrolled:
        assert new.client().post(PATH, json=body(new)).status_code == 200
    sent = body(new) if known else body(new) | {"machine_id": "e" * 32}
    with transaction(new.engine) as conn:
        conn.execute(sa.update(nodes).values(state="retired"))
    answer = new.client().post(PATH, json=sent)
    assert (answer.status_code, answer.json()["code"]) == (409, "node_retired")
    node = admin.get(f"admin/nodes/{NODE}").json()
    assert (node["state"], len(node["certificates"])) == ("retired", int(enrolled))
    answer = admin.post(f"admin/nodes/{NODE}/enrollment-token")
    assert (answer.status_code, answer.json()["code"]) == (409, "node_retired")
    with transaction(new.engine) as conn:
        ticket = tokens.issue_ticket(conn, NODE, "abc123", ["testclient"], ACT)
    answer = new.client().post(f"nodes/{NODE}/userdata", json={"ticket": ticket})
    assert (answer.status_code, answer.json()["code"]) == (409, "node_retired")


@pytest.mark.covers("ECO-3")
def test_a_ticket_fetches_the_script_once(new: Stack) -> None:
    with transaction(new.engine) as conn:
        elsewhere = tokens.issue_ticket(conn, NODE, "abc123", ["198.51.100.7"], ACT)
        ticket = tokens.issue_ticket(conn, NODE, "abc123", ["testclient"], ACT)
    path = f"nodes/{NODE}/userdata"
    for wrong in (elsewhere, "ticket_unknown"):
        answer = new.client().post(path, json={"ticket": wrong})
        assert (answer.status_code, answer.json()["code"]) == (401, "token_invalid")
    # It may be used from the machine's address only, which an enrolment is not bound to.
    sent = {**discovery()["identity"], "node_id": NODE, "hostname": "lab"}
    assert new.client().post(PATH, json={**sent, "token": ticket}).status_code == 401
    answer = new.client().post(path, json={"ticket": ticket})
    assert (answer.status_code, answer.headers["Cache-Control"]) == (200, "no-store")
    (line,) = [row for row in answer.text.splitlines() if row.startswith("token=")]
    assert new.client().post(PATH, json={**sent, "token": line.split("'")[1]}).status_code == 200
    assert new.client().post(path, json={"ticket": ticket}).status_code == 401
