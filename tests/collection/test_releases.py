"""The collection under each release of ansible-core that it claims.

Each release is unpacked and uses the packages of the lock. A release that needs a newer Python than
the tests is `long`, and uses an installed Python. The README's rows come from runs of this test.
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
from tests.unit.plugins.inventory import inventories

pytestmark = pytest.mark.covers("ECO-1")

LOCK = dict(
    line.split() for line in (ROOT / "tests/collection/releases.txt").read_text().splitlines()
)
# The oldest Python on which a release runs, where it is newer than the project's oldest.
PYTHON = {"2.20": (3, 12)}
UV = Path(sys.executable).with_name("uv")


def series(release: str) -> str:
    return release.rpartition(".")[0]


def too_new(release: str) -> bool:
    return sys.version_info < PYTHON.get(series(release), (3, 11))


@pytest.fixture(
    params=[
        pytest.param(row, marks=pytest.mark.long if too_new(row) else ()) for row in RELEASES.rows
    ]
)
def release(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def python_of(release: str, folder: Path) -> str:
    """A Python on which the release runs, with the packages of the lock."""
    if not too_new(release):
        return sys.executable
    version = f">={'.'.join(map(str, PYTHON[series(release)]))},<3.14"
    command = [UV, "python", "find", "-q", "--no-project", "--no-python-downloads", version]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"ansible-core {release} needs a Python {version} on the search path")
    python = folder / "python" / "bin" / "python"
    subprocess.run([UV, "venv", "-q", "-p", done.stdout.strip(), python.parents[1]], check=True)
    install = [UV, "pip", "install", "-q", "--require-hashes", "-p", python]
    subprocess.run([*install, "-r", ROOT / "requirements.lock"], check=True)
    return str(python)


def unpacked(release: str) -> Path:
    folder = ROOT / "build" / f"ansible-core-{release}"
    wheel = f"ansible-core=={release}"
    digest = LOCK[wheel].removeprefix("--hash=")
    subprocess.run([ROOT / "scripts/unpack-wheel", wheel, digest, folder], check=True)
    return folder


def test_a_release_of_ansible_takes_and_runs_the_collection(
    release: str, installed: Installed, tmp_path: Path
) -> None:
    python = python_of(release, tmp_path)
    ansible = replace(installed, core=unpacked(release), python=python)
    assert f"[core {release}]" in ansible.run("ansible-playbook", "--version")
    modules = {f"gpuaas.slice.{path.stem}" for path in installed.path.glob("plugins/modules/*.py")}
    documents = ansible.json("ansible-doc", "--json", *sorted(modules))
    assert set(documents) == modules
    playbooks = {f"gpuaas.slice.{path.stem}" for path in installed.path.glob("playbooks/*.yml")}
    listed = ansible.run("ansible-playbook", "--syntax-check", "-i", "localhost,", *playbooks)
    assert listed.count("playbook: ") == len(playbooks)
    result = contract.check_result(ansible.discovered())
    assert (result["ok"], result["evidence"]["discovery"]["schema"]) == (True, 1)
    assert_inventories(ansible, tmp_path)
    series_of = "import sys; print('%d.%d' % sys.version_info[:2])"
    RELEASES.record(release, subprocess.check_output([python, "-c", series_of], text=True).strip())


def assert_inventories(ansible: Installed, folder: Path) -> None:
    """Both inventory plugins, which build on classes of Ansible that change with its releases."""
    trap = "{{ lookup('ansible.builtin.pipe', 'touch " + str(folder / "trap") + "') }}"
    made = {"compose": {"copied": "gpuaas_name ~ ''"}, "strict": True}
    with inventories.answering() as service:
        service.answers = {
            "nodes": inventories.page({**inventories.NODE, "name": trap}),
            "machines": [inventories.deployed("gpu1")],
        }
        zones = [{"prefix": "zone", "key": "maas_zone"}]
        url = {case: service.url(case) for case in service.answers}
        nodes = inventories.source(folder, "reconciler", url=url["nodes"], **made)
        machines = inventories.source(folder, "maas", url=url["machines"], keyed_groups=zones)
        words = ("-i", str(nodes), "-i", str(machines), "--list")
        listed = ansible.json("ansible-inventory", *words)
    assert listed["zone_rack_1"] == {"hosts": ["gpu1"]}
    node = listed["_meta"]["hostvars"]["node-1"]
    assert node["copied"] == {"__ansible_unsafe": trap}
    assert node["gpuaas_scheduling"] is True
    assert not (folder / "trap").exists()


def test_the_collection_claims_the_releases_that_are_played() -> None:
    claim = yaml.safe_load((ROOT / "meta/runtime.yml").read_text())["requires_ansible"]
    oldest, newest = (series(RELEASES.rows[place]).split(".") for place in (0, -1))
    assert claim == f">={'.'.join(oldest)}.0,<{newest[0]}.{int(newest[1]) + 1}"
    for role in ROOT.glob("roles/*/meta/main.yml"):
        minimum = yaml.safe_load(role.read_text())["galaxy_info"]["min_ansible_version"]
        assert minimum == ".".join(oldest), role
