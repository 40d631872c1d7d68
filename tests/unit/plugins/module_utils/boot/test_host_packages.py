"""Host packages: a single dpkg query, and apt only for missing packages."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _apt, _host_packages
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host_snapshot
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

pytestmark = pytest.mark.covers("HOST-4")

ROOT = Path(__file__).resolve().parents[5]
QUERY = ("dpkg-query", "--show", "--showformat=${db:Status-Status} ${Package}\\n", "--")
APT = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "--quiet", "-o")
LOCK = "DPkg::Lock::Timeout=600"
POLICY = (
    "apt-cache", "-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache=", "policy", "--",
)  # fmt: skip
OFFERED = "{0}:\n  Installed: (none)\n  Candidate: 2.0.19\n  Version table:\n     2.0.19 500\n"
NOT_OFFERED = "{0}:\n  Installed: (none)\n  Candidate: (none)\n  Version table:\n"


@pytest.fixture(autouse=True)
def host(tree: Path) -> None:
    """Records go into the tree of a host, never into this machine's."""


def drive(*packages: str, optional: tuple[str, ...] = (), check: bool = False) -> _change.Outcome:
    params = {"packages": list(packages), "optional": list(optional)}
    return _change.drive(_host_packages.SUBJECT, params, check_mode=check)


def install(*names: str) -> tuple[str, ...]:
    return (*APT, LOCK, "install", "--yes", "--no-install-recommends", "--", *names)


def test_this_machines_own_packages_need_no_apt() -> None:
    """By the real dpkg-query."""
    outcome = drive("bash", "coreutils")
    assert (outcome.failure, outcome.plan.steps) == (None, ())


def test_what_is_missing_or_only_removed_is_installed(script: Any) -> None:
    missing = ("ovmf", "zstd", "dnsmasq")
    before, after = (
        "installed zstd\nconfig-files dnsmasq\n",
        "".join(f"installed {name}\n" for name in missing),
    )
    script.on(*QUERY, *missing, out=before, rc=1).on(*QUERY, *missing, out=after)
    script.on(*APT, LOCK, "update").on(*install("ovmf", "dnsmasq"))
    assert drive(*missing).done == ["install_packages"]
    assert script.calls[1:3] == [(*APT, LOCK, "update"), install("ovmf", "dnsmasq")]
    # The way back needs the record of packages that were not installed before.
    assert _host_snapshot.recall(_host_packages.RECORD) == dict.fromkeys(
        ["ovmf", "dnsmasq"], "installed"
    )


def test_a_package_that_apt_did_not_bring_is_no_success(script: Any) -> None:
    script.on(*QUERY, "ovmf", rc=1)
    script.on(*APT, LOCK, "update")
    script.on(*install("ovmf"))
    outcome = drive("ovmf")
    assert outcome.failure.code == "verify_failed"


@pytest.mark.parametrize("mended", [True, False])
def test_what_a_killed_dpkg_left_is_configured_once(script: Any, mended: bool) -> None:
    broken = "E: dpkg was interrupted, you must manually run 'dpkg --configure -a'"
    script.on(*QUERY, "ovmf", rc=1)
    script.on(*APT, LOCK, "update").on(*install("ovmf"), rc=100, err=broken)
    mend = ("env", "DEBIAN_FRONTEND=noninteractive", *_apt._MEND)
    if mended:
        script.on(*mend).on(*install("ovmf")).on(*QUERY, "ovmf", out="installed ovmf\n")
        assert drive("ovmf").failure is None
    else:
        script.on(*mend).on(*install("ovmf"), rc=100, err=broken)
        assert broken in drive("ovmf").failure.found
    assert script.calls.count(mend) == 1


