"""What every test needs: the collection importable under its real name, and no real commands."""

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

# Files that take about ten seconds or more: make test runs them, make test-fast does not.
SLOW = (
    "collection/",
    "contract/test_awx.py",
    "contract/test_by_hand.py",
    "contract/test_example.py",
    "contract/test_firmware_playbook.py",
    "unit/playbooks/",
    "unit/plugins/inventory/",
    "unit/reconciler/api/test_fuzz.py",
    "unit/reconciler/backup/test_backup.py",
    "unit/reconciler/cli/test_host.py",
    "unit/reconciler/cli/test_host_machine.py",
    "unit/reconciler/console/test_browser.py",
    "unit/reconciler/db/test_upgrade.py",
    "unit/reconciler/faults/",
    "unit/reconciler/gateway/",
    "unit/reconciler/lifecycle/test_concurrent_clients.py",
    "unit/reconciler/runs/awx/test_process.py",
    "unit/reconciler/runs/test_hostile_host.py",
    "unit/reconciler/runs/test_run.py",
    "unit/reconciler/runs/test_secrets.py",
    "unit/reconciler/pools/test_faults.py",
    "unit/reconciler/service/test_actions.py",
    "unit/reconciler/pools/test_worker.py",
    "unit/reconciler/service/test_crashes.py",
    "unit/reconciler/service/test_inventory.py",
    "unit/reconciler/service/test_leader.py",
    "unit/reconciler/service/test_postgres.py",
    "unit/reconciler/work/test_awx.py",
)


def pytest_runtest_setup() -> None:
    # An ssh that is killed leaves the input that it shares with all of us without blocking, which
    # Ansible refuses.
    os.set_blocking(0, True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and str(item.path.relative_to(here)).startswith(SLOW):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _programs() -> None:
    """The single-file programs, which the reconciler hands out, as the code gives them now."""
    standalone.write()


class Script:
    """Scripted programs: an argument list that nobody scripted fails the test."""

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
