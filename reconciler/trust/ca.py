"""SSH certificate authorities of the site: for hosts, for the reconciler's logins, for the gateway.

A host is accepted by its certificate only, under its node id. The reconciler logs in with a
certificate of short validity. Private keys never leave <state dir>/trust, but for the gateway's
authority: hosts accept it for their relay account alone, and every gateway has it in a folder of
its own.
"""

from __future__ import annotations

import fcntl
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from reconciler.durable import place, write_text
from reconciler.trust.certificates import (
    CertificateInfo,
    Signature,
    certify,
    certify_clock,
    read_certificate,
)
from reconciler.trust.keygen import TrustError, new_key, public_key

OPERATOR = "gpuaas-operator"
# Name of the gateway's authority among the site's.
GATEWAY = "gateway_ca"
# Account of hosts, and the principal that it accepts: it prints telemetry and can do nothing else.
TELEMETRY = "gpuaas-telemetry"
# Validity of a host certificate. Renewal begins when a third is left: long enough for a host that
# is offline for weeks, short enough to limit the use of a stolen key.
HOST_DAYS = 90

_PRINCIPAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# A host checks our certificate by its own clock, which may be slow until its time is synchronised.
_BACKDATE = timedelta(hours=1)


class Trust:
    """Folder with the keys of the authorities and of our logins; created by `open_trust`.

    A gateway's folder has its authority, and of the others the host authority's public key alone.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.host_authority = directory / "host_ca"
        self.user_authority = directory / "user_ca"
        self.gateway_authority = directory / GATEWAY
        self.operator = directory / "operator"
        self.telemetry = directory / "telemetry"


@dataclass(frozen=True)
class Identity:
    """Files of the reconciler's SSH identity."""

    key: Path
    certificate: Path
    known_hosts: Path


def open_trust(state_dir: Path) -> Trust:
    """The authorities of this state directory, created at first use and never replaced."""
    trust = Trust(state_dir.resolve() / "trust")
    trust.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    trust.directory.chmod(0o700)
    with _locked(trust):
        _ensure_key(trust.host_authority, "gpuaas host authority")
        _ensure_key(trust.user_authority, "gpuaas user authority")
        _ensure_key(trust.operator, "gpuaas operator")
        _ensure_key(trust.telemetry, "gpuaas telemetry")
        _write_known_hosts(trust, _revoked(trust))
    return trust


def certify_host(trust: Trust, host_key: str, node_id: str, *, days: int = HOST_DAYS) -> str:
    """A host certificate for `node_id`, the name under which every connection checks the host.

    The text is the line for ssh_host_ed25519_key-cert.pub.
    """
    if not _PRINCIPAL.fullmatch(node_id):
        raise TrustError(
            "node_id_invalid",
            expected="letters, digits, dot, dash and underscore",
            found=repr(node_id)[:100],
            remedy="register the node under an id of these characters",
        )
    return _certify_host(trust.host_authority, host_key, node_id, days)


def _certify_host(authority: Path, host_key: str, name: str, days: int) -> str:
    now = datetime.now(UTC)
    signature = Signature(
        key_id=f"node {name}",
        principals=(name,),
        valid_after=now - _BACKDATE,
        valid_before=now + timedelta(days=days),
        serial=secrets.randbits(63),
        host=True,
    )
    return certify(authority, host_key, signature)


def operator_identity(trust: Trust, valid_s: int = 3600) -> Identity:
    """The reconciler's identity, with a certificate that is valid for `valid_s` seconds or more.

    A run can outlive the reconciler, and nothing renews its certificate then, so `valid_s` must
    exceed the deadline of the run.
    """
    return _identity(trust, trust.operator, OPERATOR, valid_s)


def telemetry_identity(trust: Trust, valid_s: int) -> Identity:
    """The identity that may only print the telemetry of hosts."""
    return _identity(trust, trust.telemetry, TELEMETRY, valid_s)


def _identity(trust: Trust, key: Path, principal: str, valid_s: int) -> Identity:
    path = key.with_name(f"{key.name}-cert.pub")
    now = datetime.now(UTC)
    needed = now + timedelta(seconds=valid_s)
    identity = Identity(key, path, known_hosts(trust))
    with _locked(trust):
        present = _present(trust, identity, principal)
        # One that begins later was made while the clock of this machine was ahead.
        if present and present.valid_after <= now and present.valid_before > needed:
            return identity
        signature = Signature(
            key_id=principal,
            principals=(principal,),
            valid_after=now - _BACKDATE,
            # Longer than needed, so that the next launch can use the same certificate.
            valid_before=needed + timedelta(minutes=30),
            serial=secrets.randbits(63),
            host=False,
        )
        write_text(path, certify(trust.user_authority, _public(key), signature) + "\n")
    return identity


