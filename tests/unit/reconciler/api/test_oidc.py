"""Tokens of an OpenID provider: accepted, and refused for every possible reason."""

from __future__ import annotations

import math
import re
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from pydantic import ValidationError

from reconciler.model.errors import Problem
from reconciler.settings import Settings
from reconciler.trust import oidc
from reconciler.trust.oidc import FRESH_S, QUIET_S, STALE_S, Identity, Verifier
from tests.unit.reconciler.api.provider import AUDIENCE, PUBLISHED, Provider
from tests.unit.reconciler.api.stack import Stack
from tests.unit.reconciler.service.service import until
from tests.unit.reconciler.silent_names import NAME, silent_name

pytestmark = pytest.mark.covers("CTRL-10")
DEMO = ["staff", "gpuaas-project-demo"]


@pytest.fixture
def provider(process: Provider) -> Iterator[Provider]:
    oidc.verifier.cache_clear()
    yield process
    process.set(published=PUBLISHED, down=False, issuer="", manner="")


@pytest.fixture
def site(new: Stack, provider: Provider) -> Stack:
    new.settings = new.settings.model_copy(
        update={
            "oidc_issuer": provider.url,
            "oidc_audience": AUDIENCE,
            "oidc_admin_group": "gpuaas-admins",
            "oidc_project_prefix": "gpuaas-project-",
        }
    )
    return new


def opens(stack: Stack, token: str, path: str = "projects/demo/allocations") -> int:
    answer = stack.client().get(path, headers={"Authorization": f"Bearer {token}"})
    return answer.status_code


@pytest.mark.parametrize(("key", "alg"), [("rsa", "RS256"), ("ec", "ES256"), ("ed", "EdDSA")])
def test_groups_give_role_and_projects(site: Stack, provider: Provider, key: str, alg: str) -> None:
    member = provider.token(key=key, alg=alg, groups=[*DEMO, "gpuaas-project-other"])
    assert opens(site, member) == 200
    assert opens(site, member, "projects/other/allocations") == 200
    assert opens(site, member, "projects/none/allocations") == 404
    assert opens(site, member, "admin/nodes") == 403
    admin = provider.token(key=key, alg=alg, groups=["gpuaas-admins"])
    assert opens(site, admin, "admin/nodes") == 200
    nobody = provider.token(key=key, alg=alg)
    assert opens(site, nobody) == 404
    assert opens(site, nobody, "admin/nodes") == 403


# Besides those of DEMO. No database stores them, or PostgreSQL alone does not.
ODD = ["gpuaas-project-\0", "gpuaas-project-\ud800", math.inf, "\0", None, {"a": math.nan}]


def test_groups_that_no_database_stores_are_none(site: Stack, provider: Provider) -> None:
    header = {"Authorization": f"Bearer {provider.token(groups=[*DEMO, *ODD])}"}
    listed = site.client().get("projects", headers=header)
    assert [project["id"] for project in listed.json()["items"]] == ["demo"]
    named = oidc.Provider(provider.url, AUDIENCE, name_claim="name")
    with pytest.raises(ValueError, match="no usable sub"):
        oidc.identity_of(named, {"sub": "a\0", "name": "ada"})


def test_a_site_that_names_no_groups_gives_nobody_rights() -> None:
    site = oidc.Provider("https://id.example", AUDIENCE)
    person = oidc.identity_of(site, {"sub": "u-1", "groups": ["", "demo"]})
    assert (person.admin, person.projects) == (False, frozenset())


def test_groups_in_one_text_and_an_access_token(site: Stack, provider: Provider) -> None:
    token = provider.token(groups=" ".join(DEMO), headers={"typ": "at+jwt"}, aud=["x", AUDIENCE])
    assert opens(site, token) == 200


def test_audit_names_the_person_and_where_the_name_is_from(site: Stack, provider: Provider) -> None:
    token = provider.token(groups=["gpuaas-admins"], sub="admin")
    headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": "one"}
    body = {"name": "made", "id": "made"}
    for _ in range(2):
        made = site.client().post("admin/projects", json=body, headers=headers)
        assert made.status_code == 201
    log = site.client("admin").get("admin/audit", params={"subject_id": "made"}).json()["items"]
    assert [(row["actor"], row["role"]) for row in log] == [("admin:oidc:admin", "platform-admin")]


def soon(seconds: int) -> int:
    return int(time.time()) + seconds


# Longer after the collection of the tests than any session of them lasts.
LATER = int(time.time()) + 30 * 86_400


