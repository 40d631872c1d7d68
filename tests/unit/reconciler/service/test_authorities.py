"""Machine with other SSH authorities than the site's: refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import asyncssh
import pytest
import sqlalchemy as sa

from reconciler.cli.service import open_migrated
from reconciler.db import settings as site
from reconciler.db.engine import reading, retrying, transaction
from reconciler.gateway.machine import probe
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.service import process
from reconciler.service.process import adopt, adopt_gateway
from reconciler.settings import Settings
from reconciler.trust import ca
from reconciler.trust.ca import open_trust
from reconciler.trust.keygen import TrustError
from tests.bench.fleet.service import free_port

OTHERS = ("host_ca", "user_ca", "operator")


@pytest.mark.covers("CTRL-9")
def test_every_machine_has_the_sites(engine: sa.Engine, tmp_path: Path) -> None:
    first, second, third = (Settings(state_dir=tmp_path / name) for name in "abc")
    for settings in (first, second, third):
        settings.state_dir.mkdir(mode=0o700)
    adopt(first, engine)
    adopt(first, engine)
    # A machine without keys makes none, because a later process there would use them unchecked.
    with pytest.raises(Problem, match=r"authorities_differ.*found no keys"):
        adopt(second, engine)
    assert not (second.state_dir / "trust").exists()
    open_trust(third.state_dir)
    with pytest.raises(Problem, match=r"authorities_differ.*found other keys"):
        adopt(third, engine)
    shutil.copytree(first.state_dir / "trust", second.state_dir / "trust")
    adopt(second, engine)


def machine(folder: Path, source: Settings | None = None) -> Settings:
    """A machine of the site; with the keys of another machine as an earlier version had them."""
    settings = Settings(state_dir=folder)
    (folder / "trust").mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    for name in OTHERS if source else ():
        for file in (name, f"{name}.pub"):
            shutil.copy2(source.state_dir / "trust" / file, folder / "trust")
    return settings


def earlier(settings: Settings, engine: sa.Engine) -> None:
    """Record the authorities as a version without an authority for the gateway did."""
    pairs = ca.authorities(open_trust(settings.state_dir))
    assert set(pairs) == {"host_ca", "user_ca"}
    with transaction(engine) as conn:
        site.write(conn, site.AUTHORITIES, pairs, Act("service", "test"))


@pytest.mark.covers("SLICE-10")
def test_a_site_of_an_earlier_version_gets_the_gateways_authority_once(
    engine: sa.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = machine(tmp_path / "a")
    earlier(first, engine)
    second, third = machine(tmp_path / "b", first), machine(tmp_path / "c", first)
    stranger = machine(tmp_path / "d")
    open_trust(stranger.state_dir)
    with pytest.raises(Problem, match=r"authorities_differ.*found other keys"):
        adopt(stranger, engine)

    def late(*words: Any) -> Any:
        """The other machine starts between this machine's look and its record."""
        monkeypatch.undo()
        adopt(first, engine)
        return retrying(*words)

    monkeypatch.setattr(process, "retrying", late)
    adopt(second, engine)
    adopt(third, engine)
    adopt(first, engine)
    with reading(engine) as conn:
        recorded = site.read(conn, site.AUTHORITIES)
    for settings in (first, second, third):
        trust = ca.Trust(settings.state_dir / "trust")
        assert ca.authorities(trust) == recorded and ca.GATEWAY in recorded
        assert trust.gateway_authority.exists() is (settings is first)
        assert ca.gateway_folder(settings.state_dir).exists() is (settings is first)


@pytest.mark.covers("SLICE-10")
def test_a_gateway_has_its_own_keys_and_no_others(engine: sa.Engine, tmp_path: Path) -> None:
    service, gateway, other = (machine(tmp_path / name) for name in "abc")
    adopt(service, engine)
    trust = open_trust(service.state_dir)
    folder = ca.gateway_folder(gateway.state_dir)
    with pytest.raises(TrustError, match="gateway_trust_missing"):
        adopt_gateway(gateway, engine)
    ca.export_gateway(trust, folder)
    assert adopt_gateway(gateway, engine).directory == folder
    secrets = {path.name for path in folder.iterdir() if b"PRIVATE KEY" in path.read_bytes()}
    assert secrets == {"gateway_ca"}
    assert {path.stat().st_mode & 0o777 for path in (folder, folder / "gateway_ca")} == {
        0o700,
        0o600,
    }
    # A key that was revoked there stays revoked when the service writes the folder again.
    revoked = (service.state_dir / "trust" / "operator.pub").read_text()
    ca.revoke_host(ca.Trust(folder), revoked)
    ca.export_gateway(trust, folder)
    assert " ".join(revoked.split()[:2]) in (folder / "known_hosts").read_text()
    for name in (*OTHERS, "telemetry"):
        shutil.copy2(trust.directory / name, folder)
        with pytest.raises(TrustError, match=f"gateway_trust_excessive.*found {name}"):
            adopt_gateway(gateway, engine)
        (folder / name).unlink()
    ca.gateway_ca(open_trust(other.state_dir))
    ca.export_gateway(open_trust(other.state_dir), folder)
    with pytest.raises(Problem, match="authorities_differ"):
        adopt_gateway(gateway, engine)


