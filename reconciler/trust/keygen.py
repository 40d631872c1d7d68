"""The one caller of ssh-keygen: argument lists, fixed locale and time zone."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from reconciler.trust.errors import TrustError

_PUBLIC_KEY = re.compile(
    r"(ssh-ed25519|ecdsa-sha2-nistp(?:256|384|521)|ssh-rsa) (AAAA[A-Za-z0-9+/]{20,2000}={0,2})"
)
_LIMIT_S = 30


@dataclass(frozen=True)
class CertificateInfo:
    """What a certificate says. kind is `host` or `user`; times are UTC."""

    kind: str
    key_id: str
    serial: int
    principals: tuple[str, ...]
    valid_after: datetime
    valid_before: datetime
    fingerprint: str

    def expired(self, now: datetime) -> bool:
        return not self.valid_after <= now < self.valid_before


@dataclass(frozen=True)
class Signature:
    """How a key is to be certified."""

    key_id: str
    principals: tuple[str, ...]
    validity: str
    serial: int
    host: bool


def run(*arguments: str) -> str:
    """Standard output of ssh-keygen, or TrustError `keygen_failed`."""
    environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C", "TZ": "UTC"}
    done = subprocess.run(
        ["ssh-keygen", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment,
        timeout=_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise TrustError(
            "keygen_failed",
            expected="ssh-keygen to exit 0",
            found=f"exit {done.returncode}: {done.stderr.strip()[:300]}",
            remedy="check that openssh-client is installed and the state directory is writable",
        )
    return done.stdout


def new_key(path: Path, comment: str) -> None:
    """An Ed25519 pair without passphrase at `path` and `path`.pub."""
    run("-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path))


def public_key(text: str) -> str:
    """`type base64` of one public key line, its comment left out; hostile text is refused."""
    fields = text.strip().split(" ", 2)
    key = " ".join(fields[:2])
    if "\n" in text.strip() or not _PUBLIC_KEY.fullmatch(key):
        raise TrustError(
            "host_key_invalid",
            expected="one SSH public key: type and base64",
            found=repr(text)[:120],
            remedy="send the content of /etc/ssh/ssh_host_ed25519_key.pub",
        )
    return key


def certify(authority: Path, key: str, signature: Signature) -> str:
    """A certificate for the public key, signed by `authority`, as one line."""
    with tempfile.TemporaryDirectory(dir=authority.parent, prefix=".sign-") as folder:
        subject = Path(folder) / "subject.pub"
        subject.write_text(public_key(key) + "\n")
        run(
            *("-q", "-s", str(authority)),
            *("-I", signature.key_id),
            *("-n", ",".join(signature.principals)),
            *("-V", signature.validity),
            *("-z", str(signature.serial)),
            *(("-h",) if signature.host else ()),
            str(subject),
        )
        fields = (Path(folder) / "subject-cert.pub").read_text().split()
    return " ".join(fields[:2])


def read_certificate(text: str) -> CertificateInfo:
    with tempfile.TemporaryDirectory(prefix="gpuaas-cert-") as folder:
        path = Path(folder) / "certificate.pub"
        path.write_text(text.strip() + "\n")
        shown = run("-L", "-f", str(path))
    kind = re.search(r"Type: \S+ (host|user) certificate", shown)
    key_id = re.search(r'Key ID: "(.*)"', shown)
    serial = re.search(r"Serial: (\d+)", shown)
    signed = re.search(r"Public key: \S+ (SHA256:\S+)", shown)
    times = re.search(r"Valid: from (\S+) to (\S+)", shown)
    if not (kind and key_id and serial and signed and times):
        raise TrustError(
            "certificate_invalid",
            expected="a host or user certificate with a time of validity",
            found=shown.strip()[:300],
            remedy="certify the key again",
        )
    names = re.search(r"Principals:\s*\n(.*?)\n\s*Critical Options:", shown, re.DOTALL)
    return CertificateInfo(
        kind=kind[1],
        key_id=key_id[1],
        serial=int(serial[1]),
        principals=tuple(names[1].split()) if names else (),
        valid_after=datetime.fromisoformat(times[1]).replace(tzinfo=UTC),
        valid_before=datetime.fromisoformat(times[2]).replace(tzinfo=UTC),
        fingerprint=signed[1],
    )
