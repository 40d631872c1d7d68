"""A network that carries one direction only: requests arrive and answers are lost, or the reverse.

The records cannot know the acts of the host: nothing is freed (I13), not even when the host answers
again. Then the clean-up is cut off as well, in the other direction.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

from reconciler.db.engine import reading, transaction
from reconciler.lifecycle import host
from reconciler.model.states import TaskState
from reconciler.records import nodes, queue
from reconciler.runs import ssh
from reconciler.runs.spec import NodeAccess
from reconciler.runs.ssh import SshAccess
from tests.unit.reconciler.conftest import ADMIN
from tests.unit.reconciler.faults.conftest import Healthy, Open
from tests.unit.reconciler.faults.playing import How, Step
from tests.unit.reconciler.faults.scripted_site import Run, ScriptedSite, Unanswered, ended, refused
from tests.unit.reconciler.faults.test_steps import KINDS, UNDOING, Decide, come_back

pytestmark = pytest.mark.covers("CTRL-8", "CTRL-9", "I13")

# Of a connection that was never made, whichever of the first packets was lost.
NO_WAY = "ssh: connect to host 10.0.2.15 port 22: Connection timed out"
# Of an established connection that went silent.
CUT = "Timeout, server 10.0.2.15 not responding."


class Line:
    """The path to the host, cut in one direction at a step.

    unheard: effects that the host completes after the connection is lost.
    """

    def __init__(self) -> None:
        self.unheard: list[Callable[[], Any]] = []

    def requests_lost(self, number: int) -> Decide:
        """The host never hears of the step."""

        def decide(_run: Run, now: int, _step: Step) -> How | None:
            if now == number:
                raise Unanswered(CUT)
            return None

        return decide

    def answers_lost(self, number: int) -> Decide:
        """The host has done the step when contact is found to be lost."""
        return self._cut(number, lambda do: do())

    def answers_late(self, number: int) -> Decide:
        """The host is still at it then."""
        return self._cut(number, self.unheard.append)

    def _cut(self, number: int, effect: Callable[[Callable[[], Any]], Any]) -> Decide:
        def how(do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
            # A refusal of the host is lost like its answer.
            with contextlib.suppress(Refusal):
                effect(do)
            raise Unanswered(CUT)

        return lambda _run, now, _step: how if now == number else None

    def goes_on(self) -> None:
        """The host ends what it was at."""
        while self.unheard:
            with contextlib.suppress(Refusal):
                self.unheard.pop()()


# One direction, then the other.
WAYS = {
    "requests": (Line.requests_lost, Line.answers_lost),
    "answers": (Line.answers_lost, Line.requests_lost),
    "late answers": (Line.answers_late, Line.requests_lost),
}


@KINDS
@pytest.mark.parametrize("way", WAYS)
def test_one_direction_then_the_other(
    at: Open, healthy: dict[str, Healthy], kind: str, way: str
) -> None:
    # The clean-up may have fewer steps.
    others = len(healthy[UNDOING[kind.startswith("baremetal.")]].steps)
    for number in range(len(healthy[kind].steps)):
        _both(at(kind), kind, way, (number, number % others))


@KINDS
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.long
def test_each_step_with_each_of_the_clean_up(
    at: Open, healthy: dict[str, Healthy], kind: str, way: str
) -> None:
    undo = UNDOING[kind.startswith("baremetal.")]
    for first in range(len(healthy[kind].steps)):
        for second in range(len(healthy[undo].steps)):
            _both(at(kind), kind, way, (first, second))


def _both(scripted: ScriptedSite, kind: str, way: str, numbers: tuple[int, int]) -> None:
    where = f"{kind}: {way} lost at step {numbers[0]}, then the other way at {numbers[1]}"
    line, (first, second) = Line(), WAYS[way]
    scripted.runner.faults[kind] = first(line, numbers[0])
    scripted.work()
    task = ended(scripted, kind)
    assert (task.state, task.error["code"]) == ("failed", "host_unreachable"), where
    _nothing_is_freed(scripted, where)
    # Before anything was heard, these words could be those of a host that refuses us.
    assert _unreachable(scripted, task.node_id) == (numbers[0] > 0), where
    line.goes_on()
    _answers(scripted, task.node_id)
    _nothing_is_freed(scripted, where)
    for undo in UNDOING:
        scripted.runner.faults[undo] = second(line, numbers[1])
    scripted.recover()
    _nothing_is_freed(scripted, where)
    line.goes_on()
    _answers(scripted, task.node_id)
    _nothing_is_freed(scripted, where)
    scripted.runner.faults.clear()
    come_back(scripted, where)


@KINDS
def test_a_task_whose_host_was_never_reached_waits_and_goes_on(
    at: Open, healthy: dict[str, Healthy], kind: str
) -> None:
    """Whichever packet of the connection was lost: nothing has begun, so nothing is unknown."""
    scripted = at(kind)
    for times in (1, 2):
        scripted.runner.faults[kind] = _no_way
        scripted.work()
        with reading(scripted.engine) as conn:
            (task,) = (row for row in queue.every(conn) if row.kind == kind)
        assert (task.state, task.unreached) == (TaskState.WAITING, times)
        assert _unreachable(scripted, task.node_id)
        _nothing_is_freed(scripted, kind)
        _answers(scripted, task.node_id)
    scripted.work()
    assert ended(scripted, kind).state == TaskState.SUCCEEDED
    assert scripted.host.seen() == healthy[kind].host
    scripted.sound(kind)


def _no_way(_run: Run, _now: int, _step: Step) -> How | None:
    raise Unanswered(NO_WAY)


def _nothing_is_freed(scripted: ScriptedSite, where: str) -> None:
    """All of the site would be wanted, and not all of it is there."""
    assert refused(lambda: scripted.launch(everything=True)) == "no_capacity", where
    scripted.sound(where)


def _unreachable(scripted: ScriptedSite, node_id: str) -> bool:
    with reading(scripted.engine) as conn:
        return bool(nodes.get(conn, node_id).state == "unreachable")


def _answers(scripted: ScriptedSite, node_id: str) -> None:
    with transaction(scripted.engine) as conn:
        host.record_answer(conn, node_id, ADMIN)


@pytest.fixture
def one_way() -> Iterator[Callable[[bytes], int]]:
    """A port that takes every connection, says these words, and hears nothing."""
    with contextlib.ExitStack() as open_:

        def listen(words: bytes) -> int:
            server = open_.enter_context(socket.create_server(("127.0.0.1", 0)))

            def serve() -> None:
                with contextlib.suppress(OSError):
                    connection, _ = server.accept()
                    open_.callback(connection.close)
                    connection.sendall(words)

            thread = threading.Thread(target=serve)
            thread.start()
            open_.callback(thread.join)
            # It would wait for ever for an SSH that was ended before it had connected.
            open_.callback(server.shutdown, socket.SHUT_RDWR)
            port: int = server.getsockname()[1]
            return port

        yield listen


@pytest.mark.parametrize(
    "words", [b"", b"SSH-2.0-OpenSSH_9.2p1\r\n"], ids=["answers lost", "requests lost"]
)
def test_a_real_ssh_takes_neither_for_an_answer(
    one_way: Callable[[bytes], int], words: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes to an end, and never as if the host had answered."""
    monkeypatch.setattr(ssh, "_PROBE_CONNECT_S", 1)
    # By itself an SSH that is not heard ends only when its packets are not answered for minutes.
    monkeypatch.setattr(ssh, "_PROBE_LIMIT_S", 3)
    access = SshAccess(tmp_path / "key", tmp_path / "cert", tmp_path / "hosts")
    answer = ssh.probe(access, NodeAccess("n1", "127.0.0.1", one_way(words)))
    assert "timed out" in answer or "no end of the connection" in answer, answer
