"""Lifecycle of a host: enrolment, contact, bootstrap, maintenance and conversion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, journal, locks, rows
from reconciler.db.journal import NODE_MODE, advance
from reconciler.db.rows import Page
from reconciler.db.schema import (
    Allocation,
    Discovery,
    Node,
    Parity,
    StateChange,
    Task,
    claims,
    history,
    nodes,
    slots,
    tasks,
)
from reconciler.lifecycle import firmware, gate, ingress
from reconciler.lifecycle import slots as slot_life
from reconciler.model import discovery, hardware, transitions
from reconciler.model.act import Act, require_reason
from reconciler.model.errors import Problem
from reconciler.model.states import ClaimKind, ClaimState, NodeMode, NodeState, TaskKind
from reconciler.records import certificates, reports, tokens
from reconciler.records import nodes as node_records
from reconciler.records import queue as task_queue
from reconciler.records import slots as slot_records
from reconciler.records.reports import install_id
from reconciler.settings import Settings
from reconciler.trust import ca
from reconciler.trust.certificates import read_certificate

# Steps after the bootstrap of a node whose slots were approved when it was a slice host before.
TO_SLICE = (TaskKind.NODE_BIND_TOPOLOGY, TaskKind.SLICE_TOPOLOGY_DISCOVER, TaskKind.NODE_PARITY)
# Step in the health detail of a node with a fault that its discovery shows.
_DISCOVERY = "discovery"
# Key in the evidence of a drain that maintenance has made: the kind of its task.
DRAINED = "maintenance"
# Machine ids that are kept of a tenant's installation, which may report another each time.
_MOST_TENANT_IDS = 16


def enrolled(
    conn: sa.Connection, id: str, act: Act, *, machine_id: str, host_key: str, boot_id: str = ""
) -> Node:
    """Record that the host's key is certified. A new installation must be bootstrapped again.

    Call this before the certificate is recorded: a new installation has a key that was never
    certified.
    """
    before = rows.get(conn, Node, id, lock=True)
    node_records.require_living(before)
    _require_not_after_tenant(conn, before, machine_id)
    if before.tenant_machine_ids:
        _installed_anew(conn, before, act, machine_id=machine_id, host_key=host_key)
    identity = {"machine_id": machine_id, "host_key": host_key, "boot_id": boot_id}
    observed(conn, id, act, identity=identity)
    node = node_records.get(conn, id)
    # A host needs a token of an operator for another key.
    another_key = not tokens.known_host_key(conn, id, host_key)
    if node.hardware and another_key and not node.tenant_machine_ids:
        node_records.update(conn, id, hardware=hardware.reinstalled(node.hardware))
    renewed = before.install_id == node.install_id
    if before.state == NodeState.BOOTSTRAPPING or (
        renewed and before.state not in (NodeState.ENROLLING, NodeState.UNREACHABLE)
    ):
        return node
    if renewed and before.state == NodeState.UNREACHABLE:
        record_answer(conn, id, act)
        return node_records.get(conn, id)
    return advance(conn, Node, id, "enrol", act.because("enrolled", {"identity": identity}))


def _is_of_another(conn: sa.Connection, node_id: str, machine_id: str) -> bool:
    """Whether another node has this machine id, which a tenant may have chosen."""
    query = sa.select(nodes.c.id).where(nodes.c.id != node_id, nodes.c.machine_id == machine_id)
    return conn.execute(query.limit(1)).first() is not None


def _require_not_after_tenant(conn: sa.Connection, node: Node, machine_id: str) -> None:
    """Problem `reinstall_required` for an installation on which a tenant of another node was root,
    which may be retired by now.

    A machine id that the node has already is let through, because a tenant can set any.
    """
    if machine_id == node.machine_id:
        return
    others = sa.select(nodes.c.id, nodes.c.tenant_machine_ids).where(nodes.c.id != node.id)
    for other in conn.execute(others):
        if machine_id in other.tenant_machine_ids:
            raise Problem(
                node_records.REINSTALL,
                expected="a machine that was installed anew after its tenant",
                found=f"the installation on which a tenant of node {other.id} was root",
                remedy="install the machine anew, then run the script that"
                f" `gpuaas nodes userdata {node.id}` prints on it as root",
            )


def _installed_anew(
    conn: sa.Connection, node: Node, act: Act, *, machine_id: str, host_key: str
) -> None:
    """Lift `reinstall_required` from a node that enrols under a new machine id and host key.

    A node with its tenant, or with the clean-up still to come, may enrol again and stays marked.
    The same installation after the release is refused.
    """
    held = sa.select(claims.c.id).where(
        claims.c.node_id == node.id,
        claims.c.kind == ClaimKind.NODE_EXCLUSIVE,
        claims.c.state.in_((ClaimState.RESERVED, ClaimState.PROVISIONING, ClaimState.ACTIVE)),
    )
    # The last one that it reported may not be among those that are kept.
    known_machine = machine_id in {*node.tenant_machine_ids, node.machine_id}
    if known_machine or tokens.known_host_key(conn, node.id, host_key) or rows.first(conn, held):
        if certificates.cut_off(conn, node.id):
            node_records.require_installed(node)
        return
    # The old installation ran until now and can have changed the BMC. What was compared until now
    # is not the whole comparison, and nobody may accept it as that.
    values: dict[str, Any] = {
        "tenant_machine_ids": [],
        "firmware_bmc": None,
        "firmware_differences": [],
    }
    if node.health_detail.get("code") == node_records.DRIFT:
        # Drift of the previous installation.
        values |= gate.HEALTHY
    if node.maas:
        values["maas"] = {name: value for name, value in node.maas.items() if name != "tenant"}
    node_records.update(conn, node.id, **values)
    journal.audit(conn, act, "node.reinstalled", "node", node.id, detail={"machine_id": machine_id})


def bootstrapped(
    conn: sa.Connection,
    id: str,
    act: Act,
    *,
    identity: Mapping[str, Any],
    began: float | None = None,
) -> Node:
    """Record that the host is prepared. This completes a conversion to slice host under way."""
    observed(conn, id, act, identity=identity, reboot_required=False, began=began)
    node = node_records.get(conn, id)
    if node.state == NodeState.BOOTSTRAPPING:
        node = advance(conn, Node, id, "bootstrap", act)
        if kept := _taken_out(conn, id):
            why = act.because(f"still out of use: {kept.reason}", kept.evidence)
            node = advance(conn, Node, id, "drain", why)
            if kept.event == "maintain":
                node = advance(conn, Node, id, "maintain", why)
    if node.mode == NodeMode.CONVERTING_TO_SLICE:
        # The host has ended its proofs, because nothing tells what an ordinary machine did with its
        # disks.
        slot_records.void_proofs(conn, id)
        node = advance(conn, NODE_MODE, id, "converted", act)
    return node


def _taken_out(conn: sa.Connection, id: str) -> StateChange | None:
    """The drain or maintenance of a person, or the hold of an open BIOS job or of a lost run, that
    no person has ended. A new installation does not end it.
    """
    events = ("drain", "maintain", "resume", "bootstrap")
    query = sa.select(history).where(
        history.c.entity == "node", history.c.entity_id == id, history.c.event.in_(events)
    )
    # The first of them is the end of this bootstrap.
    for row in rows.every(conn, query.order_by(history.c.id.desc()), StateChange)[1:]:
        # Maintenance drains only what no person had drained.
        if row.event in ("resume", "bootstrap") or DRAINED in row.evidence:
            return None
        # A limit of time that has passed was not meant to last.
        if "deadline" not in row.evidence:
            return row
    return None


def learn_fabric(conn: sa.Connection, id: str, act: Act, *, interface: str, address: str) -> Node:
    """Store the host's own fabric interface and address, unless the node already has either."""
    node = rows.get(conn, Node, id, lock=True)
    if not (interface and address) or node.fabric_interface or node.fabric_address:
        return node
    values = {"fabric_interface": interface, "fabric_address": address}
    node_records.update(conn, id, **values)
    journal.audit(conn, act, "node.fabric.learned", "node", id, detail=values)
    return node_records.get(conn, id)