@pytest.mark.parametrize(
    "wrong",
    [
        {"exp": int(time.time()) - 3600},
        {"exp": None},
        {"iat": LATER},
        {"iat": None},
        {"nbf": LATER},
        {"iss": "https://elsewhere.example"},
        {"iss": None},
        {"aud": "another"},
        {"aud": None},
        {"sub": None},
        {"sub": ""},
        {"sub": "a\nb"},
        {"sub": "x" * 200},
        {"key": "stranger"},
        {"key": "oct", "alg": "HS256"},
        {"key": "rsa", "alg": "HS256"},
        {"key": "rsa", "alg": "none"},
        {"key": "rsa", "alg": "RS512"},
        {"key": "stranger", "headers": {"kid": "rsa"}},
        {"key": "ec", "alg": "ES256", "headers": {"kid": "rsa"}},
        {"headers": {"typ": "logout+jwt"}},
        {"headers": {"crit": ["exp"]}},
        {"exp": LATER},
        {"exp": math.inf},
        {"iat": -math.inf},
        {"nbf": math.nan},
        {"cnf": {"jkt": "0ZcOCORZNYy-DWpqq30jZyJGHTN0d2HglBV3uiguA4I"}},
        {"key": "short"},
        {"filler": "x" * 20_000},
    ],
    # Workers of pytest-xdist must agree on the names, and collect at different times.
    ids=lambda wrong: re.sub(r"\d{10}", "...", str(wrong)),
)
def test_what_opens_nothing(site: Stack, provider: Provider, wrong: dict[str, Any]) -> None:
    assert opens(site, provider.token(groups=DEMO)) == 200
    token = provider.token(**{"groups": DEMO, **wrong})
    answer = site.client().get(
        "projects/demo/allocations", headers={"Authorization": f"Bearer {token}"}
    )
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated")


def test_a_changed_token_and_no_token(site: Stack, provider: Provider) -> None:
    head, claims, signature = provider.token(groups=DEMO).split(".")
    other = provider.token(groups=["gpuaas-admins"]).split(".")[1]
    for text in (f"{head}.{other}.{signature}", f"{head}.{claims}.", "a.b.c", "..", "é.b.c"):
        token = text.encode("latin-1").decode("latin-1")
        header = {"Authorization": f"Bearer {token}".encode("latin-1")}
        assert site.client().get("admin/nodes", headers=header).status_code == 401


def test_clocks_may_be_apart_a_little(site: Stack, provider: Provider) -> None:
    assert opens(site, provider.token(groups=DEMO, exp=soon(-10))) == 200
    assert opens(site, provider.token(groups=DEMO, exp=soon(-60))) == 401
    assert opens(site, provider.token(groups=DEMO, iat=soon(10))) == 200


def test_without_a_provider_its_tokens_are_nothing(new: Stack, provider: Provider) -> None:
    requests = provider.requests()
    assert opens(new, provider.token(groups=["gpuaas-admins"]), "admin/nodes") == 401
    assert provider.requests() == requests


def test_our_own_tokens_work_while_the_provider_does_not(site: Stack, provider: Provider) -> None:
    token = provider.token(groups=DEMO)
    provider.set(down=True)
    answer = site.client().get("admin/nodes", headers={"Authorization": f"Bearer {token}"})
    assert (answer.status_code, answer.json()["code"]) == (503, "identity_provider_unavailable")
    assert site.client("admin").get("admin/nodes").status_code == 200


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def verifier(provider: Provider, clock: Clock) -> Verifier:
    return Verifier(oidc.Provider(provider.url, AUDIENCE), now=clock)


def test_keys_are_read_once_and_anew_for_an_unknown_one(
    provider: Provider, verifier: Verifier, clock: Clock
) -> None:
    assert isinstance(verifier.identity(provider.token()), Identity)
    requests = provider.requests()
    assert verifier.identity(provider.token())
    assert provider.requests() == requests
    provider.set(published=["rsa", "next"])
    token = provider.token(key="next")
    assert verifier.identity(token) is None  # too soon after the last look
    clock.now += QUIET_S
    assert verifier.identity(token)
    assert provider.requests() == requests + 2
    for _ in range(20):
        assert verifier.identity(provider.token(key="stranger")) is None
    assert provider.requests() == requests + 2


def test_a_key_that_was_withdrawn_stops_counting(
    provider: Provider, verifier: Verifier, clock: Clock
) -> None:
    token = provider.token()
    assert verifier.identity(token)
    provider.set(published=["ec"])
    clock.now += FRESH_S + 1
    assert verifier.identity(token) is None


def test_a_key_for_encryption_signs_nothing(provider: Provider, clock: Clock) -> None:
    read = partial(oidc._read, None)

    def fetch(url: str) -> Any:
        document = read(url)
        for key in document.get("keys", ()):
            key["use"] = "enc"
        return document

    verifier = Verifier(oidc.Provider(provider.url, AUDIENCE), fetch=fetch, now=clock)
    assert verifier.identity(provider.token()) is None


def test_keys_outlive_a_silent_provider_for_a_while(
    provider: Provider, verifier: Verifier, clock: Clock
) -> None:
    token = provider.token()
    assert verifier.identity(token)
    provider.set(down=True)
    clock.now += STALE_S - 1
    assert verifier.identity(token)
    clock.now += 2
    with pytest.raises(Problem) as refused:
        verifier.identity(token)
    assert refused.value.code == "identity_provider_unavailable"


