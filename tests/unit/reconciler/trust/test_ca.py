"""The authorities, with the real ssh-keygen."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Self

import pytest
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    SSHCertificate,
    load_ssh_public_identity,
)

from reconciler.trust import ca, keygen
from reconciler.trust.certificates import read_certificate
from reconciler.trust.keygen import TrustError

pytestmark = pytest.mark.covers("HOST-13")


@pytest.fixture(scope="module")
def trust(tmp_path_factory: pytest.TempPathFactory) -> ca.Trust:
    return ca.open_trust(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module")
def host_key(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("host") / "key"
    keygen.new_key(path, "root@host")
    return path.with_name("key.pub").read_text()


def test_the_authorities_are_made_once_and_kept_private(tmp_path: Path) -> None:
    threads = [threading.Thread(target=ca.open_trust, args=(tmp_path,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trust = ca.open_trust(tmp_path)
    first = {path.name: path.read_bytes() for path in trust.directory.iterdir()}
    assert {"host_ca", "host_ca.pub", "user_ca", "user_ca.pub", "operator", "known_hosts"} <= set(
        first
    )
    ca.open_trust(tmp_path)
    assert {path.name: path.read_bytes() for path in trust.directory.iterdir()} == first
    assert trust.directory.stat().st_mode & 0o777 == 0o700
    for name in ("host_ca", "user_ca", "operator"):
        assert (trust.directory / name).stat().st_mode & 0o777 == 0o600


def test_a_host_is_certified_under_its_node_id(trust: ca.Trust, host_key: str) -> None:
    made = ca.certify_host(trust, host_key, "node-1", days=30)
    read = read_certificate(made)
    assert (read.kind, read.key_id, read.principals) == ("host", "node node-1", ("node-1",))
    days = (read.valid_before - datetime.now(UTC)) / timedelta(days=1)
    assert 29.9 < days < 30.1
    assert read.valid_after < datetime.now(UTC)


@pytest.mark.parametrize("node_id", ["", "a,b", "*", "a b", "-n", "a\nb"])
def test_no_id_makes_a_certificate_for_other_names(
    trust: ca.Trust, host_key: str, node_id: str
) -> None:
    with pytest.raises(TrustError, match="node_id_invalid"):
        ca.certify_host(trust, host_key, node_id)


@pytest.mark.parametrize(
    "text",
    ["", "ssh-ed25519", "ssh-ed25519 AAAA", "-f /etc/passwd", "ssh-dss AAAAB3NzaC1kc3MAAACBAAAA"],
)
def test_what_is_no_host_key_is_refused(trust: ca.Trust, text: str) -> None:
    with pytest.raises(TrustError, match="host_key_invalid"):
        ca.certify_host(trust, text, "node-1")


def test_two_keys_are_not_one(trust: ca.Trust, host_key: str) -> None:
    with pytest.raises(TrustError, match="host_key_invalid"):
        ca.certify_host(trust, host_key + host_key, "node-1")


def test_known_hosts_holds_the_authority_and_what_was_revoked(
    tmp_path: Path, host_key: str
) -> None:
    trust = ca.open_trust(tmp_path)
    path = ca.known_hosts(trust)
    (line,) = path.read_text().splitlines()
    assert line.startswith("@cert-authority * ssh-ed25519 ")
    ca.revoke_host(trust, host_key)
    ca.revoke_host(trust)
    ca.revoke_host(trust, host_key, host_key)
    ca.open_trust(tmp_path)
    revoked = " ".join(host_key.split()[:2])
    assert path.read_text().splitlines() == [line, f"@revoked * {revoked}"]


def test_the_operator_has_a_short_certificate_that_is_renewed_in_time(trust: ca.Trust) -> None:
    first = ca.operator_identity(trust, valid_s=600)
    text = first.certificate.read_text()
    read = read_certificate(text)
    assert (read.kind, read.principals) == ("user", (ca.OPERATOR,))
    left = read.valid_before - datetime.now(UTC)
    assert timedelta(seconds=600) < left < timedelta(hours=1)
    assert ca.operator_identity(trust, valid_s=600) == first
    assert first.certificate.read_text() == text
    later = ca.operator_identity(trust, valid_s=7200)
    read = read_certificate(later.certificate.read_text())
    assert read.valid_before - datetime.now(UTC) > timedelta(seconds=7200)
    assert later.key == first.key


def test_the_key_that_reads_telemetry_is_no_operators(trust: ca.Trust) -> None:
    identity = ca.telemetry_identity(trust, valid_s=600)
    read = read_certificate(identity.certificate.read_text())
    assert (read.kind, read.principals) == ("user", (ca.TELEMETRY,))
    assert identity.key != ca.operator_identity(trust, valid_s=600).key


def test_a_certificate_that_begins_later_is_made_anew(
    trust: ca.Trust, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the service's machine was ahead once: no host would let it in until then."""

    class Ahead(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return super().now(tz) + timedelta(days=30)

    with monkeypatch.context() as patch:
        patch.setattr(ca, "datetime", Ahead)
        ca.operator_identity(trust, valid_s=600)
    identity = ca.operator_identity(trust, valid_s=600)
    assert read_certificate(identity.certificate.read_text()).valid_after < datetime.now(UTC)


Spoil = Callable[[ca.Trust, ca.Identity], object]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda _trust, identity: identity.certificate.write_bytes(b""),
        lambda _trust, identity: identity.certificate.write_bytes(bytes(600) + b"\xff"),
        lambda trust, _identity: another(trust.user_authority),
        lambda _trust, identity: another(identity.key),
    ],
    ids=["emptied", "zeros", "another-authority", "another-key"],
)
@pytest.mark.parametrize("of", [ca.operator_identity, ca.clock_identity])
def test_a_certificate_that_opens_nothing_is_made_anew(
    tmp_path: Path, of: Callable[[ca.Trust], ca.Identity], spoil: Spoil
) -> None:
    """A power cut can empty the file, and a backup can bring back other files of its folder."""
    trust = ca.open_trust(tmp_path)
    spoil(trust, of(trust))
    line = of(trust).certificate.read_text()
    certificate = load_ssh_public_identity(line.strip().encode())
    assert isinstance(certificate, SSHCertificate)
    keys = (certificate.signature_key(), certificate.public_key())
    spelled = [key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode() for key in keys]
    assert spelled == [ca._public(key) for key in (trust.user_authority, trust.operator)]


