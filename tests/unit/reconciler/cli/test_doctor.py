"""`gpuaas doctor`: every fault has its own finding, and a sound installation has none."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import sqlalchemy as sa
import yaml

from reconciler import names
from reconciler.backup import MARK
from reconciler.db import leader
from reconciler.db import schema as tables
from reconciler.db import settings as site
from reconciler.db.engine import reading, transaction
from reconciler.db.migrations import program_version
from reconciler.doctor import examine, exposure, installation, services
from reconciler.doctor.examine import RecordCheck
from reconciler.pools import hints, leases
from reconciler.records import images
from reconciler.service.process import adopt
from reconciler.settings import PROJECT, Settings
from reconciler.shipped import COLLECTION
from reconciler.trust.ca import Trust, authorities, open_trust
from tests.redis_server import RedisServer
from tests.unit.reconciler.api.stack import ACT, IMAGE, Stack
from tests.unit.reconciler.cli.conftest import Gpuaas

Doctor = Callable[[], dict[str, Any]]
_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def sound(selling: Stack, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """An installation in which everything is as it should be."""
    folder = selling.settings.state_dir
    folder.chmod(0o700)
    (folder / "reconciler.db").chmod(0o600)
    adopt(selling.settings, selling.engine)
    with transaction(selling.engine) as conn:
        roles = ["api", "worker", "loops"]
        leader.record_process(conn, "p1", roles, host="h", pid=1, version=program_version())
        leader.campaign(conn, leader.LOOPS, "p1", 3600)
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(folder))
    monkeypatch.setenv("GPUAAS_PUBLIC_URL", "https://gpuaas.example")
    monkeypatch.setenv("GPUAAS_MEMBER_ADDRESS", "gpu.example")
    monkeypatch.setattr(services, "probe", AsyncMock())
    monkeypatch.setattr(installation, "_LITTLE_GIB", 0)
    monkeypatch.setattr(installation, "_LEAST_GIB", 0)
    return selling


@pytest.fixture
def doctor(gpuaas: Gpuaas) -> Doctor:
    """Findings by check; the exit status agrees with them."""

    def ask() -> dict[str, Any]:
        document = json.loads(gpuaas("doctor", "--output", "json"))
        assert gpuaas.status == (1 if document["failures"] else 0)
        wrong = [finding for finding in document["findings"] if finding["status"] != "ok"]
        assert all(finding["expected"] and finding["remedy"] for finding in wrong)
        return {finding["check"]: finding for finding in wrong}

    return ask


def test_nothing_is_wrong(sound: Stack, doctor: Doctor, gpuaas: Gpuaas) -> None:
    assert doctor() == {}
    shown = gpuaas("doctor")
    assert "collection" in shown and "no slice runs" in shown


def test_slices_on_sale_that_nobody_can_reach(
    sound: Stack, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GPUAAS_MEMBER_ADDRESS")
    findings = doctor()
    assert {name: finding["status"] for name, finding in findings.items()} == {
        "member_address": "warn"
    }
    assert findings["member_address"]["found"].startswith("2 slots on sale")
    with transaction(sound.engine) as conn:
        off = {"status": "disabled", "available_proof_id": None}
        conn.execute(sa.update(tables.slots).values(off))
    assert doctor() == {}, "nothing is on sale"


def _open_folder(stack: Stack) -> None:
    stack.settings.state_dir.chmod(0o755)


def _open_database(stack: Stack) -> None:
    (stack.settings.state_dir / "reconciler.db").chmod(0o644)


def _other_owner_of_the_database(stack: Stack) -> None:
    os.chown(stack.settings.state_dir / "reconciler.db", 65534, -1)


def _other_owner_of_a_key(stack: Stack) -> None:
    os.chown(stack.settings.state_dir / "trust" / "known_hosts", 65534, -1)


def _no_database(stack: Stack) -> None:
    (stack.settings.state_dir / "reconciler.db").unlink()


def _old_schema(stack: Stack) -> None:
    with transaction(stack.engine) as conn:
        conn.exec_driver_sql("UPDATE alembic_version SET version_num = '0004'")


def _open_key(stack: Stack) -> None:
    Trust(stack.settings.state_dir / "trust").host_authority.chmod(0o640)


def _no_key(stack: Stack) -> None:
    Trust(stack.settings.state_dir / "trust").user_authority.unlink()


def _no_trust(stack: Stack) -> None:
    shutil.rmtree(stack.settings.state_dir / "trust")


def _other_authorities(stack: Stack) -> None:
    shutil.rmtree(stack.settings.state_dir / "trust")
    open_trust(stack.settings.state_dir)


def _operators_key_at_the_gateway(stack: Stack) -> None:
    folder = stack.settings.state_dir
    shutil.copy2(folder / "trust" / "operator", folder / "gateway")


def _open_key_of_the_gateway(stack: Stack) -> None:
    (stack.settings.state_dir / "gateway" / "gateway_ca").chmod(0o640)


def _earlier_authorities(stack: Stack) -> None:
    folder = stack.settings.state_dir
    shutil.rmtree(folder / "gateway")
    for name in ("gateway_ca", "gateway_ca.pub"):
        (folder / "trust" / name).unlink()
    with transaction(stack.engine) as conn:
        recorded = authorities(Trust(folder / "trust"))
        site.write(conn, site.AUTHORITIES, recorded, ACT)


def _no_admin(stack: Stack) -> None:
    with transaction(stack.engine) as conn:
        conn.execute(sa.update(tables.api_tokens).values(revoked_at=1))


def _nobody_works(stack: Stack) -> None:
    with transaction(stack.engine) as conn:
        leader.record_process(conn, "p1", ["api"], host="h", pid=1, version="1")


def _older_process(stack: Stack) -> None:
    """A process that was not stopped before the upgrade."""
    with transaction(stack.engine) as conn:
        leader.record_process(conn, "p0", ["worker"], host="h0", pid=9, version="0.1.0")


def _older_worker(stack: Stack) -> None:
    """Two workers that a person started, the second from an older version."""
    with transaction(stack.engine) as conn:
        leases.register(conn, host="h", pid=7, models=["m"], version=program_version())
        leases.register(conn, host="h", pid=8, models=["m"])


def _nobody_leads(stack: Stack) -> None:
    with transaction(stack.engine) as conn:
        conn.execute(sa.update(tables.leaders).values(expires_at=0))


@pytest.mark.parametrize(
    ("fault", "check", "status"),
    [
        (_open_folder, "state_dir", "fail"),
        (_open_database, "database", "fail"),
        pytest.param(_other_owner_of_the_database, "database", "fail", marks=_ROOT),
        pytest.param(_other_owner_of_a_key, "ssh_ca", "fail", marks=_ROOT),
        (_no_database, "database", "fail"),
        (_old_schema, "schema", "fail"),
        (_open_key, "ssh_ca", "fail"),
        (_no_key, "ssh_ca", "fail"),
        (_no_trust, "ssh_ca", "warn"),
        (_other_authorities, "authorities", "fail"),
        (_operators_key_at_the_gateway, "ssh_ca", "fail"),
        (_open_key_of_the_gateway, "ssh_ca", "fail"),
        (_earlier_authorities, "authorities", "warn"),
        (_no_admin, "tokens", "warn"),
        (_nobody_works, "processes", "warn"),
        (_older_process, "processes", "warn"),
        (_older_worker, "job_workers", "warn"),
        (_nobody_leads, "leader", "fail"),
    ],
)
def test_a_fault_is_named(
    sound: Stack, doctor: Doctor, fault: Callable[[Stack], None], check: str, status: str
) -> None:
    fault(sound)
    findings = doctor()
    assert {name: finding["status"] for name, finding in findings.items()} == {check: status}


@pytest.mark.parametrize(
    ("variable", "value", "check", "text"),
    [
        ("GPUAAS_COLLECTIONS_PATH", "{empty}", "collection", "any playbook"),
        ("GPUAAS_COLLECTIONS_PATH", "{older}", "collection", "version 0.0.1"),
        ("GPUAAS_PROFILES_DIR", "{empty}", "profiles", "none in"),
        ("GPUAAS_DATABASE_URL", "postgresql+psycopg://u:canary-pw@/x?host={empty}", "database", ""),
        ("GPUAAS_DATABASE_URL", "postgres://u:canary-pw@/x?host={empty}", "database", ""),
        ("GPUAAS_DATABASE_URL", "mysql://u:canary-pw@h/x", "settings", "GPUAAS_DATABASE_URL"),
        ("GPUAAS_LOG_FORMAT", "canary-xml", "settings", "GPUAAS_LOG_FORMAT"),
        ("GPUAAS_LISTN", "127.0.0.1:1", "settings", "no setting"),
        ("GPUAAS_LISTEN", "8080", "listen", "8080"),
        ("GPUAAS_OPERATOR_LISTEN", "0.0.0.0:8008", "operator_listen", "0.0.0.0:8008"),
    ],
)
def test_a_wrong_setting_is_named(
    sound: Stack,
    doctor: Doctor,
    gpuaas: Gpuaas,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variable: str,
    value: str,
    check: str,
    text: str,
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    older = tmp_path / "older"
    (folder := older / COLLECTION).mkdir(parents=True)
    (folder / "playbooks").symlink_to(PROJECT / "playbooks")
    (folder / "MANIFEST.json").write_text('{"collection_info": {"version": "0.0.1"}}')
    monkeypatch.setenv(variable, value.format(empty=empty, older=older))
    findings = doctor()
    # Without profiles, these cannot be told.
    untold = ["fabric", "guest_reach"] if check == "profiles" else []
    assert list(findings) == [check, *untold]
    assert text in findings[check]["found"]
    assert "canary" not in gpuaas.out


@pytest.mark.parametrize(
    ("accepted", "status"), [({}, "fail"), ({"GPUAAS_ENROLMENT_INSECURE": "1"}, "warn")]
)
@pytest.mark.parametrize(
    "url", [{"GPUAAS_PUBLIC_URL": "http://gpuaas.example:8080"}, {"GPUAAS_LISTEN": "192.0.2.1:80"}]
)
def test_enrolment_over_plain_http_is_named(
    sound: Stack,
    doctor: Doctor,
    monkeypatch: pytest.MonkeyPatch,
    url: dict[str, str],
    accepted: dict[str, str],
    status: str,
) -> None:
    """An attacker on the path could run commands as root on the host."""
    monkeypatch.delenv("GPUAAS_PUBLIC_URL")
    for name, value in {**url, **accepted}.items():
        monkeypatch.setenv(name, value)
    findings = doctor()
    assert findings.pop("listen", {"status": "warn"})["status"] == "warn"
    assert {name: finding["status"] for name, finding in findings.items()} == {"public_url": status}


def test_an_image_outside_of_the_folder_is_named(
    sound: Stack, doctor: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = sound.settings.images_dir / "image.raw"
    file.write_bytes(b"raw")
    with transaction(sound.engine) as conn:
        images.register(conn, ACT, **IMAGE | {"name": "local", "url": file.as_uri()})
    monkeypatch.setenv("GPUAAS_IMAGES_DIR", str(file.parent))
    assert doctor() == {}
    monkeypatch.setenv("GPUAAS_IMAGES_DIR", f"{file.parent}-other")
    findings = doctor()
    assert {name: finding["status"] for name, finding in findings.items()} == {"images": "warn"}
    assert "local 1" in findings["images"]["found"]


@pytest.mark.parametrize(
    ("listen", "named"),
    [
        ("127.0.0.1:8080", {"public_url"}),
        ("[::1]:8080", {"public_url"}),
        ("localhost:80", {"public_url"}),
        ("0.0.0.0:80", {"public_url", "listen"}),
        ("[::]:8080", {"public_url", "listen"}),
    ],
)
def test_who_reaches_the_api_is_named(
    sound: Stack, doctor: Doctor, monkeypatch: pytest.MonkeyPatch, listen: str, named: set[str]
) -> None:
    """No host, or everybody on the way to it: it speaks without TLS."""
    monkeypatch.delenv("GPUAAS_PUBLIC_URL")
    monkeypatch.setenv("GPUAAS_LISTEN", listen)
    assert {name: finding["status"] for name, finding in doctor().items()} == dict.fromkeys(
        named, "warn"
    )


def test_what_only_commands_read_is_no_misspelt_setting(
    sound: Stack, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUAAS_OIDC_CLIENT_ID", "gpuaas-cli")
    assert doctor() == {}


def test_the_file_of_settings_is_looked_at(
    sound: Stack, doctor: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "gpuaas.env"
    file.write_text("GPUAAS_WORKERS=7\nGPUAAS_WRKERS=3\n")
    monkeypatch.setenv("GPUAAS_CONFIG_FILE", str(file))
    file.chmod(0o644)
    assert [finding.found[-10:] for finding in examine.file_mode()] == ["(mode 644)"]
    assert Settings().workers == 7
    monkeypatch.setenv("GPUAAS_WORKERS", "1")
    assert Settings().workers == 1, "the environment goes before the file"
    file.chmod(0o640)
    assert f"GPUAAS_WRKERS in {file}" in doctor()["settings"]["found"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('GPUAAS_WORKERS=7\nGPUAAS_DATABASE_URL="canary\n', "no NAME=value in line 2"),
        (
            "GPUAAS_DATABASE_URL='canary\nGPUAAS_CURRENCY=EUR'\n",
            "a value with a line break in line 1",
        ),
    ],
)
def test_a_quote_that_is_not_closed_is_named(
    sound: Stack,
    doctor: Doctor,
    gpuaas: Gpuaas,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    text: str,
    found: str,
) -> None:
    """Without its settings the service would start as a new site."""
    file = tmp_path / "gpuaas.env"
    file.write_text(text)
    file.chmod(0o640)
    monkeypatch.setenv("GPUAAS_CONFIG_FILE", str(file))
    assert found in doctor()["settings"]["found"]
    gpuaas("migrate")
    assert (gpuaas.status, "settings_invalid" in gpuaas.err) == (1, True)
    assert "canary" not in gpuaas.out + gpuaas.err


def test_a_redis_that_cannot_wake_workers_is_named(
    sound: Stack, doctor: Doctor, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = RedisServer(tmp_path)
    monkeypatch.setenv("GPUAAS_REDIS_URL", server.url)
    try:
        assert "ConnectionError" in doctor()["redis"]["found"]
        server.start()
        assert doctor() == {}
        for name in (hints.STREAM, hints.DEAD):
            server.client.delete(hints.STREAM)
            server.client.set(name, "x")
            finding = doctor()["redis"]
            assert finding["status"] == "warn" and "WRONGTYPE" in finding["found"]
    finally:
        server.close()
        hints.of.cache_clear()


def test_a_restore_that_was_cut_off_is_named(sound: Stack, doctor: Doctor, gpuaas: Gpuaas) -> None:
    """The records of such a site describe the past."""
    (sound.settings.state_dir / MARK).write_text("0" * 64)
    finding = doctor()["database"]
    assert finding["status"] == "fail" and "was cut off" in finding["found"]
    gpuaas("check")
    assert (gpuaas.status, "restore_unfinished" in gpuaas.err) == (1, True)


def test_a_broken_profile_is_named(sound: Stack, tmp_path: Path) -> None:
    good = next(Settings().profiles_dir.glob("*.yml"))
    (tmp_path / "bad.yml").write_text("name: bad\nname2: [")
    (tmp_path / "short.yml").write_text("name: short\n")
    shutil.copy(good, tmp_path / "good.yml")
    old = yaml.safe_load(good.read_text())
    del old["fabric"]["link"]
    (tmp_path / "old.yml").write_text(yaml.safe_dump(old))
    rows = list(installation.profiles(Settings(profiles_dir=tmp_path)))
    assert [finding.status for finding in rows] == ["fail", "ok", "fail", "fail"]
    assert rows[2].found == "old.yml: fabric: 'link' is a required property"


def test_a_fabric_that_lacks_its_subnet_or_its_manager_is_named(
    sound: Stack, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def use(profile: str) -> list[tuple[str, str]]:
        with transaction(sound.engine) as conn:
            conn.execute(sa.update(tables.nodes).values(profile=profile))
        with reading(sound.engine) as conn:
            rows = services.fabric(Settings(), conn)
            return [(row.status, row.found) for row in rows if row.status != "ok"]

    route, manager = use("xe9680l-h200")
    assert route == ("warn", "no fabric.route in xe9680l-h200.yml, in use by nodes: 1")
    assert manager == ("warn", "ufm_missing: no UFM in the settings")
    assert doctor()["fabric"]["remedy"].startswith("set both; where one tenant owns the fabric")
    assert use("lab") == []


def test_public_addresses_that_guests_reach_are_named(sound: Stack, tmp_path: Path) -> None:
    lab = yaml.safe_load((Settings().profiles_dir / "lab.yml").read_text())
    settings = sound.settings.model_copy(
        update={
            "profiles_dir": tmp_path,
            "awx_url": "https://12.0.0.5/",
            "maas_url": "http://10.1.1.1",
        }
    )

    def reach(**network: list[str]) -> list[tuple[str, str]]:
        profile = {**lab, "network": {**lab["network"], **network}}
        (tmp_path / "lab.yml").write_text(yaml.safe_dump(profile))
        with reading(sound.engine) as conn:
            return [(row.status, row.found) for row in exposure.guest_reach(settings, conn)]

    with transaction(sound.engine) as conn:
        bmc = {"bmc_address": "11.9.0.7"}
        node = sa.update(tables.nodes).values(profile="lab", address="11.0.0.7", netbox=bmc)
        conn.execute(node)
        row = dict(conn.execute(sa.select(tables.nodes)).mappings().one())
    ((status, found),) = reach()
    # A guest never reaches an address of its own host.
    services_of_site = f"11.9.0.7 (BMC of {row['id']}), 12.0.0.5 (GPUAAS_AWX_URL)"
    assert (status, found) == ("fail", f"guests of lab.yml reach {services_of_site}")
    with transaction(sound.engine) as conn:
        other = {"id": "other", "name": "other", "address": "11.0.0.8", "netbox": None}
        conn.execute(sa.insert(tables.nodes).values(**{**row, **other}))
    ((_status, found),) = reach()
    assert f"11.0.0.7 (node {row['id']})" in found and "11.0.0.8 (node other)" in found
    ((_status, found),) = reach(denied_networks=["11.0.0.0/8"])
    assert found == "guests of lab.yml reach 12.0.0.5 (GPUAAS_AWX_URL)"
    ((status, _found),) = reach(denied_networks=["11.0.0.0/8", "12.0.0.0/8"])
    assert status == "ok"
    # The API and the gateway are for guests and tenants, also where another service shares theirs.
    for shared in ({"public_url": "https://12.0.0.5"}, {"member_address": "12.0.0.5:2222"}):
        settings = settings.model_copy(update=shared)
        ((status, found),) = reach(denied_networks=["11.0.0.0/8"])
        assert status == "warn"
        assert found.endswith("12.0.0.5 (GPUAAS_AWX_URL), which is the API's or the gateway's too")
        settings = settings.model_copy(update={"public_url": "", "member_address": ""})
    ((status, _found),) = reach(denied_networks=["11.0.0.0/8"])
    assert status == "fail"


def test_an_installation_whose_guests_reach_its_services_fails(
    sound: Stack, doctor: Doctor
) -> None:
    with transaction(sound.engine) as conn:
        bmc = {"bmc_address": "11.9.0.7"}
        conn.execute(sa.update(tables.nodes).values(profile="lab", netbox=bmc))
    finding = doctor()["guest_reach"]
    assert finding["status"] == "fail"
    assert "denied_networks" in finding["remedy"]


def test_what_was_not_resolved_or_read_is_not_called_unreachable(
    sound: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(host: str, timeout_s: float) -> list[str]:
        if host.startswith("awx"):
            raise TimeoutError
        return addresses(host, timeout_s)

    def findings(check: RecordCheck) -> list[tuple[str, str]]:
        with reading(sound.engine) as conn:
            return [(row.status, row.found) for row in check(settings, conn)]

    addresses = names.addresses
    monkeypatch.setattr(names, "addresses", look_up)
    # Guests have no IPv6.
    urls = {"awx_url": "https://awx.example", "maas_url": "http://[fd00::1]:5240"}
    settings = sound.settings.model_copy(update=urls)
    with transaction(sound.engine) as conn:
        conn.execute(sa.update(tables.nodes).values(profile="lab", address="11.0.0.7"))
    unresolved = ("warn", "not resolved: awx.example (GPUAAS_AWX_URL)")
    assert findings(exposure.guest_reach) == [unresolved]
    settings = settings.model_copy(update={"profiles_dir": tmp_path})
    unread = ("warn", "not read: lab.yml (profile_unknown)")
    assert findings(exposure.guest_reach) == [unresolved, unread]
    fabric = ("warn", "lab.yml not read (profile_unknown), in use by nodes: 1")
    assert findings(services.fabric) == [fabric]


def test_little_room_is_said(sound: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_LITTLE_GIB", 1 << 30)
    assert [finding.status for finding in installation.free_space(sound.settings)] == ["warn"]
    monkeypatch.setattr(installation, "_LEAST_GIB", 1 << 30)
    assert [finding.status for finding in installation.free_space(sound.settings)] == ["fail"]


def test_another_user_is_told_whose_folder_it_is(
    sound: Stack, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    assert doctor()["state_dir"]["remedy"].startswith("run as ")


def test_forgotten_holds_are_named(sound: Stack) -> None:
    folder = sound.settings.state_dir
    run = folder / "runs" / "nobodys-run"
    run.mkdir(parents=True)
    with transaction(sound.engine) as conn:
        assert not [
            finding
            for finding in services.run_locks(sound.settings, conn)
            if finding.status != "ok"
        ]
    with (run / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with transaction(sound.engine) as conn:
            (stale,) = services.run_locks(sound.settings, conn)
    assert (stale.status, "nobodys-run" in stale.found) == ("warn", True)
