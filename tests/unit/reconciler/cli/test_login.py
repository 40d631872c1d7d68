"""`gpuaas login` against a provider process: confirmed, awaited, refused, not trusted."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest

from reconciler.cli import tokens
from reconciler.trust import oidc
from tests.unit.reconciler.api.provider import AUDIENCE, Provider, running
from tests.unit.reconciler.api.stack import NODE, Stack
from tests.unit.reconciler.cli.conftest import Gpuaas
from tests.unit.reconciler.service.service import serving, until

pytestmark = pytest.mark.covers("CTRL-10")
PENDING = {"error": "authorization_pending"}
SLOWER = {"error": "slow_down"}
ADMINS = "gpuaas-admins"


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with running() as process:
        yield process


class Clock:
    """In which only sleeping takes time."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tokens, "time", Clock())
    monkeypatch.setattr(oidc, "_TIMEOUT_S", 60.0)
    monkeypatch.setattr(oidc, "_DEADLINE_S", 60.0)
    monkeypatch.setattr(tokens, "_INTERVAL_S", 0.1)
    monkeypatch.setattr(tokens, "_LEAST_S", 0.2)
    monkeypatch.setenv("GPUAAS_TOKEN_FILE", str(tmp_path / "token"))
    return tmp_path / "token"


def words(provider: Provider, *more: str, client: str = AUDIENCE) -> tuple[str, ...]:
    return ("login", "--issuer", provider.url, "--client-id", client, *more)


def both(provider: Provider, **wishes: Any) -> dict[str, Any]:
    """A provider's answer for a confirmed device."""
    access = {"typ": "at+jwt"}
    return {
        "id_token": provider.order(**wishes),
        "access_token": provider.order(**wishes, headers=access),
    }


@pytest.mark.parametrize(("more", "kept"), [((), "JWT"), (("--kind", "access"), "at+jwt")])
def test_the_token_is_kept_once_somebody_confirms(
    provider: Provider, gpuaas: Gpuaas, file: Path, more: tuple[str, ...], kept: str
) -> None:
    provider.set(device=[PENDING, SLOWER, PENDING, both(provider)])
    gpuaas(*words(provider, *more))
    assert gpuaas.status == 0, gpuaas.err
    assert "https://id.example/device" in gpuaas.err
    assert "ABCD-EFGH" in gpuaas.err
    token = file.read_text().strip()
    assert token not in gpuaas.out + gpuaas.err
    assert jwt.get_unverified_header(token)["typ"] == kept
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_what_is_kept_opens_the_service(
    new: Stack, provider: Provider, gpuaas: Gpuaas, file: Path
) -> None:
    """From the code on the screen to an answer: provider and service are processes of their own."""
    site = {"ISSUER": provider.url, "AUDIENCE": AUDIENCE, "ADMIN_GROUP": ADMINS}
    environment = {f"GPUAAS_OIDC_{name}": value for name, value in site.items()}
    with serving(new.settings.state_dir, **environment) as service:
        service.start("serve", "--api-only")
        until(service.alive)
        results = []
        # The same, but for who has signed it.
        for key in ("rsa", "stranger"):
            provider.set(device=[both(provider, groups=[ADMINS], key=key)])
            gpuaas(*words(provider))
            assert gpuaas.status == 0, gpuaas.err
            results.append(service.gpuaas("nodes", "list", GPUAAS_TOKEN_FILE=str(file)))
    assert (results[0].returncode, NODE in results[0].stdout) == (0, True), results[0].stderr
    assert (results[1].returncode, "unauthenticated" in results[1].stderr) == (1, True), results[
        1
    ].stderr


@pytest.mark.parametrize(
    ("answers", "client", "problem"),
    [
        ([{"error": "access_denied"}], AUDIENCE, "access_denied"),
        ([PENDING], AUDIENCE, "not confirmed"),
        ([{}], AUDIENCE, "id_token"),
        ([{}], "another", "invalid_client"),
    ],
)
def test_what_ends_without_a_token(
    provider: Provider, gpuaas: Gpuaas, file: Path, answers: Any, client: str, problem: str
) -> None:
    provider.set(device=answers)
    gpuaas(*words(provider, client=client))
    assert (gpuaas.status, "login_failed" in gpuaas.err, problem in gpuaas.err) == (1, True, True)
    assert not file.exists()


@pytest.mark.parametrize(
    ("manner", "problem"),
    [("endless", "more than 1048576 bytes"), ("inflates", "gzip, gzip"), ("drips", "Timeout")],
)
def test_an_answer_without_an_end_takes_neither_memory_nor_time(
    provider: Provider,
    gpuaas: Gpuaas,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    manner: str,
    problem: str,
) -> None:
    monkeypatch.setattr(oidc, "_DEADLINE_S", 1 if manner == "drips" else 600)
    provider.set(manner=manner)
    try:
        gpuaas(*words(provider))
    finally:
        provider.set(manner="")
    assert (gpuaas.status, problem in gpuaas.err) == (1, True), gpuaas.err
    assert not file.exists()


@pytest.mark.parametrize("name", ["device_authorization_endpoint", "token_endpoint"])
def test_no_code_is_asked_for_over_a_line_that_anybody_can_read(
    gpuaas: Gpuaas, file: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A provider whose own documents come over TLS."""
    named = dict.fromkeys(("device_authorization_endpoint", "token_endpoint"), "https://id/x")
    named[name] = "http://id.example/x"
    urls: list[str] = []

    def converse(_ca_file: None, method: str, url: str) -> httpx.Response:
        if method == "POST":
            urls.append(url)
        return httpx.Response(200, json=named)

    monkeypatch.setattr(oidc, "converse", converse)
    gpuaas("login", "--issuer", "https://id.example", "--client-id", "x")
    assert (gpuaas.status, "http://id.example/x" in gpuaas.err, urls) == (1, True, [])


def test_no_provider_over_a_line_that_anybody_can_write_on(gpuaas: Gpuaas, file: Path) -> None:
    gpuaas("login", "--issuer", "http://id.example", "--client-id", "x")
    assert (gpuaas.status, "https" in gpuaas.err) == (1, True)
    gpuaas("login", "--issuer", "http://127.0.0.1:1", "--client-id", "x")
    assert (gpuaas.status, "login_failed" in gpuaas.err) == (1, True)
