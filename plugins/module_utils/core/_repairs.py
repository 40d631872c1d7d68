"""Record of the repairs on this host: step, number of times, first and last time.

Guardians and `slice_upkeep` write it, and drift detection shows it. It is below /run, so that a
full disk stops no repair. It need not survive a boot: that sets up the whole host again, and the
reconciler keeps the repairs that it has read.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

RECORD = "/run/gpuaas/repairs.json"
# Most steps that are kept; the least recent ones are dropped. A step contains the name of a host
# object, so there may be any number of them.
_MOST = 50


def note(steps: Collection[str]) -> None:
    """Record the steps of a repair that was done. A failure to record stops no repair."""
    if not steps:
        return
    with contextlib.suppress(Refusal, OSError), _host.locked("/run/gpuaas/repairs", mode=0o700):
        now = _host.now()
        rows = {str(row["step"]): row for row in read()}
        for step in steps:
            before = rows.pop(step, {"times": 0, "first_at": now})
            times = int(before["times"]) + 1
            rows[step] = {**before, "step": step, "times": times, "last_at": now}
        _host.write(RECORD, json.dumps(list(rows.values())[-_MOST:]) + "\n", 0o600)


def read() -> list[dict[str, Any]]:
    """The recorded repairs, the latest last. A damaged record counts as empty."""
    try:
        rows = json.loads(_host.kept(RECORD) or "[]")
        return [
            {
                "step": str(row["step"])[:500],
                "times": int(row["times"]),
                "first_at": str(row["first_at"]),
                "last_at": str(row["last_at"]),
            }
            for row in rows
        ]
    except (ValueError, TypeError, KeyError):
        return []
