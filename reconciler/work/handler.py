"""Task handler: playbook, variables and effects of the outcome for a kind of task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from reconciler.db import locks
from reconciler.db.schema import Node, Task
from reconciler.model import hardware
from reconciler.model.act import Act
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

    @property
    def act(self) -> Act:
        return Act(f"task:{self.task.id}", correlation_id=self.task.correlation_id or "")


@dataclass(frozen=True)
class Failure:
    """Failure of a run.

    step: the playbook task that failed, "" when the run itself broke. error: code, expected, found,
    remedy. evidence: the report of the playbook, as far as it got. known: False when the effect on
    the host is unknown (process lost, contact lost). Then nothing may be freed (I13).
    """

    step: str
    error: dict[str, str]
    evidence: dict[str, Any]
    known: bool

    @property
    def untouched(self) -> bool:
        """Whether the host reports that nothing was written and nothing is left."""
        return (
            self.known
            and self.evidence.get("disk_written") is False
            and self.evidence.get("leftovers") is False
        )


def nothing_to_start(_work: Work) -> None:
    """Default `start`: most kinds change no state when their run starts."""


def nothing_to_undo(_work: Work, _failure: Failure) -> None:
    """Default `fail`: most kinds change no records; the failure is stored in the task."""


@dataclass(frozen=True)
class Handler:
    """Handler for a kind of task.

    deadlines: entries of the profile's deadlines that the run may use up. wiped: the variable that
    lists the disks; the profile's `wipe` is the limit per disk, and disks are wiped in sequence.
    variables must be deterministic per task, because a restarted reconciler calls it again and the
    run contract refuses a different document. succeed runs in the transaction that ends the task
    and returns the task's result.
    """

    playbook: str
    variables: Callable[[Work], dict[str, Any]]
    succeed: Callable[[Work, dict[str, Any]], dict[str, Any]]
    fail: Callable[[Work, Failure], None] = nothing_to_undo
    start: Callable[[Work], None] = nothing_to_start
    deadlines: tuple[str, ...] = ()
    wiped: str = ""

    def deadline_s(self, work: Work, variables: dict[str, Any]) -> int:
        """Time limit of a run in seconds: the profile's limits of its parts, plus 600 s."""
        wipes = max(1, len(variables[self.wiped])) if self.wiped else 0
        allowed = hardware.limit_s(work.profile, (*self.deadlines, *("wipe",) * wipes))
        return min(LONGEST_S, max(int(work.task.deadline_s), allowed + 600))


def open_work(conn: Connection, settings: Settings, task: Task) -> Work:
    node = nodes.get(conn, task.node_id)
    profile = hardware.node_profile(
        hardware_profile(settings.profiles_dir, node.profile), vars(node)
    )
    return Work(conn, task, node, profile, settings)


def locked_subject(conn: Connection, task: Task) -> AbstractContextManager[object]:
    """Lock the allocation of a task; work on a node locks nothing here."""
    return locks.allocation(conn, task.allocation_id) if task.allocation_id else nullcontext()


@contextmanager
def failed_work(conn: Connection, settings: Settings, task: Task) -> Iterator[Work]:
    """Work of a failed task, with its subject locked.

    The profile is left out, because no failure needs it and it may no longer exist.
    """
    with locked_subject(conn, task):
        yield Work(conn, task, nodes.get(conn, task.node_id), {}, settings)
