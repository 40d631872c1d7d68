"""Login through the OpenID provider's own process: code, PKCE, state, nonce, and refusals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import cycle
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from starlette.testclient import TestClient

from reconciler.console import login
from reconciler.db.engine import transaction
from reconciler.db.schema import allocations, console_sessions, ssh_keys
from reconciler.lifecycle import ssh_access
from reconciler.model.errors import Problem
from reconciler.records import console_sessions as console_records
from reconciler.records.ssh_keys import bare
from reconciler.trust import oidc
from tests.unit.reconciler.api.provider import AUDIENCE, Provider, running
from tests.unit.reconciler.api.stack import ACT, KEY, Stack
from tests.unit.reconciler.api.test_launches import activate, launch
from tests.unit.reconciler.api.test_oidc import ODD
from tests.unit.reconciler.console.browser import SAME, Browser
from tests.unit.reconciler.service.service import until

pytestmark = pytest.mark.covers("CTRL-13", "CTRL-10")

Browse = Callable[[str], Browser]
FLEET = "/console/fleet"
ADMIN, MEMBER = ["gpuaas-admins"], ["gpuaas-project-demo"]
OTHER_KEY, THIRD_KEY = KEY.replace("8rLa", "8rLb"), KEY.replace("8rLa", "8rLc")


@pytest.fixture(scope="module")
def process() -> Iterator[Provider]:
    with running() as provider:
        yield provider


@pytest.fixture
def provider(process: Provider) -> Iterator[Provider]:
    oidc.verifier.cache_clear()
    process.set(login=process.order(groups=ADMIN), manner="")
    yield process
    process.set(down=False, manner="", issuer="", authorize="")


@pytest.fixture
def site(selling: Stack, console: FastAPI, provider: Provider) -> Stack:
    changed = {
        "oidc_issuer": provider.url,
        "oidc_audience": AUDIENCE,
        "oidc_admin_group": "gpuaas-admins",
        "oidc_project_prefix": "gpuaas-project-",
    }
    configure(selling, console, **changed)
    return selling


def configure(stack: Stack, console: FastAPI, **changed: Any) -> None:
    stack.settings = stack.settings.model_copy(update=changed)
    console.state.settings = stack.settings


def in_an_hour() -> str:
    return (datetime.now(UTC) + timedelta(hours=1)).isoformat()


def to_provider(browser: Browser, after: str = "") -> str:
    """Where the login page's link sends the browser."""
    answer = browser.get("/console/login/provider", params={"next": after} if after else {})
    assert answer.status_code == 303, answer.text
    return answer.headers["Location"]


def back(address: str) -> str:
    """The provider's answer: the address of the console with the code."""
    location: str = httpx.get(address, timeout=60).headers["Location"]
    assert location.startswith("http://localhost/console/login/callback?")
    return location


def log_in(browser: Browser, after: str = "") -> httpx.Response:
    return browser.get(back(to_provider(browser, after)))


def refused(browser: Browser, answer: httpx.Response, *words: str) -> None:
    """The login page with the refusal, and no session."""
    assert answer.status_code in (401, 503), answer.headers
    assert "gpuaas=" not in answer.headers.get("Set-Cookie", "")
    for word in words:
        assert word in answer.text
    assert browser.get(FLEET).status_code == 303


def test_a_session_keeps_no_claims_that_no_database_stores(
    site: Stack, browse: Browse, provider: Provider
) -> None:
    provider.set(login=provider.order(groups=[*MEMBER, *ODD]))
    assert log_in(browse("")).headers["Location"] == "/console/"
    with transaction(site.engine) as conn:
        claims = conn.execute(sa.select(console_sessions.c.claims)).scalars().one()
    assert claims["groups"] == MEMBER


def test_a_person_logs_in_at_the_pace_of_people(
    site: Stack, browse: Browse, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_records, "PACE", 1)
    assert log_in(browse("")).status_code == 303
    answer = log_in(browse(""))
    assert (answer.status_code, "at most 1 logins" in answer.text) == (429, True)
    assert "gpuaas=" not in answer.headers.get("Set-Cookie", "")
    provider.set(login=provider.order(groups=ADMIN, sub="u-2"))
    assert log_in(browse("")).status_code == 303


