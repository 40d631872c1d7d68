"""The host's address on the fabric, as netplan reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpuaas.slice.plugins.module_utils import _change, _host, _ipoib

pytestmark = pytest.mark.covers("HOST-7")

PARAMS = {"interface": "ibp65s0", "address": "10.20.0.7/16", "route": "10.20.0.0/16"}


def drive(**more: str) -> _change.Outcome:
    return _change.drive(_ipoib.SUBJECT, PARAMS | more, check_mode=False)


def test_the_file_is_what_netplan_takes_and_written_once(tree: Path, script: Any) -> None:
    script.on("netplan", "apply")
    assert drive().done == ["remember_before", "write_netplan"]
    text = _host.read(_ipoib.FILE)
    assert text is not None
    assert yaml.safe_load(text)["network"]["ethernets"] == {
        "ibp65s0": {
            "addresses": ["10.20.0.7/16"],
            "routes": [{"to": "10.20.0.0/16", "scope": "link"}],
        }
    }
    assert _host.path(_ipoib.FILE).stat().st_mode & 0o777 == 0o600
    assert not drive().changed
    assert drive(route="").changed


@pytest.mark.parametrize(
    "bad",
    [
        {"interface": ""},
        {"interface": 'ib": {}'},
        {"address": ""},
        {"address": "10.20.0.7/33"},
        {"route": "default\nx: y"},
    ],
)
def test_what_netplan_would_read_as_more_is_refused(
    tree: Path, script: Any, bad: dict[str, str]
) -> None:
    failure = drive(**bad).failure
    assert failure is not None and failure.code == "ipoib_invalid"
    assert _host.read(_ipoib.FILE) is None


@pytest.mark.covers("HOST-15")
@pytest.mark.parametrize("was", [None, "network: {version: 2, renderer: networkd}\n"])
def test_the_sites_own_file_comes_back_or_ours_goes(
    tree: Path, script: Any, was: str | None
) -> None:
    script.on("netplan", "apply")
    if was:
        _host.write(_ipoib.FILE, was)
    drive()
    drive(address="10.20.0.8/16")
    assert drive(state="absent").failure is None
    assert _host.read(_ipoib.FILE) == (was.strip() if was else None)
    assert not drive(state="absent").changed


@pytest.mark.covers("HOST-15")
def test_what_somebody_puts_over_our_file_is_not_what_was_before(tree: Path, script: Any) -> None:
    script.on("netplan", "apply")
    drive()
    _host.write(_ipoib.FILE, "network: {version: 2}\n")
    assert drive().done == ["write_netplan"]
    assert drive(state="absent").done == ["remove_netplan", "forget_before"]
    assert _host.read(_ipoib.FILE) is None


@pytest.mark.covers("HOST-15")
def test_a_file_of_the_site_is_not_ours_to_remove(tree: Path, script: Any) -> None:
    _host.write(_ipoib.FILE, "network: {version: 2}\n")
    assert not drive(state="absent").changed
