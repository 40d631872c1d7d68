"""`gpuaas recover`: output of each step, and following a case to its end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reconciler.cli import recovery as command
from reconciler.client import Client
from reconciler.db import journal
from reconciler.db.engine import reading, transaction
from reconciler.db.schema import Task
from reconciler.lifecycle import host as host_life
from reconciler.lifecycle import recovery, slices
from reconciler.model.states import TaskKind, TaskState
from reconciler.records import leasing, queue, reports
from reconciler.records.claims import held_slots
from reconciler.work.loops import play_recovery_cases
from tests.unit.reconciler.api.stack import ACT, NODE, Stack
from tests.unit.reconciler.api.test_allocations import failed
from tests.unit.reconciler.cli.conftest import Gpuaas
from tests.unit.reconciler.wipes import proofs

pytestmark = pytest.mark.covers("CTRL-7")


def test_what_is_left_on_the_host_is_named() -> None:
    checks = {
        "domain": {"absent": False, "known": True, "detail": "slice-1 is running"},
        "nvram": {"absent": True, "known": True, "detail": "nothing found"},
        "flows": {"absent": False, "known": False, "detail": "unknown: ovs-ofctl failed"},
    }
    assert list(command.lines("runtime_absence", {"absent": False, "checks": checks})) == [
        "not absent: 2 of 3 checks found something or do not know",
        "domain: slice-1 is running",
        "flows: unknown: ovs-ofctl failed",
    ]


def test_a_hosts_words_cannot_pass_for_a_step() -> None:
    forged = {"domain": {"detail": "x\n  audit\n    all is well" + "!" * 999}, "nvram": "odd"}
    lines = list(command.lines("runtime_absence", {"absent": False, "checks": forged}))
    assert lines[1].startswith("domain: x audit all is well!")
    assert max(len(line) for line in lines) == 300
    assert lines[2] == "nvram: odd"


def test_a_slot_that_was_never_proven_and_one_that_is_not_sold() -> None:
    assert list(command.lines("disk_evidence", {"s1": None})) == ["slot s1: no proof of its disk"]
    shut = {
        "gate": [{"code": "parity_stale"}],
        "wanted": "available",
        "next": "gpuaas nodes parity n1",
    }
    assert list(command.lines("not_on_sale", {"s1": shut})) == [
        "slot s1: parity_stale; next: gpuaas nodes parity n1"
    ]


def test_a_step_that_is_new_is_told_whole() -> None:
    assert list(command.lines("another", {"a": [1]})) == ['{"a": [1]}']


class Host:
    """Plays the leader and the host of a recovery. absent: the host's answers, look after look."""

    def __init__(self, stack: Stack, *absent: bool) -> None:
        self.stack = stack
        self.absent = list(absent)

    def attend(self, patch: pytest.MonkeyPatch) -> Host:
        """Go on with the case before every answer about it."""
        get, post = Client.get, Client.post

        def answer(api: Client, path: str, **query: Any) -> Any:
            if path.endswith("/recovery"):
                self.go_on()
            return get(api, path, **query)

        def opened(api: Client, path: str, *words: Any, **options: Any) -> Any:
            case = post(api, path, *words, **options)
            return (
                api.get(f"{path.removesuffix('/recover')}/recovery") if "recover" in path else case
            )

        patch.setattr(Client, "get", answer)
        patch.setattr(Client, "post", opened)
        return self

    def go_on(self) -> None:
        """Play the steps that need no wipe."""
        for _ in range(3):
            play_recovery_cases(self.stack.engine, self.stack.settings)
            with transaction(self.stack.engine) as conn:
                for task in leasing.lease(conn, "test", kinds=[TaskKind.SLICE_ABSENCE_VERIFY]):
                    self.look(conn, task)

    def look(self, conn: Any, task: Task) -> None:
        held = (task.id, task.lease_token)
        report = {"absent": self.absent.pop(0), "checks": {}}
        times = {"task_id": task.id, "observed_at": task.started_at}
        reports.record_absence(conn, task.allocation_id, report, ACT, **times)
        queue.finish(conn, *held, TaskState.SUCCEEDED, ACT, result={"absence": report})

    def wipe(self, _seconds: float = 0) -> None:
        task = self.stack.lease()
        assert task.kind == TaskKind.SLICE_WIPE
        with transaction(self.stack.engine) as conn:
            allocation_id = task.allocation_id
            given = proofs(conn, allocation_id)
            slices.cleanup_succeeded(
                conn, allocation_id, ACT, proofs=given, absence={"absent": True}
            )
            queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ACT)


@pytest.fixture
def host(selling: Stack, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch) -> Host:
    gpuaas.at(selling)
    host = Host(selling)
    # The host wipes while the command waits.
    monkeypatch.setattr("reconciler.cli.recovery.time.sleep", host.wipe)
    return host.attend(monkeypatch)


def stuck(stack: Stack) -> str:
    allocation_id = failed(stack)
    with transaction(stack.engine) as conn:
        conn.exec_driver_sql("UPDATE tasks SET state = 'canceled'")
    return allocation_id


