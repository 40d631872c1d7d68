"""The shape of a kind of task: which playbook, with which variables, and what its end means."""

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
    """A task at hand, inside a transaction of the worker.

    profile: hardware profile of the node, with what is the node's own over it.
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
        """The allocation that the task is about; "" for work on a node."""
        return self.task.allocation_id or ""

    @property
    def act(self) -> Act:
        return Act(f"task:{self.task.id}", correlation_id=self.task.correlation_id or "")


@dataclass(frozen=True)
class Failure:
    """How a run failed.

    step: the playbook task that failed, "" when the run itself broke. error: code, expected, found,
    remedy. evidence: what the playbook could still say. known: False when the effect on the host is
    unknown (process lost, contact lost): then nothing may be freed (I13).
    """

    step: str
    error: dict[str, str]
    evidence: dict[str, Any]
    known: bool

    @property
    def untouched(self) -> bool:
        """The host itself says that nothing was written and nothing is left."""
        return (
            self.known
            and self.evidence.get("disk_written") is False
            and self.evidence.get("leftovers") is False
        )


def nothing_to_start(_work: Work) -> None:
    """Most kinds change no state when their run starts."""


def nothing_to_undo(_work: Work, _failure: Failure) -> None:
    """Most kinds leave the records as they were when their run fails; the task tells the story."""


@dataclass(frozen=True)
class Handler:
    """One kind of task.

    deadlines names the entries of the profile's deadlines that the run may use up. wiped names the
    variable that lists the disks: the entry `wipe` is that of one disk, and they come one by one.
    variables must give the same document for the same task every time: a restarted reconciler calls
    it again and the run contract refuses another answer. succeed runs in the transaction that ends
    the task and returns the task's result.
    """

    playbook: str
    variables: Callable[[Work], dict[str, Any]]
    succeed: Callable[[Work, dict[str, Any]], dict[str, Any]]
    fail: Callable[[Work, Failure], None] = nothing_to_undo
    start: Callable[[Work], None] = nothing_to_start
    deadlines: tuple[str, ...] = ()
    wiped: str = ""

    def deadline_s(self, work: Work, variables: dict[str, Any]) -> int:
        """Seconds that a run may take: what the profile allows for its parts, and some for us."""
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
    """Lock the allocation that a task is about; work on a node locks nothing here."""
    return locks.allocation(conn, task.allocation_id) if task.allocation_id else nullcontext()


@contextmanager
def failed_work(conn: Connection, settings: Settings, task: Task) -> Iterator[Work]:
    """A task that failed, with its subject locked.

    The profile is left out: no failure needs it, and it may be gone by now.
    """
    with locked_subject(conn, task):
        yield Work(conn, task, nodes.get(conn, task.node_id), {}, settings)