def another(key: Path) -> None:
    key.unlink()
    keygen.new_key(key, "another")


def test_what_is_written_outlives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
    trust = ca.open_trust(tmp_path)
    ca.operator_identity(trust)
    ca.gateway_ca(trust)
    ca.replace_gateway_ca(trust, lambda _public: None)
    files = {path.stat().st_ino for path in trust.directory.iterdir() if path.name != "lock"}
    assert files <= {*synced} and synced[-1] == trust.directory.stat().st_ino
    synced.clear()
    ca.open_trust(tmp_path)
    assert synced == []


@pytest.mark.parametrize("of", [ca.relay_certificate, ca.terminal_certificate])
def test_a_login_of_the_gateway_is_short_and_for_one_slice(
    trust: ca.Trust, host_key: str, of: Callable[[ca.Trust, str, str], str]
) -> None:
    # The authority is made at its first use.
    ca.gateway_ca(trust)
    line = of(trust, host_key, "slice-1")
    read = read_certificate(line)
    way = "slice" if of is ca.relay_certificate else "terminal"
    assert (read.kind, read.principals) == ("user", (f"{way}:slice-1",))
    assert 200 < (read.valid_before - datetime.now(UTC)).total_seconds() <= 300
    assert read.valid_after < datetime.now(UTC)
    certificate = load_ssh_public_identity(line.encode())
    assert isinstance(certificate, SSHCertificate)
    permits = {"slice": b"permit-port-forwarding", "terminal": b"permit-pty"}
    assert certificate.extensions == {permits[way]: b""}
    assert certificate.critical_options == {}
