"""Exactly one job per run, wherever the connection, AWX or our process breaks."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reconciler.runs import collect, contract
from reconciler.runs.awx import job, request
from reconciler.runs.awx.client import Client
from reconciler.runs.awx.request import JobRecord
from reconciler.runs.contract import PLAYBOOKS
from reconciler.runs.paths import RunPaths
from tests.standin.controller import Controller
from tests.unit.reconciler.runs.awx.conftest import (
    LAUNCH,
    RESULT,
    ROOT,
    TEMPLATE,
    Play,
    events,
    spec,
)

pytestmark = pytest.mark.covers("CTRL-9", "ECO-4")


def ended(verdict: dict[str, Any] | None) -> None:
    assert (verdict["status"], verdict["result"]) == ("successful", RESULT), verdict


def test_what_awx_is_asked_for(awx: Controller, play: Play) -> None:
    ended(play())
    (body,) = awx.record()["bodies"]
    variables = body["extra_vars"]
    assert (body["limit"], body["timeout"], variables["slice_hosts"]) == ("node-1", 60, "node-1")
    assert {key: variables[key] for key in spec().variables} == spec().variables
    assert (variables["ansible_host"], variables["ansible_port"]) == ("192.0.2.7", 2222)
    assert variables["ansible_host_key_checking"] is True
    assert variables["ansible_ssh_retries"] == 0
    assert variables["ansible_target_log_info"] == "run=run-1 correlation_id=c-1"
    assert "HostKeyAlias=node-1" in variables["ansible_ssh_args"]


def test_awx_and_its_inventory_add_no_variable_of_the_contract() -> None:
    """The launch has all of them, with the meaning that the playbooks give to their absence."""
    ours = {"slice_run": spec().variables["slice_run"]}
    for playbook in PLAYBOOKS:
        text = (ROOT / "playbooks" / f"{playbook}.yml").read_text()
        schema = contract.schema(playbook)
        optional = schema["properties"].keys() - set(schema["required"])
        run = replace(spec(), playbook=playbook, variables=ours)
        sent = request.body(run)["extra_vars"]
        assert optional <= sent.keys(), playbook
        for name in optional:
            value = json.dumps(sent[name]).replace("null", "none")
            meanings = (f"{name} | default({value})".replace('"', "'"), f"{name}: {value}\n")
            assert any(meaning in text for meaning in meanings), name
        run = replace(run, variables={**ours, **dict.fromkeys(optional, 7)})
        assert {request.body(run)["extra_vars"][name] for name in optional} <= {7}


@pytest.mark.parametrize("others", [0, 1, 4])
def test_a_launch_whose_answer_was_lost_is_found_and_not_repeated(
    awx: Controller, prepared: RunPaths, play: Play, others: int
) -> None:
    """Also among other jobs of the same template, page by page: a relaunch, an attempt before."""
    for number in range(others):
        awx.launch(TEMPLATE, slice_run={"id": f"run-1{number}"})
    awx.change(cut={LAUNCH: 1}, page_size=2)
    ended(play())
    assert len(awx.jobs()) == others + 1
    record = JobRecord.load(prepared)
    assert (record.posted, record.job) == (True, others + 1)


def test_a_job_of_an_awx_that_counts_from_an_older_number_is_not_repeated(
    prepared: RunPaths, awx: Controller, play: Play
) -> None:
    """It was restored from a backup between our look at its newest job and the launch."""
    record = JobRecord.load(prepared)
    record.after = 5000
    record.save(prepared)
    ended(play(quiet=0.1))
    assert len(awx.jobs()) == 1


def test_a_launch_that_is_carried_out_late_is_waited_for(awx: Controller, play: Play) -> None:
    awx.change(cut={LAUNCH: 1}, later_s=0.3)
    ended(play(quiet=30))
    time.sleep(0.35)
    assert len(awx.jobs()) == 1


@pytest.mark.parametrize("faults", [{"drop": {LAUNCH: 1}}, {"status": {LAUNCH: [502, 1]}}])
def test_a_launch_that_never_arrived_is_repeated_after_a_while(
    awx: Controller, play: Play, faults: dict[str, Any]
) -> None:
    awx.change(**faults)
    begun = time.monotonic()
    ended(play())
    assert len(awx.jobs()) == 1
    assert time.monotonic() - begun > 0.6


def test_a_launch_that_is_repeated_is_waited_for_as_long_as_the_first(
    awx: Controller, play: Play
) -> None:
    """The first launch never arrived, and the second is carried out late."""
    awx.change(drop={LAUNCH: 1}, cut={LAUNCH: 1}, later_s=0.3)
    ended(play(quiet=2.0))
    time.sleep(0.35)
    assert len(awx.jobs()) == 1


def test_a_process_that_died_after_asking_finds_its_job(
    awx: Controller, prepared: RunPaths, play: Play
) -> None:
    """Killed between the request and the record of its answer."""
    ended(play())
    record = JobRecord.load(prepared)
    record.job = 0
    record.save(prepared)
    ended(play())
    assert len(awx.jobs()) == 1


def test_a_launch_is_recorded_durably_before_awx_gets_it(
    prepared: RunPaths, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename that a loss of power undoes would leave a record without a request, and the next
    process would launch a second job.
    """
    calls: list[str] = []
    fsync, replace_file, post = os.fsync, Path.replace, Client.post

    def sync(descriptor: int) -> None:
        fsync(descriptor)
        if Path(f"/proc/self/fd/{descriptor}").resolve() == prepared.root:
            calls.append("folder synced")

    def rename(path: Path, target: Path) -> Path:
        calls.append(f"renamed to {target.name}")
        return replace_file(path, target)

    def launch(client: Client, path: str, document: dict[str, Any]) -> dict[str, Any]:
        calls.append("launched")
        return post(client, path, document)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", rename)
    monkeypatch.setattr(Client, "post", launch)
    ended(play())
    assert calls[:3] == ["renamed to awx.json", "folder synced", "launched"]


