"""Task kinds that restart a host: its reboot, and a change of its firmware settings."""

from __future__ import annotations

from typing import Any

from reconciler.lifecycle import maintenance, power
from reconciler.model import firmware
from reconciler.model.states import TaskKind
from reconciler.work.handler import Handler, Work


def reboot_variables(work: Work) -> dict[str, Any]:
    guests = []
    for guest in work.parameters["guests"]:
        # A late run of power starts no guest between its stop and the restart.
        fence = power.fence_of_ended_runs(work.conn, guest["allocation_id"])
        guests.append(guest if fence is None else {**guest, "power_fence": fence})
    return {
        "slice_guests": guests,
        "slice_shutdown_deadline": work.profile["deadlines"]["shutdown"],
        "boot_id": work.parameters["boot_id"],
    }


def begin(work: Work) -> None:
    """Refuse a restart of a node on which others are by now."""
    maintenance.began(work.conn, work.task)


def reboot_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    named = {guest["allocation_id"] for guest in work.parameters["guests"]}
    act = work.act.because("its guest was off before the host's restart")
    power.powered_off(work.conn, named & set(evidence["powered_off"]), act)
    first = maintenance.restarted(work.conn, work.task, work.act.because("the host was restarted"))
    return {**evidence, "next_task_id": first.id}


def firmware_variables(work: Work) -> dict[str, Any]:
    apply = bool(work.parameters.get("apply"))
    variables = {"slice_apply": apply, "slice_allow_reboot": apply}
    if apply:
        variables["slice_approved_plan"] = work.parameters["digest"]
        variables["slice_bios_acknowledged_jobs"] = work.parameters["acknowledged_jobs"]
    return variables


def firmware_begin(work: Work) -> None:
    if work.parameters.get("apply"):
        maintenance.began(work.conn, work.task)


def firmware_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    """Record the plan with its digest, or the change."""
    if not work.parameters.get("apply"):
        plan = firmware.approvable(evidence["bios"].get("differences") or [])
        return {**evidence, "digest": plan.get("digest", "")}
    act = work.act.because("its firmware settings were changed")
    first = maintenance.restarted(work.conn, work.task, act)
    return {**evidence, "next_task_id": first.id}


HANDLERS: dict[str, Handler] = {
    TaskKind.NODE_REBOOT: Handler(
        "reboot_node",
        reboot_variables,
        reboot_succeeded,
        begin,
        deadlines=("reboot",),
        stopped="slice_guests",
    ),
    TaskKind.NODE_FIRMWARE: Handler(
        "firmware", firmware_variables, firmware_succeeded, firmware_begin, deadlines=("firmware",)
    ),
}
