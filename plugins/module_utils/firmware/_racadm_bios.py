"""BIOS settings through RACADM on the host: read, stage, create the job, follow it.

The local program talks to the controller over the host's own interface without credentials. No
password can therefore appear in an argument list, a log or a process table. Answers are parsed
strictly: an unknown form is refused as `racadm_garbled` and never taken for an empty answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _host_idle
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware import _bios, _bios_jobs

# Dell's packages install it outside the PATH.
_PLACES = ("/opt/dell/srvadmin/sbin/racadm", "/opt/dell/srvadmin/bin/idracadm7")

_NAME = re.compile(r"[A-Za-z0-9]+\.[A-Za-z0-9_]+")
_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+:/-]{0,127}")
# A read-only setting is listed behind `#`, and a setting disabled by another setting behind `!!`.
_SETTING = re.compile(r"([#!]*)([A-Za-z0-9_]+)=(.*?)(?: \(Pending Value=(.*)\))?")
_JOB_HEAD = re.compile(r"\[Job ID=([JR]ID_[0-9]{6,20})\]")
_JOB_FIELD = re.compile(r"([A-Z][A-Za-z ]+)=\[?(.*?)\]?")


@dataclass(frozen=True)
class Racadm:
    """program: path or name. timeout: seconds for one answer; a controller under load needs 30."""

    program: str
    timeout: float

    def settings(self, groups: Iterable[str]) -> dict[str, _bios.Attribute]:
        """Every setting of the groups, by `Group.Name`; raises Refusal `racadm_garbled`."""
        attributes: dict[str, _bios.Attribute] = {}
        for group in groups:
            attributes.update(parse_group(group, self._ask("get", f"BIOS.{group}")))
        return attributes

    def queue(self) -> tuple[_bios.Job, ...]:
        return parse_jobs(self._ask("jobqueue", "view"), "JOB QUEUE")

    def job(self, job_id: str) -> _bios.Job:
        jobs = parse_jobs(self._ask("jobqueue", "view", "-i", job_id), "JOB")
        if [job.id for job in jobs] != [job_id]:
            raise garbled(f"jobqueue view -i {job_id}", f"the job {job_id}", "another or no job")
        return jobs[0]

    def stage(self, name: str, value: str) -> None:
        self._ask("set", f"BIOS.{name}", value)

    def commit(self) -> list[str]:
        """Create the job and its power cycle; returns their ids."""
        words = ("jobqueue", "create", _bios.TARGET, "-r", "pwrcycle", "-s", "TIME_NOW")
        answer = self._ask(*words)
        ids = _bios.job_ids(answer)
        if {job_id.partition("_")[0] for job_id in ids} != {"JID", "RID"}:
            raise garbled(" ".join(words), "the ids JID_… and RID_… of job and power cycle", answer)
        return ids

    def _ask(self, *words: str) -> str:
        return _command.run([self.program, *words], timeout=self.timeout).out


def program(name: str) -> str:
    """Path or name of RACADM; `racadm` is also searched in Dell's folders."""
    if name == "racadm":
        return next((place for place in _PLACES if _host.path(place).exists()), name)
    return name


def desired_values(attributes: Mapping[str, Any]) -> dict[str, str]:
    """`attributes` with full names; a bare name must be in `_bios.REQUIRED`.

    Raises Refusal `attribute_invalid`.
    """
    groups = {name.partition(".")[2]: name for name in _bios.REQUIRED}
    values = {}
    for name, value in attributes.items():
        full = groups.get(str(name), str(name))
        if not _NAME.fullmatch(full) or not _VALUE.fullmatch(str(value)):
            raise Refusal(
                "attribute_invalid",
                expected="settings as GROUP.NAME with a plain value, for example"
                " ProcSettings.ProcVirtualization: Enabled",
                found=f"{name!r}: {value!r}"[:200],
                remedy="name the setting as `racadm get BIOS.GROUP` lists it; quote the value",
            )
        values[full] = str(value)
    return values


def wish(params: _change.Params) -> _bios.Wish:
    return _bios.Wish(
        attributes=desired_values(params["attributes"]),
        power_cycle=params["power_cycle"],
        wait=params["wait"],
        acknowledged=frozenset(params["acknowledged_jobs"]),
    )


def observe(params: _change.Params) -> _bios.State:
    racadm = _of(params)
    groups = dict.fromkeys(name.partition(".")[0] for name in desired_values(params["attributes"]))
    # The queue first: a job that ends between the two reads then still appears open, and is
    # followed. In the other order its old values would look like work for another power cycle.
    jobs = racadm.queue()
    attributes = racadm.settings(groups)
    return _bios.State(attributes, jobs, tuple(_host_idle.refusals()))


def plan(params: _change.Params, state: _bios.State) -> _change.Plan:
    """Unless the state is `present`, the plan is empty and unblocked; the facts contain the
    forecast.
    """
    if params["state"] != "present":
        return _change.Plan()
    planned = _bios.plan(wish(params), state)
    changed = _bios.unapproved(params.get("approved") or "", planned.steps)
    return _change.Plan(planned.steps, (*changed, *planned.blockers))


