"""`gpuaas login` against a provider process: confirmed, waited for, refused, not believed."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reconciler.cli import login
from tests.unit.reconciler.api.provider import AUDIENCE, Provider, running
from tests.unit.reconciler.cli.conftest import Gpuaas

pytestmark = pytest.mark.covers("CTRL-10")
PENDING = {"error": "authorization_pending"}
SLOWER = {"error": "slow_down"}
TOKENS = {"id_token": "an-id-token", "access_token": "an-access-token"}


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with running() as process:
        yield process


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(login, "_INTERVAL_S", 0.01)
    monkeypatch.setattr(login, "_LEAST_S", 0.05)
    monkeypatch.setenv("GPUAAS_TOKEN_FILE", str(tmp_path / "token"))
    return tmp_path / "token"


def words(provider: Provider, *more: str, client: str = AUDIENCE) -> tuple[str, ...]:
    return ("login", "--issuer", provider.url, "--client-id", client, *more)


@pytest.mark.parametrize(
    ("more", "kept"), [((), "an-id-token"), (("--kind", "access"), "an-access-token")]
)
def test_the_token_is_kept_once_somebody_confirms(
    provider: Provider, gpuaas: Gpuaas, file: Path, more: tuple[str, ...], kept: str
) -> None:
    provider.set(device=[PENDING, SLOWER, PENDING, TOKENS])
    gpuaas(*words(provider, *more))
    assert gpuaas.status == 0, gpuaas.err
    assert "https://id.example/device" in gpuaas.err
    assert "ABCD-EFGH" in gpuaas.err
    assert kept not in gpuaas.out + gpuaas.err
    assert (file.read_text().strip(), stat.S_IMODE(file.stat().st_mode)) == (kept, 0o600)


@pytest.mark.parametrize(
    ("answers", "client", "found"),
    [
        ([{"error": "access_denied"}], AUDIENCE, "access_denied"),
        ([PENDING], AUDIENCE, "nobody did"),
        ([{"access_token": "no-id-token"}], AUDIENCE, "id_token"),
        ([TOKENS], "another", "invalid_client"),
    ],
)
def test_what_ends_without_a_token(
    provider: Provider, gpuaas: Gpuaas, file: Path, answers: Any, client: str, found: str
) -> None:
    provider.set(device=answers)
    gpuaas(*words(provider, client=client))
    assert (gpuaas.status, "login_failed" in gpuaas.err, found in gpuaas.err) == (1, True, True)
    assert not file.exists()


def test_no_provider_over_a_line_that_anybody_can_write_on(gpuaas: Gpuaas, file: Path) -> None:
    gpuaas("login", "--issuer", "http://id.example", "--client-id", "x")
    assert (gpuaas.status, "https" in gpuaas.err) == (1, True)
    gpuaas("login", "--issuer", "http://127.0.0.1:1", "--client-id", "x")
    assert (gpuaas.status, "login_failed" in gpuaas.err) == (1, True)
