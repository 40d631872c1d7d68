"""BIOS settings through a BMC that is a separate process and answers like an iDRAC."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _errors
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware import (
    _bios,
    _redfish_attributes,
    _redfish_bios,
    _redfish_command,
    _redfish_session,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware._redfish_connection import Trust
from ansible_collections.gpuaas.slice.plugins.modules import redfish_bios as module

from tests.standin import bmc as standin
from tests.standin import redfish

pytestmark = pytest.mark.covers("HOST-3")

VALUES = {"ProcVirtualization": "Enabled", "LogicalProc": "Enabled", "SriovGlobalEnable": "Enabled"}
SETTINGS = f"{redfish.SYSTEM}/Bios/Settings"
JOB = "JID_763788807801"


def drive(bmc: standin.Bmc, *, check: bool = False, **change: Any) -> _change.Outcome:
    params = {
        "attributes": VALUES, "state": "present", "power_cycle": False, "wait": True,
        "deadline": 60, "interval": 0.05, "timeout": 60, "acknowledged_jobs": [], "system": "",
    }  # fmt: skip
    account = _redfish_session.Account("root", standin.PASSWORD)
    with _redfish_session.Client(
        bmc.address, account, Trust(ca_file=bmc.ca_file), timeout=60
    ) as client:
        subject = _redfish_bios.subject(client)
        return _change.drive(subject, params | change, check_mode=check)


def refused(bmc: standin.Bmc, **change: Any) -> _errors.Refusal:
    """Return the refusal of a run that changed nothing."""
    try:
        outcome = drive(bmc, **change)
    except _errors.Refusal as refusal:
        failure = refusal
    else:
        assert outcome.failure is not None
        assert not outcome.changed
        failure = outcome.failure
    assert (bmc.record()["patches"], bmc.record()["resets"]) == ([], [])
    return failure


def test_the_wishes_are_those_of_racadm() -> None:
    assert VALUES == _bios.BARE
    assert len(_bios.REQUIRED) == 3


@pytest.mark.covers("P15")
def test_planned_says_what_would_be_and_changes_nothing(bmc: standin.Bmc) -> None:
    outcome = drive(bmc, state="planned")
    assert (outcome.changed, outcome.plan.steps) == (False, ())
    assert outcome.facts["differences"][0]["after"] == VALUES
    assert bmc.record()["patches"] == []


def test_check_mode_tells_the_change_it_would_make(bmc: standin.Bmc) -> None:
    before = drive(bmc, check=True)
    assert bmc.record()["patches"] == []
    done = drive(bmc)
    assert (before.changed, done.changed, done.failure) == (True, True, None)
    assert before.document()["diff"] == done.document()["diff"]
    assert before.document()["diff"]["after"] == {_bios.TARGET: VALUES}


def test_one_request_stages_all_and_makes_the_job(bmc: standin.Bmc) -> None:
    outcome = drive(bmc)
    assert bmc.record()["patches"] == [
        {"Attributes": VALUES, "@Redfish.SettingsApplyTime": {"ApplyTime": "OnReset"}}
    ]
    assert outcome.evidence["commit_job"] == {"jobs": [{"id": JOB}]}
    assert {row["status"] for row in outcome.facts["attributes"]} == {"pending"}
    assert outcome.facts["settled"] is False
    assert bmc.count(f"GET {redfish.REGISTRY_FILE}") == 1, "it takes an iDRAC seconds"
    again = drive(bmc)
    assert (again.changed, again.failure, bmc.record()["resets"]) == (False, None, [])


def test_a_power_cycle_brings_them_and_is_followed(bmc: standin.Bmc) -> None:
    bmc.begin(slow_job=3, expire_after=16)
    outcome = drive(bmc, power_cycle=True)
    assert outcome.failure is None
    assert outcome.facts["settled"] is True
    assert outcome.evidence["commit_job"]["jobs"][0]["status"] == "Completed"
    assert bmc.record()["resets"] == ["PowerCycle"]
    assert bmc.record()["opened"] == 2, "the session expired on the way and was replaced"
    again = drive(bmc, power_cycle=True)
    assert (again.changed, bmc.record()["resets"]) == (False, ["PowerCycle"])


def test_a_job_that_waits_is_finished_by_a_later_call(bmc: standin.Bmc) -> None:
    drive(bmc)
    outcome = drive(bmc, power_cycle=True)
    assert (outcome.done, outcome.facts["settled"]) == (["finish_job"], True)
    assert len(bmc.record()["patches"]) == 1


def test_without_waiting_the_reset_is_the_end_of_it(bmc: standin.Bmc) -> None:
    outcome = drive(bmc, power_cycle=True, wait=False)
    assert outcome.evidence["commit_job"] == {"jobs": [{"id": JOB}], "reset": "PowerCycle"}


def test_a_machine_that_is_off_is_started(bmc: standin.Bmc) -> None:
    bmc.begin(powered=False)
    assert drive(bmc, power_cycle=True).facts["settled"] is True
    assert bmc.record()["resets"] == ["On"]


def test_values_that_wait_without_a_job_get_one(bmc: standin.Bmc) -> None:
    """A newer iDRAC answers 200 and makes no job when the values are pending already."""
    bmc.begin(pending=VALUES, no_job=True)
    outcome = drive(bmc)
    assert outcome.failure is None
    assert outcome.evidence["commit_job"] == {"jobs": [{"id": JOB}]}
    assert bmc.count(f"POST {redfish.JOBS}") == 1


def test_a_change_that_is_not_kept_fails_the_second_look(bmc: standin.Bmc) -> None:
    bmc.begin(forget=True)
    outcome = drive(bmc)
    assert (outcome.failed_step, outcome.failure.code) == ("verify", "job_in_queue")


def test_a_bmc_that_is_gone_after_the_change_is_named_with_it(
    bmc: standin.Bmc, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, looks = _redfish_bios.subject, []

    def subject(*words: Any) -> _change.Subject:
        whole = real(*words)

        def observe(params: Any) -> Any:
            looks.append(params)
            if len(looks) > 1:
                raise _errors.Refusal("bmc_unreachable", expected="a", found="b", remedy="c")
            return whole.observe(params)

        return dataclasses.replace(whole, observe=observe)

    monkeypatch.setattr(_redfish_bios, "subject", subject)
    monkeypatch.setattr(_redfish_session, "end_by_signals", lambda: None)
    environment = {
        "IDRAC_HOST": bmc.address, "IDRAC_USER": "root", "IDRAC_PASSWORD": standin.PASSWORD,
    }  # fmt: skip
    words = ["--apply", f"--ca-file={bmc.ca_file}"]
    assert _redfish_command.main(words, environment) == _redfish_command.REFUSED
    plan, *_others, last = capsys.readouterr().out.splitlines()
    assert plan == "GPUAAS_SLICE_BIOS_PLAN ProcVirtualization=Enabled"
    assert "status=refused code=bmc_unreachable" in last
    assert len(bmc.record()["patches"]) == 1


def test_a_job_that_fails_is_named_and_not_repeated_by_itself(bmc: standin.Bmc) -> None:
    bmc.begin(job_fails=True)
    outcome = drive(bmc, power_cycle=True)
    assert outcome.failure.code == "bios_job_failed"
    again = drive(bmc, power_cycle=True)
    assert (again.failure.code, again.changed) == ("bios_job_failed", False)
    assert drive(bmc, acknowledged_jobs=[JOB]).failure is None


@pytest.mark.parametrize("expand", [True, False])
@pytest.mark.parametrize("status", ["Scheduled", "ReadyForExecution", "SomethingNew"])
def test_an_open_job_of_somebody_else_is_in_the_way(
    bmc: standin.Bmc, status: str, expand: bool
) -> None:
    bmc.begin(jobs=[redfish.job_entry("JID_700000000001", status)], expand=expand)
    refusal = refused(bmc)
    assert refusal.code == "job_in_queue"
    assert "JID_700000000001" in refusal.found


def jobs(count: int, last: str = "Completed") -> list[dict[str, Any]]:
    """Return a queue in which only the last entry may be open."""
    return [
        redfish.job_entry(f"JID_7{number:011d}", last if number == count else "Completed")
        for number in range(1, count + 1)
    ]


@pytest.mark.parametrize("expand", [True, False])
def test_an_open_job_on_a_later_page_is_in_the_way(bmc: standin.Bmc, expand: bool) -> None:
    bmc.begin(jobs=jobs(5, "Scheduled"), page=2, expand=expand)
    refusal = refused(bmc)
    assert refusal.code == "job_in_queue" and "JID_700000000005" in refusal.found
    bmc.begin(jobs=jobs(5), page=2, expand=expand)
    assert drive(bmc, check=True).failure is None


@pytest.mark.parametrize(
    "link",
    [
        f"{redfish.JOBS}?$expand=*($levels=1)",  # the first page again, for ever
        f"{redfish.JOBS}?$skip=4",  # past entries that were never read
        "/somewhere/else",
    ],
)
def test_a_queue_that_is_not_shown_whole_is_never_settled(bmc: standin.Bmc, link: str) -> None:
    bmc.begin(jobs=jobs(5), page=2, next_link=link)
    assert refused(bmc).code == "bmc_answer_malformed"


def test_whatever_host_a_page_names_this_bmc_is_asked(bmc: standin.Bmc) -> None:
    bmc.begin(jobs=jobs(3), page=2, next_link=f"https://bmc.invalid{redfish.JOBS}?$skip=2")
    assert drive(bmc, check=True).failure is None
    assert bmc.count(f"GET {redfish.JOBS}") == 2


def test_a_job_that_comes_between_plan_and_change_is_named(
    bmc: standin.Bmc, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = _redfish_bios.plan

    def late(params: _change.Params, firmware: _redfish_attributes.Firmware) -> _change.Plan:
        bmc.begin(jobs=[redfish.job_entry("JID_700000000002", "Scheduled")])
        return real(params, firmware)

    monkeypatch.setattr(_redfish_bios, "plan", late)
    outcome = drive(bmc)
    assert (outcome.failure.code, outcome.failed_step) == ("job_in_queue", "commit_job")
    assert "JID_700000000002" in outcome.failure.found


def test_ended_jobs_and_dells_other_entries_are_in_nobodys_way(bmc: standin.Bmc) -> None:
    ended = redfish.job_entry("JID_700000000003", "Completed")
    bmc.begin(jobs=[ended, redfish.job_entry("JID_CLEARALL", "Pending", JobType="Unknown")])
    assert drive(bmc, check=True).failure is None


def test_a_foreign_change_is_in_the_way_and_its_value_stays_unread(bmc: standin.Bmc) -> None:
    bmc.begin(pending={"IscsiDev1Con1ChapSecret": "another-chap-secret"})
    refusal = refused(bmc)
    assert refusal.code == "foreign_pending_values"
    assert "IscsiDev1Con1ChapSecret" in refusal.found
    assert "chap-secret" not in json.dumps(drive(bmc, check=True).document()) + str(refusal)


@pytest.mark.parametrize(
    ("attributes", "code"),
    [
        ({"VtForDirectIo": "Enabled"}, "attribute_unknown"),
        ({"SystemServiceTag": "ABC"}, "attribute_read_only"),
        ({"Proc1NumCores": "1"}, "attribute_read_only"),
        ({"ProcVirtualization": "enabled"}, "value_not_allowed"),
        ({"AcPwrRcvryUserDelay": "601"}, "value_not_allowed"),
        ({"AcPwrRcvryUserDelay": "soon"}, "value_not_allowed"),
        ({"IscsiDev1Con1ChapSecret": "x"}, "value_not_allowed"),
        ({"SetupPassword": "x"}, "attribute_unknown"),
    ],
)
def test_the_registry_is_asked_first(
    bmc: standin.Bmc, attributes: dict[str, str], code: str
) -> None:
    refusal = refused(bmc, attributes=attributes)
    assert refusal.code == code
    assert redfish.SECRET_OF_ANOTHER not in json.dumps(
        drive(bmc, attributes=attributes, check=True).document()
    )


def test_numbers_are_sent_as_numbers(bmc: standin.Bmc) -> None:
    assert drive(bmc, attributes={"AcPwrRcvryUserDelay": "120"}).failure is None
    assert bmc.record()["patches"][0]["Attributes"] == {"AcPwrRcvryUserDelay": 120}


def test_booleans_are_spelt_as_json_spells_them() -> None:
    rule = _redfish_attributes.Rule("Boolean")
    assert [_redfish_attributes.typed(value, rule) for value in ("true", "False")] == [True, False]
    assert [r.code for r in _redfish_bios.unfit({"A": "yes"}, {"A": rule})] == ["value_not_allowed"]


@pytest.mark.parametrize("lack", ["Manager.Jobs", "SupportedApplyTimes"])
def test_a_bmc_that_cannot_let_changes_wait_is_only_read(bmc: standin.Bmc, lack: str) -> None:
    bmc.begin(lacks=[lack])
    assert refused(bmc).code == "bmc_feature_missing"
    assert drive(bmc, state="planned").failure is None


def test_without_a_registry_the_bmc_is_the_judge(bmc: standin.Bmc) -> None:
    bmc.begin(lacks=["Root.Registries"])
    assert drive(bmc).failure is None


def test_another_system_is_not_taken_for_the_one_asked_for(bmc: standin.Bmc) -> None:
    assert refused(bmc, system="System.Embedded.2").code == "system_ambiguous"
    assert drive(bmc, system="System.Embedded.1", check=True).failure is None


def test_what_is_staged_against_a_good_value_is_taken_back(bmc: standin.Bmc) -> None:
    bmc.begin(values=VALUES, pending={"LogicalProc": "Disabled"})
    outcome = drive(bmc)
    assert (outcome.done, outcome.failure) == (["stage_attribute"], None)
    assert bmc.record()["patches"] == [{"Attributes": {"LogicalProc": "Enabled"}}]


def run(bmc: standin.Bmc, tmp_path: Path, **change: Any) -> tuple[dict[str, Any], str]:
    """Run the module as Ansible does: a process, its arguments on standard input."""
    arguments = {
        "host": bmc.address, "user": "root", "password": standin.PASSWORD,
        "ca_file": bmc.ca_file, "state": "present", "timeout": 60,
        "_ansible_remote_tmp": str(tmp_path), **change,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, module.__file__],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments}),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return json.loads(done.stdout), done.stdout + done.stderr


def test_the_module_as_a_process_keeps_the_password(bmc: standin.Bmc, tmp_path: Path) -> None:
    answer, printed = run(bmc, tmp_path, _ansible_check_mode=True, _ansible_diff=True)
    assert (answer["changed"], answer["settled"]) == (True, False)
    assert standin.PASSWORD not in printed
    assert answer["invocation"]["module_args"]["password"] == "VALUE_SPECIFIED_IN_NO_LOG_PARAMETER"
    changed, _ = run(bmc, tmp_path)
    assert changed["diff"] == answer["diff"]


def test_the_module_fails_with_the_refusal_and_logs_out(bmc: standin.Bmc, tmp_path: Path) -> None:
    answer, printed = run(bmc, tmp_path, attributes={"Nothing": "x"})
    assert answer["error"]["code"] == "attribute_unknown"
    assert bmc.record()["opened"] == 1
    assert standin.PASSWORD not in printed
    assert run(bmc, tmp_path, host="a b")[0]["error"]["code"] == "bmc_address_invalid"
