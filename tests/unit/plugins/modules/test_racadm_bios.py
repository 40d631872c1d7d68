"""BIOS settings through a real program that behaves like RACADM and its controller."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _command,
    _errors,
    _host,
    _ledger,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware import _bios, _racadm_bios

from reconciler.model import firmware

pytestmark = pytest.mark.covers("HOST-1")

STANDIN = Path(__file__).resolve().parents[3] / "standin" / "racadm"
SUBJECT = _change.Subject(
    _racadm_bios.observe, _racadm_bios.plan, _racadm_bios.apply, _racadm_bios.facts
)
BLOCKING = {"id": "JID_700000000001", "name": "Firmware Update: NIC", "status": "Scheduled"}


class Idrac:
    """Controller behind the stand-in: its state, and a drive of the module against it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "racadm-state.json"

    def set(self, **state: Any) -> None:
        self.file.write_text(json.dumps(self.state() | state))

    def state(self) -> dict[str, Any]:
        return json.loads(self.file.read_text()) if self.file.exists() else {}

    def value(self, full: str) -> str:
        group, _, name = full.partition(".")
        return str(self.state()["settings"][group][name])

    def called(self, *words: str) -> int:
        return sum(call[: len(words)] == list(words) for call in self.state()["calls"])

    def drive(self, *, check: bool = False, **change: Any) -> _change.Outcome:
        params: dict[str, Any] = {
            "attributes": _bios.BARE,
            "state": "present",
            "power_cycle": True,
            "wait": True,
            "deadline": 60,
            "interval": 0,
            "timeout": 60,
            "acknowledged_jobs": [],
            "program": "racadm",
        }
        return _change.drive(SUBJECT, params | change, check_mode=check)

    def refused(self, **change: Any) -> str:
        try:
            failure = self.drive(**change).failure
        except _errors.Refusal as refusal:
            return refusal.code
        return failure.code


@pytest.fixture
def idrac(tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch) -> Idrac:
    """A machine with all settings off, its `racadm` on the command gate's PATH, and no tenant."""
    (tmp_path / "racadm").symlink_to(STANDIN)
    monkeypatch.setattr(_command, "_PATH", f"{tmp_path}:{_command._PATH}")
    return Idrac(tmp_path)


@pytest.mark.covers("P15")
def test_it_only_looks_unless_told_otherwise(idrac: Idrac) -> None:
    outcome = idrac.drive(state="planned", power_cycle=False)
    assert (outcome.failure, outcome.changed, outcome.plan.steps) == (None, False, ())
    steps = [(row["name"], row["subject"]) for row in outcome.facts["differences"]]
    assert steps == [
        ("stage_attribute", "ProcSettings.ProcVirtualization"),
        ("stage_attribute", "ProcSettings.LogicalProc"),
        ("stage_attribute", "IntegratedDevices.SriovGlobalEnable"),
        ("commit_job", "BIOS.Setup.1-1"),
    ]
    assert [row["code"] for row in outcome.facts["refusals"]] == ["power_cycle_not_allowed"]
    assert not outcome.facts["settled"]
    assert not idrac.called("set") and not idrac.called("jobqueue", "create")


def test_only_the_approved_plan_is_carried_out(idrac: Idrac) -> None:
    plan = idrac.drive(state="planned", power_cycle=False).facts
    # The reconciler shows this digest for approval, and passes it on.
    assert firmware.approvable(plan["differences"])["digest"] == plan["digest"]
    other = {**_bios.BARE, "LogicalProc": "Disabled"}
    assert idrac.refused(attributes=other, approved=plan["digest"]) == "plan_changed"
    assert not idrac.called("set")
    done = idrac.drive(approved=plan["digest"])
    assert done.failure is None and done.facts["settled"]
    assert not idrac.drive(approved=plan["digest"]).changed


def test_check_mode_says_what_then_happens(idrac: Idrac) -> None:
    checked = idrac.drive(check=True)
    assert checked.changed and not idrac.called("set")
    done = idrac.drive()
    assert done.failure is None and done.changed and done.facts["settled"]
    assert done.document()["diff"] == checked.document()["diff"]
    assert done.document()["diff"]["after"]["BIOS.Setup.1-1"] == dict(_bios.REQUIRED)
    assert [job["id"][:4] for job in done.evidence["commit_job"]["jobs"]] == ["JID_", "RID_"]
    assert [idrac.value(name) for name in _bios.REQUIRED] == ["Enabled"] * 3
    assert idrac.state()["cycles"] == 1
    again = idrac.drive()
    assert not again.changed and again.failure is None
    assert idrac.called("jobqueue", "create") == 1


def test_a_job_is_left_to_the_power_cycle_and_followed_afterwards(idrac: Idrac) -> None:
    left = idrac.drive(wait=False)
    assert left.failure is None and left.changed
    # The controller already shows the new values as pending, which proves nothing.
    assert not left.facts["settled"]
    assert {row["status"] for row in left.facts["attributes"]} == {"pending"}
    between = idrac.drive(wait=False)
    assert not between.changed and not between.facts["settled"]
    after = idrac.drive()
    assert after.done == ["finish_job"] and after.facts["settled"]
    assert idrac.called("jobqueue", "create") == 1 and idrac.state()["cycles"] == 1