def lost(conn: sa.Connection, id: str, act: Act) -> Node:
    """Record lost contact. Nothing is freed, because the state of the host is unknown (I13)."""
    return advance(conn, Node, id, "lose", act)


def regained(conn: sa.Connection, id: str, act: Act) -> Node:
    """Record regained contact. The node returns to its state from before the loss."""
    losses = [row for row in journal.history_of(conn, "node", id) if row.event == "lose"]
    before = losses[-1].source if losses else NodeState.MAINTENANCE.value
    return advance(conn, Node, id, f"regain_{before}", act)


def drain(conn: sa.Connection, id: str, act: Act) -> Node:
    """Stop accepting new work."""
    return node_records.by_admin(conn, id, "drain", act)


def resume(conn: sa.Connection, id: str, act: Act) -> Node:
    """Accept work again."""
    return node_records.by_admin(conn, id, "resume", act)


def maintain(conn: sa.Connection, id: str, act: Act) -> Node:
    """Take the node out of use until it is resumed. Refused while a tenant is on it."""
    with locks.node(conn, id):
        # Close the gate first, so that the in-use check below sees every launch that already has a
        # slot. A launch that has only chosen a slot does not get it.
        gate.close(conn, id, act.because("the node is in maintenance"))
        node_records.refuse_in_use(conn, id)
        return node_records.by_admin(conn, id, "maintain", act)


