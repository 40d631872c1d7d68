"""BIOS settings through Redfish: the plan of `_bios`, staged in one request.

RACADM stages setting by setting and then creates the job. Redfish does both at once, so no partial
state exists. Without a power cycle the job waits for the machine's next reset.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware import (
    _bios,
    _bios_jobs,
    _redfish_attributes,
    _redfish_session,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware._redfish_attributes import (
    Firmware,
    Rule,
)

# A reset starts only a job in one of these states; it skips a job in an earlier state.
_WAITS_FOR_RESET = {"scheduled", "scheduled with errors", "ready for execution"}


def subject(
    client: _redfish_session.Client, observer: _bios_jobs.Observer = _bios_jobs.silent
) -> _change.Subject:
    """The subject that `_change` drives. Parameters as in the documentation of the module
    redfish_bios.
    """
    return _change.Subject(
        observe=lambda params: _observe(client, params),
        plan=plan,
        apply=lambda params, step: _apply(client, params, step, observer),
        facts=facts,
    )


def wish(params: _change.Params) -> _bios.Wish:
    """The wish for the plan. A job that waits for a reset is allowed, because it does not interrupt
    the machine. Without a power cycle the plan does not wait either.
    """
    return _bios.Wish(
        attributes={str(name): str(value) for name, value in params["attributes"].items()},
        power_cycle=True,
        wait=params["power_cycle"] and params["wait"],
        acknowledged=frozenset(params["acknowledged_jobs"]),
    )


def plan(params: _change.Params, firmware: Firmware) -> _change.Plan:
    """Unless the state is `present`, the plan is empty and unblocked; the facts contain the
    forecast.
    """
    return _would(params, firmware) if params["state"] == "present" else _change.Plan()


def facts(params: _change.Params, firmware: Firmware) -> dict[str, Any]:
    would = _would(params, firmware)
    return {
        **_bios.document(wish(params), firmware.state),
        "differences": [step.document() for step in would.steps],
        "refusals": [blocker.document() for blocker in would.blockers],
    }


def one_request(shared: _change.Plan) -> _change.Plan:
    """The shared plan, with its staged values moved into the step that creates the job."""
    commit = next((step for step in shared.steps if step.name == "commit_job"), None)
    if commit is None:
        return shared
    staged = [step for step in shared.steps if step.name == "stage_attribute"]
    whole = _change.Step(
        commit.name,
        commit.subject,
        before={step.subject: step.before["current"] for step in staged} | commit.before,
        after={step.subject: step.after["pending"] for step in staged} | commit.after,
    )
    return _change.Plan((whole,), shared.blockers)


def unfit(requested: Mapping[str, str], rules: Mapping[str, Rule]) -> list[Refusal]:
    """The requested values that the registry does not allow."""
    blockers = []
    for name, value in requested.items():
        rule = rules.get(name)
        allowed = None if rule is None else _allowed(rule, value)
        if allowed is not None:
            blockers.append(
                Refusal(
                    "value_not_allowed",
                    expected=f"for {name} {allowed}",
                    found=ascii(value)[:100],
                    remedy="take a value of the BIOS's own registry; case matters",
                )
            )
    return blockers


def _allowed(rule: Rule, value: str) -> str | None:
    """The allowed values if `value` is not allowed; None when it is allowed."""
    if rule.kind == "Password":
        return "no value: this is a password, which is never set here"
    if rule.kind == "Enumeration" and rule.allowed and value not in rule.allowed:
        return "one of " + ", ".join(map(ascii, rule.allowed))[:500]
    try:
        number = _redfish_attributes.typed(value, rule)
    except (ValueError, KeyError):
        return f"a value of the type {rule.kind}"
    low = rule.lower is not None and isinstance(number, int) and number < rule.lower
    high = rule.upper is not None and isinstance(number, int) and number > rule.upper
    return f"a number from {rule.lower} to {rule.upper}" if low or high else None


def _would(params: _change.Params, firmware: Firmware) -> _change.Plan:
    request = wish(params)
    shared = one_request(_bios.plan(request, firmware.state))
    blockers = unfit(request.attributes, firmware.rules or {})
    if shared.steps and not (firmware.settings and firmware.jobs and firmware.on_reset):
        blockers.append(
            Refusal(
                "bmc_feature_missing",
                expected="settings that wait for a reset (OnReset) and a queue of their jobs",
                found=f"settings {firmware.settings or 'missing'}, "
                f"jobs {firmware.jobs or 'missing'}, "
                f"OnReset {'offered' if firmware.on_reset else 'missing'}",
                remedy="update the BMC's firmware; nothing is changed at another time",
            )
        )
    return _change.Plan(shared.steps, (*blockers, *shared.blockers))


def _observe(client: _redfish_session.Client, params: _change.Params) -> Firmware:
    client.begin()
    return _redfish_attributes.read(client, wish(params).attributes, system=params["system"])


def _apply(
    client: _redfish_session.Client,
    params: _change.Params,
    step: _change.Step,
    observer: _bios_jobs.Observer,
) -> dict[str, Any] | None:
    # Only a few requests lie between this read and the plan's. The BMC itself refuses a change
    # while another job locks the settings.
    firmware = _observe(client, params)
    if step.name == "stage_attribute":
        _redfish_attributes.stage(
            client, firmware, {step.subject: step.after["pending"]}, commit=False
        )
        return None
    if step.name == "commit_job":
        ids = [_commit(client, firmware, step.after)]
    else:
        ids = [job_id for job_id in step.before["open"].split(", ") if job_id]
    if not params["power_cycle"]:
        return {"jobs": [{"id": job_id} for job_id in ids]}
    kind = _restart(client, firmware, ids, params)
    if not params["wait"]:
        return {"jobs": [{"id": job_id} for job_id in ids], "reset": kind}
    ended = _bios_jobs.follow(_watch(client, firmware, params, observer), ids)
    return {"jobs": [job.document() for job in ended], "reset": kind}


def _commit(client: _redfish_session.Client, firmware: Firmware, changes: Mapping[str, str]) -> str:
    """Request `changes` and verify that a job will apply them; its id."""
    try:
        job_id = _redfish_attributes.stage(client, firmware, changes, commit=True)
    except Refusal as refused:
        others = _open(client, firmware)
        if refused.code == "bmc_request_refused" and others:
            raise _bios.queued(others) from refused
        raise
    if not job_id:
        job_id = next((job.id for job in _open(client, firmware) if job.is_bios), "")
    return job_id or _redfish_attributes.schedule(client, firmware) or _no_job(firmware)


def _open(client: _redfish_session.Client, firmware: Firmware) -> list[_bios.Job]:
    return _bios.State({}, tuple(_redfish_attributes.queue(client, firmware.jobs))).open_jobs()


def _no_job(firmware: Firmware) -> str:
    raise Refusal(
        "bios_job_missing",
        expected=f"a job for {firmware.settings}",
        found="the BMC took the request and named no job",
        remedy="look at the BMC's job queue; the values may wait there without a job",
    )


def _restart(
    client: _redfish_session.Client, firmware: Firmware, ids: Iterable[str], params: _change.Params
) -> str:
    """Power-cycle the machine once its BIOS job waits for that. Returns the reset type, or "" when
    the job runs already or another client's power cycle is pending.
    """
    until = time.monotonic() + params["timeout"]
    job_ids = list(ids)
    while True:
        client.begin()
        jobs = [_new_job(client, firmware, job_id) for job_id in job_ids]
        states = {job.status.lower() for job in jobs if job.phase is _bios.Phase.OPEN}
        if not states or "running" in states or any(job.is_reboot for job in jobs):
            return ""
        if states <= _WAITS_FOR_RESET:
            return _redfish_attributes.reset(client, firmware)
        if time.monotonic() >= until:
            unready = ", ".join(f"{job.id} is {job.status}" for job in jobs)
            raise _bios_jobs.late(unready, params["timeout"], "be ready for a reset")
        time.sleep(min(params["interval"], 5))


def _new_job(client: _redfish_session.Client, firmware: Firmware, job_id: str) -> _bios.Job:
    """Read a job that was just created; it appears in the queue with a short delay."""
    try:
        return _redfish_attributes.job(client, firmware, job_id)
    except Refusal as refusal:
        if refusal.code != "bmc_answer_missing":
            raise
        return _bios.Job(job_id, _bios.TARGET, "New")


def _watch(
    client: _redfish_session.Client,
    firmware: Firmware,
    params: _change.Params,
    observer: _bios_jobs.Observer,
) -> _bios_jobs.Watch:
    def look(job_id: str) -> _bios.Job:
        client.begin()
        return _redfish_attributes.job(client, firmware, job_id)

    return _bios_jobs.Watch(
        look,
        deadline=params["deadline"],
        interval=params["interval"],
        observer=observer,
        # Repeated refused logins would block this address on the BMC.
        fatal=("bmc_login_refused", "tls_untrusted"),
    )
