"""Limits of runs: never below the limits that they hand to their host.

If the task's deadline was shorter, the run was killed while the host still booted, and its effects
were then unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml

from reconciler.db.engine import transaction
from reconciler.lifecycle import host, launch, maintenance, power, recovery
from reconciler.model.states import NodeMode, PowerAction, TaskKind
from reconciler.records import leasing, nodes, queue
from reconciler.runs.spec import RunSpec
from reconciler.settings import Settings
from reconciler.work import worker
from reconciler.work.kinds import HANDLERS
from tests.playbooks import text
from tests.unit.reconciler.conftest import ADMIN, Site

ROOT = Path(__file__).resolve().parents[4]
# A variable of the run that its playbook gives to a role or a module as a limit.
HANDED = re.compile(r'^\s+(?:\w+_)?(?:timeout|deadline): "\{\{ ([\w.]+) \}\}"$', re.MULTILINE)
# Modules without a limit on the host: the profile says how long they may take.
UNLIMITED = {
    "gpuaas.slice.image_clone": "slice_profile.deadlines.clone",
    "gpuaas.slice.nvme_wipe": "slice_profile.deadlines.wipe",
}


def handed(kind: str) -> list[str]:
    """Where a run's variables have the limits that its playbook goes by."""
    return HANDED.findall(text(HANDLERS[kind].playbook))


def unlimited(kind: str) -> list[str]:
    content = text(HANDLERS[kind].playbook)
    return [name for module, name in UNLIMITED.items() if f" {module}:\n" in content]


KINDS = [TaskKind(kind) for kind in HANDLERS if handed(kind)]


def provision(sold: Site, conn: sa.Connection) -> None:
    sold.allocate(conn)


def release(sold: Site, conn: sa.Connection) -> None:
    launch.release(conn, sold.active(conn), ADMIN)


def restart(sold: Site, conn: sa.Connection) -> None:
    power.request(conn, sold.active(conn), PowerAction.RESTART, ADMIN)


def wipe(sold: Site, conn: sa.Connection) -> None:
    sold.failed(conn)
    recovery.repair(conn, recovery.blocked(conn)[0].id, ADMIN)


def on_the_node(kind: TaskKind) -> Callable[[Site, sa.Connection], None]:
    def ask(_sold: Site, conn: sa.Connection) -> None:
        item = queue.Enqueue(kind, "n1", "node", "n1", {"allow_reboot": True})
        queue.enqueue(conn, item, ADMIN)

    return ask


def convert(sold: Site, conn: sa.Connection) -> None:
    host.convert(conn, "n1", NodeMode.BAREMETAL, ADMIN)
    on_the_node(TaskKind.NODE_CONVERT)(sold, conn)


def reboot(sold: Site, conn: sa.Connection) -> None:
    maintenance.request_reboot(conn, "n1", ADMIN, allocations=[sold.active(conn)])


ASKED: dict[str, Callable[[Site, sa.Connection], None]] = {
    TaskKind.SLICE_VM_PROVISION: provision,
    TaskKind.SLICE_VM_POWER: restart,
    TaskKind.SLICE_VM_RELEASE: release,
    TaskKind.SLICE_WIPE: wipe,
    TaskKind.NODE_BOOTSTRAP: on_the_node(TaskKind.NODE_BOOTSTRAP),
    TaskKind.NODE_REBOOT: reboot,
    TaskKind.NODE_CONVERT: convert,
}


@pytest.fixture
def slow(tmp_path: Path) -> Settings:
    """A site whose machines may take longer for each single part than a task has by itself."""
    profile = yaml.safe_load((ROOT / "profiles" / "xe9680l-h200.yml").read_text())
    plain = queue.Enqueue(TaskKind.NODE_BOOTSTRAP, "n1", "node", "n1").deadline_s
    profile["deadlines"] = dict.fromkeys(profile["deadlines"], 2 * plain)
    folder = tmp_path / "profiles"
    folder.mkdir()
    (folder / "slow.yml").write_text(yaml.safe_dump({**profile, "name": "slow"}))
    return Settings(state_dir=tmp_path / "state", profiles_dir=folder)


@pytest.mark.covers("CTRL-8")
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_lasts_for_all_the_limits_that_it_hands_to_its_host(
    sold: Site, slow: Settings, kind: TaskKind
) -> None:
    with transaction(sold.engine) as conn:
        ASKED[kind](sold, conn)
        nodes.change(conn, "n1", ADMIN, profile="slow")
        (task,) = leasing.lease(conn, "w", kinds=[kind])
    plain = task.deadline_s
    spec: RunSpec = worker.prepare(sold.engine, slow, HANDLERS[kind], task, "run-1")
    # Ansible waits so long for a new boot, and so long again for an answer of it.
    twice = [name for name in handed(kind) if name.endswith("reboot")]
    # A run of power stops a guest or starts it anew, each within the same limit.
    names = [*dict.fromkeys(handed(kind)), *unlimited(kind), *twice]
    limits = [value_of(spec, name) for name in names]
    assert sum(limits) > plain, "shorter limits would fit any deadline"
    assert spec.deadline_s > sum(limits)


def test_the_kinds_with_a_limit_are_found() -> None:
    """The question above is empty where the playbooks are not read."""
    assert set(KINDS) == set(ASKED)


def value_of(spec: RunSpec, name: str) -> int:
    """The variable of the run that an expression such as slice_profile.deadlines.ready means."""
    value: Any = spec.variables
    for part in name.split("."):
        value = value[part]
    return int(value)