def test_what_apt_does_not_have_is_named_and_stops_nothing(script: Any) -> None:
    """Like rshim on a stock Debian 12: unknown to apt, and in no list of a mirror."""
    script.on(*QUERY, "zstd", "rshim", rc=1).on(
        *QUERY, "zstd", "rshim", out="installed zstd\n", rc=1
    )
    script.on(*POLICY, "rshim").on(*APT, LOCK, "update").on(*install("zstd"))
    outcome = drive("zstd", optional=("rshim",))
    assert outcome.failure is None and outcome.facts["unavailable"] == ["rshim"]
    assert outcome.evidence["install_optional"] == {"installed": [], "unavailable": ["rshim"]}
    assert _host_snapshot.recall(_host_packages.RECORD) == {"zstd": "installed"}
    # The next run has nothing to do, and needs no mirror to find that out.
    calls = len(script.calls)
    again = drive("zstd", optional=("rshim",))
    assert (again.changed, again.facts["unavailable"]) == (False, ["rshim"])
    assert [call[0] for call in script.calls[calls:]] == ["dpkg-query", "apt-cache"]


def test_what_apt_has_is_installed_though_it_is_optional(script: Any) -> None:
    query = (*QUERY, "rshim", "nosuch")
    script.on(*query, rc=1).on(*query, rc=1).on(*query, out="installed rshim\n", rc=1)
    script.on(
        *POLICY, "rshim", "nosuch", out=OFFERED.format("rshim") + NOT_OFFERED.format("nosuch")
    )
    script.on(*POLICY, "rshim", out=OFFERED.format("rshim"))
    script.on(*POLICY, "nosuch", out=NOT_OFFERED.format("nosuch"))
    script.on(*APT, LOCK, "update").on(*install("rshim"))
    script.on(*QUERY, "rshim", out="installed rshim\n")
    forecast = drive(optional=("rshim", "nosuch"), check=True)
    assert [step.after for step in forecast.plan.steps] == [["rshim"]]
    assert forecast.facts["unavailable"] == ["nosuch"] and install("rshim") not in script.calls
    outcome = drive(optional=("rshim", "nosuch"))
    assert outcome.failure is None
    assert outcome.facts == {"installed": ["rshim"], "unavailable": ["nosuch"]}
    assert _host_snapshot.recall(_host_packages.RECORD) == {"rshim": "installed"}


def test_what_apt_has_and_cannot_install_stops_nothing(script: Any) -> None:
    """Like a package on hold: apt names a candidate. The other package came before apt failed."""
    query = (*QUERY, "zstd", "rshim", "mstflint")
    script.on(*query, rc=1).on(*query, out="installed zstd\ninstalled mstflint\n", rc=1)
    script.on(
        *POLICY, "rshim", "mstflint", out=OFFERED.format("rshim") + OFFERED.format("mstflint")
    )
    script.on(*POLICY, "rshim", out=OFFERED.format("rshim"))
    script.on(*APT, LOCK, "update").on(*install("zstd"))
    broken = "E: Unable to correct problems, you have held broken packages."
    script.on(*install("rshim", "mstflint"), rc=100, err=broken)
    script.on(*QUERY, "rshim", "mstflint", out="installed mstflint\n", rc=1)
    outcome = drive("zstd", optional=("rshim", "mstflint"))
    assert (outcome.failure, outcome.done) == (None, ["install_packages"])
    (doubt,) = outcome.doubts
    assert doubt.code == "command_failed" and broken in doubt.found
    # If the site installs a package later, its service does not count as installed by the product.
    assert _host_snapshot.recall(_host_packages.RECORD) == {
        "zstd": "installed",
        "mstflint": "installed",
    }


@contextmanager
def held(lock: Path) -> Iterator[Callable[[], None]]:
    """Hold the lock as another program does, until the returned function is called."""
    with lock.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield lambda: fcntl.lockf(file, fcntl.LOCK_UN)