def test_a_job_ends_in_another_boot_only(idrac: Idrac) -> None:
    """As on the lab host, where the machine is really restarted."""
    idrac.set(boots=True)
    assert idrac.refused(deadline=0) == "bios_job_timeout"
    idrac.set(jobs=[{**job, "boot": "an earlier one"} for job in idrac.state()["jobs"]])
    after = idrac.drive()
    assert after.done == ["finish_job"] and after.facts["settled"]
    assert idrac.called("jobqueue", "create") == 1 and idrac.state()["cycles"] == 1


@pytest.mark.parametrize("command", ["get", "jobqueue view", "jobqueue create"])
@pytest.mark.parametrize("answer", ["garbage", "empty"])
def test_what_is_no_answer_is_not_taken_for_one(idrac: Idrac, command: str, answer: str) -> None:
    idrac.set(faults={command: answer})
    assert idrac.refused() == "racadm_garbled"
    assert idrac.called("set") == (3 if "create" in command else 0)


@pytest.mark.parametrize(
    "queue",
    [
        "[Job ID=JID_763788807801]\nJob Name=Configure: BIOS.Setup.1-1",
        "[Job ID=JID_763788807801]\nJob Name=x\nStatus=Completed\nStatus=Failed",
    ],
)
def test_a_queue_that_contradicts_itself_is_refused(queue: str) -> None:
    with pytest.raises(_errors.Refusal, match="racadm_garbled"):
        _racadm_bios.parse_jobs(f"----JOB QUEUE----\n{queue}\n", "JOB QUEUE")
    rows = "[Key=BIOS.Setup.1-1#G]\nA=Off\nA=On\n"
    with pytest.raises(_errors.Refusal, match="racadm_garbled"):
        _racadm_bios.parse_group("G", rows)


def test_the_queue_is_read_before_the_settings(idrac: Idrac) -> None:
    """A job that ends between the reads must not pass for settings that need another job."""
    idrac.drive(state="planned")
    assert idrac.state()["calls"] == [
        ["jobqueue", "view"], ["get", "BIOS.ProcSettings"], ["get", "BIOS.IntegratedDevices"],
    ]  # fmt: skip


TENANT = "23bd713b-6073-4ef7-8a51-2897e902365d"


def a_guest(tree: Path) -> str:
    (tree / "proc/9").mkdir(parents=True)
    (tree / "proc/9/cmdline").write_text("/usr/bin/qemu-system-x86_64\0-name\0guest=x")
    return "qemu-system-x86_64 9"


def a_slot(_tree: Path) -> str:
    _ledger.hold("slot-0", fence=1, allocation_id=TENANT, disk_identity="")
    return f"slot-0 leased by {TENANT}"


def a_machine(_tree: Path) -> str:
    _ledger.hold(_ledger.MACHINE, fence=1, allocation_id=TENANT, disk_identity="")
    return f"the whole machine leased by {TENANT}"


@pytest.mark.parametrize("comes", [a_guest, a_slot, a_machine], ids=lambda case: case.__name__)
def test_nobody_is_power_cycled(idrac: Idrac, tree: Path, comes: Callable[[Path], str]) -> None:
    users = comes(tree)
    for check in (True, False):
        failure = idrac.drive(check=check).failure
        assert (failure.code, failure.found) == ("host_in_use", users)
    # The forecast reports the refusal too, as soon as a power cycle is due.
    refusals = idrac.drive(state="planned").facts["refusals"]
    assert [row["code"] for row in refusals] == ["host_in_use"]
    assert idrac.refused(power_cycle=False) == "power_cycle_not_allowed"
    assert not idrac.called("set") and not idrac.called("jobqueue", "create")