def retire(conn: sa.Connection, id: str, act: Act) -> Node:
    """Retire the node for good. Refused while a tenant is on it.

    On an unreachable node, slots that may still hold data are written off with the node.
    """
    node = rows.get(conn, Node, id, lock=True)
    if transitions.target("node", node.state, "retire") is None:
        return node_records.by_admin(conn, id, "retire", act)
    lost = node.state == NodeState.UNREACHABLE
    if lost:
        require_reason(act, gate.WHY_GIVEN_UP)
    else:
        node_records.require_clean(node)
    # Close the gate first, so that the in-use check below sees every launch that has a slot.
    gate.close(conn, id, act.because("the node is retired"))
    node_records.refuse_in_use(conn, id, busy=node_records.AT_WORK if lost else node_records.BUSY)
    given_up = slot_life.written_off_slots(conn, id, act)
    conn.execute(sa.update(nodes).where(nodes.c.id == id).values(slice_scheduling=False))
    for task in task_queue.open_of_node(conn, id):
        task_queue.cancel(conn, task.id, act.because("its node is retired"))
    # That of an installation under way stays on the machine, which may get another tenant.
    tokens.end_tickets(conn, id)
    ingress.given_up(conn, id, act.because("its node is retired"))
    detail = {"written_off_slots": given_up, "unclean": node.unclean_allocation_id}
    return node_records.by_admin(conn, id, "retire", act, detail)


def convert(conn: sa.Connection, id: str, to: NodeMode, act: Act) -> Node:
    """Begin or continue a conversion, or turn it round. The node's slots go off sale first.

    Raises Problem `node_in_use` while a tenant or a clean-up is on the node, and
    `transition_refused` when the node already has the mode.
    """
    node = rows.get(conn, Node, id, lock=True)
    if node.mode == f"converting_to_{to}":
        return node
    node_records.require_clean(node)
    gate.close(conn, id, act.because(f"conversion to {to} begins"))
    node_records.refuse_in_use(conn, id)
    if to == NodeMode.SLICE:
        node_records.require_installed(node)
    conn.execute(sa.update(nodes).where(nodes.c.id == id).values(slice_scheduling=False))
    journal.audit(conn, act, "admin.node.converted", "node", id, detail={"to": to})
    return advance(conn, NODE_MODE, id, f"to_{to}", act)


def require_slice_mode(conn: sa.Connection, id: str) -> Node:
    """Return the node. A bare-metal node is refused: it becomes a slice host by conversion only."""
    node = rows.get(conn, Node, id)
    if node.mode in (NodeMode.BAREMETAL, NodeMode.CONVERTING_TO_BAREMETAL):
        raise Problem(
            "node_is_baremetal",
            expected="a slice host, or a node that is being made one",
            found=f"mode {node.mode}",
            remedy="convert the node to a slice host first",
        )
    return node


def converted(conn: sa.Connection, id: str, act: Act) -> Node:
    """Record that the conversion is complete and proven."""
    return advance(conn, NODE_MODE, id, "converted", act)


def set_scheduling(conn: sa.Connection, id: str, on: bool, act: Act) -> Node:
    """Switch the sale of slices on or off. On needs approved slots and passing parity."""
    node = rows.get(conn, Node, id, lock=True)
    if on:
        approved = sa.select(slots.c.id).where(slots.c.node_id == id, slots.c.retired_at.is_(None))
        parity = reports.latest_parity(conn, id)
        missing = [] if rows.first(conn, approved) else ["approved slots"]
        if parity is None or parity.failures:
            missing.append("a passing parity report")
        if missing:
            raise Problem(
                "scheduling_not_ready",
                expected="approved slots and a passing parity report",
                found=f"no {' and no '.join(missing)}",
                remedy="approve slots, bind the topology and run parity first",
            )
    node_records.update(conn, id, slice_scheduling=on)
    detail = {"from": node.slice_scheduling, "to": on}
    journal.audit(conn, act, "admin.node.scheduling", "node", id, detail=detail)
    return node_records.get(conn, id)


