"""Dependencies: each is pinned with digests, installed as pinned, and in the bill of materials."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest

from scripts import sbom

pytestmark = pytest.mark.covers("P16")

ROOT = Path(__file__).resolve().parents[3]
SERVICE = (ROOT / "requirements.lock").read_text()
TESTS = (ROOT / "requirements-dev.lock").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def canonical(name: str) -> str:
    """Name of a requirement such as "psycopg[binary]>=3.2", as the locks spell it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=~; ]", name)[0]).lower()


def test_the_service_is_locked_apart_from_its_tests() -> None:
    service, tests = sbom.pins(SERVICE), sbom.pins(TESTS)
    needed = (
        PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["worker"]
    )
    assert {canonical(name) for name in needed} <= set(service)
    needed = [*PROJECT["dependency-groups"]["dev"], *PROJECT["build-system"]["requires"]]
    assert {canonical(name) for name in needed} <= set(tests)
    assert service.items() <= tests.items(), "the tests run on the packages of the service"
    assert not {"pytest", "hypothesis", "schemathesis", "molecule", "mypy", "uv"} & set(service)


@pytest.mark.parametrize(
    "line",
    [
        "httpx==0.28.1\n",
        "httpx>=0.27 --hash=sha256:" + "0" * 64,
        "httpx @ https://example.org/httpx.whl --hash=sha256:" + "0" * 64,
        "httpx==0.28.1 --hash=md5:" + "0" * 32,
        "httpx==0.28.1 --hash=sha256:" + "0" * 64 + " --hash=sha1:" + "0" * 40,
        "--extra-index-url https://example.org/simple",
    ],
)
def test_a_line_that_is_not_locked_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="found"):
        sbom.pins(line)


def test_what_is_installed_is_what_is_locked() -> None:
    """pip is older than the lock: it installs uv, which installs everything else."""
    locked = {name: version for name, (version, _) in sbom.pins(TESTS).items()}
    installed = {canonical(each.metadata["Name"]): each.version for each in distributions()}
    others = {"pip", "setuptools", PROJECT["project"]["name"]}
    assert {
        name: version for name, version in installed.items() if locked.get(name) != version
    }.keys() <= others


def test_nothing_is_installed_without_its_digest() -> None:
    """Programs and pages that install from a package index.

    ansible-test has requirements of its own, which it pins (`scripts/archive_sanity.py`).
    """
    words = ["git", "grep", "-hE", r"pip('|\") install|pip install|\"pip\", \"install\"", "--"]
    places = [
        "scripts",
        ":!scripts/archive_sanity.py",
        "Makefile",
        ".ci",
        "packaging",
        "docs",
        "README.md",
        "CONTRIBUTING.md",
    ]
    lines = subprocess.run(
        [*words, *places], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert len(lines) >= 4
    assert [row for row in lines if not re.search(r"--require-hashes|--no-deps", row)] == []
    assert "--no-deps --build-constraints" in (ROOT / "scripts" / "setup").read_text()


def test_the_bill_of_materials_has_every_package_with_its_digests() -> None:
    bill = json.loads(sbom.document(SERVICE, PROJECT["project"]))
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == (
        "CycloneDX",
        "gpuaas-slice",
    )
    listed = {
        each["name"]: (
            each["version"],
            sorted(row["content"] for row in each["externalReferences"][0]["hashes"]),
        )
        for each in bill["components"]
    }
    assert listed == {
        name: (version, sorted(digests)) for name, (version, digests) in sbom.pins(SERVICE).items()
    }
    assert all(each["purl"].startswith("pkg:pypi/") for each in bill["components"])


@pytest.mark.parametrize("code", [0, 1])
def test_the_audit_is_of_the_lock_by_a_pinned_tool_and_fails_with_it(
    tmp_path: Path, code: int
) -> None:
    """With stand-ins for the setup and uv, because the findings depend on public databases."""
    for program, text in (
        ("scripts/setup", "exit 0"),
        (".venv/bin/uv", f'printf "%s\\n" "$@" >called\nexit {code}'),
    ):
        path = tmp_path / program
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    make = ["make", "--no-print-directory", "-C", str(tmp_path), "-f", str(ROOT / "Makefile")]
    done = subprocess.run([*make, "audit"], check=False, capture_output=True, text=True)
    assert (done.returncode != 0) is (code != 0), done.stderr
    called = (tmp_path / "called").read_text().splitlines()
    assert called[:2] == ["tool", "run"]
    assert re.fullmatch(r"pip-audit==\d+\.\d+\.\d+", called[2])
    assert {"--strict", "--require-hashes"} <= set(called)
    assert called[called.index("-r") + 1] == "requirements.lock"
    assert "requirements-dev.lock" not in called