def test_who_comes_while_it_stages_is_not_power_cycled(
    idrac: Idrac, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = _racadm_bios.Racadm.stage

    def stage(self: _racadm_bios.Racadm, name: str, value: str) -> None:
        staged(self, name, value)
        if not _ledger.entries():
            a_slot(tree)

    monkeypatch.setattr(_racadm_bios.Racadm, "stage", stage)
    outcome = idrac.drive()
    assert outcome.failure.code == "host_in_use"
    assert outcome.failed_step == "commit_job" and not idrac.called("jobqueue", "create")


def test_settings_that_are_right_disturb_nobody(idrac: Idrac, tree: Path) -> None:
    assert idrac.drive().failure is None
    a_guest(tree)
    again = idrac.drive()
    assert (again.failure, again.changed) == (None, False)


@pytest.mark.covers("I13")
def test_a_ledger_that_cannot_be_read_allows_no_power_cycle(idrac: Idrac) -> None:
    _host.write(f"{_ledger.DIRECTORY}/slot-0.json", "{")
    assert idrac.refused() == "ledger_unreadable"
    assert not idrac.called("set")


def test_other_jobs_in_the_queue_stop_it(idrac: Idrac) -> None:
    idrac.set(jobs=[BLOCKING])
    assert idrac.refused() == "job_in_queue"
    # This includes a job that arrives between the read and the act.
    idrac.set(jobs=[], intruder=[BLOCKING | {"name": "Configure: BIOS.Setup.1-1"}])
    assert idrac.refused() == "job_in_queue"
    # This includes an open BIOS job with other settings.
    idrac.set(intruder=[], pending={})
    assert idrac.refused() == "job_in_queue"
    assert idrac.state()["cycles"] == 0


def test_a_failed_job_is_named_and_not_tried_again(idrac: Idrac) -> None:
    idrac.set(outcome="Failed")
    outcome = idrac.drive()
    assert outcome.failure.code == "bios_job_failed"
    assert "PR21" in outcome.failure.found and outcome.failed_step == "commit_job"
    idrac.set(outcome="Completed")
    assert idrac.refused() == "bios_job_failed"
    assert idrac.called("jobqueue", "create") == 1
    failed = next(job["id"] for job in idrac.state()["jobs"] if job["status"] == "Failed")
    assert idrac.drive(acknowledged_jobs=[failed]).facts["settled"]


def test_a_job_whose_power_cycle_failed_is_not_waited_for(idrac: Idrac) -> None:
    idrac.set(reboot="Reboot Failed", power=3)
    idrac.drive(wait=False)
    jobs = idrac.state()["jobs"]
    jobs[-1]["status"] = "Reboot Failed"
    idrac.set(jobs=jobs)
    assert idrac.refused() == "bios_job_failed"


def test_a_completed_job_that_changed_nothing_is_not_believed(idrac: Idrac) -> None:
    idrac.set(keeps=["ProcSettings.LogicalProc"])
    outcome = idrac.drive()
    assert outcome.failure.code == "verify_failed"
    assert "LogicalProc" in outcome.failure.found and idrac.called("jobqueue", "create") == 1


def test_a_job_without_end_meets_its_deadline(idrac: Idrac) -> None:
    idrac.set(power=1000)
    outcome = idrac.drive(deadline=0.3)
    assert outcome.failure.code == "bios_job_timeout"
    assert "JID_763788807801 is Running" in outcome.failure.found


def test_slow_and_broken_answers_while_it_follows_are_no_news(idrac: Idrac) -> None:
    idrac.set(faults={"jobqueue view -i": "error"})
    assert idrac.refused(deadline=0.3) == "bios_job_timeout"
    idrac.set(faults={"get": "slow"})
    assert idrac.refused(timeout=0.4) == "command_timeout"
    idrac.set(faults={})
    assert idrac.drive().facts["settled"]
    assert idrac.called("jobqueue", "create") == 1


def test_a_value_that_was_not_staged_is_not_power_cycled_for(idrac: Idrac) -> None:
    idrac.set(faults={"set": "silent_set"})
    assert idrac.refused() == "staging_failed"
    assert not idrac.called("jobqueue", "create")


def test_settings_of_somebody_else_are_not_committed_along(idrac: Idrac) -> None:
    idrac.set(pending={"ProcSettings.CpuInterconnectBusSpeed": "12GTps"})
    assert idrac.refused() == "foreign_pending_values"


def test_a_staged_change_of_a_right_value_is_taken_back_without_a_job(idrac: Idrac) -> None:
    idrac.drive()
    idrac.set(pending={"ProcSettings.LogicalProc": "Disabled"})
    assert not idrac.drive(state="planned").facts["settled"]
    outcome = idrac.drive()
    assert outcome.done == ["stage_attribute"] and outcome.facts["settled"]
    assert idrac.state()["pending"] == {} and idrac.state()["cycles"] == 1


@pytest.mark.parametrize(
    ("attributes", "code"),
    [
        ({"ProcSettings.Turbo9": "On"}, "attribute_unknown"),
        ({"ProcSettings.Proc1Brand": "AMD"}, "attribute_read_only"),
        ({"NoSuchGroup.Setting": "On"}, "command_failed"),
        ({"LogicalProc": "Enabled\nx"}, "attribute_invalid"),
        ({"LogicalProc": "--help"}, "attribute_invalid"),
        ({"Unheard": "Enabled"}, "attribute_invalid"),
    ],
)
def test_settings_that_cannot_be(idrac: Idrac, attributes: dict[str, str], code: str) -> None:
    assert idrac.refused(attributes=attributes) == code
    assert not idrac.file.exists() or not idrac.called("set")


@pytest.mark.covers("P15")
def test_a_power_cycle_needs_leave(idrac: Idrac) -> None:
    assert idrac.refused(power_cycle=False) == "power_cycle_not_allowed"
    assert not idrac.called("set")


def test_a_status_that_nobody_knows_has_not_ended() -> None:
    assert _bios.Job("JID_763788807801", "x", "Pondering").phase is _bios.Phase.OPEN