def contacted(conn: sa.Connection, node_id: str) -> None:
    """Set the time of last contact to now."""
    conn.execute(sa.update(nodes).where(nodes.c.id == node_id).values(last_contact_at=clock.now()))


def observed(
    conn: sa.Connection,
    node_id: str,
    act: Act,
    *,
    identity: Mapping[str, Any],
    reboot_required: bool | None = None,
    began: float | None = None,
) -> bool:
    """Store boot and installation. Returns True, with the gate closed, when either changed.

    began: when the observation began, on the database's clock; None means now. If the observation
    differs from the stored identity but began before that identity was learned, it may be older or
    newer. Neither is trusted, and the host is verified again.
    """
    node = rows.get(conn, Node, node_id, lock=True)
    identifiers = {
        name: str(identity.get(name) or getattr(node, name))
        for name in ("boot_id", "machine_id", "host_key")
    }
    install = install_id(identifiers["machine_id"], identifiers["host_key"])
    changed = [
        name
        for name, value in (("boot", identifiers["boot_id"]), ("installation", install))
        if value != getattr(node, "boot_id" if name == "boot" else "install_id")
    ]
    learned = node.boot_learned_at or 0.0
    if changed and began is not None and began < learned:
        _doubt(conn, node, act.because(f"gate closed: another {' and '.join(changed)}, seen late"))
        return True
    values: dict[str, Any] = {**identifiers, "install_id": install, "last_contact_at": clock.now()}
    if changed:
        values["boot_learned_at"] = clock.now()
    # The tenant can change the machine id, and change it back later.
    ids, reported = node.tenant_machine_ids, identifiers["machine_id"]
    if 0 < len(ids) < _MOST_TENANT_IDS and not _is_of_another(conn, node_id, reported):
        values["tenant_machine_ids"] = sorted({*ids, reported})
    if reboot_required is not None:
        values["reboot_required"] = reboot_required
    conn.execute(sa.update(nodes).where(nodes.c.id == node_id).values(**values))
    if changed or reboot_required:
        reason = f"new {' and '.join(changed)}" if changed else "the host must be rebooted"
        gate.close(conn, node_id, act.because(f"gate closed: {reason}", {"identity": identifiers}))
    return bool(changed)


def record_discovery(
    conn: sa.Connection,
    node_id: str,
    document: Mapping[str, Any],
    act: Act,
    *,
    task_id: str | None = None,
    observed_at: float | None = None,
) -> Discovery:
    """Store a discovery document. Slots that it blocks go off sale.

    observed_at: when its run started, on the database's clock.
    """
    node = rows.get(conn, Node, node_id)
    # Only a slice host needs the reboot. A bare-metal machine does not.
    reboot = bool(document.get("reboot_required")) and node.mode != NodeMode.BAREMETAL
    identity = document.get("identity") or {}
    observed(conn, node_id, act, identity=identity, reboot_required=reboot, began=observed_at)
    values = reports.report_values(node_id, document, task_id, observed_at)
    row = rows.add(conn, Discovery, {**values, "reboot_required": reboot})
    _learn_hardware(conn, node_id, document, install_id=row.install_id)
    firmware.take_over(conn, node_id, act)
    firmware.compare(conn, node_id, document, act, install_id=row.install_id)
    gate.review(conn, node_id, act.because(act.reason, {"discovery_id": row.id}))
    faults = discovery.degraded(document)
    fault = (faults[0].code, "; ".join(row.detail for row in faults)) if faults else None
    well = "every GPU is present and answers"
    node_records.note_fault(conn, node_id, _DISCOVERY, fault, act, well=well)
    summary = dict(document.get("candidate_summary") or {})
    reports.emit_report(conn, "node.discovered", node_id, summary, act)
    return row


def _learn_hardware(
    conn: sa.Connection, node_id: str, document: Mapping[str, Any], *, install_id: str
) -> None:
    """Keep what the host says of its machine. A tenant who was root could report any machine."""
    node, machine = rows.get(conn, Node, node_id), hardware.machine_of(document)
    trusted = install_id == node.install_id and not node.tenant_machine_ids
    if not machine or not trusted:
        return
    learned = hardware.learned(machine, node.hardware)
    if learned != node.hardware:
        node_records.update(conn, node_id, hardware=learned)


