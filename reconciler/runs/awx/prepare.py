"""The files of a run that AWX will carry out; whatever can be refused is refused here."""

from __future__ import annotations

import time
from typing import Any

from reconciler.runs.awx import check, request
from reconciler.runs.awx.access import AwxAccess
from reconciler.runs.awx.client import Client, results
from reconciler.runs.awx.record import Record
from reconciler.runs.paths import RunPaths, write_json
from reconciler.runs.spec import RunSpec


def prepare(access: AwxAccess, spec: RunSpec, paths: RunPaths) -> dict[str, Any]:
    """What the manifest holds of it. RunError: nothing was started; LauncherAway: later perhaps."""
    with Client(access) as client:
        template = check.template(client, access, spec)
        newest = results(client.get("/jobs/", order_by="-id", page_size=1))
    after = int(newest[0]["id"]) if newest else 0
    paths.env.mkdir(mode=0o700, exist_ok=True)
    write_json(paths.env / "request.json", request.document(spec))
    Record(template["id"], template["name"], after, time.time()).save(paths)
    return access.document()
