"""Firmware of a machine over a tenancy: recorded before it, compared after it.

A new installation changes no firmware. So a machine on which a tenant was root is sold again only
when nothing of it differs, or when a person has accepted the differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from reconciler.db import journal, rows
from reconciler.db.schema import Node, nodes
from reconciler.lifecycle import gate
from reconciler.model import firmware
from reconciler.model.act import Act, require_reason
from reconciler.model.errors import Problem
from reconciler.model.hardware import serial_of
from reconciler.model.states import NodeState
from reconciler.records import nodes as node_records
from reconciler.records import reports

_TAKEN_OVER = "node.firmware.taken_over"


def remember(conn: sa.Connection, node_id: str) -> None:
    """Keep the machine's latest report as its state before the tenant.

    A later attempt, or a second tenant, changes nothing: what counts is the last state that no
    tenant could have changed.
    """
    node = rows.get(conn, Node, node_id, lock=True)
    if node.firmware_before is None:
        latest = reports.latest_discovery(conn, node_id)
        document = latest.document.get("firmware") if latest else {}
        before = firmware.bounded(document, firmware.HOST)
        merged = firmware.merged(before, node.firmware_bmc or {})
        node_records.update(conn, node_id, firmware_before=merged, firmware_bmc=None)


def forget_bmc(conn: sa.Connection, node_id: str) -> None:
    """Forget the BMC's report, because the tenant's system can have changed the BMC since."""
    node_records.update(conn, node_id, firmware_bmc=None)


def restore(conn: sa.Connection, node_id: str) -> None:
    """Undo `remember`, because no tenant was on the machine. The BMC's report still is one from
    before a tenant, for the next one.
    """
    node = rows.get(conn, Node, node_id, lock=True)
    bmc = node.firmware_bmc or firmware.of_bmc(node.firmware_before or {})
    node_records.update(conn, node_id, firmware_bmc=bmc)
    forget(conn, node_id)


def forget(conn: sa.Connection, node_id: str) -> None:
    """Forget the record, because nothing is left to compare with it."""
    node_records.update(conn, node_id, firmware_before=None, firmware_differences=[])


def take_over(conn: sa.Connection, node_id: str, act: Act) -> None:
    """Compare with the record of a retired node, too, whose machine may be this node's now, by the
    serial number. Each is compared once.

    The retired node keeps it: a hostile host can report any serial number, before the machine with
    this number is registered again.
    """
    node = rows.get(conn, Node, node_id, lock=True)
    serial = serial_of(node.hardware)
    if not serial or node.firmware_before is not None:
        return
    query = sa.select(nodes.c.id, nodes.c.hardware).where(nodes.c.state == NodeState.RETIRED)
    retired = [id for id, hardware in conn.execute(query) if serial_of(hardware) == serial]
    if not retired:
        return
    before = journal.audit_rows(conn, action=_TAKEN_OVER, subject_id=node_id)
    taken = {row.detail["from"] for row in before}
    for former in (node_records.get(conn, id) for id in sorted({*retired} - taken)):
        if former.firmware_before is not None:
            node_records.update(conn, node_id, firmware_before=former.firmware_before)
            detail = {"from": former.id}
            journal.audit(conn, act, _TAKEN_OVER, "node", node_id, detail=detail)
            return


def compare(
    conn: sa.Connection, node_id: str, document: Mapping[str, Any], act: Act, *, install_id: str
) -> None:
    """Compare a discovery with the record, if it is that of an installation without a tenant.

    install_id: of the discovery. A report of the tenant's installation proves nothing.
    """
    node = rows.get(conn, Node, node_id, lock=True)
    trusted = install_id == node.install_id and not node.tenant_machine_ids
    if node.firmware_before is None or not trusted:
        return
    host = firmware.bounded(document.get("firmware"), firmware.HOST)
    after = firmware.merged(host, node.firmware_bmc or {})
    differences = firmware.differences(node.firmware_before, after)
    if not differences:
        forget(conn, node_id)
        journal.audit(conn, act, "node.firmware.unchanged", "node", node_id)
    elif differences != node.firmware_differences:
        _name(conn, node_id, differences, act)


def record_bmc(conn: sa.Connection, node_id: str, report: Mapping[str, Any], act: Act) -> Node:
    """Record what the BMC reports, which does not depend on the system of the machine."""
    node = rows.get(conn, Node, node_id, lock=True)
    bmc = firmware.bounded(report, firmware.REDFISH)
    node_records.update(conn, node_id, firmware_bmc=bmc)
    journal.audit(conn, act, "admin.node.firmware.recorded", "node", node_id)
    node = rows.get(conn, Node, node_id)
    latest = reports.latest_discovery(conn, node_id)
    if node.firmware_before is not None and node.tenant_machine_ids:
        # Until the new installation, only what the BMC shows is compared.
        differences = firmware.differences(node.firmware_before, bmc, firmware.REDFISH)
        if differences != node.firmware_differences:
            _name(conn, node_id, differences, act)
    elif latest is not None:
        compare(conn, node_id, latest.document, act, install_id=latest.install_id)
        gate.open_gate(conn, node_id, act.because("firmware recorded"))
    return rows.get(conn, Node, node_id)


def _name(conn: sa.Connection, node_id: str, differences: list[dict[str, str]], act: Act) -> None:
    node_records.update(conn, node_id, firmware_differences=differences)
    detail = {"differences": differences}
    journal.audit(conn, act, "node.firmware.changed", "node", node_id, detail=detail)


def accept(conn: sa.Connection, node_id: str, act: Act) -> Node:
    """Accept the differences, on the responsibility of the person who reviewed them."""
    node = rows.get(conn, Node, node_id, lock=True)
    require_reason(act, "say why the firmware may stay as it is")
    # Those of the tenant's installation come from the BMC only and are not all.
    node_records.require_installed(node)
    if not node.firmware_differences:
        raise Problem(
            "no_firmware_difference",
            expected="a node whose firmware differs from before its tenant",
            found="no comparison yet" if node.firmware_before is not None else "no difference",
            remedy="run discovery first"
            if node.firmware_before is not None
            else "nothing to accept",
        )
    detail = {"differences": node.firmware_differences}
    journal.audit(conn, act, "admin.node.firmware.accepted", "node", node_id, detail=detail)
    forget(conn, node_id)
    gate.open_gate(conn, node_id, act.because(act.reason))
    return rows.get(conn, Node, node_id)