def pausing(monkeypatch: pytest.MonkeyPatch, pause: Callable[[], None]) -> list[float]:
    """Make apt's wait call `pause`; return the requested pauses."""
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        pause()

    # The real module stays as it is, because subprocess sleeps too.
    monkeypatch.setattr(_apt, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    return pauses


@pytest.fixture
def scratch(tmp_path: Path) -> list[str]:
    """Settings for the real apt-get: a separate folder, and no source."""
    for name in ("lists/partial", "archives/partial", "dpkg"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "dpkg/status").touch()
    places = {
        "State::lists": "lists", "State::status": "dpkg/status", "Cache": "cache",
        "Cache::archives": "archives", "Etc::sourcelist": "none", "Etc::sourceparts": "none",
    }  # fmt: skip
    return [f"Dir::{name}={tmp_path / place}" for name, place in places.items()]


def test_apt_itself_says_what_it_has(
    scratch: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the real apt-cache; its packages are the installed packages."""
    row = "Package: there\nStatus: install ok {0}\nVersion: 1\nArchitecture: all\n"
    status = tmp_path / "dpkg/status"
    status.write_text(row.format("installed"))
    monkeypatch.setattr(_apt, "_LOOK", (*_apt._LOOK, *scratch))
    assert _apt.offered(["there", "no-such-package-anywhere"]) == {"there"}
    # Known to apt, but available nowhere.
    status.write_text(row.format("config-files"))
    assert _apt.offered(["there"]) == frozenset()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("lock", "words"), [("lists/lock", ["update"]), ("archives/lock", ["clean"])]
)
def test_a_lock_that_somebody_holds_is_waited_for(
    scratch: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: str, words: list[str]
) -> None:
    """apt-daily holds the lock at a first boot, and apt itself waits only for dpkg's lock."""
    with held(tmp_path / lock) as release:
        pauses = pausing(monkeypatch, release)
        _apt.run(*words, settings=scratch)
    assert pauses == [_apt._PAUSE_S]


@pytest.mark.parametrize(
    ("lock", "words"), [("lists/lock", ["update"]), ("dpkg/lock-frontend", ["--yes", "upgrade"])]
)
def test_a_lock_that_stays_is_said(
    scratch: list[str], tmp_path: Path, lock: str, words: list[str]
) -> None:
    with held(tmp_path / lock), pytest.raises(Refusal) as refused:
        _apt.run(*words, settings=scratch, wait=0.01)
    assert refused.value.code == "apt_locked" and "lock" in refused.value.found


@pytest.mark.parametrize(
    ("lock", "words"), [("lists/lock", ["update"]), ("dpkg/lock-frontend", ["--yes", "upgrade"])]
)
def test_a_lock_that_nobody_can_open_is_not_waited_for(
    scratch: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: str, words: list[str]
) -> None:
    """The lock is a folder here, which even root cannot open for writing; waiting does not help."""
    (tmp_path / lock).mkdir()
    pauses = pausing(monkeypatch, (tmp_path / lock).rmdir)
    with pytest.raises(Refusal) as refused:
        _apt.run(*words, settings=scratch)
    assert refused.value.code == "command_failed" and "Is a directory" in refused.value.found
    assert pauses == []


def test_what_is_wrong_for_good_is_not_tried_again(script: Any) -> None:
    script.on(*APT, LOCK, "update", rc=100, err="E: The repository is not signed.")
    with pytest.raises(Refusal) as refused:
        _apt.run("update")
    assert refused.value.code == "command_failed" and len(script.calls) == 1


@pytest.mark.parametrize("name", ["--allow-unauthenticated", "a b", "x=1", "", "UP", "a\nb"])
def test_a_name_that_apt_would_read_as_more_is_refused(script: Any, name: str) -> None:
    outcome = drive(name)
    assert outcome.failure.code == "package_invalid"
    outcome = drive("ovmf", optional=(name,))
    assert outcome.failure.code == "package_invalid"
    assert script.calls == []


def test_the_roles_list_is_the_scripts_list() -> None:
    defaults = yaml.safe_load((ROOT / "roles/slice_packages/defaults/main.yml").read_text())
    assert tuple(defaults["slice_packages_required"]) == _host_packages.REQUIRED
