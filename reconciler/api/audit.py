"""The audit log: who used which power, and why."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from reconciler.api.models import Filter
from reconciler.api.paging import Paging
from reconciler.api.security import Admin
from reconciler.db import journal

router = APIRouter(prefix="/admin/audit", tags=["audit"])


@router.get("")
def list_audit(
    context: Admin,
    part: Paging,
    action: Filter = None,
    subject_id: Filter = None,
    correlation_id: Filter = None,
) -> dict[str, Any]:
    """Newest first."""
    page = part.page(journal.AUDIT_ORDER)
    wanted = {"action": action, "subject_id": subject_id, "correlation_id": correlation_id}
    rows = context.read(lambda conn: journal.audit_rows(conn, **wanted, page=page))
    return part.told(journal.AUDIT_ORDER, rows)