def test_a_process_told_to_go_before_its_launch_is_known_leaves_that_to_the_next(
    awx: Controller, prepared: RunPaths, play: Play
) -> None:
    awx.change(cut={LAUNCH: 1}, later_s=0.4)
    assert play(lambda: True) is None
    record = JobRecord.load(prepared)
    assert (record.posted, record.job) == (True, 0)
    ended(play(quiet=30))
    assert len(awx.jobs()) == 1


def test_a_run_canceled_before_anything_was_asked_for_never_begins(
    awx: Controller, prepared: RunPaths, play: Play
) -> None:
    collect.cancel(prepared.root)
    verdict = play()
    assert (verdict["status"], verdict["problem"]) == ("canceled", "never_began")
    assert awx.jobs() == []


def test_a_run_canceled_while_its_launch_is_unknown_is_found_and_ended(
    awx: Controller, prepared: RunPaths, play: Play
) -> None:
    awx.change(cut={LAUNCH: 1}, later_s=0.3, steps=1000)

    def stop_requested() -> bool:
        if LAUNCH in awx.record()["requests"]:
            collect.cancel(prepared.root)
        return False

    verdict = play(stop_requested, quiet=30)
    assert (verdict["status"], verdict["result"]) == ("canceled", None)
    assert awx.record()["canceled"] == [1]


SEEN = f"GET /job_templates/{TEMPLATE}/"
NAME = "gpuaas.slice.prepare_runtime"
ASKING = {"name": NAME, "ask_limit_on_launch": True, "ask_variables_on_launch": True}


@pytest.mark.covers("I13")
@pytest.mark.parametrize(
    ("refused", "status", "launches"),
    [(LAUNCH, 403, 2), (LAUNCH, 404, 2), (SEEN, 403, 1), (SEEN, 404, 1)],
)
def test_a_job_that_cannot_be_seen_may_exist(
    awx: Controller, prepared: RunPaths, play: Play, refused: str, status: int, launches: int
) -> None:
    """The answer of its launch was lost, and the token's user has lost the sight of jobs since."""
    awx.change(cut={LAUNCH: 1}, hidden=[1])
    assert play(lambda: awx.jobs() != []) is None
    awx.change(status={refused: [status, 10_000]})
    assert play(lambda: awx.record()["requests"].count(refused) == 2, quiet=0.2) is None
    record = JobRecord.load(prepared)
    assert (record.posted, record.job) == (True, 0)
    assert awx.record()["requests"].count(LAUNCH) == launches
    awx.change(hidden=[], status={})
    ended(play())
    assert len(awx.jobs()) == 1


@pytest.mark.covers("I13")
@pytest.mark.parametrize("cut", [0, 1])
def test_a_job_of_a_template_that_was_renamed_is_followed(
    awx: Controller, play: Play, cut: int
) -> None:
    """The template had its new name at the launch, and so has the job. Then it is renamed back."""
    awx.begin(
        changed={NAME: {"name": "renamed"}},
        cut={LAUNCH: cut},
        artifacts={"slice_result": RESULT},
        events=events("One"),
        strange={SEEN: [ASKING] * 9},
    )
    until = time.monotonic() + 20
    ended(play(lambda: time.monotonic() > until))
    assert len(awx.jobs()) == 1


