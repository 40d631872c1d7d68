"""Compose file and execution environment: their form. No container engine runs them here."""

from __future__ import annotations

import json
import re
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.main import get_command

from reconciler.cli.main import app
from reconciler.settings import Settings
from tests.unit.packaging.machine import ROOT
from tests.unit.repository.test_docs import parse, words

FOLDER = ROOT / "packaging" / "compose"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: row for name, row in SERVICES.items() if row["image"] == "gpuaas:local"}
DASHBOARDS = "/var/lib/grafana/dashboards"
# Variables that the page's commands set. Another variable without a default would be an error.
PAGE = (ROOT / "docs/scaling.md").read_text().partition("## In containers")[2]
EXPORTED = dict(pair.split("=") for pair in re.findall(r"^export (.+)$", PAGE, re.M)[0].split())
CA = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGPuYXMtdGVzdC1jYS1wdWJsaWMta2V5LTAwMDAwMDAw"


def test_the_compose_file_has_the_form_of_the_specification() -> None:
    vendored = files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    jsonschema.Draft7Validator(json.loads(vendored.read_text())).validate(COMPOSE)
    assert {"postgres", "redis", "api", "worker", "gateway", "prometheus", "grafana"} == set(
        SERVICES
    )
    for service in SERVICES.values():
        names = {each.split(":")[0] for each in service.get("volumes", ())}
        assert {name for name in names if "/" not in name} <= set(COMPOSE["volumes"])
        assert set(service.get("depends_on", ())) <= set(SERVICES)
        assert set(service.get("secrets", ())) <= set(COMPOSE["secrets"])


@pytest.mark.parametrize("name", OURS)
def test_a_container_starts_a_command_with_settings_that_exist(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, settings = OURS[name]["command"], OURS[name]["environment"]
    gpuaas: Any = get_command(app)
    gpuaas.commands[words[0]].make_context(words[0], words[1:])
    for variable, value in settings.items():
        filled = re.sub(r"\$\{(\w+):[-?]([^}]*)\}", _given, value)
        monkeypatch.setenv(variable, filled)
        assert variable.removeprefix("GPUAAS_").lower() in Settings.model_fields
    read = Settings()
    role = "gpuaas_gateway:" if name == "gateway" else "gpuaas:secret"
    assert read.database_url == f"postgresql+psycopg://{role}@postgres/gpuaas"
    assert read.url_for_hosts == "https://gpuaas.example"
    # Without it the gateway does not start.
    assert read.member_address == "ssh.gpuaas.example:2222"
    assert read.workers == (4 if name == "worker" else 3)


def test_what_a_container_mounts_is_in_the_folder() -> None:
    mounted = [each for row in SERVICES.values() for each in row.get("volumes", ())]
    sources = {each.split(":")[0] for each in mounted if each.startswith(".")}
    # The site's own: its images, and the token that Prometheus gets.
    assert {source for source in sources if not (FOLDER / source).exists()} == {"./images"}
    prometheus = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert prometheus["scrape_configs"][0]["static_configs"] == [{"targets": ["api:8080"]}]
    # Alerts and dashboard are those of every site.
    assert "../../monitoring/alerts:/etc/prometheus/alerts:ro" in mounted
    assert prometheus["rule_files"] == ["alerts/*.yml"]
    assert f"../../monitoring/grafana:{DASHBOARDS}:ro" in mounted
    provider = yaml.safe_load((FOLDER / "grafana" / "dashboards.yml").read_text())["providers"][0]
    assert provider["options"] == {"path": DASHBOARDS}


def test_the_page_has_the_commands_of_the_program_and_a_token_for_a_person() -> None:
    """`run` goes through the entry point of the image, and `exec` does not."""
    start = r"^docker compose (?:run --rm|exec(?: -T)?) (?:{}) (?:(/\S+) )?(.+)$"
    lines = re.findall(start.format("|".join(OURS)), PAGE.partition("\n## ")[0], re.M)
    assert {program for program, _ in lines} == {"", "/opt/gpuaas/bin/gpuaas"}
    assert 'ENTRYPOINT ["/opt/gpuaas/bin/gpuaas"]' in OURS["api"]["build"]["dockerfile_inline"]
    for _, line in lines:
        parse(words(f"gpuaas {line}"), whole=True)
    shown = [line for _, line in lines if line.startswith("token create") and ">" not in line]
    assert shown == ["token create --role platform-admin --name YOU"]


@pytest.mark.long
def test_the_execution_environment_is_one_of_ansible_builder(tmp_path: Path) -> None:
    key = tmp_path / "host_ca.pub"
    key.write_text(f"{CA} gpuaas host authority\n")
    made = _make("execution-environment", str(key), str(tmp_path))
    assert made.returncode == 0, made.stdout + made.stderr
    context = tmp_path / "context"
    assert (context / "_build" / "ssh_known_hosts").read_text() == f"@cert-authority * {CA}\n"
    assert (context / "_build" / "gpuaas-slice.tar.gz").stat().st_size > 100_000
    assert "openssh-client" in (context / "_build" / "bindep.txt").read_text()
    steps = (context / "Containerfile").read_text()
    assert "COPY _build/ssh_known_hosts /etc/ssh/ssh_known_hosts" in steps
    assert 'ARG ANSIBLE_INSTALL_REFS="ansible-core>=2.19,<2.20' in steps


def test_an_execution_environment_without_our_authority_is_refused(tmp_path: Path) -> None:
    refused = _make("execution-environment", str(tmp_path / "none"))
    assert refused.returncode == 1
    assert "expected CA=FILE" in refused.stderr and "certified" in refused.stderr


def _make(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [str(ROOT / "scripts" / script), *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)


def _given(variable: re.Match[str]) -> str:
    required = ":?" in variable[0]
    value = EXPORTED[variable[1]] if required else variable[2]
    return "secret" if value == "…" else value
