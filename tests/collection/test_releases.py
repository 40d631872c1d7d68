"""The collection under each release of ansible-core that it claims, as far as this Python allows.

Each release is unpacked and uses the packages of the lock. Its row in the README comes from
a run of this test.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from reconciler.runs import contract
from scripts.scenarios import RELEASES
from tests.collection.conftest import ROOT, Installed

pytestmark = pytest.mark.covers("ECO-1")

LOCK = dict(
    line.split() for line in (ROOT / "tests/collection/releases.txt").read_text().splitlines()
)
# The oldest Python on which a release runs, where it is newer than the project's oldest.
PYTHON = {"2.20": (3, 12)}


def series(release: str) -> str:
    return release.rpartition(".")[0]


@pytest.fixture(params=RELEASES.rows)
def release(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    if sys.version_info < (needed := PYTHON.get(series(chosen), (3, 11))):
        pytest.skip(f"ansible-core {chosen} needs Python {'.'.join(map(str, needed))}")
    return chosen


def unpacked(release: str) -> Path:
    folder = ROOT / "build" / f"ansible-core-{release}"
    wheel = f"ansible-core=={release}"
    digest = LOCK[wheel].removeprefix("--hash=")
    subprocess.run([ROOT / "scripts/unpack-wheel", wheel, digest, folder], check=True)
    return folder


def test_a_release_of_ansible_takes_and_runs_the_collection(
    release: str, installed: Installed
) -> None:
    ansible = replace(installed, core=unpacked(release))
    assert f"[core {release}]" in ansible.run("ansible-playbook", "--version")
    modules = {f"gpuaas.slice.{path.stem}" for path in installed.path.glob("plugins/modules/*.py")}
    documents = ansible.json("ansible-doc", "--json", *sorted(modules))
    assert set(documents) == modules
    playbooks = {f"gpuaas.slice.{path.stem}" for path in installed.path.glob("playbooks/*.yml")}
    listed = ansible.run("ansible-playbook", "--syntax-check", "-i", "localhost,", *playbooks)
    assert listed.count("playbook: ") == len(playbooks)
    assert contract.check_result(ansible.discovered())["evidence"]["discovery"]["schema"] == 1
    RELEASES.record(release, f"{sys.version_info.major}.{sys.version_info.minor}")


def test_the_collection_claims_the_releases_that_are_played() -> None:
    claim = yaml.safe_load((ROOT / "meta/runtime.yml").read_text())["requires_ansible"]
    oldest, newest = (series(RELEASES.rows[place]).split(".") for place in (0, -1))
    assert claim == f">={'.'.join(oldest)}.0,<{newest[0]}.{int(newest[1]) + 1}"
    for role in ROOT.glob("roles/*/meta/main.yml"):
        found = yaml.safe_load(role.read_text())["galaxy_info"]["min_ansible_version"]
        assert found == ".".join(oldest), role
