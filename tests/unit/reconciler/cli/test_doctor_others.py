"""`gpuaas doctor` asks the provider of identities and AWX, both as processes of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.standin.bmc import authority
from tests.standin.controller import Controller, standing
from tests.unit.reconciler.api.provider import Provider, running
from tests.unit.reconciler.cli.conftest import Gpuaas

TEMPLATES = "GET /job_templates/"


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with running() as provider:
        yield provider


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    with standing(tmp_path_factory.mktemp("awx")) as controller:
        yield controller


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(tmp_path))


def findings(gpuaas: Gpuaas, check: str) -> list[tuple[str, str]]:
    rows = json.loads(gpuaas("doctor", "--output", "json"))["findings"]
    return [(row["status"], row["found"]) for row in rows if row["check"] == check]


@pytest.mark.covers("CTRL-10")
@pytest.mark.usefixtures("site")
def test_the_provider_of_identities(
    gpuaas: Gpuaas, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = "identity_provider"
    assert findings(gpuaas, check) == [], "a site without one"
    monkeypatch.setenv("GPUAAS_OIDC_ISSUER", provider.url)
    monkeypatch.setenv("GPUAAS_OIDC_AUDIENCE", "gpuaas")
    assert findings(gpuaas, check) == [("ok", f"{provider.url}: 3 keys")]
    provider.set(issuer="https://elsewhere.example")
    ((status, text),) = findings(gpuaas, check)
    assert (status, "names another issuer" in text) == ("warn", True)
    provider.set(issuer="", down=True)
    ((status, text),) = findings(gpuaas, check)
    assert (status, provider.url in text) == ("warn", True)
    monkeypatch.setenv("GPUAAS_OIDC_CA_FILE", "/none/ca.pem")
    provider.set(down=False)
    ((status, text),) = findings(gpuaas, check)
    assert (status, "No such file" in text) == ("warn", True)


@pytest.mark.covers("CTRL-10")
@pytest.mark.usefixtures("site")
def test_a_ca_of_the_sites_own(
    gpuaas: Gpuaas, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is no provider: with its CA it is at least heard."""
    controller.begin()
    monkeypatch.setenv("GPUAAS_OIDC_ISSUER", controller.url)
    monkeypatch.setenv("GPUAAS_OIDC_AUDIENCE", "gpuaas")
    ((_, text),) = findings(gpuaas, "identity_provider")
    assert "CERTIFICATE_VERIFY_FAILED" in text
    monkeypatch.setenv("GPUAAS_OIDC_CA_FILE", str(controller.ca_file))
    ((_, text),) = findings(gpuaas, "identity_provider")
    assert "401" in text


@pytest.mark.covers("CTRL-9")
@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ({}, [("ok", " job templates as required")]),
        ({"without": ["gpuaas.slice.parity"]}, [("fail", "parity: 0 of that name")]),
        (
            {"changed": {"gpuaas.slice.parity": {"project": 6}}},
            [("fail", ", and gpuaas.slice (6) in gpuaas.slice.parity")],
        ),
        ({"jinja": "always"}, [("fail", "awx_jinja_allowed")]),
        (
            {"privileged": False},
            [("ok", " job templates as required"), ("warn", "may not read whether AWX expands")],
        ),
        ({"status": {TEMPLATES: [401, 99]}}, [("fail", "awx_unauthorized")]),
    ],
)
def test_awx(
    gpuaas: Gpuaas,
    controller: Controller,
    monkeypatch: pytest.MonkeyPatch,
    faults: dict[str, Any],
    expected: list[tuple[str, str]],
) -> None:
    controller.begin(**{"privileged": True, **faults})
    monkeypatch.setenv("GPUAAS_LAUNCHER", "awx")
    monkeypatch.setenv("GPUAAS_AWX_URL", controller.url)
    monkeypatch.setenv("GPUAAS_AWX_TOKEN_FILE", str(controller.token_file))
    monkeypatch.setenv("GPUAAS_AWX_CA_FILE", str(controller.ca_file))
    result = findings(gpuaas, "awx")
    assert [status for status, _ in result] == [status for status, _ in expected]
    assert all(part in answer for (_, answer), (_, part) in zip(result, expected, strict=True)), (
        result
    )


@pytest.mark.usefixtures("site")
def test_the_project_of_all_templates_is_read_once(
    gpuaas: Gpuaas, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller.begin(privileged=True)
    monkeypatch.setenv("GPUAAS_LAUNCHER", "awx")
    monkeypatch.setenv("GPUAAS_AWX_URL", controller.url)
    monkeypatch.setenv("GPUAAS_AWX_TOKEN_FILE", str(controller.token_file))
    monkeypatch.setenv("GPUAAS_AWX_CA_FILE", str(controller.ca_file))
    monkeypatch.setenv("GPUAAS_AWX_PROJECT_URL", "https://git.example/other")
    ((status, text),) = findings(gpuaas, "awx")
    assert status == "fail" and "19 others: scm_url" in text, text
    reads = [each for each in controller.record()["requests"] if "/projects/" in each]
    assert len(reads) == 1, reads


@pytest.mark.usefixtures("site")
def test_an_awx_that_nobody_vouches_for(
    gpuaas: Gpuaas, controller: Controller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certificate, _ = authority(tmp_path, "other", "IP:127.0.0.1")
    monkeypatch.setenv("GPUAAS_LAUNCHER", "awx")
    monkeypatch.setenv("GPUAAS_AWX_URL", controller.url)
    monkeypatch.setenv("GPUAAS_AWX_TOKEN_FILE", str(controller.token_file))
    monkeypatch.setenv("GPUAAS_AWX_CA_FILE", str(certificate))
    ((status, text),) = findings(gpuaas, "awx")
    assert (status, "awx_untrusted" in text) == ("fail", True)
