"""Launches that failed on the host and touched nothing, counted slot by slot.

They are read from the proofs of the untouched disk, which nobody changes; a wiped disk, a new
takeover of it, or a person who lets the slot back in begins the count anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from reconciler.domain import blame
from reconciler.domain.gate import Failures
from reconciler.domain.states import ProofKind
from reconciler.store import audit, rows
from reconciler.store.tables import proofs

ENABLED = "admin.slot.enabled"
_CODE = "failure"


def failed(evidence: Mapping[str, Any], code: str) -> dict[str, Any]:
    """What the proof of an untouched disk holds: of whose failure it tells, if of the host's."""
    return {**evidence, _CODE: code} if blame.on_host(code) else dict(evidence)


def failures(conn: sa.Connection, slot: Mapping[str, Any]) -> Failures:
    """Those that stand between the slot and the next tenant."""
    of_disk = sa.and_(
        proofs.c.disk_identity == slot["nvme_identity"], proofs.c.node_id == slot["node_id"]
    )
    cleaned = sa.select(sa.func.max(proofs.c.created_at)).where(
        of_disk, proofs.c.kind != ProofKind.UNTOUCHED
    )
    since = float(conn.execute(cleaned).scalar() or 0.0)
    query = sa.select(proofs).where(
        of_disk, proofs.c.kind == ProofKind.UNTOUCHED, proofs.c.created_at > since
    )
    found = rows.every(conn, query.order_by(proofs.c.created_at))
    found = [proof for proof in found if proof["document"].get(_CODE)]
    if found:
        let_in = audit.every(conn, action=ENABLED, subject_id=slot["id"])
        at = let_in[0]["at"] if let_in else 0.0
        found = [proof for proof in found if proof["created_at"] > at]
    if not found:
        return Failures()
    last = found[-1]
    return Failures(len(found), last["created_at"], str(last["document"][_CODE]))