def test_groups_decide_what_a_person_sees(site: Stack, browse: Browse, provider: Provider) -> None:
    browser = browse("")
    link = "/console/login/provider?next=/console/fleet%3Fregion%3Dnorth"
    assert link in browser.open("/console/login?next=/console/fleet%3Fregion%3Dnorth").links
    query = dict(parse_qsl(urlsplit(to_provider(browser)).query))
    assert (query["response_type"], query["code_challenge_method"]) == ("code", "S256")
    assert query["client_id"] == AUDIENCE
    # The endpoint's own parameters stay.
    assert query["tenant"] == "1"
    entered = log_in(browser, f"{FLEET}?region=north")
    assert (entered.status_code, entered.headers["Location"]) == (303, f"{FLEET}?region=north")
    assert "oidc:u-1" in browser.get(FLEET).text
    entries = site.client("admin").get("admin/audit").json()["items"]
    assert entries[0]["actor"] == "admin:oidc:u-1"
    browser.client.post("/console/logout", headers=SAME)
    assert browser.get(FLEET).status_code == 303
    provider.set(login=provider.order(groups=MEMBER, sub="u-2"))
    member = browse("")
    assert log_in(member).headers["Location"] == "/console/"
    assert member.get("/console/projects/demo").status_code == 200
    assert member.get("/console/projects/other").status_code == 404
    assert member.get(FLEET).status_code == 404


def test_a_session_follows_the_settings(site: Stack, browse: Browse, console: FastAPI) -> None:
    browser = browse("")
    log_in(browser)
    assert browser.get(FLEET).status_code == 200
    configure(site, console, oidc_admin_group="others")
    assert browser.get(FLEET).status_code == 404
    configure(site, console, oidc_issuer="")
    assert browser.get("/console/projects").headers["Location"].startswith("/console/login")


def older(stack: Stack, seconds: float) -> None:
    """The sessions' groups were asked for this long ago."""
    with transaction(stack.engine) as conn:
        earlier = console_sessions.c.expires_at - seconds
        conn.execute(sa.update(console_sessions).values(expires_at=earlier))


def test_groups_are_asked_for_again_while_a_session_lives(
    site: Stack, browse: Browse, provider: Provider
) -> None:
    browser = browse("")
    log_in(browser)
    cookie = browser.client.cookies["gpuaas"]
    assert browser.get(FLEET).status_code == 200
    older(site, console_records.ASK_S + 1)
    redirect = browser.get(f"{FLEET}?region=north")
    assert redirect.headers["Location"].startswith(provider.url)
    # Parts of a page and forms do not wait for the provider.
    assert browser.get(FLEET, headers={"HX-Request": "true"}).status_code == 200
    renewed = browser.get(back(redirect.headers["Location"]))
    assert renewed.headers["Location"] == f"{FLEET}?region=north"
    # The same session, so that its streams and terminals go on.
    assert browser.client.cookies["gpuaas"] == cookie
    assert browser.get(FLEET).status_code == 200
    provider.set(login=provider.order(groups=MEMBER))
    older(site, console_records.ASK_S + 1)
    log_in(browser)
    assert browser.get(FLEET).status_code == 404
    assert browser.get("/console/projects/demo").status_code == 200


def test_who_has_left_loses_what_the_session_opened(
    site: Stack, browse: Browse, provider: Provider
) -> None:
    browser = browse("")
    log_in(browser)
    provider.set(login=provider.order(groups=[]))
    log_in(browser)
    assert browser.get(FLEET).status_code == 404
    assert browser.get("/console/projects/demo").status_code == 404
    query = dict(parse_qsl(urlsplit(back(to_provider(browser))).query))
    denied = urlencode({"state": query["state"], "error": "access_denied"})
    assert browser.get(f"/console/login/callback?{denied}").status_code == 401
    assert browser.get("/console/projects").status_code == 303
    provider.set(login=provider.order(groups=ADMIN))
    log_in(browser)
    provider.set(login=provider.order(groups=ADMIN, sub=""))
    refused(browser, log_in(browser), "login_failed")


