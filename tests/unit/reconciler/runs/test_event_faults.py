"""Events of a run that come twice, in another order, cut, late, or never: 200 histories, or 10,000.

Whatever reaches the recorder, success is believed only when the run's own end said so, and a host
counts as untouched only when nothing can have happened on it.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reconciler.runs import collect
from reconciler.runs.events import Recorder, judge
from reconciler.runs.paths import RunPaths

pytestmark = pytest.mark.covers("CTRL-9", "I13")

Event = dict[str, Any]
SEEDS = pytest.mark.parametrize(
    "seeds", [200, pytest.param(10_000, marks=pytest.mark.long)], ids=["some", "many"]
)
KEYS = {"at", "event", "task", "code", "seconds"}
REFUSAL = {"code": "disk_in_use", "expected": "a", "found": "b", "remedy": "c"}
RESULTS: dict[bool, dict[str, Any]] = {
    ok: {
        "schema": 1,
        "playbook": "a_test",
        "ok": ok,
        "step": "" if ok else "Step 3",
        "error": {} if ok else REFUSAL,
        "evidence": {"told": ok},
    }
    for ok in (True, False)
}


def event(kind: str, number: int, **more: Any) -> Event:
    data = {
        "task": f"Step {number}",
        "task_uuid": f"u{number}",
        "task_action": "gpuaas.slice.image_cache",
        "duration": 0.5,
    }
    return {"event": kind, "event_data": data | more}


def history(chance: random.Random, *, ok: bool) -> list[Event]:
    """The events of a run with a few steps."""
    events: list[Event] = [{"event": "playbook_on_start", "event_data": {}}]
    steps = chance.randint(2, 6)
    for number in range(steps):
        events.append(event("playbook_on_task_start", number))
        if not ok and number == steps - 1:
            events.append(event("runner_on_failed", number, res={"error": REFUSAL}))
        elif chance.random() < 0.2:
            events.append(event("runner_on_skipped", number))
        else:
            events.append(event("runner_on_ok", number, res={"changed": chance.random() < 0.5}))
    # At least one step was carried out.
    events.append(event("runner_on_ok", 0, res={}))
    stats = {"artifact_data": {"slice_result": RESULTS[ok]}, "dark": {}, "ok": {"n1": steps}}
    return [*events, {"event": "playbook_on_stats", "event_data": stats}]


def twice(chance: random.Random, events: list[Event]) -> list[Event]:
    return [repeated for each in events for repeated in [each] * chance.randint(1, 3)]


def shuffled(chance: random.Random, events: list[Event]) -> list[Event]:
    return chance.sample(events, len(events))


def dropped(chance: random.Random, events: list[Event]) -> list[Event]:
    return [event for event in events if chance.random() < 0.7]


def cut(chance: random.Random, events: list[Event]) -> list[Event]:
    """The end is missing, and of some events the inside."""
    whole = copy.deepcopy(events[: chance.randint(0, len(events))])
    for event in whole:
        if chance.random() < 0.4:
            inside: Any = event["event_data"]
            event["event_data"] = chance.choice(
                [None, "text", 7, [], {}, {key: inside[key] for key in list(inside)[:1]}]
            )
    return whole


def late(chance: random.Random, events: list[Event]) -> list[Event]:
    """Some events arrive after the event that ends the run."""
    place = chance.randrange(len(events) - 1)
    return events[:place] + events[place + 1 :] + [events[place]]


Fault = Callable[[random.Random, list[Event]], list[Event]]


def hear(tmp_path: Path, events: list[Event], *, ok: bool) -> tuple[Recorder, dict[str, Any]]:
    progress = tmp_path / "progress.jsonl"
    progress.unlink(missing_ok=True)
    recorder = Recorder(progress)
    for event in events:
        assert recorder(event) is False
    if progress.exists():
        for line in progress.read_text().splitlines():
            assert set(json.loads(line)) <= KEYS
    return recorder, judge(recorder, "successful" if ok else "failed", 0 if ok else 2, 1.0)


@SEEDS
@pytest.mark.parametrize("fault", [twice, shuffled, dropped, cut, late])
def test_only_the_end_that_was_told_is_believed(tmp_path: Path, fault: Fault, seeds: int) -> None:
    for seed in range(seeds):
        chance = random.Random(seed)  # noqa: S311
        ok = chance.random() < 0.5
        events = history(chance, ok=ok)
        _, verdict = hear(tmp_path, events, ok=ok)
        assert verdict["result"] == RESULTS[ok]
        heard = fault(chance, events)
        _, result = hear(tmp_path, heard, ok=ok)
        ends = [event["event_data"] for event in heard if event["event"] == "playbook_on_stats"]
        whole = any(isinstance(end, dict) and end.get("artifact_data") for end in ends)
        assert result["result"] == (RESULTS[ok] if whole else None), seed
        assert whole or (result["status"], bool(result["problem"])) == ("failed", True), seed
        if fault in (twice, late):
            assert result == verdict, seed


@SEEDS
@pytest.mark.parametrize("fault", [twice, shuffled, late])
def test_a_host_that_was_there_never_counts_as_untouched(
    tmp_path: Path, fault: Fault, seeds: int
) -> None:
    for seed in range(seeds):
        chance = random.Random(seed)  # noqa: S311
        events = history(chance, ok=False)[:-1]
        lost = event("runner_on_unreachable", 9, res={"msg": "connect to host n1 port 22: x"})
        recorder, _ = hear(tmp_path, fault(chance, [*events, lost]), ok=False)
        assert recorder.touched and recorder.unreachable, seed


def test_one_lost_word_does_not_make_a_host_untouched(tmp_path: Path) -> None:
    """Each of the events of a run whose second step did not reach the host, left out in turn."""
    events = [
        event("playbook_on_task_start", 1),
        event("runner_on_ok", 1, res={}),
        event("playbook_on_task_start", 2),
        event("runner_on_unreachable", 2, res={"msg": "gone"}),
    ]
    for left_out in range(len(events)):
        heard = [event for place, event in enumerate(events) if place != left_out]
        assert hear(tmp_path, heard, ok=False)[0].touched
    first = [events[0], event("runner_on_unreachable", 1, res={"msg": "gone"})]
    assert not hear(tmp_path, first, ok=False)[0].touched
    at_home = event("runner_on_ok", 0, task_action="ansible.builtin.set_fact", res={})
    assert not hear(tmp_path, [at_home, *first], ok=False)[0].touched


def test_what_a_crash_left_in_the_progress_is_passed_over(tmp_path: Path) -> None:
    """Power loss: a hole, a torn line, a line without its end."""
    file = RunPaths(tmp_path).progress
    good = b'{"event": "ok"}\n'
    file.write_bytes(good + b"\0\0\0\0\n" + b'{"event": "o\n' + b"[1]\n" + good + b'{"event"')
    lines, offset = collect.progress(tmp_path)
    assert lines == [{"event": "ok"}, {"event": "ok"}]
    with file.open("ab") as handle:
        handle.write(b': "late"}\n')
    assert collect.progress(tmp_path, offset)[0] == [{"event": "late"}]


@pytest.mark.covers("CTRL-8")
def test_a_line_that_no_database_takes_is_passed_over(tmp_path: Path) -> None:
    """A bad line must not stop the progress of the run from being stored."""
    file = RunPaths(tmp_path).progress
    deep = b'{"task": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    bad = (rb'{"task": "a\u0000b"}', rb'{"task": "\ud800"}', b'{"seconds": NaN}', deep)
    file.write_bytes(b"\n".join([*bad, b'{"event": "ok"}', b""]))
    assert collect.progress(tmp_path)[0] == [{"event": "ok"}]