def test_open_sessions_do_not_wait_for_the_provider(provider: Provider, clock: Clock) -> None:
    fetched, released = threading.Event(), threading.Event()
    read = partial(oidc._read, None)

    def fetch(url: str) -> Any:
        if clock.now:
            fetched.set()
            released.wait(60)
        return read(url)

    verifier = Verifier(oidc.Provider(provider.url, AUDIENCE), fetch=fetch, now=clock)
    token = provider.token()
    assert verifier.identity(token)
    provider.set(published=["ec"])
    clock.now += FRESH_S + 1
    assert verifier.identity(token, patient=False)
    # The keys are read meanwhile, and count as soon as they are there.
    assert fetched.wait(20)
    assert verifier.identity(token, patient=False)
    released.set()
    until(lambda: not verifier.identity(token, patient=False))


def test_a_name_server_that_hangs_keeps_few_requests_waiting(
    provider: Provider, clock: Clock
) -> None:
    """Each that waits is a thread of the service."""
    urls, released = [], threading.Event()

    def fetch(url: str) -> Any:
        urls.append(url)
        released.wait(60)
        raise OSError("no such name")

    verifier = Verifier(oidc.Provider(provider.url, AUDIENCE), fetch=fetch, now=clock)
    token = provider.token()
    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(verifier.identity, token) for _ in range(20)]
        until(lambda: sum(answer.done() for answer in answers) == 19)
        clock.now += 2 * QUIET_S
        released.set()
        codes = [getattr(answer.exception(60), "code", "") for answer in answers]
    assert codes == ["identity_provider_unavailable"] * 20
    assert len(urls) == 1


def test_a_provider_that_calls_itself_something_else_is_not_believed(
    provider: Provider, verifier: Verifier
) -> None:
    provider.set(issuer="https://elsewhere.example")
    with pytest.raises(Problem):
        verifier.identity(provider.token())


def test_an_answer_that_inflates_takes_no_memory(provider: Provider) -> None:
    provider.set(manner="inflates")
    form = {"client_id": AUDIENCE, "grant_type": "authorization_code"}
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="gzip, gzip"):
            oidc.converse(None, "POST", f"{provider.url}/token", form)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "host", ["id.example", "localhost.id.example", "127.0.0.1.id.example", "localhost@id.example"]
)
def test_keys_come_over_tls_or_from_this_machine(clock: Clock, host: str) -> None:
    configuration = {"issuer": "https://id.example", "jwks_uri": f"http://{host}/jwks"}
    urls: list[str] = []

    def fetch(url: str) -> Any:
        urls.append(url)
        return configuration

    verifier = Verifier(oidc.Provider("https://id.example", AUDIENCE), fetch=fetch, now=clock)
    token = "eyJhbGciOiJSUzI1NiIsImtpZCI6ImsifQ.e30.c2ln"
    with pytest.raises(Problem):
        verifier.identity(token)
    assert urls == ["https://id.example/.well-known/openid-configuration"]


def test_an_id_token_without_a_nonce_ends_no_login(provider: Provider, verifier: Verifier) -> None:
    form = {"client_id": AUDIENCE}
    assert verifier.login(provider.token(nonce="n"), form, "n")
    with pytest.raises(ValueError, match="another login"):
        verifier.login(provider.token(), form, "n")


def test_a_redirect_of_the_provider_is_not_followed(provider: Provider) -> None:
    """It could lead to another's keys, or to an address that only this machine reaches."""
    requests = provider.requests()
    query = urlencode({"redirect_uri": f"{provider.url}/jwks", "state": "x"})
    answer = oidc.converse(None, "GET", f"{provider.url}/authorize?{query}")
    assert (answer.status_code, provider.requests()) == (302, requests + 1)


def test_a_private_ca_is_the_only_one(tmp_path: Path) -> None:
    words = ["openssl", "req", "-x509", "-newkey", "ed25519", "-nodes", "-subj", "/CN=private"]
    files = ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "ca.pem")]
    subprocess.run([*words, *files], check=True, capture_output=True)
    (only,) = oidc._tls(tmp_path / "ca.pem", 0).get_ca_certs()
    assert only["subject"] == ((("commonName", "private"),),)


@pytest.mark.parametrize(
    "wrong",
    [
        {"oidc_issuer": "https://id.example"},
        {"oidc_issuer": "http://id.example", "oidc_audience": "x"},
        {"oidc_skew_s": 3600},
    ],
)
def test_settings_that_would_believe_too_much(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Settings(**wrong)


def test_a_hanging_name_of_the_provider_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oidc, "_DEADLINE_S", 0.2)
    with silent_name() as lookups:
        with pytest.raises(oidc.UNREADABLE):
            oidc.converse(None, "GET", f"https://{NAME}/keys")
        # Its thread may begin later than the limit.
        until(lambda: lookups.begun)
        assert (lookups.begun, lookups.ended) == (1, False)
