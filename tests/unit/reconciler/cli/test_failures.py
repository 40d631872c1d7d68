"""What an operator gets wrong is said in three lines, without what may be secret in it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy import exc

from reconciler.cli import failures
from reconciler.service import logs
from reconciler.settings import Settings
from reconciler.store import migrations
from reconciler.store.engine import open_engine, transaction
from reconciler.trust.errors import TrustError
from tests.unit.reconciler.api.world import World
from tests.unit.reconciler.cli.conftest import Gpuaas

SECRET = "s3cret-canary"


@pytest.fixture(autouse=True)
def _log_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up once for a process; here it would write to what pytest has closed by then."""
    monkeypatch.setattr(logs, "configure", lambda _settings: None)


@pytest.mark.parametrize("command", [("serve",), ("worker",), ("migrate",), ("check",)])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GPUAAS_AWX_URL", f"https://svc:{SECRET}@awx.example"),
        ("GPUAAS_DATABASE_URL", f"mysql://u:{SECRET}@h/x"),
        ("GPUAAS_DATABASE_URL", f"postgresql://u:p@{SECRET}@h/x"),
        ("GPUAAS_DATABASE_URL", f"postgres://u:p@h:{SECRET}/x"),
        ("GPUAAS_WORKERS", SECRET),
        ("GPUAAS_OIDC_ISSUER", "https://issuer.example"),
    ],
)
def test_a_refused_setting_is_named_without_its_value(
    gpuaas: Gpuaas,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    name: str,
    value: str,
) -> None:
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(tmp_path))
    monkeypatch.setenv(name, value)
    gpuaas(*command, "--output", "json")
    assert (gpuaas.status, gpuaas.out) == (1, "")
    told = json.loads(gpuaas.err)
    assert told["code"] == "settings_invalid"
    assert name in told["found"]
    assert SECRET not in gpuaas.err
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize(
    "url",
    [
        "postgres://u:p%40@h:5432/x?sslmode=require",
        "postgresql://u:p%40@h:5432/x?sslmode=require",
        "postgresql+psycopg://u:p%40@h:5432/x?sslmode=require",
    ],
)
def test_postgresql_by_any_of_its_names(url: str) -> None:
    found = Settings(database_url=url).database
    assert found == "postgresql+psycopg://u:p%40@h:5432/x?sslmode=require"
    assert sa.make_url(found).password == "p@"
    here = "postgresql:///gpuaas?host=/run/postgresql"
    assert Settings(database_url=here).database.startswith("postgresql+psycopg:///gpuaas?")
    assert Settings(database_url="sqlite:////tmp/x.db").database == "sqlite:////tmp/x.db"


@pytest.mark.parametrize("command", [("serve",), ("worker",), ("migrate",), ("check",)])
def test_a_database_that_is_away(
    gpuaas: Gpuaas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("GPUAAS_LISTEN", "127.0.0.1:0")
    monkeypatch.setenv("GPUAAS_DATABASE_URL", f"postgresql://u:{SECRET}@127.0.0.1:9/x")
    gpuaas(*command, "--output", "json")
    assert gpuaas.status == 1
    # A service logs as well; the refusal is what it ends with.
    told = json.loads(gpuaas.err[gpuaas.err.index("{\n") :])
    assert told["code"] == "database_unavailable"
    assert SECRET not in gpuaas.err


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


def test_a_defect_stays_one() -> None:
    assert failures.told(ValueError("a defect")) is None
    assert failures.told(BrokenPipeError(32, "Broken pipe")) is None
    assert failures.told(exc.ProgrammingError("SELECT 1", {}, Exception(SECRET))) is None
    refused = TrustError("key_invalid", expected="a", found="b", remedy="c")
    assert failures.told(refused).document()["code"] == "key_invalid"  # type: ignore[union-attr]
    unreadable = failures.told(PermissionError(13, "Permission denied", "/etc/x"))
    assert unreadable is not None and unreadable.found == "/etc/x: Permission denied"


@pytest.mark.covers("CTRL-2")
def test_a_token_does_not_bring_a_database_to_another_schema(
    new: World, gpuaas: Gpuaas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a backup there would be no way back to the version that runs."""
    before = migrations.revisions()[-2]
    url = f"sqlite:///{tmp_path / 'older.db'}"
    engine = open_engine(url)
    assert migrations.migrate(engine, before) == before
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("GPUAAS_DATABASE_URL", url)
    words = ("token", "create", "--role", "platform-admin", "--name", "me")
    gpuaas(*words)
    assert (gpuaas.status, "schema_outdated" in gpuaas.err) == (1, True)
    assert migrations.current(engine) == before
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
