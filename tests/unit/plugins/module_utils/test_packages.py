"""Packages: dpkg is asked once, apt only for what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpuaas.slice.plugins.module_utils import _before, _change, _packages

pytestmark = pytest.mark.covers("HOST-4")

ROOT = Path(__file__).resolve().parents[4]
QUERY = ("dpkg-query", "--show", "--showformat=${db:Status-Status} ${Package}\\n", "--")
APT = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "--quiet", "-o")
LOCK = "DPkg::Lock::Timeout=600"


@pytest.fixture(autouse=True)
def host(tree: Path) -> None:
    """Records go into the tree of a host, never into this machine's."""


def drive(*packages: str) -> _change.Outcome:
    return _change.drive(_packages.SUBJECT, {"packages": list(packages)}, check_mode=False)


def test_this_machines_own_packages_need_no_apt() -> None:
    """The real dpkg-query."""
    outcome = drive("bash", "coreutils")
    assert (outcome.failure, outcome.plan.steps) == (None, ())


def test_what_is_missing_or_only_removed_is_installed(script: Any) -> None:
    wanted = ("ovmf", "zstd", "dnsmasq")
    before, after = (
        "installed zstd\nconfig-files dnsmasq\n",
        "".join(f"installed {name}\n" for name in wanted),
    )
    script.on(*QUERY, *wanted, out=before, rc=1).on(*QUERY, *wanted, out=after)
    install = (*APT, LOCK, "install", "--yes", "--no-install-recommends", "--", "ovmf", "dnsmasq")
    script.on(*APT, LOCK, "update").on(*install)
    assert drive(*wanted).done == ["install_packages"]
    assert script.calls[1:3] == [(*APT, LOCK, "update"), install]
    # The way back asks which of them were not there before.
    assert _before.recalled(_packages.RECORD) == dict.fromkeys(["ovmf", "dnsmasq"], "installed")


def test_a_package_that_apt_did_not_bring_is_no_success(script: Any) -> None:
    script.on(*QUERY, "ovmf", rc=1)
    script.on(*APT, LOCK, "update")
    script.on(*APT, LOCK, "install", "--yes", "--no-install-recommends", "--", "ovmf")
    outcome = drive("ovmf")
    assert outcome.failure is not None and outcome.failure.code == "verify_failed"


@pytest.mark.parametrize("name", ["--allow-unauthenticated", "a b", "x=1", "", "UP", "a\nb"])
def test_a_name_that_apt_would_read_as_more_is_refused(script: Any, name: str) -> None:
    outcome = drive(name)
    assert outcome.failure is not None and outcome.failure.code == "package_invalid"
    assert script.calls == []


def test_the_roles_list_is_the_scripts_list() -> None:
    defaults = yaml.safe_load((ROOT / "roles/slice_packages/defaults/main.yml").read_text())
    assert tuple(defaults["slice_packages_required"]) == _packages.REQUIRED
