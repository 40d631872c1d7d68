"""Fixtures of all tests: the collection importable under its real name, and no real commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build" / "collections"))

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _host

from scripts import standalone

pytest_plugins = ("tests.coverage", "tests.workers", "tests.standin.bmc_fixtures")

# A busy machine is no failure: examples have no time limit.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# Tests that start processes, serve requests or take long: make test plays them, make test-fast does
# not even load their files.
SLOW = (
    "collection/",
    "contract/",
    "unit/bench/",
    "unit/lab/test_demo_pictures.py",
    "unit/monitoring/",
    "unit/packaging/",
    "unit/playbooks/",
    "unit/plugins/inventory/",
    "unit/plugins/module_utils/boot/test_deploy_bootstrap_machine.py",
    "unit/plugins/module_utils/firmware/test_firmware_preflight.py",
    "unit/plugins/module_utils/network/test_guards.py",
    "unit/plugins/module_utils/network/test_ingress_rig.py",
    "unit/plugins/module_utils/network/test_isolation.py",
    "unit/plugins/module_utils/network/test_neighbours.py",
    "unit/plugins/module_utils/parity/test_file_edits.py",
    "unit/plugins/module_utils/parity/test_upkeep.py",
    "unit/plugins/module_utils/slice/test_machine.py",
    "unit/plugins/modules/test_nvme_wipe.py",
    "unit/plugins/modules/test_racadm_bios.py",
    "unit/reconciler/api/",
    "unit/reconciler/backup/",
    "unit/reconciler/cli/",
    "unit/reconciler/console/",
    "unit/reconciler/db/test_upgrade.py",
    "unit/reconciler/faults/",
    "unit/reconciler/gateway/",
    "unit/reconciler/lifecycle/test_concurrent_clients.py",
    "unit/reconciler/pools/",
    "unit/reconciler/runs/",
    "unit/reconciler/service/",
    "unit/reconciler/work/",
    "unit/repository/test_forced_variants.py",
    "unit/scripts/",
)


def _is_slow(path: Path) -> bool:
    here = Path(__file__).parent
    return path.is_relative_to(here) and str(path.relative_to(here)).startswith(SLOW)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    left_out = "not slow" in config.option.markexpr and collection_path.is_file()
    return True if left_out and _is_slow(collection_path) else None


def pytest_runtest_setup() -> None:
    # An ssh that is killed leaves the input that it shares with all of us without blocking, which
    # Ansible refuses.
    os.set_blocking(0, True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _is_slow(item.path):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _programs() -> None:
    """The single-file programs, which the reconciler hands out, as the code gives them now."""
    standalone.write()


class Script:
    """Scripted programs: an unscripted argument list fails the test."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, ...], list[_command.Result]] = {}
        self.calls: list[tuple[str, ...]] = []

    def on(self, *argv: str, out: str = "", rc: int = 0, err: str = "") -> Script:
        """Answer `argv`; several answers to the same list are given in order, the last for ever."""
        self.answers.setdefault(argv, []).append(_command.Result(rc, out, err))
        return self

    def run(
        self,
        argv: Sequence[str],
        *,
        ok: Sequence[int] = (0,),
        stdin: str | None = None,
        timeout: float = 60,
    ) -> _command.Result:
        key = tuple(argv)
        self.calls.append(key)
        assert key in self.answers, f"unscripted command: {' '.join(key)}"
        queue = self.answers[key]
        result = queue.pop(0) if len(queue) > 1 else queue[0]
        if result.rc not in ok:
            raise _command.Refusal(
                "command_failed",
                expected=f"exit {ok}",
                found=f"exit {result.rc}: {result.err}",
                remedy="scripted failure",
            )
        return result


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Every program that the collection runs in this test."""
    scripted = Script()
    monkeypatch.setattr(_command, "run", scripted.run)
    return scripted


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty host root."""
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.setattr(_host, "ROOT", root)
    yield root
