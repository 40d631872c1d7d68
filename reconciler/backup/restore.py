"""A site from its backup. What happened since the backup was made is unknown, and treated so.

Hosts went on: runs ended, tenants came and went. So what was running is lost and not repeated, what
was still to begin is canceled, for it may have begun since, and the slots of both are blocked;
nothing is on sale until each host has been discovered and proven again; and new claims get fences
above all that a host can have seen. Tokens and host keys that were revoked since are valid again:
they are named.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine

from reconciler.backup import archive, database, unfinished
from reconciler.db import clock, migrations
from reconciler.db.engine import open_engine, transaction
from reconciler.db.schema import ApiToken
from reconciler.lifecycle import restore as restored
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.states import TaskState
from reconciler.records import certificates, queue, tokens
from reconciler.runs.paths import write_text
from reconciler.settings import Settings
from reconciler.work import deadlines as overdue
from reconciler.work.cancel import cancel


def restore(settings: Settings, file: Path) -> dict[str, Any]:
    """Make the site of the backup; what was done about what was under way.

    One that was cut off is begun again with the same file. Problem `restore_not_empty` where there
    is a site, `backup_unreadable`, `backup_newer`.
    """
    settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with unfinished.alone(settings):
        return _restore(settings, file)


def _restore(settings: Settings, file: Path) -> dict[str, Any]:
    state = settings.state_dir
    trust = state / "trust"
    backup = unfinished.name_of(file)
    begun = unfinished.begun(settings) == backup
    if trust.exists() and not begun:
        raise database.not_empty(f"{trust} exists")
    with unfinished.workplace(settings) as folder:
        manifest = archive.read(file, folder)
        engine = open_engine(settings.database)
        try:
            _refuse_another(engine, manifest)
            there = database.found(engine)
            if there and not begun:
                raise database.not_empty(there)
            # From here on nobody opens this site until the last of it is in place: by what the
            # backup says, slots are on sale that others may have by now.
            unfinished.begin(settings, backup)
            if not there:
                database.put_back(engine, folder / archive.DATABASE)
            revision = migrations.migrate(engine)
            with transaction(engine) as conn:
                done = restored.told(conn, backup) or _doubt(conn, settings, manifest, backup)
                believed = _believed(conn)
        finally:
            engine.dispose()
        write_text(state / "restored-settings.env", (folder / archive.SETTINGS).read_text())
        if not trust.exists():
            _put_keys(folder / archive.TRUST, folder / "keys", trust)
        unfinished.end(settings)
    return {**manifest, "revision": revision, **done, **believed}


def _doubt(
    conn: Connection, settings: Settings, manifest: dict[str, Any], backup: str
) -> dict[str, Any]:
    act = Act("restore", f"restored from the backup of {manifest['made_at']}")
    error = {
        "code": "restored",
        "expected": "a service that was there when the run ended",
        "found": f"a backup of {manifest['made_at']}, in which it was running",
        "remedy": "the effect on the host is unknown: verify the host before anything is freed",
    }
    undone = {
        **error,
        "expected": "a service that was there since it was asked for",
        "found": f"a backup of {manifest['made_at']}, in which nobody had begun it",
        "remedy": "it may have begun since: look at the host; what is blocked needs"
        " `gpuaas recover`, a machine `gpuaas nodes clean-machine`; then ask for it again",
    }
    waiting = restored.unfinished(conn)
    lost = queue.every(conn, state=TaskState.RUNNING, limit=100_000)
    for task in lost:
        overdue.lose(conn, settings, replace(task, error=error), act)
    for task in waiting:
        cancel(conn, settings, task.id, act, error=undone, believed=False)
    ended = {
        "lost_tasks": [task.id for task in lost],
        "canceled_tasks": [task.id for task in waiting],
    }
    return restored.doubt(conn, act, backup=backup, ended=ended)


def _believed(conn: Connection) -> dict[str, Any]:
    """Whom the records let in again, whatever became of them since."""
    return {
        "valid_tokens": [_token(token) for token in tokens.valid(conn)],
        "valid_host_keys": [_host_key(key) for key in certificates.accepted(conn)],
    }


def _token(token: ApiToken) -> dict[str, Any]:
    """One that was revoked after the backup opens everything again, and nobody knows which."""
    return {
        "name": token.name,
        "role": token.role,
        "created_at": clock.iso(token.created_at),
        "if_revoked_since": f"gpuaas token revoke {token.id}",
    }


def _host_key(key: dict[str, Any]) -> dict[str, Any]:
    """One that its host gave up after the backup may be in other hands: where the host has another
    by now, its enrolment tells the records so, and this one is refused again.
    """
    return {
        "node": key["node_id"],
        "host_key": key["public_key"],
        "certified_at": clock.iso(key["since"]),
        "valid_until": clock.iso(key["until"]),
        "if_replaced_since": f"gpuaas nodes userdata {key['node_id']}, its script on the host",
    }


def _refuse_another(engine: Engine, manifest: dict[str, Any]) -> None:
    if manifest["engine"] != engine.dialect.name:
        raise Problem(
            "backup_other_engine",
            422,
            expected=f"a backup of {engine.dialect.name}, which GPUAAS_DATABASE_URL names",
            found=f"one of {manifest['engine']}",
            remedy="restore to the engine that it was made of",
        )
    if manifest["revision"] not in migrations.revisions():
        raise Problem(
            "backup_newer",
            422,
            expected=f"a schema that this version knows, up to {migrations.head()}",
            found=f"revision {manifest['revision']} of version {manifest['version']}",
            remedy="restore with that version of the service or a newer one",
        )


def _put_keys(source: Path, fresh: Path, trust: Path) -> None:
    """All at once: with half of them a site would make the others anew."""
    fresh.mkdir(mode=0o700)
    for key in sorted(source.iterdir()):
        write_text(fresh / key.name, key.read_text())
    fresh.rename(trust)