@pytest.mark.covers("SLICE-10")
def test_a_replaced_authority_is_the_sites_on_every_machine(
    engine: sa.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, stranger, gateway = (machine(tmp_path / name) for name in "abc")
    adopt(first, engine)
    second = machine(tmp_path / "d", first)
    trust, folder = open_trust(first.state_dir), ca.gateway_folder(gateway.state_dir)
    for file in ("gateway_ca", "gateway_ca.pub"):
        shutil.copy2(trust.directory / file, second.state_dir / "trust")
    ca.export_gateway(trust, folder)
    act, old = Act("local-operator", "stolen"), ca.gateway_ca(trust)
    with pytest.raises(Problem, match="authorities_differ"):
        process.replace_gateway(stranger, engine, act)
    with monkeypatch.context() as broken, pytest.raises(OSError):
        broken.setattr(process, "retrying", lambda *_: (_ for _ in ()).throw(OSError))
        process.replace_gateway(first, engine, act)
    assert ca.gateway_ca(trust) == old and adopt_gateway(gateway, engine)
    assert process.replace_gateway(first, engine, act) == 0
    new = ca.gateway_ca(trust)
    with reading(engine) as conn:
        assert site.read(conn, site.AUTHORITIES) == ca.authorities(trust)
    assert new != old and adopt_gateway(first, engine)
    for settings in (first, second):
        adopt(settings, engine)
        assert ca.gateway_ca(open_trust(settings.state_dir)) == new
    # The key of the earlier authority is of no more use there.
    assert not (second.state_dir / "trust" / "gateway_ca").exists()
    with pytest.raises(Problem, match="authorities_differ"):
        adopt_gateway(gateway, engine)
    ca.export_gateway(trust, folder)
    assert adopt_gateway(gateway, engine)


@pytest.mark.covers("SLICE-10")
def test_the_gateway_starts_with_that_folder_alone(tmp_path: Path) -> None:
    """The processes themselves. The service's own files stay on its machine."""
    service, gateway = machine(tmp_path / "a"), machine(tmp_path / "b")
    engine, _ = open_migrated(service)
    adopt(service, engine)
    engine.dispose()
    folder = gateway.state_dir / "gateway"
    (gateway.state_dir / "trust").rmdir()
    assert run(service, "gateway-trust", str(folder)).returncode == 0
    again = run(service, "gateway-trust", str(folder))
    assert again.returncode and "gateway_folder_exists" in again.stderr
    for file in service.state_dir.glob("reconciler.db*"):
        shutil.copy2(file, gateway.state_dir)
    address = f"127.0.0.1:{free_port()}"
    trust = open_trust(service.state_dir)
    words, environment = command(gateway, "gateway", address)
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
    try:
        while True:
            assert process.poll() is None, (tmp_path / "log").read_text()
            with contextlib.suppress(OSError, asyncssh.Error):
                asyncio.run(probe(trust, *split(address)))
                break
            time.sleep(0.1)
    finally:
        process.terminate()
        process.wait()
    shutil.copy2(trust.operator, folder)
    refused = run(gateway, "gateway", address)
    assert refused.returncode and "gateway_trust_excessive" in refused.stderr


def command(settings: Settings, *words: str) -> tuple[list[str], dict[str, str]]:
    """A command of `gpuaas` on this machine; a second word is the gateway's address."""
    environment = {"GPUAAS_STATE_DIR": str(settings.state_dir)}
    if words[0] == "gateway":
        environment |= dict.fromkeys(("GPUAAS_MEMBER_ADDRESS", "GPUAAS_GATEWAY_LISTEN"), words[1])
        words = words[:1]
    return [sys.executable, "-m", "reconciler.cli.main", *words], {**os.environ, **environment}


def run(settings: Settings, *words: str) -> subprocess.CompletedProcess[str]:
    line, environment = command(settings, *words)
    return subprocess.run(
        line, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def split(address: str) -> tuple[str, int]:
    host, _, port = address.partition(":")
    return host, int(port)
