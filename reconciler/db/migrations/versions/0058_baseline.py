"""The schema before the first migration. `db.schema.creation` makes new databases, so this is only
the revision that the first migration follows.
"""

from __future__ import annotations

revision = "0058"
down_revision = None
