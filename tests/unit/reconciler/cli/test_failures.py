"""Operators' mistakes are reported in three lines, without possible secrets."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import exc

from reconciler import logs
from reconciler.cli import failures
from reconciler.db import migrations
from reconciler.db.engine import open_engine, transaction
from reconciler.inventory import maas
from reconciler.model.errors import Problem
from reconciler.runs.awx import client as awx
from reconciler.settings import Settings
from reconciler.trust.keygen import TrustError
from reconciler.work import ufm
from tests.postgresql import running
from tests.unit.reconciler.api.stack import Stack
from tests.unit.reconciler.cli.conftest import Gpuaas

SECRET = "s3cret-canary"


@pytest.fixture(autouse=True)
def _log_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logging is set up once for a process; here it would write to a stream that pytest closed."""
    monkeypatch.setattr(logs, "configure", lambda _settings: None)


REFUSED = [
    ("GPUAAS_AWX_URL", f"https://svc:{SECRET}@awx.example"),
    ("GPUAAS_DATABASE_URL", f"mysql://u:{SECRET}@h/x"),
    ("GPUAAS_DATABASE_URL", f"postgresql://u:p@{SECRET}@h/x"),
    ("GPUAAS_DATABASE_URL", f"postgres://u:p@h:{SECRET}/x"),
    ("GPUAAS_REDIS_URL", f"redis://:{SECRET}/x@h:6379/0"),
    ("GPUAAS_WORKERS", SECRET),
    ("GPUAAS_OIDC_ISSUER", "https://issuer.example"),
]


@pytest.mark.parametrize(
    ("command", "name", "value"),
    [("serve", *setting) for setting in REFUSED]
    + [(command, *REFUSED[0]) for command in ("worker", "migrate", "check")],
)
def test_a_refused_setting_is_named_without_its_value(
    gpuaas: Gpuaas,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    name: str,
    value: str,
) -> None:
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(tmp_path))
    monkeypatch.setenv(name, value)
    gpuaas(command, "--output", "json")
    assert (gpuaas.status, gpuaas.out) == (1, "")
    answer = json.loads(gpuaas.err)
    assert answer["code"] == "settings_invalid"
    assert name in answer["found"]
    assert SECRET not in gpuaas.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("service", "least", "slowest"),
    [
        ({"LAUNCHER": "awx", "AWX_URL": "https://awx", "AWX_TOKEN_FILE": "t"}, 25, awx.Client),
        ({"UFM_URL": "https://ufm", "UFM_TOKEN_FILE": "t"}, 25, ufm.Client),
        ({"MAAS_URL": "https://maas", "MAAS_TOKEN_FILE": "t"}, 30, maas.Client),
    ],
)
def test_a_lease_that_ends_before_a_slow_service_answers(
    gpuaas: Gpuaas,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    service: dict[str, str],
    least: int,
    slowest: Any,
) -> None:
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("GPUAAS_TASK_LEASE_S", str(least - 1))
    Settings()
    for name, value in service.items():
        monkeypatch.setenv(f"GPUAAS_{name}", value)
    gpuaas("serve", "--output", "json")
    answer = json.loads(gpuaas.err)
    assert (gpuaas.status, answer["code"]) == (1, "settings_invalid")
    assert "GPUAAS_TASK_LEASE_S: at least " in answer["found"]
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("GPUAAS_TASK_LEASE_S", str(least))
    assert Settings().task_lease_s > slowest.DEADLINE_S


def test_a_backup_that_is_not_there(gpuaas: Gpuaas, tmp_path: Path) -> None:
    missing = tmp_path / "none.tar.gz"
    for file, reason in ((missing, "No such file or directory"), (tmp_path, "Is a directory")):
        gpuaas("restore", str(file), "--output", "json")
        answer = json.loads(gpuaas.err)
        assert (gpuaas.status, answer["code"], answer["found"]) == (1, "backup_unreadable", reason)
        assert str(file) in answer["expected"]