def record_parity(
    conn: sa.Connection,
    node_id: str,
    report: Mapping[str, Any],
    act: Act,
    *,
    task_id: str | None = None,
    observed_at: float | None = None,
) -> Parity:
    """Store a parity report. Failures close the gate until a later report passes."""
    identity = report.get("identity") or {}
    observed(conn, node_id, act, identity=identity, began=observed_at)
    failures = int(report.get("failures", 1))
    row = rows.add(
        conn,
        Parity,
        {
            **reports.report_values(node_id, report, task_id, observed_at),
            "intent": str(report.get("intent") or "slice"),
            "failures": failures,
            "warnings": int(report.get("warnings", 0)),
        },
    )
    if failures and row.intent == "slice":
        why = act.because(f"gate closed: {failures} parity checks fail", {"parity_id": row.id})
        gate.close(conn, node_id, why)
    elif row.intent == "slice":
        # A GPU that died, or was used since its reset, closes the gate of its own slot.
        gate.review(conn, node_id, act.because(act.reason, {"parity_id": row.id}))
    counts = {"failures": failures, "warnings": row.warnings}
    reports.emit_report(conn, "node.parity", node_id, counts, act)
    return row


def restarted(conn: sa.Connection, node_id: str, act: Act, *, since: str) -> bool:
    """Record that the host no longer runs under boot `since`. Discovery learns the new boot id.

    Until then earlier evidence does not count, so the gate is closed (I16). Returns False when the
    stored boot id is already another.
    """
    node = rows.get(conn, Node, node_id, lock=True)
    if node.boot_id != since:
        return False
    _forget_boot(conn, node_id)
    gate.close(conn, node_id, act.because("gate closed: new boot", {"boot_id_was": since}))
    return True


def _doubt(conn: sa.Connection, node: Node, act: Act) -> None:
    contacted(conn, node.id)
    if node.boot_id:
        _forget_boot(conn, node.id)
    gate.close(conn, node.id, act.because(act.reason, {"boot_id_was": node.boot_id}))
    reverify(conn, node, act)


def _forget_boot(conn: sa.Connection, node_id: str) -> None:
    unknown = {"boot_id": "", "boot_learned_at": clock.now()}
    conn.execute(sa.update(nodes).where(nodes.c.id == node_id).values(**unknown))


def record_silence(conn: sa.Connection, node_id: str, act: Act) -> bool:
    """Record that the host did not answer, so that its tasks wait.

    Returns False when the node is already lost, is not enrolled yet or is retired.
    """
    node = rows.get(conn, Node, node_id, lock=True)
    if transitions.target("node", node.state, "lose") is None:
        return False
    lost(conn, node_id, act)
    return True


def record_answer(conn: sa.Connection, node_id: str, act: Act) -> bool:
    """Record an answer. If the host was lost, its tasks resume and proven slots are sold again."""
    node = rows.get(conn, Node, node_id, lock=True)
    contacted(conn, node_id)
    if node.state != NodeState.UNREACHABLE:
        return False
    regained(conn, node_id, act)
    task_queue.resume(conn, node_id)
    # A slot that came back clean in the meantime was parked: a lost node sells nothing.
    gate.open_gate(conn, node_id, act)
    return True


# The order matters: parity compares with the discovery, and a parity pass opens the gate.
VERIFICATION = (TaskKind.SLICE_TOPOLOGY_DISCOVER, TaskKind.NODE_PARITY)
# Error code of a host that was restarted since its gate was proven.
BOOT_CHANGED = "boot_changed"
# A restarted host answers before its services run, and parity would fail until they do.
BOOTING_S = 60.0


# Window in which starts that the host refused are counted, and the longest pause before it is
# proven again. From so many starts of a slice in vain the node is named, with the step BOOT.
_VAIN_S, _LONGEST_S, _VAIN_STARTS = 86_400.0, 3_600.0, 3
BOOT = "boot"


def restarted_before_start(conn: sa.Connection, node_id: str, act: Act, *, since: str) -> None:
    """Record that the host refused a start, because it runs under another boot than its proof's,
    and have it proven again: later each time, because a host may name another boot to each run.
    """
    if not restarted(conn, node_id, act, since=since):
        return
    vain = _vain_starts(conn, node_id)
    pause_s = min(BOOTING_S * 2**vain, _LONGEST_S)
    reverify(conn, rows.get(conn, Node, node_id), act, after_s=pause_s)