def printed(err: str) -> dict[str, list[str]]:
    """The lines of each step, until a refusal comes."""
    steps: dict[str, list[str]] = {}
    for line in err.splitlines():
        if line.startswith("    "):
            steps[list(steps)[-1]].append(line.strip())
        elif line.startswith("  "):
            steps[line.strip()] = []
        else:
            break
    return steps


@pytest.mark.covers("CTRL-7")
@pytest.mark.parametrize(
    ("looks", "steps"),
    [
        ((True,), ["runtime_absence", "disk_evidence", "force_cleanup"]),
        (
            (False, True),
            [
                "runtime_absence",
                "disk_evidence",
                "force_cleanup",
                "repair",
                "runtime_absence_after",
            ],
        ),
    ],
)
def test_recover_does_the_whole_runbook(
    selling: Stack, gpuaas: Gpuaas, host: Host, looks: tuple[bool, ...], steps: list[str]
) -> None:
    host.absent = list(looks)
    allocation_id = stuck(selling)
    gpuaas("recover", allocation_id, "--reason", "demo", "--output", "json")
    assert gpuaas.status == 0, gpuaas.err
    evidence = json.loads(gpuaas.out)
    order = ["allocation", "inventory", *steps, "inventory_after", "disk_evidence_after", "audit"]
    assert list(evidence) == order == list(printed(gpuaas.err)), "one JSON, and progress beside it"
    (after,) = evidence["inventory_after"].values()
    assert (after["status"], after["health_state"], after["health_detail"]) == (
        "available",
        "healthy",
        {},
    )
    (event,) = evidence["audit"]["events"]
    assert event["detail"]["runtime_verified_absent"] is looks[0]
    with reading(selling.engine) as conn:
        absence_checks = queue.every(
            conn, allocation_id=allocation_id, kind=TaskKind.SLICE_ABSENCE_VERIFY
        )
        begun = [journal.history_of(conn, "task", task.id)[0] for task in absence_checks]
        acts: list[Any] = [*begun, *journal.audit_rows(conn, action="admin.slot.repair")]
    assert {row.reason for row in acts} == {"demo"}
    # Each step printed its findings at once, not at the end.
    summaries = printed(gpuaas.err)
    assert [step for step, lines in summaries.items() if not lines] == []
    (slot_id,) = evidence["inventory_after"]
    assert "cleanup_blocked, failed" in summaries["inventory"][0]
    assert summaries["runtime_absence"][0].startswith("absent" if looks[0] else "not absent")
    before, after_it = (
        evidence[name][slot_id] for name in ("disk_evidence", "disk_evidence_after")
    )
    assert before["id"] in summaries["disk_evidence"][0]
    assert after_it["id"] in summaries["disk_evidence_after"][0]
    assert before["id"] != after_it["id"]
    assert "available, healthy" in summaries["inventory_after"][0]
    assert event["reason"] in summaries["audit"][0]


@pytest.mark.covers("CTRL-7", "I16")
def test_recover_succeeds_where_the_gate_is_shut_and_says_what_comes_next(
    selling: Stack, gpuaas: Gpuaas, host: Host
) -> None:
    allocation_id = stuck(selling)
    with transaction(selling.engine) as conn:
        host_life.observed(conn, NODE, ACT, identity={"boot_id": "another"})
    host.absent = [True]
    gpuaas("recover", allocation_id, "--reason", "rebooted", "--output", "json")
    assert gpuaas.status == 0, gpuaas.err
    evidence = json.loads(gpuaas.out)
    ((slot_id, gate),) = evidence["not_on_sale"].items()
    assert evidence["inventory_after"][slot_id]["status"] == "disabled"
    assert {row["code"] for row in gate["gate"]} == {"discovery_stale", "parity_stale"}
    assert gate["next"] == f"gpuaas nodes discover {NODE} && gpuaas nodes parity {NODE}"