def test_a_group_that_is_lost_takes_its_keys_and_tokens(
    site: Stack, browse: Browse, provider: Provider, console: FastAPI
) -> None:
    configure(site, console, oidc_name_claim="preferred_username")
    both = [*MEMBER, "gpuaas-project-other"]

    def enter(groups: list[str], sub: str) -> Browser:
        provider.set(login=provider.order(groups=groups, sub=sub, preferred_username="alex"))
        browser = browse("")
        assert log_in(browser).status_code == 303
        return browser

    person, namesake = enter(both, "u-7"), enter(both, "u-8")
    for who, project, key in (
        (person, "demo", KEY),
        (person, "other", KEY),
        (namesake, "demo", OTHER_KEY),
    ):
        page = f"/console/projects/{project}/ssh"
        form = who.open(page).form(f"POST /projects/{project}/ssh-keys")
        assert who.send(page, form, public_key=key).status_code == 303
        account = "/console/account"
        form = who.open(account).form("POST /tokens")
        assert "shown once" in who.send(account, form, name="t", project_id=project).text
    mine = launch(site, ssh_keys=[KEY, THIRD_KEY]).json()["id"]
    activate(site, mine)
    with transaction(site.engine) as conn:
        owner = sa.select(ssh_keys.c.owner).where(ssh_keys.c.public_key == bare(KEY)).limit(1)
        change = sa.update(allocations).where(allocations.c.id == mine)
        requested = {"requested_by": "member:oidc:alex", "owner": owner.scalar_subquery()}
        conn.execute(change.values(requested))

    def opens(key: str) -> bool:
        try:
            with transaction(site.engine) as conn:
                ssh_access.authorise(conn, mine, bare(key))
        except Problem as problem:
            assert problem.code == "ssh_key_expired"
            return False
        return True

    def valid(project: str) -> list[bool]:
        rows = site.client("admin").get("admin/tokens").json()["items"]
        return [row["valid"] for row in rows if (row["name"], row["project_id"]) == ("t", project)]

    assert [opens(key) for key in (KEY, THIRD_KEY, OTHER_KEY)] == [True] * 3
    # The namesake's login ends no keys of other people, and a login with the same groups ends none.
    enter(both, "u-8")
    enter(both, "u-7")
    assert [opens(key) for key in (KEY, THIRD_KEY, OTHER_KEY)] == [True] * 3
    provider.set(login=provider.order(groups=both[1:], sub="u-7", preferred_username="alex"))
    log_in(person)
    assert [opens(key) for key in (KEY, THIRD_KEY, OTHER_KEY)] == [False, False, True]
    assert (sorted(valid("demo")), valid("other")) == ([False, True], [True])
    (kept,) = site.client("admin").get("projects/other/ssh-keys").json()["items"]
    assert kept["expires_at"] > in_an_hour()


def test_a_session_is_renewed_for_a_working_day_only(site: Stack, browse: Browse) -> None:
    """A stolen cookie would live as long as its owner works with the console."""
    browser = browse("")
    log_in(browser)
    cookie = browser.client.cookies["gpuaas"]
    rest = console_records.LIFETIME_S - console_records.PROVIDER_S
    with transaction(site.engine) as conn:
        earlier = console_sessions.c.created_at - rest
        conn.execute(sa.update(console_sessions).values(created_at=earlier))
    log_in(browser)
    assert browser.client.cookies["gpuaas"] != cookie


def test_another_person_does_not_get_the_session(
    site: Stack, browse: Browse, provider: Provider
) -> None:
    browser = browse("")
    log_in(browser)
    cookie = browser.client.cookies["gpuaas"]
    provider.set(login=provider.order(groups=MEMBER, sub="u-2"))
    log_in(browser)
    assert browser.client.cookies["gpuaas"] != cookie
    assert browser.get(FLEET).status_code == 404
    first = browse("")
    first.client.cookies["gpuaas"] = cookie
    assert first.get(FLEET).status_code == 200


def test_a_provider_that_is_away_ends_nobody(
    site: Stack, browse: Browse, provider: Provider
) -> None:
    browser = browse("")
    log_in(browser)
    older(site, console_records.ASK_S + 1)
    oidc.verifier.cache_clear()
    provider.set(down=True)
    assert browser.get(FLEET).status_code == 200
    older(site, console_records.PROVIDER_S)
    assert browser.get(FLEET).status_code == 303


@pytest.mark.parametrize("error", ["temporarily_unavailable", "server_error"])
def test_a_provider_that_is_busy_ends_nobody(site: Stack, browse: Browse, error: str) -> None:
    """And does not send a page back and forth."""
    browser = browse("")
    log_in(browser)
    older(site, console_records.ASK_S + 1)

    def answer(word: str) -> httpx.Response:
        fields = dict(parse_qsl(urlsplit(to_provider(browser, FLEET)).query))
        query = urlencode({"state": fields["state"], "error": word})
        return browser.get(f"/console/login/callback?{query}")

    assert answer(error).headers["Location"] == FLEET
    assert browser.get(FLEET).status_code == 200
    assert answer("login_required").status_code == 401
    assert browser.get(FLEET).status_code == 303


