"""Task kinds for hosts, from enrolment and bootstrap to conversion, reboot and firmware."""

from __future__ import annotations

from typing import Any

from reconciler.lifecycle import drift, host, maintenance, power
from reconciler.lifecycle import gate as slot_gate
from reconciler.model import discovery, firmware, hardware
from reconciler.model.states import NodeMode, NodeState, TaskKind
from reconciler.records import images, nodes, proofs, reports, slots, tokens
from reconciler.work import partitions
from reconciler.work.handler import Handler, Work, canceled
from reconciler.work.kinds.slices import image_document


def enrol_variables(work: Work) -> dict[str, Any]:
    return {"slice_certificate": work.parameters["certificate"]}


def enrol_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    """Record the new certificate, which the host presents from now on."""
    text, key = work.parameters["certificate"], work.parameters["public_key"]
    # The host may have enrolled with another key meanwhile. Then that key counts.
    tokens.check_host_key(work.conn, work.task.node_id, key)
    act = work.act.because("certificate renewed", evidence)
    host.record_certificate(work.conn, work.task.node_id, act, certificate=text, public_key=key)
    return evidence


def bootstrap_variables(work: Work) -> dict[str, Any]:
    return {
        "slice_allow_reboot": bool(work.parameters.get("allow_reboot", False)),
        "slice_api_names": work.settings.api_names,
        "slice_plan_only": bool(work.parameters.get("plan_only", False)),
        "slice_expected_plan": work.parameters.get("expected_plan", ""),
    }


def for_slices(work: Work) -> None:
    """Problem `canceled`, which starts no run, if the node is to be no slice host any more."""
    mode = NodeMode(work.node.mode)
    if mode.purpose != "slice":
        raise canceled("a slice host, or a node on its way to one", f"mode {mode}")


def for_baremetal(work: Work) -> None:
    """Problem `canceled`, which starts no run, if the node is to stay a slice host, or is bare
    metal already: a tenant may have it by now.
    """
    mode = NodeMode(work.node.mode)
    if mode != NodeMode.CONVERTING_TO_BAREMETAL:
        raise canceled("a node on its way to bare metal", f"mode {mode}")


def bootstrap_start(work: Work) -> None:
    """Refuse a reboot of a node in use. New tenants may have come since the task was queued; none
    can come while it runs.
    """
    for_slices(work)
    if work.parameters.get("allow_reboot", False):
        nodes.refuse_in_use(work.conn, work.task.node_id, nodes.AT_WORK)


def bootstrap_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    if work.parameters.get("plan_only", False):
        return evidence
    act = work.act.because("bootstrap finished", {"identity": evidence["identity"]})
    host.bootstrapped(
        work.conn, work.task.node_id, act, identity=evidence["identity"], began=work.task.started_at
    )
    return evidence


def discover_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    expected = int((work.profile.get("gpu") or {}).get("expected") or 0)
    document = discovery.with_gpu_count(evidence["discovery"], expected)
    host.record_discovery(
        work.conn,
        work.task.node_id,
        document,
        work.act.because("topology discovered"),
        task_id=work.task.id,
        observed_at=work.task.started_at,
    )
    node = nodes.get(work.conn, work.task.node_id)
    if (node.mode, node.state) == (NodeMode.BAREMETAL, NodeState.BOOTSTRAPPING):
        # A bare-metal machine needs no preparation beyond certificate, contact and discovery.
        act = work.act.because("an ordinary machine, discovered")
        identity, began = document["identity"], work.task.started_at
        host.bootstrapped(work.conn, work.node.id, act, identity=identity, began=began)
    # Reopen the gate of slots that an earlier discovery closed and this discovery shows healthy.
    slot_gate.open_gate(work.conn, work.task.node_id, work.act.because("seen without blockers"))
    maintenance.discovered(work.conn, work.task.node_id, work.act)
    return {"candidate_summary": document["candidate_summary"]}


def takeover_variables(work: Work) -> dict[str, Any]:
    parameters = work.parameters
    return {
        "slice_devices": parameters["devices"],
        "slice_apply": bool(parameters.get("apply", False)),
        "slice_expected": parameters.get("expected", {}),
    }


def takeover_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    act = work.act.because("storage transition applied")
    for device in evidence["devices"]:
        if device.get("proof"):
            proofs.record_transition(
                work.conn,
                work.task.node_id,
                device["proof"],
                act,
                task_id=work.task.id,
                manifest=str(device.get("manifest") or evidence.get("manifest") or ""),
            )
    return evidence


def bind_variables(work: Work) -> dict[str, Any]:
    return {"slice_slots": slots.bundles(work.conn, work.task.node_id)}


def parity_variables(work: Work) -> dict[str, Any]:
    node_id, intent = work.task.node_id, NodeMode(work.node.mode).purpose
    names = work.node.maas_tags
    # On a site with MAAS, a machine of unknown intent is none that may be sold.
    tags = hardware.maas_tags([] if names is None and work.settings.maas_url else names)
    if intent != "slice":
        return {"slice_slots": [], "slice_intent": intent, **tags}
    latest = reports.latest_discovery(work.conn, node_id)
    topology: dict[str, Any] = {"source": "reconciler", "completed": latest is not None}
    summary = latest.document["candidate_summary"] if latest else {}
    topology["blockers"] = summary.get("blockers", [])
    return {
        "slice_slots": slots.bundles(work.conn, node_id),
        "slice_intent": intent,
        "slice_api_topology": topology,
        **tags,
    }


