"""Login, sessions and the refusal of requests that other pages made a browser send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi import FastAPI

from reconciler.api import security
from reconciler.db.engine import transaction
from reconciler.db.schema import console_sessions
from reconciler.lifecycle import restore
from reconciler.records import console_sessions as sessions
from tests.unit.reconciler.api.stack import ACT, Stack
from tests.unit.reconciler.api.test_launches import launch
from tests.unit.reconciler.console.browser import SAME, Browser

pytestmark = pytest.mark.covers("CTRL-13")

Browse = Callable[[str], Browser]
FLEET = "/console/fleet"


def test_a_page_without_a_session_leads_to_the_login_and_back(
    browse: Browse, selling: Stack
) -> None:
    browser = browse("")
    assert browser.get("/console").headers["Location"] == "/console/"
    turned_away = browser.get(f"{FLEET}?region=north")
    assert turned_away.status_code == 303
    login = turned_away.headers["Location"]
    assert login == "/console/login?next=/console/fleet%3Fregion%3Dnorth"
    assert "Log in" in browser.get(login).text
    entered = browser.client.post(login, data={"token": selling.secrets["admin"]})
    assert entered.headers["Location"] == f"{FLEET}?region=north"
    assert browser.get(FLEET).status_code == 200


def test_a_form_whose_session_has_ended_leads_back_to_its_page(
    browse: Browse, selling: Stack
) -> None:
    """The address of the page holds the choices so far. A browser does not encode the star."""
    browser = browse("")
    page = f"/console/projects/demo/launch?step=review&offer=lab*1&ssh_keys={'x' * 3000}"
    form = {"_call": "POST /projects/demo/allocations", "_key": "k"}
    login = browser.client.post(page, data=form, headers=SAME).headers["Location"]
    assert "Your form was not sent" in browser.get(login).text
    wrong = browser.client.post(login, data={"token": "wrong"}, headers=SAME)
    assert "Your form was not sent" in wrong.text
    data = {"token": selling.secrets["member"]}
    assert browser.client.post(login, data=data, headers=SAME).headers["Location"] == page
    assert selling.client("member").get("projects/demo/allocations").json()["items"] == []


@pytest.mark.parametrize(
    "target", ["https://evil.example/", "//evil.example", "/console/../../evil", "/\\evil"]
)
def test_the_login_leads_to_no_other_site(browse: Browse, selling: Stack, target: str) -> None:
    browser = browse("")
    data = {"token": selling.secrets["admin"]}
    answer = browser.client.post("/console/login", params={"next": target}, data=data)
    assert answer.headers["Location"] == "/console/"


@pytest.mark.parametrize("secret", ["", "gpuaas_unknown", "é" * 40, "x" * 5000])
def test_an_unusable_token_starts_no_session(browse: Browse, secret: str, selling: Stack) -> None:
    answer = browse("").log_in(secret)
    assert answer.status_code == 401
    assert "Set-Cookie" not in answer.headers
    assert answer.text.count("expired, revoked, or of a node") == 1
    assert not secret or secret not in answer.text
    with transaction(selling.engine) as conn:
        assert not conn.execute(sa.select(console_sessions)).all()


@pytest.mark.parametrize("fields", ["a=&" * 5000, f"a={'x' * 300_000}&"], ids=["many", "large"])
def test_a_login_of_countless_fields_is_not_read(browse: Browse, fields: str) -> None:
    """Anybody can send a login, and all others wait while its fields are read."""
    answer = browse("").client.post("/console/login", content=f"{fields}token=x")
    assert (answer.status_code, "request_invalid" in answer.text) == (422, True)


def test_large_forms_are_counted_by_their_bytes(
    browse: Browse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "_BYTES_BURST", 30_000)
    monkeypatch.setattr(security, "_BYTES_PER_S", 1)
    for who, last in (("member", 429), ("admin", 422)):
        browser = browse(who)
        answers = [
            browser.client.post("/console/account", content="x" * 20_000, headers=SAME).status_code
            for _ in range(2)
        ]
        assert answers == [422, last], who


def test_a_token_logs_in_at_the_pace_of_people(browse: Browse, selling: Stack) -> None:
    """Each login is a row of the database, and of the audit log."""
    browser = browse("")
    answers = [browser.log_in(selling.secrets["member"]) for _ in range(sessions.PACE + 1)]
    assert {answer.status_code for answer in answers[:-1]} == {303}
    assert answers[-1].status_code == 429 and "Set-Cookie" not in answers[-1].headers
    assert browse("admin").get(FLEET).status_code == 200
    with transaction(selling.engine) as conn:
        earlier = console_sessions.c.created_at - sessions.PACE_S
        conn.execute(sa.update(console_sessions).values(created_at=earlier))
    assert browser.log_in(selling.secrets["member"]).status_code == 303


def test_a_node_cannot_log_in(browse: Browse, selling: Stack) -> None:
    assert browse("").log_in(selling.secrets["node"]).status_code == 401


def test_the_database_and_the_log_hold_no_usable_cookie(
    browse: Browse, selling: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    browser = browse("admin")
    secret = browser.client.cookies["gpuaas"]
    with transaction(selling.engine) as conn:
        (session,) = conn.execute(sa.select(console_sessions)).mappings()
    assert secret not in str(dict(session))
    assert secret not in caplog.text
    assert selling.secrets["admin"] not in caplog.text


@pytest.mark.parametrize("how", ["logout", "revoked", "expired", "restored"])
def test_a_session_ends(browse: Browse, selling: Stack, how: str) -> None:
    browser = browse("admin")
    assert browser.get(FLEET).status_code == 200
    cookie = {"gpuaas": browser.client.cookies["gpuaas"]}
    if how == "logout":
        assert browser.client.post("/console/logout", headers={"Origin": "http://localhost"})
        assert "gpuaas" not in browser.client.cookies
    elif how == "revoked":
        rows = selling.client("admin").get("admin/tokens").json()["items"]
        (mine,) = [row["id"] for row in rows if row["name"] == "admin"]
        assert selling.client("admin").delete(f"admin/tokens/{mine}").status_code == 200
    elif how == "expired":
        with transaction(selling.engine) as conn:
            conn.execute(sa.update(console_sessions).values(expires_at=1))
    else:
        with transaction(selling.engine) as conn:
            restore.doubt(conn, ACT)
    browser.client.cookies.update(cookie)
    assert browser.get(FLEET).headers["Location"].startswith("/console/login")
    # A part of a page that refreshes itself must not be replaced by the login page.
    polled = browser.get(FLEET, headers={"HX-Request": "true"})
    login = "/console/login?next=/console/fleet"
    assert (polled.status_code, polled.headers["HX-Redirect"]) == (204, login)


def test_cookie_of_a_secure_site(console: FastAPI, selling: Stack) -> None:
    browser = Browser(console, "https://gpuaas.example")
    cookie = browser.log_in(selling.secrets["member"]).headers["Set-Cookie"]
    assert cookie.startswith("__Host-gpuaas=")
    assert {"Secure", "HttpOnly", "Path=/", "SameSite=lax"} <= set(cookie.split("; "))
    assert browser.get("/console/projects").status_code == 200


OTHERS: list[dict[str, str]] = [
    {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"},
    # Another port of the same host: cookies are sent to it, whatever SameSite says.
    {"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:9999"},
    {"Origin": "http://localhost:9999"},
    {"Origin": "null"},
    {"Origin": "http://["},
    {},
]


@pytest.mark.parametrize(
    ("scheme", "allowed"), [("https", True), ("http", False)], ids=["https", "http"]
)
def test_a_page_without_tls_cannot_send_a_form_to_one_with_it(
    console: FastAPI, selling: Stack, scheme: str, allowed: bool
) -> None:
    """Anybody on the way could have written it. Not every browser sends Sec-Fetch-Site."""
    browser = Browser(console, "https://gpuaas.example")
    browser.log_in(selling.secrets["member"])
    headers = {"Origin": f"{scheme}://gpuaas.example"}
    answer = browser.client.post("/console/logout", headers=headers)
    assert answer.status_code == (303 if allowed else 403)


@pytest.mark.parametrize("headers", OTHERS)
@pytest.mark.parametrize("path", [FLEET, "/console/logout", "/console/login"])
def test_another_page_cannot_send_a_form(
    browse: Browse, selling: Stack, headers: dict[str, str], path: str
) -> None:
    browser = browse("admin")
    data = {
        "_call": "PUT /admin/settings/slice-scheduling",
        "enabled:bool": "false",
        "reason": "evil",
        "token": selling.secrets["stranger"],
    }
    refused = browser.client.post(path, data=data, headers=headers)
    assert refused.status_code == 403
    assert "origin_refused" in refused.text
    assert browser.get(FLEET).status_code == 200
    on = selling.client("admin").get("admin/settings/slice-scheduling").json()
    assert on == {"enabled": True}


def test_the_cookie_is_no_credential_of_the_api(browse: Browse) -> None:
    browser = browse("admin")
    assert browser.get("/api/v1/admin/nodes").status_code == 401


@pytest.mark.parametrize("path", ["/console/login", FLEET, "/console/nowhere"])
def test_every_answer_has_the_headers(browse: Browse, path: str) -> None:
    headers = browse("admin").get(path).headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_the_terminals_page_may_write_styles_and_no_scripts(browse: Browse, selling: Stack) -> None:
    page = f"/console/projects/demo/allocations/{launch(selling).json()['id']}"
    member = browse("member")
    texts = [
        member.get(path).headers["Content-Security-Policy"] for path in (page, f"{page}/terminal")
    ]
    policies = [dict(part.split(" ", 1) for part in text.split("; ")) for text in texts]
    assert policies[1]["script-src"] == "'self'"
    assert policies[1] == policies[0] | {"style-src": "'self' 'unsafe-inline'"}


def test_login_and_logout_are_audited(browse: Browse, selling: Stack) -> None:
    browse("member").client.post("/console/logout", headers={"Sec-Fetch-Site": "same-origin"})
    entries: list[dict[str, Any]] = selling.client("admin").get("admin/audit").json()["items"]
    actions = [row["action"] for row in entries if row["actor"].startswith("member:member#")]
    assert actions == ["console.session.ended", "console.session.started"]