def apply(
    params: _change.Params, step: _change.Step, observer: _bios_jobs.Observer = _bios_jobs.silent
) -> dict[str, Any] | None:
    racadm = _of(params)
    if step.name == "stage_attribute":
        racadm.stage(step.subject, step.after["pending"])
        return None
    if step.name == "finish_job":
        ids = [job_id for job_id in step.before["open"].split(", ") if job_id]
        return {"jobs": _follow(racadm, ids, params, observer)}
    ids = _commit(racadm, params)
    for job_id in ids:
        observer(_bios.Job(job_id, _bios.TARGET, "Scheduled"))
    if not params["wait"]:
        return {"jobs": [{"id": job_id} for job_id in ids]}
    return {"jobs": _follow(racadm, ids, params, observer)}


def facts(params: _change.Params, state: _bios.State) -> dict[str, Any]:
    request = wish(params)
    would = _bios.plan(request, state)
    return {
        **_bios.document(request, state),
        "differences": [step.document() for step in would.steps],
        "digest": _bios.digest(would.steps),
        "refusals": [blocker.document() for blocker in would.blockers],
    }


def parse_group(group: str, text: str) -> dict[str, _bios.Attribute]:
    """The settings in the answer to `racadm get BIOS.<group>`."""
    rows = [row.rstrip("\r").strip() for row in text.split("\n")]
    head = f"[Key={_bios.TARGET}#{group}]"
    command = f"get BIOS.{group}"
    if head not in rows:
        raise garbled(command, head, text)
    attributes: dict[str, _bios.Attribute] = {}
    for row in rows[rows.index(head) + 1 :]:
        match = _SETTING.fullmatch(row)
        if match is None:
            continue
        mark, name, current, pending = match.groups()
        full = f"{group}.{name}"
        if full in attributes:
            raise garbled(command, f"{name} once", f"{name} twice")
        attributes[full] = _bios.Attribute(full, current.strip(), pending, read_only=bool(mark))
    if not attributes:
        raise garbled(command, "settings below the head", text)
    return attributes


def parse_jobs(text: str, head: str) -> tuple[_bios.Job, ...]:
    """The jobs in the answer to `racadm jobqueue view`; head: the words of its first line."""
    rows = [row.rstrip("\r").strip() for row in text.split("\n")]
    if not any(re.fullmatch(rf"-+ ?{head} ?-+", row) for row in rows):
        raise garbled("jobqueue view", f"the head line {head}", text)
    blocks: list[tuple[str, dict[str, str]]] = []
    for row in rows:
        start = _JOB_HEAD.fullmatch(row)
        if start:
            blocks.append((start[1], {}))
            continue
        field = _JOB_FIELD.fullmatch(row)
        if not field or not blocks:
            continue
        if field[1] in blocks[-1][1]:
            raise garbled("jobqueue view", f"{field[1]} once for {blocks[-1][0]}", "it twice")
        blocks[-1][1][field[1]] = field[2]
    for job_id, fields in blocks:
        if not fields.get("Status"):
            raise garbled("jobqueue view", f"a Status for {job_id}", "none")
    return tuple(
        _bios.Job(
            id=job_id,
            name=fields.get("Job Name", ""),
            status=fields["Status"],
            message=fields.get("Message", ""),
            percent=fields.get("Percent Complete", ""),
        )
        for job_id, fields in blocks
    )


def garbled(command: str, expected: str, found: str) -> Refusal:
    """The refusal of an invalid answer."""
    shown = " ".join(found.split())[:200] or "nothing"
    return Refusal(
        "racadm_garbled",
        expected=f"`racadm {command}` to answer with {expected}",
        found=shown,
        remedy="run it by hand; reset the controller (`racadm racreset`) if this does not help",
    )


def _of(params: _change.Params) -> Racadm:
    return Racadm(program(params["program"]), params["timeout"])


def _commit(racadm: Racadm, params: _change.Params) -> list[str]:
    """Create the job for the staged values. A setting that was not staged causes no power cycle."""
    state = observe(params)
    for refusal in state.in_use:
        raise refusal
    missing = _bios.unstaged(wish(params), state)
    if missing:
        raise Refusal(
            "staging_failed",
            expected="every requested value staged before the job is made",
            found="; ".join(missing),
            remedy="set it by hand and read RACADM's message; nothing was power-cycled",
        )
    try:
        return racadm.commit()
    except Refusal as refused:
        # Another client may have created a job since the queue was read.
        others = _bios.State({}, racadm.queue()).open_jobs()
        if refused.code == "command_failed" and others:
            raise _bios.queued(others) from refused
        raise


def _follow(
    racadm: Racadm, ids: list[str], params: _change.Params, observer: _bios_jobs.Observer
) -> list[dict[str, str]]:
    watch = _bios_jobs.Watch(racadm.job, params["deadline"], params["interval"], observer)
    return [job.document() for job in _bios_jobs.follow(watch, ids)]