def parity_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    report, node_id = evidence["parity"], work.task.node_id
    host.record_parity(
        work.conn,
        node_id,
        report,
        work.act.because("parity measured"),
        task_id=work.task.id,
        observed_at=work.task.started_at,
    )
    result = {"failures": report["failures"], "warnings": report["warnings"]}
    if report["failures"] or report.get("intent", "slice") != "slice":
        return result
    act = work.act.because("parity passed", result)
    gate = slot_gate.open_gate(work.conn, node_id, act)
    restart = work.profile["vm"].get("restart_after_host_reboot", True)
    started = power.start_after_boot(work.conn, node_id, act, restart=restart)
    resumed = maintenance.finish(work.conn, node_id, act)
    return {**result, **gate, "started": started, "resumed": resumed}


def convert_variables(work: Work) -> dict[str, Any]:
    return {
        "slice_allow_reboot": bool(work.parameters.get("allow_reboot", False)),
        "slice_written_off": work.parameters.get("written_off", []),
    }


def convert_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    """Record the conversion. The run compared the host item by item with an ordinary machine."""
    act = work.act.because("the host is bare metal again", evidence)
    host.observed(
        work.conn, work.task.node_id, act, identity=evidence["identity"], began=work.task.started_at
    )
    # As it is under the lock that the observation took: an operator may have turned it round.
    if nodes.get(work.conn, work.task.node_id).mode == NodeMode.CONVERTING_TO_BAREMETAL:
        host.converted(work.conn, work.task.node_id, act)
        drift.forget(work.conn, work.task.node_id, act)
    return evidence


def cache_image_variables(work: Work) -> dict[str, Any]:
    return {
        "slice_image": image_document(
            work, vars(images.get(work.conn, work.parameters["image_id"]))
        )
    }


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


def reboot_start(work: Work) -> None:
    """Refuse a restart of a node on which others are by now."""
    maintenance.began(work.conn, work.task)


def reboot_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    named = {guest["allocation_id"] for guest in work.parameters["guests"]}
    act = work.act.because("its guest was off before the host's restart")
    power.powered_off(work.conn, named & set(evidence["powered_off"]), act)
    first = maintenance.restarted(work.conn, work.task, work.act.because("the host was restarted"))
    return {**evidence, "next_task_id": first}


def firmware_variables(work: Work) -> dict[str, Any]:
    apply = bool(work.parameters.get("apply"))
    variables = {"slice_apply": apply, "slice_allow_reboot": apply}
    if apply:
        variables["slice_approved_plan"] = work.parameters["digest"]
        variables["slice_bios_acknowledged_jobs"] = work.parameters["acknowledged_jobs"]
    return variables


def firmware_start(work: Work) -> None:
    if work.parameters.get("apply"):
        maintenance.began(work.conn, work.task)


def firmware_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    """Record the plan with its digest, or the change."""
    if not work.parameters.get("apply"):
        plan = firmware.approvable(evidence["bios"].get("differences") or [])
        return {**evidence, "digest": plan.get("digest", "")}
    act = work.act.because("its firmware settings were changed")
    first = maintenance.firmware_changed(work.conn, work.task, act)
    return {**evidence, "next_task_id": first}


HANDLERS: dict[str, Handler] = {
    TaskKind.NODE_ENROL: Handler("renew_certificate", enrol_variables, enrol_succeeded),
    TaskKind.NODE_BOOTSTRAP: Handler(
        "bootstrap",
        bootstrap_variables,
        bootstrap_succeeded,
        start=bootstrap_start,
        deadlines=("reboot",),
    ),
    TaskKind.SLICE_TOPOLOGY_DISCOVER: Handler("discover", lambda _work: {}, discover_succeeded),
    TaskKind.NODE_STORAGE_TRANSITION: Handler(
        "transition_storage",
        takeover_variables,
        takeover_succeeded,
        for_slices,
        wiped="slice_devices",
    ),
    # A failure leaves the node in conversion, where nothing is sold. A new request continues there,
    # or turns the conversion round.
    TaskKind.NODE_CONVERT: Handler(
        "restore_baremetal",
        convert_variables,
        convert_succeeded,
        for_baremetal,
        deadlines=("reboot",),
    ),
    TaskKind.NODE_BIND_TOPOLOGY: Handler("bind_topology", bind_variables, start=for_slices),
    TaskKind.NODE_PARITY: Handler(
        "parity", parity_variables, parity_succeeded, arrange=partitions.look
    ),
    TaskKind.NODE_IMAGE_CACHE: Handler("cache_image", cache_image_variables, start=for_slices),
    TaskKind.NODE_REBOOT: Handler(
        "reboot_node",
        reboot_variables,
        reboot_succeeded,
        reboot_start,
        deadlines=("reboot",),
        stopped="slice_guests",
    ),
    TaskKind.NODE_FIRMWARE: Handler(
        "firmware", firmware_variables, firmware_succeeded, firmware_start, deadlines=("firmware",)
    ),
}
