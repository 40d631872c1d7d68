"""The service as it is installed: a wheel in an environment of its own, and no checkout."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import httpx
import pytest

from reconciler.shipped import COLLECTION
from scripts import sbom, standalone
from tests.bench.fleet.service import free_port

ROOT = Path(__file__).resolve().parents[3]
OURS = Path(sys.executable).parent
pytestmark = pytest.mark.slow

READS = """
import json, reconciler
from reconciler.benchmark.document import SCHEMA
from reconciler.runs import contract
from reconciler.profiles import hardware_profile
from reconciler.settings import Settings
from reconciler.trust import preflight
settings = Settings()
for name in (*contract.PLAYBOOKS, "result"):
    contract.schema(name)
profile = hardware_profile(settings.profiles_dir, "xe9680l-h200")
print(json.dumps({
    "package": reconciler.__file__,
    "benchmark": json.loads(SCHEMA.read_text())["type"],
    "script": preflight.document(profile)["script"][:2],
    "state": str(Settings.model_fields["state_dir"].default),
    "collections": str(Settings.model_fields["collections_path"].default),
}))
"""


@dataclass
class Installed:
    """`gpuaas` of the environment, with the file of settings that an operator copies."""

    folder: Path
    port: int

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": "/usr/bin:/bin", "GPUAAS_CONFIG_FILE": str(self.folder / "gpuaas.env")}

    def argv(self, *words: str) -> list[str]:
        return [str(self.folder / "opt" / "bin" / words[0]), *words[1:]]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*words),
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    _quietly(OURS / "python", "-m", "venv", "--without-pip", folder / "opt")
    python = folder / "opt" / "bin" / "python"
    _quietly(OURS / "uv", "pip", "install", "--no-deps", "--offline", "--python", python, wheel)
    (packages,) = (folder / "opt" / "lib").glob("python*/site-packages")
    _link_locked(packages)
    (python.parent / "ansible-playbook").symlink_to(OURS / "ansible-playbook")
    port = free_port()
    text = (ROOT / "packaging" / "gpuaas.env").read_text()
    for name, value in {
        "GPUAAS_STATE_DIR": folder / "state",
        "GPUAAS_LISTEN": f"127.0.0.1:{port}",
        "GPUAAS_PUBLIC_URL": f"https://gpuaas.example:{port}",
    }.items():
        lines = [f"{name}={value}" if f"{name}=" in line else line for line in text.splitlines()]
        text = "\n".join(lines) + "\n"
    (folder / "gpuaas.env").write_text(text)
    (folder / "gpuaas.env").chmod(0o640)
    return Installed(folder, port)


@pytest.fixture(scope="module")
def serving(installed: Installed) -> Iterator[Installed]:
    with (
        (installed.folder / "serve.log").open("wb") as log,
        subprocess.Popen(
            installed.argv("gpuaas", "serve"),
            env=installed.environment,
            cwd=installed.folder,
            stdout=log,
            stderr=log,
        ) as process,
    ):
        try:
            _until_ready(installed, process)
            yield installed
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def test_what_it_reads_comes_with_it(installed: Installed) -> None:
    answer = installed.run("python", "-c", READS)
    assert answer.returncode == 0, answer.stderr
    paths = json.loads(answer.stdout)
    package = paths.pop("package")
    assert package.startswith(str(installed.folder / "opt"))
    assert paths == {
        "benchmark": "object",
        "script": "#!",
        "state": "/var/lib/gpuaas",
        "collections": str(Path(package).parent / "_shipped" / "collections"),
    }


def test_service_and_commands_mean_one_site(serving: Installed) -> None:
    """Both find the site by the file of settings alone, when the service's user runs a command."""
    made = serving.run("gpuaas", "token", "create", "--role", "platform-admin", "--name", "me")
    assert made.returncode == 0, made.stderr
    headers = {"Authorization": f"Bearer {made.stdout.strip()}"}
    url = f"http://127.0.0.1:{serving.port}"
    with httpx.Client(base_url=url, headers=headers, timeout=60) as http:
        body = {"id": "n1", "address": "192.0.2.7", "profile": "xe9680l-h200"}
        assert http.post("/api/v1/admin/nodes", json=body).status_code == 201
        # An answer to an enrolment begins with a token; only its userdata is asked for here.
        assert http.post("/api/v1/admin/nodes/n1/enrollment-token").status_code == 201
    assert serving.run("gpuaas", "check").returncode == 0
    backup = serving.folder / "backup.tar.gz"
    assert serving.run("gpuaas", "backup", str(backup)).returncode == 0
    assert backup.stat().st_mode & 0o777 == 0o600