def _present(trust: Trust, identity: Identity, principal: str) -> CertificateInfo | None:
    """The certificate in an identity's file. None if it has to be made: a power cut can empty the
    file, and a backup that is restored in part can bring back another key or authority.
    """
    try:
        present = read_certificate(identity.certificate.read_text(errors="replace"))
    except (FileNotFoundError, TrustError):
        return None
    expected = ((principal,), _public(identity.key), user_ca(trust))
    return present if (present.principals, present.key, present.authority) == expected else None


def clock_identity(trust: Trust) -> Identity:
    """An identity that only reads the clock of a host, whatever time the host's clock shows."""
    path = trust.directory / "clock-cert.pub"
    with _locked(trust):
        line = certify_clock(trust.user_authority, _public(trust.operator), OPERATOR)
        write_text(path, line + "\n")
    return Identity(trust.operator, path, known_hosts(trust))


def relay_certificate(trust: Trust, key: str, allocation_id: str) -> str:
    """Certificate of the gateway for a connection to the host of a slice, for five minutes.

    The host accepts its principal only while the slice lives, and for its address.
    """
    return _gateway_login(trust, key, f"slice:{allocation_id}", b"permit-port-forwarding")


def terminal_certificate(trust: Trust, key: str, allocation_id: str) -> str:
    """Certificate of the gateway for a terminal in a slice, for five minutes.

    The guest accepts its principal only if it was launched with a terminal.
    """
    return _gateway_login(trust, key, terminal_principal(allocation_id), b"permit-pty")


def terminal_principal(allocation_id: str) -> str:
    """The principal of terminals in a slice, which its seed lets in."""
    return f"terminal:{allocation_id}"


def _gateway_login(trust: Trust, key: str, principal: str, extension: bytes) -> str:
    now = datetime.now(UTC)
    signature = Signature(
        key_id=f"gateway {principal}",
        principals=(principal,),
        valid_after=now - _BACKDATE,
        valid_before=now + timedelta(minutes=5),
        serial=secrets.randbits(63),
        host=False,
        extensions=(extension,),
    )
    return certify(trust.gateway_authority, key, signature)


def gateway_host_key(trust: Trust, name: str) -> tuple[Path, str]:
    """The host key of this machine's gateway, created at first use, with a new certificate."""
    key = trust.directory / "gateway"
    with _locked(trust):
        _ensure_key(key, "gpuaas gateway")
    return key, _certify_host(trust.gateway_authority, _public(key), name, HOST_DAYS)


def gateway_hosts(trust: Trust, name: str, port: int) -> str:
    """The known_hosts line by which a client knows every gateway of the site."""
    where = name if port == 22 else f"[{name}]:{port}"
    return f"@cert-authority {where} {gateway_ca(trust)}\n"


def gateway_ca(trust: Trust) -> str:
    """The public key of the gateway's authority, which is created at first use.

    A machine of the site that has the public key alone (`keep_gateway_ca`) never makes another.
    """
    if not _public_path(trust.gateway_authority).exists():
        with _locked(trust):
            _ensure_key(trust.gateway_authority, "gpuaas gateway authority", public_last=True)
    return _public(trust.gateway_authority)


def replace_gateway_ca(trust: Trust, record: Callable[[str], None]) -> None:
    """Make another authority for the gateway.

    record: makes its public key the site's, before this machine has it. After a failure between the
    two, another call makes another authority.
    """
    with _locked(trust), tempfile.TemporaryDirectory(dir=trust.directory, prefix=".new-") as folder:
        key = Path(folder) / GATEWAY
        new_key(key, "gpuaas gateway authority")
        record(_public(key))
        place(key, trust.gateway_authority)
        place(_public_path(key), _public_path(trust.gateway_authority))


def keep_gateway_ca(trust: Trust, recorded: str, *, replace: bool = False) -> None:
    """Write the site's public key of the gateway's authority where there is none. replace: also
    instead of another pair, which is not the site's or not any more.
    """
    public = _public_path(trust.gateway_authority)
    with _locked(trust):
        if replace and _public(trust.gateway_authority) != recorded:
            trust.gateway_authority.unlink(missing_ok=True)
            public.unlink()
        if not public.exists():
            write_text(public, f"{recorded}\n")


