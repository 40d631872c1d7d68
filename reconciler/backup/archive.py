"""Backup file: a tar with a manifest, the database, the SSH authorities and the settings.

It contains private keys and hashes of tokens, so only its owner can read it. Folders of runs are
not included, because their results are in the database.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import shutil
import sqlite3
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from psycopg.pq import Conninfo
from sqlalchemy import Engine

from reconciler.backup import refuse_unfinished_restore, take
from reconciler.db import migrations, postgresql
from reconciler.db.engine import open_existing
from reconciler.db.settings import AUTHORITIES
from reconciler.durable import place
from reconciler.model.errors import Problem
from reconciler.settings import PREFIX, Settings, config_file
from reconciler.trust.ca import GATEWAY, Trust, authorities

SCHEMA = 1
MANIFEST, DATABASE, SETTINGS, TRUST = "manifest.json", "database", "settings.env", "trust/"
_SERVICE = "gpuaas"
_WORK_PREFIX = ".gpuaas-backup-"
# Entries of a dump that give rights to other roles, such as the gateway's.
_RIGHTS = re.compile(r"[0-9]+; [0-9]+ [0-9]+ (ACL|DEFAULT ACL|POLICY|ROW SECURITY) ")
_COPY = re.compile(r"COPY \S*settings \((?P<names>[^)]*)\) FROM stdin;")
# libpq strips white space from the end of a password in a service file, and a service cannot refer
# to another service.
_NOT_IN_A_FILE = {"password", "service"}
# A large table comes in pieces of less; only its server's locks take longer.
_LOOK_S, _STILL_S = 1.0, 600.0


def write(settings: Settings, file: Path) -> dict[str, Any]:
    """Write a backup while the service may be running, and return its manifest.

    Problem `backup_exists`, `database_missing`, `authorities_differ`, or `restore_unfinished` while
    a restore is incomplete, because the records may lack changes of their backup until then.
    """
    refuse_unfinished_restore(settings)
    if file.exists():
        raise Problem(
            "backup_exists",
            expected="the path of a new file",
            found=str(file),
            remedy="choose another path, or move that file",
        )
    if not file.parent.is_dir():
        raise Problem(
            "backup_folder_missing",
            404,
            expected=f"a folder {file.parent}",
            found="no such folder",
            remedy="create it for the service's user only, because a backup contains private keys",
        )
    with open_existing(settings) as engine, work_folder(file.parent) as folder:
        # A consistent copy: later changes belong to the next backup.
        copy = folder / DATABASE
        copy_database(engine, copy)
        manifest = {
            "schema": SCHEMA,
            "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "version": version("gpuaas-slice"),
            "engine": engine.dialect.name,
            "revision": migrations.current(engine),
        }
        if manifest["revision"] is None:
            raise Problem(
                "database_missing",
                404,
                expected="the database of a site",
                found=f"an empty one at {engine.url.render_as_string(hide_password=True)}",
                remedy="set GPUAAS_DATABASE_URL as the service has it",
            )
        trust = settings.state_dir / "trust"
        keys = sorted(path for path in trust.glob("*") if path.is_file() and path.name != "lock")
        if not keys:
            raise Problem(
                "backup_incomplete",
                expected="the SSH authorities, without which every host must enrol again",
                found=f"no keys in {trust}",
                remedy="run the backup on the machine with the service's state folder",
            )
        if refusal := other_authorities(trust, recorded_authorities(engine, copy)):
            raise refusal
        fresh = folder / "backup.tar.gz"
        with _private(fresh) as handle, tarfile.open(fileobj=handle, mode="w:gz") as tar:
            _add(tar, MANIFEST, json.dumps(manifest, indent=1).encode())
            _add(tar, SETTINGS, _settings().encode())
            tar.add(copy, DATABASE)
            for key in keys:
                tar.add(key, f"{TRUST}{key.name}")
        # Renamed when complete, so that a file with this name is a whole backup.
        place(fresh, file)
    return manifest


@contextmanager
def work_folder(parent: Path, prefix: str = _WORK_PREFIX) -> Iterator[Path]:
    """A folder for the parts of a backup, locked. Those of killed processes are removed: they hold
    the database and private keys.
    """
    for leftover in parent.glob(f"{prefix}*"):
        with _sole(leftover) as free:
            if free:
                shutil.rmtree(leftover)
    while True:
        with (
            tempfile.TemporaryDirectory(
                prefix=prefix, dir=parent, ignore_cleanup_errors=True
            ) as name,
            _sole(Path(name)) as held,
        ):
            # Another backup may have taken it for a leftover, before the lock.
            if held and Path(name).exists():
                yield Path(name)
                return


@contextmanager
def _sole(folder: Path) -> Iterator[bool]:
    """Lock a work folder; false when another process has it, or another user."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        is_owner = os.fstat(descriptor).st_uid == os.geteuid()
        yield is_owner and take(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def read(file: Path, folder: Path) -> dict[str, Any]:
    """Unpack the known members of a backup into the folder and return its manifest."""
    try:
        with tarfile.open(file) as tar:
            for member in tar:
                name = member.name
                expected = name in {MANIFEST, DATABASE, SETTINGS} or name.startswith(TRUST)
                content = tar.extractfile(member) if member.isreg() and expected else None
                if content is None or ".." in Path(name).parts:
                    raise _unreadable(file, f"{name[:100]!r} in it")
                # Not extracted by tarfile: its version in Debian 12 has no option to ignore modes
                # and owners.
                path = folder / name
                path.parent.mkdir(mode=0o700, exist_ok=True)
                with _private(path) as handle:
                    shutil.copyfileobj(content, handle)
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        if manifest["schema"] != SCHEMA:
            raise _unreadable(file, f"schema {manifest['schema']!r}")
    except (OSError, ValueError, KeyError, tarfile.TarError) as broken:
        raise _unreadable(file, f"{type(broken).__name__}: {broken}") from broken
    return manifest


def copy_database(engine: Engine, file: Path) -> None:
    """A consistent copy of a database that other processes may write to."""
    if engine.dialect.name == "postgresql":
        words = ["--format=custom", "--no-owner", f"--file={file}"]
        _postgresql(engine, "pg_dump", words, grows=file)
        return
    source = sqlite3.connect(str(engine.url.database))
    with closing(source), closing(sqlite3.connect(file)) as target:
        source.backup(target)
        # The copy must be a single file, without a write-ahead log beside it.
        target.execute("PRAGMA journal_mode = DELETE")


def recorded_authorities(engine: Engine, copy: Path) -> dict[str, str] | None:
    """The site's authorities by the copy of a database; None when it has none yet."""
    if engine.dialect.name != "postgresql":
        query = "SELECT value FROM settings WHERE name = ?"
        with closing(sqlite3.connect(copy)) as conn:
            row = conn.execute(query, (AUTHORITIES,)).fetchone()
        return json.loads(row[0]) if row else None
    words = ["--data-only", "--table=settings", "--file=-", str(copy)]
    lines = iter(_run("pg_restore", words).splitlines())
    head = next((_COPY.match(line) for line in lines if _COPY.match(line)), None)
    names = head["names"].split(", ") if head else []
    for line in lines:
        row = dict(zip(names, line.split("\t"), strict=False))
        if row.get("name") == AUTHORITIES:
            # A public key has no character that COPY escapes.
            return dict(json.loads(row["value"]))
    return None


def other_authorities(folder: Path, recorded: dict[str, str] | None) -> Problem | None:
    """The refusal of a folder of keys that are not the site's: no service would open the site.

    Not every machine has an authority of the gateway.
    """
    local = authorities(Trust(folder))
    needed = {
        name: key for name, key in (recorded or {}).items() if name in local or name != GATEWAY
    }
    wrong = sorted(name for name, key in needed.items() if local.get(name) != key)
    if not wrong:
        return None
    return Problem(
        "authorities_differ",
        expected="the SSH authorities that the database records for the site",
        found=f"others, or none, as {', '.join(wrong)} in {folder}",
        remedy="make the backup on a machine of the site with its keys, which starts the service",
    )


def existing_database(engine: Engine) -> str:
    """Description of an existing database, "" if there is none."""
    if engine.dialect.name == "postgresql":
        with engine.connect() as conn:
            tables = sa.inspect(conn).get_table_names()
        return f"a database with {len(tables)} tables" if tables else ""
    target = Path(str(engine.url.database))
    return f"{target} exists" if target.exists() else ""


def left_log(engine: Engine) -> str:
    """Log of a SQLite database that is gone, "" if there is none. SQLite would replay it into any
    database of the same name.
    """
    target = Path(str(engine.url.database))
    if engine.dialect.name == "postgresql" or target.exists():
        return ""
    logs = (target.with_name(f"{target.name}{end}") for end in ("-wal", "-journal"))
    return next((f"{log} exists" for log in logs if log.exists()), "")


def put_back_database(engine: Engine, file: Path) -> str:
    """Create the database from the copy, completely or not at all. Returns why the rights of other
    roles in it are missing, "" when they are there: another server need not have these roles.
    """
    if engine.dialect.name == "postgresql":
        _restore_entries(engine, file, rights=False)
        return put_back_rights(engine, file)
    target = Path(str(engine.url.database))
    fresh = target.with_name(f".{target.name}.restored")
    fresh.touch(mode=0o600)
    shutil.copyfile(file, fresh)
    place(fresh, target)
    return ""


def put_back_rights(engine: Engine, file: Path) -> str:
    """Give other roles their rights in a database that is there; returns as `put_back_database`."""
    if engine.dialect.name != "postgresql":
        return ""
    try:
        _restore_entries(engine, file, rights=True)
    except Problem as refusal:
        # All of them are restored at once, so a single one that exists tells of all.
        return "" if "already exists" in refusal.found else refusal.found
    return ""


def _restore_entries(engine: Engine, file: Path, *, rights: bool) -> None:
    words = ["--no-owner", "--exit-on-error", "--single-transaction", str(file)]
    content = _run("pg_restore", ["--list", str(file)]).splitlines()
    with tempfile.NamedTemporaryFile("w", suffix=".list", dir=file.parent) as chosen:
        entries = (line for line in content if bool(_RIGHTS.match(line)) == rights)
        chosen.write("".join(f"{line}\n" for line in entries))
        chosen.flush()
        _postgresql(engine, "pg_restore", [f"--use-list={chosen.name}", *words])


def _settings() -> str:
    """The settings of this site, as information for a restore, which does not apply them."""
    lines = [f"# from {config_file()}"]
    if config_file().is_file():
        lines += config_file().read_text().splitlines()
    lines.append("# from the environment")
    names = {PREFIX + name.upper() for name in Settings.model_fields}
    lines += [f"{name}={os.environ[name]}" for name in sorted(names & set(os.environ))]
    return "\n".join(lines) + "\n"


@contextmanager
def _private(path: Path) -> Iterator[io.BufferedWriter]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as handle:
        yield handle
        handle.flush()
        os.fsync(descriptor)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o600
    tar.addfile(member, io.BytesIO(content))


def _unreadable(file: Path, found: str) -> Problem:
    return Problem(
        "backup_unreadable",
        422,
        expected=f"a backup of this version in {file}",
        found=found,
        remedy="use a file of `gpuaas backup`; nothing was restored",
    )


def _postgresql(
    engine: Engine, program: str, words: Sequence[str], grows: Path | None = None
) -> None:
    # The connection parameters of the service, including those for TLS and for a lost server.
    _, given = engine.dialect.create_connect_args(engine.url)
    parameters = {**postgresql.LINK, **given}
    password = parameters.get("password")
    secret = {"PGPASSWORD": str(password)} if password else {}
    with _service(parameters) as file:
        connection = {"PGSERVICEFILE": str(file), **secret}
        _run(program, [f"--dbname=service={_SERVICE}", *words], connection, grows)


def _run(
    program: str,
    words: Sequence[str],
    connection: Mapping[str, str] | None = None,
    grows: Path | None = None,
) -> str:
    """The output of a program. grows: a file that it writes; it is ended when that stands still,
    because a proxy may acknowledge everything for a server that hangs.
    """
    if not shutil.which(program):
        raise Problem(
            "program_missing",
            expected=f"{program} of the server's version on this machine",
            found=f"no {program} on PATH",
            remedy="install postgresql-client of the server's version",
        )
    environment = {**os.environ, **(connection or {})}
    with subprocess.Popen(
        [program, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, errors = _to_its_end(process, grows)
        finally:
            process.kill()
    if process.returncode:
        # Without the statement, which may be longer than the server's message.
        message = " ".join(errors.partition("Command was:")[0].split())
        raise Problem(
            "program_failed",
            expected=f"{program} to succeed",
            found=f"exit {process.returncode}: {message[-300:]}",
            remedy="nothing was changed; correct the cause and repeat the command",
        )
    return out


def _to_its_end(process: subprocess.Popen[str], grows: Path | None) -> tuple[str, str]:
    size, since = -1, time.monotonic()
    while True:
        try:
            return process.communicate(timeout=_LOOK_S)
        except subprocess.TimeoutExpired:
            if grows is None:
                continue
        now = grows.stat().st_size if grows.exists() else 0
        if now != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > _STILL_S:
            raise Problem(
                "program_failed",
                expected="a server that goes on sending the database",
                found=f"nothing new in {grows} for {_STILL_S:.0f} s",
                remedy="nothing was changed; look at the server and at a proxy before it, then"
                " repeat the command",
            )


@contextmanager
def _service(parameters: Mapping[str, Any]) -> Iterator[Path]:
    """A service file for libpq, because every user of this machine can read a command line."""
    # Other parameters are options of the driver, such as its type adapters.
    options = {option.keyword.decode() for option in Conninfo.get_defaults()} - _NOT_IN_A_FILE
    lines = [f"{name}={value}" for name, value in parameters.items() if name in options]
    # Created with mode 600.
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        file.write("\n".join([f"[{_SERVICE}]", *lines, ""]))
        file.flush()
        yield Path(file.name)
