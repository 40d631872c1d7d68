"""Places in which hosts are asked: which wait beside the others, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from reconciler.work.watch import SLOW_S, Places

pytestmark = pytest.mark.covers("CTRL-8")
Ask = Callable[..., bool]


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def ask(now: list[float]) -> Iterator[Ask]:
    """Ask host n1, which takes some seconds; whether it had a place of the slow hosts."""
    places = Places("probe", lambda: now[0])

    def ask(seconds: float, reason: str = "") -> bool:
        def answer() -> str:
            now[0] += seconds
            names.append(threading.current_thread().name)
            return reason

        names: list[str] = []
        assert places.submit("n1", answer).result() == reason
        return "slow" in names[0]

    yield ask
    places.close()


def test_a_host_that_restarts_is_slow_until_it_answers_quickly(ask: Ask) -> None:
    silent = (SLOW_S + 10, "timed out")
    assert [ask(*silent) for _ in range(3)] == [False, True, True]
    assert ask(0.1, "connection refused"), "that is no answer"
    assert ask(0.1), "the first answer, in the place that it waited for"
    assert not ask(0.1)


def test_a_host_that_hangs_by_turns_stays_slow_for_an_hour(ask: Ask, now: list[float]) -> None:
    assert [ask(SLOW_S + 1), ask(0.1), ask(SLOW_S + 1)] == [False, True, False]
    assert [ask(seconds) for seconds in (0.1, SLOW_S + 1) * 3] == [True] * 6
    now[0] += 3601
    assert not ask(0.1)


def test_a_question_that_breaks_is_no_answer(now: list[float]) -> None:
    places = Places("probe", lambda: now[0])

    def hang() -> str:
        now[0] += SLOW_S + 1
        return ""

    def fail() -> str:
        raise OSError("no route")

    places.submit("n1", hang).result()
    with pytest.raises(OSError, match="no route"):
        places.submit("n1", fail).result()
    assert "slow" in places.submit("n1", lambda: threading.current_thread().name).result()
    places.close()