def gateway_folder(state_dir: Path) -> Path:
    """What a gateway has of the site's keys. On its own machine the service writes it."""
    return state_dir.resolve() / "gateway"


def export_gateway(trust: Trust, folder: Path) -> None:
    """Write what a gateway needs into a folder: its authority, and public keys.

    Existing files are replaced, but host keys that were revoked there stay so.
    """
    gateway = Trust(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    with _locked(gateway):
        for key in (trust.host_authority, trust.gateway_authority):
            write_text(folder / f"{key.name}.pub", f"{_public(key)}\n")
        _write_known_hosts(gateway, sorted({*_revoked(trust), *_revoked(gateway)}))
        write_text(gateway.gateway_authority, trust.gateway_authority.read_text())


def open_gateway(state_dir: Path) -> Trust:
    """The keys of this machine's gateway; TrustError if one is missing, or opens hosts."""
    folder = gateway_folder(state_dir)
    trust = Trust(folder)
    public = (_public_path(trust.host_authority), _public_path(trust.gateway_authority))
    needed = (trust.gateway_authority, known_hosts(trust), *public)
    missing = [path.name for path in needed if not path.is_file()]
    if missing:
        raise TrustError(
            "gateway_trust_missing",
            expected=f"the gateway's keys in {folder}",
            found=f"no {', '.join(missing)}",
            remedy="start the service on this machine, or copy there what"
            " `gpuaas gateway-trust FOLDER` writes on the service's machine",
        )
    excess = [path.name for path in host_keys(trust) if path.exists()]
    if excess:
        raise TrustError(
            "gateway_trust_excessive",
            expected=f"no key in {folder} that opens hosts, or stands for one",
            found=", ".join(excess),
            remedy="delete the folder, and copy there what `gpuaas gateway-trust FOLDER` writes on"
            " the service's machine",
        )
    return trust


def host_keys(trust: Trust) -> tuple[Path, ...]:
    """The private keys of a folder by which its reader logs in to hosts, or poses as one."""
    return (trust.host_authority, trust.user_authority, trust.operator, trust.telemetry)


def user_ca(trust: Trust) -> str:
    """The public key of the authority that hosts trust for logins."""
    return _public(trust.user_authority)


def authorities(trust: Trust) -> dict[str, str]:
    """Public keys of the authorities by file name. Machines of a site have the same.

    A machine has none of the gateway before the first start of a version that makes it.
    """
    keys = (trust.host_authority, trust.user_authority, trust.gateway_authority)
    return {key.name: _public(key) for key in keys if _public_path(key).exists()}


def known_hosts(trust: Trust) -> Path:
    """File with the host authority and the revoked keys; it never lists the key of a host."""
    return trust.directory / "known_hosts"


def revoke_host(trust: Trust, *host_keys: str) -> None:
    """Refuse these host keys, with any certificate. Their nodes have enrolled with new keys."""
    keys = {public_key(key) for key in host_keys}
    with _locked(trust):
        revoked = _revoked(trust)
        new = sorted(keys.difference(revoked))
        if new:
            _write_known_hosts(trust, [*revoked, *new])


def _public_path(key: Path) -> Path:
    return key.with_name(f"{key.name}.pub")


def _public(key: Path) -> str:
    return public_key(_public_path(key).read_text())


def _revoked(trust: Trust) -> list[str]:
    path = known_hosts(trust)
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.removeprefix("@revoked * ") for line in lines if line.startswith("@revoked * ")]


def _write_known_hosts(trust: Trust, revoked: Sequence[str]) -> None:
    lines = [f"@cert-authority * {_public(trust.host_authority)}"]
    lines += [f"@revoked * {key}" for key in revoked]
    path, text = known_hosts(trust), "".join(f"{line}\n" for line in lines)
    if not path.exists() or path.read_text() != text:
        write_text(path, text)


def _ensure_key(path: Path, comment: str, *, public_last: bool = False) -> None:
    """Create a pair of keys. The private key is moved last, so its presence means a whole pair;
    with public_last the presence of the public key does.
    """
    pair = [_public_path(path), path]
    if public_last:
        pair.reverse()
    if pair[-1].exists():
        return
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as folder:
        new_key(Path(folder) / path.name, comment)
        for file in pair:
            place(Path(folder) / file.name, file)


@contextmanager
def _locked(trust: Trust) -> Iterator[None]:
    """Hold the lock under which keys and known_hosts are written."""
    with (trust.directory / "lock").open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
