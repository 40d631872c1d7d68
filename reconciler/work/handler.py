"""Task handler: playbook, variables and effects of success for a kind of task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine

from reconciler.db import rows
from reconciler.db.schema import Allocation, Node, Task
from reconciler.lifecycle.task_failures import act_of
from reconciler.model import hardware
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.profiles import hardware_profile
from reconciler.records import nodes
from reconciler.runs.spec import LONGEST_S
from reconciler.settings import Settings


@dataclass(frozen=True)
class Work:
    """A task and its records, inside a transaction of the worker.

    profile: hardware profile of the node, overridden by the values of the node itself.
    """

    conn: Connection
    task: Task
    node: Node
    profile: dict[str, Any]
    settings: Settings

    @property
    def parameters(self) -> dict[str, Any]:
        parameters: dict[str, Any] = self.task.parameters
        return parameters

    @property
    def allocation_id(self) -> str:
        """Allocation of the task; "" for work on a node."""
        return self.task.allocation_id or ""

    def allocation(self) -> Allocation:
        """The record of the task's allocation as it is now, without its claims and tasks."""
        return rows.get(self.conn, Allocation, self.allocation_id)

    @property
    def act(self) -> Act:
        return act_of(self.task)


def canceled(expected: str, found: str) -> Problem:
    """A refusal to start the run of a task that is no longer needed: the task ends canceled."""
    remedy = "nothing to do: no run was started"
    return Problem("canceled", expected=expected, found=found, remedy=remedy)


def return_evidence(_work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    """Default `succeed`: the evidence is the result, and no record changes."""
    return evidence


@dataclass(frozen=True)
class Handler:
    """Handler for a kind of task. `lifecycle.task_failures` has the effects of a failure.

    deadlines: entries of the profile's deadlines that the run may use up. wiped: the variable that
    lists the disks; the profile's `wipe` is the limit per disk, and disks are wiped in sequence.
    stopped: the variable that lists the guests, which are shut down in sequence.
    variables must be deterministic per task, because a restarted reconciler calls it again and the
    run contract refuses a different document. succeed runs in the transaction that ends the task
    and returns the task's result. start may refuse the run. arrange does what other machines must
    do before the run, outside of transactions; it may be repeated.
    """

    playbook: str
    variables: Callable[[Work], dict[str, Any]]
    succeed: Callable[[Work, dict[str, Any]], dict[str, Any]] = return_evidence
    start: Callable[[Work], None] = lambda _work: None
    deadlines: tuple[str, ...] = ()
    wiped: str = ""
    stopped: str = ""
    arrange: Callable[[Engine, Settings, Task], None] = lambda _engine, _settings, _task: None

    def deadline_s(self, work: Work, variables: dict[str, Any]) -> int:
        """Time limit of a run in seconds: the profile's limits of its parts, plus 600 s."""
        wipes = max(1, len(variables[self.wiped])) if self.wiped else 0
        stops = max(1, len(variables[self.stopped])) if self.stopped else 0
        parts = (*self.deadlines, *("wipe",) * wipes, *("shutdown",) * stops)
        allowed = hardware.limit_s(work.profile, parts)
        return min(LONGEST_S, max(int(work.task.deadline_s), allowed + 600))


def open_work(conn: Connection, settings: Settings, task: Task) -> Work:
    node = nodes.get(conn, task.node_id)
    profile = hardware.node_profile(
        hardware_profile(settings.profiles_dir, node.profile), vars(node)
    )
    return Work(conn, task, node, profile, settings)