def note_boots(conn: sa.Connection, node_id: str, act: Act) -> None:
    """Record in the node's health whether it names another boot to each run."""
    vain = _vain_starts(conn, node_id)
    reason = f"{vain} starts of a slice within a day met another boot than the one just proven"
    fault = ("boot_unstable", reason) if vain >= _VAIN_STARTS else None
    well = "its starts meet the boot that was proven"
    node_records.note_fault(conn, node_id, BOOT, fault, act, well=well)


def _vain_starts(conn: sa.Connection, node_id: str) -> int:
    """The most starts of one slice within a day that its host refused for another boot."""
    count = sa.func.count()
    query = sa.select(count).where(
        tasks.c.node_id == node_id,
        tasks.c.kind == TaskKind.SLICE_VM_POWER,
        tasks.c.finished_at > clock.now() - _VAIN_S,
        tasks.c.error["code"].as_string() == BOOT_CHANGED,
    )
    most = query.group_by(tasks.c.allocation_id).order_by(count.desc()).limit(1)
    return int(conn.execute(most).scalar() or 0)


def reverify_allocation(conn: sa.Connection, allocation_id: str, act: Act) -> None:
    """Queue discovery and parity for the allocation's host."""
    allocation = rows.get(conn, Allocation, allocation_id)
    reverify(conn, rows.get(conn, Node, allocation.node_id), act)


def reverify(conn: sa.Connection, node: Node, act: Act, *, after_s: float = 0) -> None:
    """Queue discovery for a host, and parity if it is a slice host; after_s: not before then."""
    node_id, sliced = node.id, NodeMode(node.mode).purpose == "slice"
    for kind in VERIFICATION if sliced else VERIFICATION[:1]:
        task_queue.enqueue(conn, task_queue.Enqueue(kind, node_id, not_before_s=after_s), act)


# Interval between attempts to renew a certificate. People repair the cause of a failed renewal, and
# weeks are left.
RENEWAL_RETRY_S = 86_400.0
_NOT_RENEWED = (NodeState.ENROLLING, NodeState.UNREACHABLE, NodeState.RETIRED)


def certificates_ending(conn: sa.Connection, within_s: float) -> list[str]:
    """List reachable nodes whose valid certificate ends within this time, soonest first.

    Nodes with a renewal under way, or with a recent attempt, are left out.
    """
    now = clock.read(conn)
    ends = certificates.ends_where(conn, nodes.c.state.not_in(_NOT_RENEWED)).items()
    at = {node_id: until for node_id, until in ends if now < until <= now + within_s}
    tried = sa.exists().where(
        tasks.c.node_id == nodes.c.id,
        tasks.c.kind == TaskKind.NODE_ENROL,
        sa.or_(
            tasks.c.state.in_(task_queue.OPEN), tasks.c.created_at > clock.now() - RENEWAL_RETRY_S
        ),
    )
    query = sa.select(nodes.c.id).where(nodes.c.id.in_(list(at)), ~tried)
    return sorted(conn.execute(query).scalars(), key=lambda node_id: (at[node_id], node_id))


RENEW_S = ca.HOST_DAYS * 86_400 / 3


def record_certificate(
    conn: sa.Connection, id: str, act: Act, *, certificate: str, public_key: str
) -> None:
    """Record the certificate that the host presents from now on."""
    fields = read_certificate(certificate)
    tokens.record_certificate(
        conn,
        id,
        act,
        serial=str(fields.serial),
        public_key=public_key,
        certificate=certificate,
        principals=fields.principals,
        valid_until=fields.valid_before.timestamp(),
    )


def queue_renewal(conn: sa.Connection, settings: Settings, node_id: str, act: Act) -> Task:
    """Queue a renewal of the node's certificate, or return the renewal that is already open.

    The certificate is signed here and travels in the task's parameters, because a re-attached run
    must get the same certificate. It takes effect once the host has it.
    """
    certificate = certificates.current(conn, node_id)
    for task in task_queue.every(conn, node_id=node_id, kind=TaskKind.NODE_ENROL, page=Page(1)):
        if task.finished_at is None:
            return task
    signed = ca.certify_host(ca.open_trust(settings.state_dir), certificate.public_key, node_id)
    item = task_queue.Enqueue(
        kind=TaskKind.NODE_ENROL,
        node_id=node_id,
        parameters={"certificate": signed, "public_key": certificate.public_key},
        audited=bool(act.role),
    )
    return task_queue.add(conn, item, act)