def test_a_file_of_settings_that_is_no_text(
    gpuaas: Gpuaas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "gpuaas.env"
    file.write_bytes(b"GPUAAS_WORKERS=\xff\xfe\n")
    monkeypatch.setenv("GPUAAS_CONFIG_FILE", str(file))
    gpuaas("check")
    assert (gpuaas.status, "settings_invalid" in gpuaas.err) == (1, True)
    assert "is no text" in gpuaas.err
    gpuaas("doctor")
    assert (gpuaas.status, "is no text" in gpuaas.out) == (1, True)


def test_a_file_of_settings_that_is_named_and_not_there(
    gpuaas: Gpuaas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slip in its name would else be another site, with a new database."""
    monkeypatch.setenv("GPUAAS_CONFIG_FILE", str(tmp_path / "gpuass.env"))
    gpuaas("migrate", "--output", "json")
    answer = json.loads(gpuaas.err)
    assert (gpuaas.status, answer["code"]) == (1, "settings_invalid")
    assert "gpuass.env, which GPUAAS_CONFIG_FILE names" in answer["expected"]
    gpuaas("doctor")
    assert (gpuaas.status, "No such file" in gpuaas.out) == (1, True)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("GPUAAS_CONFIG_FILE", str(tmp_path))
    gpuaas("doctor")
    assert (gpuaas.status, "Is a directory" in gpuaas.out) == (1, True)
    # The environment alone.
    monkeypatch.setenv("GPUAAS_CONFIG_FILE", "/dev/null")
    assert Settings().workers == Settings.model_fields["workers"].default


@pytest.mark.parametrize(
    "url",
    [
        "postgres://u:p%40@h:5432/x?sslmode=require",
        "postgresql://u:p%40@h:5432/x?sslmode=require",
        "postgresql+psycopg://u:p%40@h:5432/x?sslmode=require",
    ],
)
def test_postgresql_by_any_of_its_names(url: str) -> None:
    result = Settings(database_url=url).database
    assert result == "postgresql+psycopg://u:p%40@h:5432/x?sslmode=require"
    assert sa.make_url(result).password == "p@"
    here = "postgresql:///gpuaas?host=/run/postgresql"
    assert Settings(database_url=here).database.startswith("postgresql+psycopg:///gpuaas?")
    assert Settings(database_url="sqlite:////tmp/x.db").database == "sqlite:////tmp/x.db"


@pytest.mark.parametrize("command", [("serve",), ("worker",), ("migrate",), ("check",)])
def test_a_database_that_is_away(
    gpuaas: Gpuaas,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    command: tuple[str, ...],
) -> None:
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("GPUAAS_LISTEN", "127.0.0.1:0")
    monkeypatch.setenv("GPUAAS_DATABASE_URL", f"postgresql://u:{SECRET}@127.0.0.1:9/x")
    gpuaas(*command, "--output", "json")
    assert gpuaas.status == 1
    # A service logs as well; the refusal comes last.
    answer = json.loads(gpuaas.err[gpuaas.err.index("{\n") :])
    assert answer["code"] == "database_unavailable"
    assert SECRET not in gpuaas.err + caplog.text
    assert ("connection" in caplog.text) == (command != ("check",))


@pytest.mark.parametrize("command", ["serve", "worker", "migrate"])
def test_a_state_folder_that_cannot_be_written(
    gpuaas: Gpuaas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    # A file in the way stops root too.
    (tmp_path / "file").touch()
    monkeypatch.setenv("GPUAAS_LISTEN", "127.0.0.1:0")
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(tmp_path / "file" / "state"))
    gpuaas(command)
    assert (gpuaas.status, "state_dir_unusable" in gpuaas.err) == (1, True)
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    gpuaas(command)
    assert (gpuaas.status, "may not write there" in gpuaas.err) == (1, True)


@pytest.mark.parametrize("command", [("migrate",), ("restore", "/dev/null"), ("serve",)])
def test_root_writes_no_files_that_the_service_cannot_read(
    gpuaas: Gpuaas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("GPUAAS_LISTEN", "127.0.0.1:0")
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "state").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    gpuaas(*command)
    assert (gpuaas.status, "could not read the new files" in gpuaas.err) == (1, True)
    assert list((tmp_path / "state").iterdir()) == []


def test_a_database_anywhere_is_for_the_services_user_only(
    gpuaas: Gpuaas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "elsewhere.db"
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("GPUAAS_DATABASE_URL", f"sqlite:///{file}")
    gpuaas("migrate")
    assert gpuaas.status == 0 and file.stat().st_mode & 0o777 == 0o600


def test_a_defect_stays_one() -> None:
    assert failures.as_problem(ValueError("a defect")) is None
    assert failures.as_problem(BrokenPipeError(32, "Broken pipe")) is None
    assert failures.as_problem(exc.ProgrammingError("SELECT 1", {}, Exception(SECRET))) is None
    refused = TrustError("key_invalid", expected="a", found="b", remedy="c")
    assert failures.as_problem(refused).document()["code"] == "key_invalid"  # type: ignore[union-attr]
    unreadable = failures.as_problem(PermissionError(13, "Permission denied", "/etc/x"))
    assert unreadable.found == "/etc/x: Permission denied"


def refusal_of(url: str, *statements: str) -> Problem | None:
    """The refusal of such a statement, as a Problem."""
    engine = open_engine(url)
    try:
        with transaction(engine) as conn:
            for statement in statements:
                conn.execute(sa.text(statement), {"value": SECRET} if ":value" in statement else {})
    except exc.DBAPIError as failure:
        return failures.as_problem(failure)
    finally:
        engine.dispose()
    raise AssertionError("not refused")


def test_of_a_database_only_what_keeps_it_away_is_no_defect(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'x.db'}"
    table = "CREATE TABLE t (a INT)"
    assert refusal_of(url, table, "INSERT INTO t (b) VALUES (:value)") is None, "no such column"
    assert refusal_of(url, table, "ALTER TABLE t ADD COLUMN a INT") is None, "duplicate column"
    away = refusal_of(f"sqlite:///{tmp_path / 'none' / 'x.db'}", "SELECT 1")
    assert away.found == "unable to open database file"
    reads = refusal_of(url, table, "PRAGMA query_only = ON", "INSERT INTO t VALUES (1)")
    assert reads.code == "database_unavailable"
    with closing(sqlite3.connect(tmp_path / "x.db")) as other:
        other.execute("BEGIN EXCLUSIVE")
        locked = sa.create_engine(f"{url}?timeout=0")
        with pytest.raises(exc.OperationalError) as caught, locked.connect() as conn:
            conn.exec_driver_sql("BEGIN IMMEDIATE")
        locked.dispose()
    held = failures.as_problem(caught.value)
    assert held.found == "database is locked"


@pytest.mark.postgres
def test_of_a_server_too() -> None:
    with running(fsync=False) as result:
        _of_a_server(result.url)


def _of_a_server(server: str) -> None:
    assert refusal_of(server, "SELECT no_such_column") is None
    assert refusal_of(server, "SET LOCAL statement_timeout = 1", "SELECT pg_sleep(9)") is None
    ended = refusal_of(server, "SELECT pg_terminate_backend(pg_backend_pid())")
    assert ended.code == "database_unavailable"
    reads = refusal_of(server, "SET TRANSACTION READ ONLY", "CREATE TABLE t (a INT)")
    assert reads.code == "database_unavailable"
    role = ("CREATE ROLE reader", "SET LOCAL ROLE reader")
    lacks = refusal_of(server, *role, "CREATE SCHEMA s")
    assert lacks.code == "database_unavailable"
    assert lacks.found.startswith("permission denied for database")
    unknown = sa.make_url(server).set(database="no_such_database")
    none = refusal_of(unknown.render_as_string(hide_password=False), "SELECT 1")
    assert none.code == "database_unavailable"


def test_of_files_only_those_that_let_nobody_in() -> None:
    for number in (errno.ENOENT, errno.EEXIST):
        assert failures.as_problem(OSError(number, os.strerror(number), "/etc/x")) is None
    for number in (errno.EACCES, errno.EPERM, errno.EROFS):
        answer = failures.as_problem(OSError(number, os.strerror(number), "/etc/x"))
        assert answer.code == "file_unusable"


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """Of the database, and of a file that a backup or an image is written to."""
    url = f"sqlite:///{tmp_path / 'x.db'}"
    table = "CREATE TABLE t (a BLOB)"
    large = "INSERT INTO t VALUES (zeroblob(100000))"
    full = refusal_of(url, table, "PRAGMA max_page_count = 4", large)
    assert full is not None and (full.code, full.status) == ("disk_full", 507)
    with pytest.raises(OSError, match="No space left") as caught:
        Path("/dev/full").write_bytes(b"x")
    answer = failures.as_problem(caught.value)
    assert answer.code == "disk_full" and "df -h" in answer.remedy


def test_a_program_that_is_not_installed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as program:
        subprocess.run(["no-such-program"], check=True)
    answer = failures.as_problem(program.value)
    assert (answer.code, answer.expected) == ("program_missing", "no-such-program on this machine")
    with pytest.raises(FileNotFoundError) as folder:
        subprocess.run(["true"], check=True, cwd=tmp_path / "none")
    assert failures.as_problem(folder.value) is None


def test_the_log_keeps_where_it_came_from(caplog: pytest.LogCaptureFixture) -> None:
    away = exc.OperationalError("SELECT :a", {"a": SECRET}, psycopg.OperationalError("away"))
    with pytest.raises(exc.OperationalError), failures.logged():
        raise away
    (line,) = caplog.records
    assert line.exc_info[1] is away
    assert "SELECT :a" in caplog.text and SECRET not in caplog.text
    caplog.clear()
    with pytest.raises(TrustError), failures.logged():
        raise TrustError("key_invalid", expected="a", found="b", remedy="c")
    assert caplog.records == []


@pytest.mark.covers("CTRL-2")
def test_a_token_does_not_bring_a_database_to_another_schema(
    new: Stack, gpuaas: Gpuaas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a backup there would be no way back to the version that runs."""
    url = f"sqlite:///{tmp_path / 'older.db'}"
    engine = open_engine(url)
    migrations.migrate(engine)
    with transaction(engine) as conn:
        conn.exec_driver_sql("UPDATE alembic_version SET version_num = '0001'")
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("GPUAAS_DATABASE_URL", url)
    words = ("token", "create", "--role", "platform-admin", "--name", "me")
    gpuaas(*words)
    assert (gpuaas.status, "schema_outdated" in gpuaas.err) == (1, True)
    assert migrations.current(engine) == "0001"
    gpuaas("check")
    assert (gpuaas.status, "schema_outdated" in gpuaas.err) == (1, True)
    with transaction(engine) as conn:
        conn.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    gpuaas(*words)
    assert (gpuaas.status, "schema_outdated" in gpuaas.err) == (1, True)
    engine.dispose()
    # The very first command of a site makes its database.
    monkeypatch.setenv("GPUAAS_DATABASE_URL", f"sqlite:///{tmp_path / 'new.db'}")
    gpuaas(*words)
    assert (gpuaas.status, len(gpuaas.out.split())) == (0, 1), gpuaas.err
