"""Restore of a site from its backup, with changes since the backup treated as unknown.

Runs may have ended since the backup, and tenants may have come and gone. Therefore:

- running tasks are lost and not repeated; waiting tasks are canceled, as they may have started;
- the slots of both are blocked, and no slot is on sale until its host has been discovered and
  proven again;
- new claims get fences above every fence that a host can have seen;
- tokens and host keys that were revoked since the backup are valid again, so the result lists them.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine

from reconciler.backup import MARK, archive, backup_in_progress, locked
from reconciler.db import clock, migrations
from reconciler.db.engine import open_engine, transaction
from reconciler.durable import place, write_text
from reconciler.lifecycle import restore as restored
from reconciler.lifecycle import task_failures
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.recovery import UNKNOWN_EFFECT
from reconciler.model.states import TaskState
from reconciler.records import certificates, queue, tokens, usage
from reconciler.settings import Settings

_WORK_PREFIX = ".restore-"
_RIGHTS_AGAIN = (
    "an administrator of the database runs what `gpuaas gateway-role` prints, and grants"
    " the rights of other roles again"
)


def restore(settings: Settings, file: Path) -> dict[str, Any]:
    """Restore the site and return the changes made to its records.

    An interrupted restore is repeated with the same file. Problem `restore_not_empty` if there is a
    site, `service_running`, `backup_unreadable`, `backup_schema_unknown`, `authorities_differ`.
    """
    settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(settings):
        return _restore(settings, file)


def _restore(settings: Settings, file: Path) -> dict[str, Any]:
    state = settings.state_dir
    trust = state / "trust"
    backup = _digest(file)
    repeated = backup_in_progress(settings) == backup
    if trust.exists() and not repeated:
        raise _not_empty(f"{trust} exists")
    with archive.work_folder(state, _WORK_PREFIX) as folder:
        manifest = archive.read(file, folder)
        engine = open_engine(settings.database)
        try:
            _refuse_another(engine, manifest)
            present = archive.existing_database(engine)
            if present and not repeated:
                raise _not_empty(present)
            if log := archive.left_log(engine):
                raise _not_empty(log)
            recorded = archive.recorded_authorities(engine, folder / archive.DATABASE)
            if refusal := archive.other_authorities(folder / archive.TRUST, recorded):
                raise refusal
            # From here on no command opens this site until the restore is complete: the records of
            # the backup may offer slots that have tenants by now.
            write_text(state / MARK, f"{backup}\n")
            if not present:
                rights = archive.put_back_database(engine, folder / archive.DATABASE)
            else:
                # The attempt before may have ended between the two.
                rights = archive.put_back_rights(engine, folder / archive.DATABASE)
            revision = migrations.migrate(engine)
            with transaction(engine) as conn:
                done = restored.result(conn, backup) or _doubt(conn, manifest, backup)
                accepted = _accepted_again(conn)
        finally:
            engine.dispose()
        write_text(state / "restored-settings.env", (folder / archive.SETTINGS).read_text())
        if not trust.exists():
            _put_keys(folder / archive.TRUST, folder / "keys", trust)
        (state / MARK).unlink()
    missing = {"rights_not_restored": f"{rights}; {_RIGHTS_AGAIN}"} if rights else {}
    return {**manifest, "revision": revision, **done, **accepted, **missing}


def _digest(file: Path) -> str:
    """Digest of a backup; "" for an unreadable file, which `archive.read` reports."""
    try:
        with file.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError:
        return ""


def _doubt(conn: Connection, manifest: dict[str, Any], backup: str) -> dict[str, Any]:
    act = Act("restore", f"restored from the backup of {manifest['made_at']}")
    lost_error = {
        "code": "restored",
        "expected": "a service that was running when the run ended",
        "found": f"a backup of {manifest['made_at']}, in which it was running",
        "remedy": UNKNOWN_EFFECT,
    }
    canceled_error = {
        "code": "restored",
        "expected": "a service that was running since the task was queued",
        "found": f"a backup of {manifest['made_at']}, in which the task had not started",
        "remedy": "it may have started since: check the host; a blocked slot needs"
        " `gpuaas recover`, a machine `gpuaas nodes clean-machine`; then queue the task again",
    }
    waiting = restored.unfinished(conn)
    lost = queue.every(conn, state=TaskState.RUNNING)
    for task in lost:
        task_failures.lose(conn, replace(task, error=lost_error), act)
    for task in waiting:
        task_failures.cancel(conn, task.id, act, error=canceled_error, trust_record=False)
    ended = {
        "lost_tasks": [task.id for task in lost],
        "canceled_tasks": [task.id for task in waiting],
    }
    return restored.doubt(conn, act, backup=backup, ended=ended)


def _accepted_again(conn: Connection) -> dict[str, Any]:
    """Tokens, host keys and allocations that are valid by the records, and may have ended since.

    Each has the command that ends it. A key that the host gave up after the backup may be in
    other hands: a new enrolment of the host records its current key and revokes this key again.
    """
    valid_tokens = [
        {
            "name": token.name,
            "role": token.role,
            "created_at": clock.iso(token.created_at),
            "if_revoked_since": f"gpuaas token revoke {token.id}",
        }
        for token in tokens.valid(conn)
    ]
    valid_host_keys = [
        {
            "node": key.node_id,
            "host_key": key.public_key,
            "certified_at": clock.iso(key.since),
            "valid_until": clock.iso(key.until),
            "if_replaced_since": f"gpuaas nodes userdata {key.node_id}, its script on the host",
        }
        for key in certificates.accepted(conn)
    ]
    # Its usage goes on until its release, and so does its bill.
    active_allocations = [
        {
            "allocation": row.allocation_id,
            "project": row.project_id,
            "since": clock.iso(row.started_at),
            "if_released_since": f"gpuaas release {row.allocation_id} --project {row.project_id}",
        }
        for row in usage.unfinished(conn)
    ]
    return {
        "valid_tokens": valid_tokens,
        "valid_host_keys": valid_host_keys,
        "active_allocations": active_allocations,
    }


def _not_empty(found: str) -> Problem:
    return Problem(
        "restore_not_empty",
        expected="an empty state folder and no database",
        found=found,
        remedy="stop the service and move both away, a database of SQLite with its -wal and"
        " -journal; nothing was restored",
    )


def _refuse_another(engine: Engine, manifest: dict[str, Any]) -> None:
    if manifest["engine"] != engine.dialect.name:
        raise Problem(
            "backup_other_engine",
            422,
            expected=f"a backup of {engine.dialect.name}, the engine in GPUAAS_DATABASE_URL",
            found=f"a backup of {manifest['engine']}",
            remedy="restore to the engine of the backup",
        )
    if manifest["revision"] not in migrations.revisions():
        raise Problem(
            "backup_schema_unknown",
            422,
            expected=f"a backup of a schema that this version knows, revision {migrations.span()}",
            found=f"revision {manifest['revision']} of version {manifest['version']}",
            remedy="restore with a version of the service that knows this revision",
        )


def _put_keys(source: Path, fresh: Path, trust: Path) -> None:
    """Move all keys in a single step: with a part of them the service would create new ones."""
    fresh.mkdir(mode=0o700)
    for key in sorted(source.iterdir()):
        write_text(fresh / key.name, key.read_text())
    place(fresh, trust)