def test_every_tab_has_its_own_login(site: Stack, browse: Browse) -> None:
    """And all of them have room in a header."""
    browser = browse("")
    for _ in range(2):
        tabs = [to_provider(browser, page) for page in (FLEET, "/console/tasks")]
        places = [browser.get(back(tab)).headers["Location"] for tab in tabs]
        assert places == [FLEET, "/console/tasks"]
        # A session of these is renewed the second time.
        older(site, console_records.ASK_S + 1)
    assert list(browser.client.cookies) == ["gpuaas"]
    tabs = [to_provider(browser, f"{FLEET}?region={'n' * 900}") for _ in range(9)]
    assert sum(map(len, browser.client.cookies.values())) <= login._TOGETHER
    refused(browse(""), browser.get(back(tabs[0])), "another state")
    assert browser.get(back(tabs[-1])).status_code == 303


def test_an_operator_ends_a_persons_sessions_and_keys(
    site: Stack, browse: Browse, provider: Provider
) -> None:
    person, former, operator = browse(""), browse(""), browse("admin")
    # A key that was made in another role is theirs, too.
    provider.set(login=provider.order(groups=ADMIN, sub="u-9"))
    log_in(former)
    form = former.open("/console/projects/demo/ssh").form("POST /projects/demo/ssh-keys")
    other = {"public_key": OTHER_KEY}
    assert former.send("/console/projects/demo/ssh", form, **other).status_code == 303
    provider.set(login=provider.order(groups=MEMBER, sub="u-9"))
    log_in(person)
    log_in(person)
    key = {"public_key": KEY}
    form = person.open("/console/projects/demo/ssh").form("POST /projects/demo/ssh-keys")
    assert person.send("/console/projects/demo/ssh", form, **key).status_code == 303
    form = person.open("/console/account").form("POST /tokens")
    made = person.send("/console/account", form, name="script", project_id="demo").text
    assert "shown once" in made
    page = operator.open("/console/tokens")
    named = "member:oidc:u-9"
    ends = [form for form in page.forms if dict(form.fields).get("actor") == named]
    assert operator.send("/console/tokens", ends[0], reason="left").status_code == 303
    assert person.get("/console/projects/demo").status_code == 303
    assert former.get("/console/projects/demo").status_code == 303
    listed = site.client("admin").get("admin/tokens").json()["items"]
    (script,) = [row for row in listed if row["name"] == "script"]
    assert (script["issued_by"], script["valid"]) == (named, False)
    latest = datetime.now(UTC) + timedelta(seconds=console_records.PROVIDER_S)
    assert script["expires_at"] <= latest.isoformat(), "the end of its session"
    keys = site.client("admin").get("projects/demo/ssh-keys").json()["items"]
    assert {key["registered_by"] for key in keys} == {named, "admin:oidc:u-9"}
    assert all(key["expires_at"] < in_an_hour() for key in keys)
    ended = site.client("admin").get("admin/audit?action=ssh_key.ended").json()["items"]
    assert [row["reason"] for row in ended] == ["left", "left"]


def test_a_login_starts_one_session(site: Stack, browse: Browse) -> None:
    browser = browse("")
    address = to_provider(browser)
    ((name, kept),) = browser.client.cookies.items()
    first = back(address)
    assert browser.get(first).status_code == 303
    assert name not in browser.client.cookies
    browser.client.cookies[name] = kept
    assert browser.get(back(address)).status_code == 401
    # The same answer again, the same state with a new code, and both after the logout.
    for number, again in enumerate((first, back(address), back(address))):
        other = browse("")
        other.client.cookies[name] = "" if number == 0 else kept
        refused(other, other.get(again), "login_failed")
        browser.client.post("/console/logout", headers=SAME)
        # Another login removes sessions, but none whose login would be accepted again.
        assert log_in(browse("")).status_code == 303
    with transaction(site.engine) as conn:
        assert len(conn.execute(sa.select(console_sessions)).all()) == 4
        # Of two answers at once, neither finds the session of the other at first.
        with pytest.raises(Problem, match="login_failed"):
            console_records.start(conn, ACT, address="", agent="", login=kept, claims={"sub": "x"})