@pytest.fixture(scope="module")
def project(serving: Installed) -> str:
    """A project, and a token that the commands of the service's user find."""
    words = ["token", "create", "--role", "platform-admin", "--name", "operator", "--save"]
    saved = serving.run("gpuaas", *words)
    assert saved.returncode == 0, saved.stderr
    return str(_answer(serving, "projects", "add", "jobs")["id"])


def test_a_worker_of_jobs_serves_the_shipped_model(serving: Installed, project: str) -> None:
    log = serving.folder / "jobs.log"
    environment = {**serving.environment, "GPUAAS_LOG_LEVEL": "info"}
    with log.open("wb") as output:
        worker = subprocess.Popen(
            serving.argv("gpuaas", "jobs", "worker"),
            env=environment, cwd=serving.folder, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        end = time.monotonic() + 90
        while "takes jobs" not in log.read_text():
            assert worker.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        (serving.folder / "call.json").write_text('{"segments": [[0, 1, 1, 0, 0, 0, 0]]}')
        words = ("digits", "call.json", "--project", project, "--wait")
        assert _answer(serving, "jobs", "submit", *words)["result"]["digit"] == [1]
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0, log.read_text()
    finally:
        worker.kill()
        worker.wait()


def test_the_commands_of_the_documentation_get_a_digit(serving: Installed, project: str) -> None:
    """The first lines of the page about pools, as an operator types them."""
    page = (ROOT / "docs" / "pools.md").read_text()
    lines = page.split("```\n")[1].replace("--project P", f"--project {project} --output json")
    path = f"{serving.folder / 'opt' / 'bin'}:/usr/bin:/bin"
    done = subprocess.run(
        ["sh", "-ec", lines],
        env={**serving.environment, "PATH": path},
        cwd=serving.folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout[done.stdout.rindex("\n{\n") :])["result"]
    assert result["digit"] == [1], result
    assert _answer(serving, "pools", "stop", "demo", "--wait")["state"] == "stopped"


def test_a_person_s_own_function_answers_in_a_pool(serving: Installed, project: str) -> None:
    """The ten lines of Python of the documentation."""
    page = (ROOT / "docs" / "pools.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    models = serving.folder / "state" / "models"
    models.mkdir(mode=0o700, exist_ok=True)
    (models / "double.py").write_text(code + "\n\nrun = double\n")
    _until(lambda: "double" in _host(serving)["models"])
    words = ["--model", "double", "--memory", "512", "--wait"]
    assert _answer(serving, "pools", "start", "kit", *words)["state"] == "running"
    (serving.folder / "call.json").write_text('{"number": 21}')
    of_project = ("--project", project, "--wait")
    job = _answer(serving, "jobs", "submit", "double", "call.json", *of_project)
    assert job["result"] == {"twice": 42}
    assert _answer(serving, "pools", "stop", "kit", "--wait")["state"] == "stopped"


def test_without_onnxruntime_nothing_offers_the_shipped_model(
    serving: Installed, project: str
) -> None:
    (packages,) = (serving.folder / "opt").glob("lib/python*/site-packages")
    runtime, away = packages / "onnxruntime", serving.folder / "onnxruntime"
    assert "digits" in _host(serving)["models"]
    runtime.rename(away)
    try:
        _until(lambda: "digits" not in _host(serving)["models"])
        assert "drill" in _host(serving)["models"]
        for words in ((), ("--models", str(serving.folder), "--model", "digits")):
            refused = serving.run("gpuaas", "jobs", "worker", *words)
            assert refused.returncode == 1
            assert "gpuaas-slice[worker]" in refused.stderr, refused.stderr
            assert "Traceback" not in refused.stderr
    finally:
        away.rename(runtime)
    _until(lambda: "digits" in _host(serving)["models"])


def test_the_doctor_finds_it_whole(serving: Installed) -> None:
    findings = _doctor(serving)
    named = {finding["check"] for finding in findings}
    assert {"collection", "profiles", "ansible-playbook", "processes", "ssh_ca"} <= named
    # Disk space and fabric depend on the site, and the first token is not created yet.
    wrong = [finding for finding in findings if finding["status"] != "ok"]
    assert {finding["check"] for finding in wrong} <= {"disk_space", "fabric", "tokens"}, wrong


def test_the_units_leave_settings_to_the_file() -> None:
    """A unit with a state folder of its own would be a different site than that of the commands."""
    for unit in (ROOT / "packaging" / "systemd").glob("*.service"):
        assert "GPUAAS_" not in unit.read_text().replace("/etc/gpuaas/gpuaas.env", "")
    text = (ROOT / "packaging" / "gpuaas.env").read_text()
    assert "\nGPUAAS_STATE_DIR=/var/lib/gpuaas\n" in text


def test_every_profile_is_in_the_wheel(installed: Installed) -> None:
    (carried,) = (installed.folder / "opt").glob("lib/python*/site-packages/reconciler/_shipped")
    for kind in ("profiles", "contracts", "contracts/runs", "monitoring/alerts"):
        ours = {file.name: file.read_bytes() for file in (ROOT / kind).iterdir() if file.is_file()}
        theirs = {f.name: f.read_bytes() for f in (carried / kind).iterdir() if f.is_file()}
        assert ours == theirs


def test_the_collection_is_in_the_wheel_and_is_played_from_there(installed: Installed) -> None:
    (carried,) = (installed.folder / "opt").glob("lib/python*/site-packages/reconciler/_shipped")
    folder = carried / "collections" / COLLECTION
    for part in ("galaxy.yml", "meta", "playbooks", "plugins", "roles"):
        assert _files(folder / part) == _files(ROOT / part)
    words = ["discover", "provision_slice", "release_slice"]
    done = subprocess.run(
        [OURS / "ansible-playbook", "--syntax-check", "-i", "localhost,"]
        + [f"gpuaas.slice.{word}" for word in words],
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(installed.folder),
            "ANSIBLE_COLLECTIONS_PATH": str(carried / "collections"),
            "ANSIBLE_COLLECTIONS_SCAN_SYS_PATH": "false",
        },
        cwd=installed.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.count(f"playbook: {folder}") == len(words), done.stderr


def test_every_program_for_hosts_is_in_the_wheel(installed: Installed) -> None:
    (carried,) = (installed.folder / "opt").glob("lib/python*/site-packages/reconciler/_shipped")
    for script in standalone.SCRIPTS:
        assert (carried / script.path).read_text() == standalone.build(script)


def _files(place: Path) -> dict[str, bytes]:
    """Content by path; without compiled files, which Ansible writes beside a plugin."""
    if place.is_file():
        return {"": place.read_bytes()}
    return {
        str(file.relative_to(place)): file.read_bytes()
        for file in place.rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }


def _answer(here: Installed, *words: str) -> dict[str, Any]:
    """The JSON document that a command prints."""
    done = here.run("gpuaas", *words, "--output", "json")
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def _host(here: Installed) -> dict[str, Any]:
    done = here.run("gpuaas", "pools", "hosts", "--output", "json")
    assert done.returncode == 0, done.stderr
    (host,) = json.loads(done.stdout)
    return dict(host)


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


def _link_locked(packages: Path) -> None:
    """The packages of the service's lock, as they are installed here, and no others."""
    locked = sbom.pins((ROOT / "requirements.lock").read_text())
    for each in distributions():
        if re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower() in locked:
            names = {file.parts[0] for file in each.files or ()} - {"..", "__pycache__"}
            for name in names:
                (packages / name).symlink_to(each.locate_file(name))


def _doctor(here: Installed) -> list[dict[str, Any]]:
    answer = here.run("gpuaas", "doctor", "--output", "json")
    findings: list[dict[str, Any]] = json.loads(answer.stdout)["findings"]
    return findings


def _until_ready(here: Installed, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 90
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{here.port}/readyz", timeout=30).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError((here.folder / "serve.log").read_text())


def _quietly(*words: str | Path) -> None:
    argv = [str(word) for word in words]
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=180, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