@pytest.mark.covers("I13")
def test_a_sight_that_is_regained_after_the_search_repeats_no_job(
    awx: Controller, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    require = job.Job._require_sight

    def regain(followed: job.Job) -> None:
        awx.change(hidden=[])
        require(followed)

    monkeypatch.setattr(job.Job, "_require_sight", regain)
    awx.change(cut={LAUNCH: 1}, hidden=[1])
    ended(play())
    assert len(awx.jobs()) == 1


@pytest.mark.covers("I13")
@pytest.mark.parametrize("field", ["ask_limit_on_launch", "ask_variables_on_launch"])
def test_nothing_is_launched_again_from_a_template_that_drops_fields(
    awx: Controller, play: Play, field: str
) -> None:
    """Its job may have no run id, by which it would be found."""
    awx.begin(templates={field: False}, drop={LAUNCH: 1})
    assert play(lambda: awx.record()["requests"].count(SEEN) == 2, quiet=0.2) is None
    assert awx.record()["requests"].count(LAUNCH) == 1


@pytest.mark.covers("I13")
@pytest.mark.parametrize("how", ["canceled", "late"])
def test_a_run_that_ends_while_its_launch_is_unknown_is_lost(
    awx: Controller, prepared: RunPaths, play: Play, how: str
) -> None:
    awx.change(cut={LAUNCH: 1}, hidden=[1])
    assert play(lambda: awx.jobs() != []) is None
    if how == "canceled":
        collect.cancel(prepared.root)
    else:
        manifest = prepared.manifest.read_text()
        prepared.manifest.write_text(manifest.replace('"deadline_s": 60', '"deadline_s": 0'))
    verdict = play(quiet=0.2)
    assert (verdict["status"], verdict["begun"], verdict["touched"]) == ("lost", True, True)
    assert verdict["problem"].startswith("awx_launch_unknown: ")


def test_a_launch_that_awx_refuses_is_over(awx: Controller, play: Play) -> None:
    awx.change(status={LAUNCH: [400, 1]})
    verdict = play()
    assert (verdict["status"], verdict["touched"]) == ("failed", False)
    assert verdict["problem"].startswith("awx_refused: HTTP 400")


def test_a_launch_that_is_answered_with_the_job_of_another_run_finds_its_own(
    awx: Controller, prepared: RunPaths, play: Play
) -> None:
    other = {"id": 7, "limit": "node-1", "extra_vars": "slice_run: {id: run-2}"}
    awx.change(cut={LAUNCH: 1})
    assert play(lambda: awx.jobs() != []) is None
    record = JobRecord.load(prepared)
    record.posted = False
    record.save(prepared)
    awx.change(strange={LAUNCH: [other]})
    until = time.monotonic() + 20
    ended(play(lambda: time.monotonic() > until, quiet=30))
    assert JobRecord.load(prepared).job == 1


@pytest.mark.parametrize(
    ("field", "cut"),
    [("ask_limit_on_launch", 0), ("ask_limit_on_launch", 1), ("ask_variables_on_launch", 0)],
)
def test_a_job_that_is_not_what_was_asked_for_is_ended(
    awx: Controller, prepared: RunPaths, play: Play, field: str, cut: int
) -> None:
    """The template was changed after it had been looked at: something is left out in silence."""
    awx.begin(templates={field: False}, steps=1000, cut={LAUNCH: cut}, events=events("One")[:2])
    verdict = play()
    assert verdict["status"] == "canceled"
    assert verdict["problem"].startswith("awx_job_differs: "), verdict
    assert ("limit" if "limit" in field else "extra_vars") in verdict["problem"]
    assert prepared.cancel.exists()


def test_variables_of_jobs_are_read_however_awx_keeps_them() -> None:
    variables = {"slice_run": {"id": "run-1"}}
    assert request.run_id({"extra_vars": json.dumps(variables)}) == "run-1"
    assert request.run_id({"extra_vars": variables}) == "run-1"
    assert request.run_id({"extra_vars": "---\nslice_run: {id: run-1}\n"}) == "run-1"
    others = ("", "{", "[1]", "slice_run: 1", '{"slice_run": {"id": 1}}', None)
    # Values that PyYAML fails on, in jobs of other users of AWX.
    for other in (*others, "a: !!bool x", "a: 2001-99-99", "a: !!timestamp x", "a: !!int ''"):
        assert request.run_id({"extra_vars": other}) == ""