def test_an_answer_for_another_browser_is_refused(site: Stack, browse: Browse) -> None:
    """The attacker's own answer, and the attacker's code under the victim's state."""
    attacker, victim, unaware = browse(""), browse(""), browse("")
    stolen = back(to_provider(attacker))
    refused(unaware, unaware.get(stolen), "another state")
    mine = back(to_provider(victim))
    code = parse_qs(urlsplit(stolen).query)["code"][0]
    state = parse_qs(urlsplit(mine).query)["state"][0]
    injected = f"/console/login/callback?{urlencode({'code': code, 'state': state})}"
    refused(victim, victim.get(injected), "refuses the code")


WRONG: dict[str, dict[str, Any]] = {
    "expired": {"exp": int(time.time()) - 3600},
    "other-audience": {"aud": "another"},
    "two-audiences": {"aud": [AUDIENCE, "another"]},
    "other-party": {"azp": "another"},
    "other-issuer": {"iss": "https://evil.example"},
    "other-nonce": {"nonce": "mine"},
    "no-subject": {"sub": None},
    "no-name": {"sub": ""},
    "unsigned": {"alg": "none"},
    "shared-secret": {"alg": "HS256", "key": "oct"},
    "stranger": {"key": "stranger"},
    "access-token": {"headers": {"typ": "at+jwt"}},
}


@pytest.mark.parametrize("name", WRONG)
def test_another_token_starts_no_session(
    site: Stack, browse: Browse, provider: Provider, name: str
) -> None:
    provider.set(login=provider.order(groups=ADMIN, **WRONG[name]))
    browser = browse("")
    refused(browser, log_in(browser), "login_failed", "an ID token of the provider for this login")


@pytest.mark.parametrize("manner", ["drips", "endless", "nonsense", "nested", "inflates"])
def test_a_provider_that_does_not_answer_a_code(
    site: Stack, browse: Browse, provider: Provider, monkeypatch: pytest.MonkeyPatch, manner: str
) -> None:
    browser = browse("")
    answer = back(to_provider(browser))
    provider.set(manner=manner)
    monkeypatch.setattr(oidc, "_DEADLINE_S", 0.3 if manner == "drips" else 600)
    began = time.monotonic()
    refused(browser, browser.get(answer), "no ID token of the provider")
    assert time.monotonic() - began < 60
    # While others of the network wait.
    monkeypatch.setattr(login, "_PLACES", login._Places(8, 0))
    monkeypatch.setattr(login, "_WAIT_S", 0.1)
    refused(browser, browser.get(back(to_provider(browser))), "too many logins")


def begin(console: FastAPI, address: str) -> tuple[Browser, str]:
    """A browser at an address, and the provider's answer for it."""
    browser = Browser(console)
    where = {"base_url": "http://localhost", "follow_redirects": False}
    browser.client = TestClient(console, client=(address, 1), **where)
    return browser, back(to_provider(browser))


@pytest.mark.parametrize(
    ("near", "far"),
    [(("192.0.2.1",), "192.0.2.2"), (("2001:db8::1", "2001:db8::ffff:2"), "2001:db8:0:1::1")],
)
def test_a_stranger_does_not_close_the_login(
    site: Stack, console: FastAPI, provider: Provider, monkeypatch: pytest.MonkeyPatch,
    near: tuple[str, ...], far: str,
) -> None:  # fmt: skip
    """Anybody can make a state with its cookie, and any code waits for an answer."""
    places = login._Places(8, of_network=2)
    monkeypatch.setattr(login, "_PLACES", places)
    monkeypatch.setattr(oidc, "_DEADLINE_S", 60)
    monkeypatch.setattr(login, "_WAIT_S", 1)
    strangers = [begin(console, each) for each, _ in zip(cycle(near), range(8), strict=False)]
    neighbour, other = begin(console, near[0]), begin(console, far)
    provider.set(manner="drips")
    with ThreadPoolExecutor(9) as pool:
        answers = [pool.submit(browser.get, address) for browser, address in strangers]
        until(lambda: sum(answer.done() for answer in answers) == 6)
        late = [answer.result() for answer in answers if answer.done()]
        assert [answer.status_code for answer in late] == [503] * 6
        assert "too many logins" in late[0].text
        assert not all(answer.done() for answer in answers)
        provider.set(manner="")
        assert other[0].get(other[1]).headers["Location"] == "/console/"
        # A client of the same network waits for its place.
        monkeypatch.setattr(login, "_WAIT_S", 60)
        waits = pool.submit(neighbour[0].get, neighbour[1])
        time.sleep(0.2)
        assert not waits.done()
        for exchange in tuple(places._waiting):
            exchange.cancel()
        assert waits.result().headers["Location"] == "/console/"