@pytest.mark.covers("CTRL-7")
def test_a_refusal_carries_the_evidence_so_far(
    selling: Stack, gpuaas: Gpuaas, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocation_id = stuck(selling)
    host.absent = [True]
    error = {"code": "command_failed", "found": "I/O error"}

    def breaks(_seconds: float) -> None:
        with transaction(selling.engine) as conn:
            slot_ids = [slot.id for slot in held_slots(conn, allocation_id)]
            slices.cleanup_failed(conn, slot_ids, ACT, step="nvme_wipe", error=error)

    monkeypatch.setattr("reconciler.cli.recovery.time.sleep", breaks)
    gpuaas("recover", allocation_id, "--reason", "x", "--output", "json")
    assert (gpuaas.status, "slots_not_recovered" in gpuaas.err) == (1, True)
    assert gpuaas.out == ""
    summaries = printed(gpuaas.err)
    (proven,) = summaries["disk_evidence"]
    assert summaries["runtime_absence"] == ["absent: nothing is left on the host by 0 checks"]
    assert "nvme_wipe, command_failed, I/O error" in summaries["inventory_after"][0]
    # The refusal keeps the evidence that a person decides on.
    refusal = json.loads(gpuaas.err[gpuaas.err.index("{") :])
    evidence = refusal["evidence"]
    assert list(evidence) == list(summaries)
    assert evidence["runtime_absence"]["absent"] is True
    (proof,) = evidence["disk_evidence"].values()
    assert proof["id"] in proven


def test_the_slots_at_the_end_or_the_whole_evidence(
    selling: Stack, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    after = {
        "slot_index": 3,
        "status": "available",
        "health_state": "healthy",
        "health_detail": {},
        "more": "all",
    }
    steps = [
        {"step": "inventory", "evidence": {}},
        {"step": "inventory_after", "evidence": {"s-1": after}},
    ]

    def post(_client: object, path: str, body: dict[str, Any]) -> dict[str, Any]:
        seen.append((path, body["reason"]))
        return {"id": "c-1", "state": "recovered", "steps": steps, "waits_for": None}

    monkeypatch.setattr(Client, "post", post)
    gpuaas.at(selling)("recover", "a-1", "--reason", "stuck")
    assert seen == [("/admin/allocations/a-1/recover", "stuck")]
    assert gpuaas.status == 0
    assert gpuaas.out.splitlines()[1].split() == ["3", "s-1", "available", "healthy"]
    gpuaas("recover", "a-1", "--reason", "stuck", "--output", "json")
    assert json.loads(gpuaas.out)["inventory_after"]["s-1"]["more"] == "all"


def test_an_interrupted_command_stops_nothing(
    selling: Stack, gpuaas: Gpuaas, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocation_id = stuck(selling)
    host.absent = [True]

    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("reconciler.cli.recovery.time.sleep", interrupted)
        gpuaas("recover", allocation_id, "--reason", "demo")
    assert gpuaas.status != 0
    assert f"`gpuaas recover {allocation_id}` follows it again" in gpuaas.err
    # The leader went on meanwhile.
    host.wipe()
    host.go_on()
    gpuaas("recover", allocation_id, "--output", "json")
    assert gpuaas.status == 0, gpuaas.err
    evidence = json.loads(gpuaas.out)
    assert list(evidence)[:2] == ["allocation", "inventory"], "all of it, from the beginning"
    assert [slot["status"] for slot in evidence["inventory_after"].values()] == ["available"]
    with reading(selling.engine) as conn:
        assert len(journal.audit_rows(conn, action=recovery.FORCE_CLEANUP)) == 1


def test_a_second_command_joins_the_first(selling: Stack, gpuaas: Gpuaas) -> None:
    allocation_id = stuck(selling)
    cases = []
    for reason in ("one", "two"):
        gpuaas.at(selling)("recover", allocation_id, "--reason", reason, "--no-wait")
        assert gpuaas.status == 0, gpuaas.err
        gpuaas("recover", allocation_id, "--no-wait", "--output", "json")
        cases.append(json.loads(gpuaas.out))
    assert cases[0] == cases[1]
    assert (cases[0]["reason"], cases[0]["state"]) == ("one", "opened")


def test_without_a_case_a_reason_is_needed(selling: Stack, gpuaas: Gpuaas) -> None:
    gpuaas.at(selling)("recover", stuck(selling))
    assert (gpuaas.status, "reason_required" in gpuaas.err) == (1, True)


def test_what_waits_for_a_person_is_said_and_goes_on_later(
    selling: Stack, gpuaas: Gpuaas, host: Host
) -> None:
    allocation_id = stuck(selling)
    host.absent = [True]
    with transaction(selling.engine) as conn:
        conn.exec_driver_sql("UPDATE nodes SET health_state = 'failed'")
    gpuaas("recover", allocation_id, "--reason", "x")
    assert (gpuaas.status, "node_unhealthy" in gpuaas.err) == (1, True)
    assert "gpuaas nodes drain" in gpuaas.err
    with transaction(selling.engine) as conn:
        host_life.drain(conn, NODE, ACT)
    gpuaas("recover", allocation_id)
    assert gpuaas.status == 0, gpuaas.err


def test_a_host_that_says_nothing_is_not_followed_for_ever(
    selling: Stack, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocation_id = stuck(selling)
    seconds = [0.0]
    monkeypatch.setattr("reconciler.wait_timeout.monotonic", lambda: seconds[0])

    def passes(_seconds: float) -> None:
        seconds[0] += 60
        play_recovery_cases(selling.engine, selling.settings)

    monkeypatch.setattr("reconciler.cli.recovery.time.sleep", passes)
    gpuaas.at(selling)("recover", allocation_id, "--reason", "x", "--output", "json")
    refusal = json.loads(gpuaas.err[gpuaas.err.index("{") :])
    assert (gpuaas.status, refusal["code"]) == (1, "task_timeout")
    assert "state verifying, waits for worker" in refusal["found"]
    assert list(refusal["evidence"]) == ["allocation", "inventory"]
    gpuaas("recover", allocation_id, "--no-wait", "--output", "json")
    assert json.loads(gpuaas.out)["state"] == "verifying", "the case goes on"