def test_strangers_of_many_networks_do_not_close_the_login(
    site: Stack, console: FastAPI, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = login._Places(8, of_network=2)
    monkeypatch.setattr(login, "_PLACES", places)
    monkeypatch.setattr(oidc, "_DEADLINE_S", 600)
    monkeypatch.setattr(login, "_WAIT_S", 0)
    addresses = [f"192.0.2.{number}" for number in range(4)] * 2
    strangers = [begin(console, address) for address in addresses]
    people = [begin(console, f"198.51.100.{number}") for number in range(2)]
    provider.set(manner="ponders")
    with ThreadPoolExecutor(8) as pool:
        answers = []
        for browser, address in strangers:
            answers.append(pool.submit(browser.get, address.replace("code=", "code=invented-")))
            until(lambda: len(places._waiting) == len(answers))
        for person, address in people:
            assert person.get(address).headers["Location"] == "/console/"
        # The longest-waiting exchange made way for the first person, who left room for the second.
        assert answers[0].result().status_code == 503
        assert "too many logins" in answers[0].result().text
        assert [answer.done() for answer in answers] == [True] + [False] * 7
        for exchange in tuple(places._waiting):
            exchange.cancel()


NO_PROVIDER: list[dict[str, Any]] = [
    {"down": True},
    {"issuer": "https://evil.example"},
    {"authorize": "http://evil.example/"},
    {"authorize": "https://evil.example:port/"},
    {"authorize": "javascript:alert(1)"},
]


@pytest.mark.parametrize("wrong", NO_PROVIDER)
def test_a_provider_without_a_configuration(
    site: Stack, browse: Browse, provider: Provider, wrong: dict[str, Any]
) -> None:
    provider.set(**wrong)
    browser = browse("")
    page = browser.get("/console/login/provider")
    assert page.status_code == 503
    assert "identity_provider_unavailable" in page.text
    # A token works meanwhile.
    assert browser.log_in(site.secrets["admin"]).status_code == 303


def test_errors_of_the_provider_are_not_repeated_word_for_word(site: Stack, browse: Browse) -> None:
    for error, shown in (("access_denied", "access_denied"), ("<b>Call 555</b>", "another error")):
        browser = browse("")
        state = parse_qs(urlsplit(to_provider(browser)).query)["state"][0]
        query = urlencode({"error": error, "state": state, "error_description": "Call 555"})
        answer = browser.get(f"/console/login/callback?{query}")
        refused(browser, answer, shown)
        assert "555" not in answer.text
    browser = browse("")
    mixed = back(to_provider(browser)).replace("iss=", "iss=x")
    refused(browser, browser.get(mixed), "another provider")


@pytest.mark.parametrize("target", ["https://evil.example/", "//evil.example", "/console/../x"])
def test_a_login_leads_to_no_other_site(site: Stack, browse: Browse, target: str) -> None:
    browser = browse("")
    assert log_in(browser, target).headers["Location"] == "/console/"
    assert log_in(browser, f"/console/{'x' * 5000}").headers["Location"] == "/console/"
    # A forged cookie is no better.
    forged = f"{int(time.time() * 1000)}.x.{target}"
    state = login._derived(forged, "state")
    browser.client.cookies[login._cookie(state)] = forged
    answer = browser.get("/console/login/callback", params={"state": state, "code": "x"})
    assert answer.status_code == 401
    assert "evil.example" not in answer.text


@pytest.mark.parametrize(
    ("age", "ended"), [(-3600, True), (-50, False), (500, False), (700, True), (None, True)]
)
def test_a_login_lasts_ten_minutes(
    site: Stack, browse: Browse, age: int | None, ended: bool
) -> None:
    """Only then does an answer's code matter."""
    browser = browse("")
    begun = "soon" if age is None else str(int((time.time() - age) * 1000))
    state = login._derived(f"{begun}.x.", "state")
    browser.client.cookies[login._cookie(state)] = f"{begun}.x."
    answer = browser.get("/console/login/callback", params={"state": state, "code": "x"})
    refused(browser, answer)
    assert ("began earlier" in answer.text) == ended


def test_without_a_provider_there_is_no_such_login(selling: Stack, browse: Browse) -> None:
    browser = browse("")
    assert "provider" not in "".join(browser.open("/console/login").links)
    for path in ("provider", "callback"):
        assert browser.get(f"/console/login/{path}").status_code == 404
