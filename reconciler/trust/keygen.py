"""SSH key pairs by ssh-keygen, and validation of public keys."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from reconciler.model.errors import Refusal

_PUBLIC_KEY = re.compile(
    r"(ssh-ed25519|ecdsa-sha2-nistp(?:256|384|521)|ssh-rsa) (AAAA[A-Za-z0-9+/]{20,2000}={0,2})"
)
_LIMIT_S = 30


class TrustError(Refusal):
    """A certificate or key cannot be made or read."""


def run(*arguments: str) -> str:
    """Run ssh-keygen and return its output; TrustError `keygen_failed`."""
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
    """Create an Ed25519 pair without a passphrase at `path` and `path`.pub."""
    run("-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path))


def public_key(text: str) -> str:
    """Validate the line of a public key and return its type and base64, without the comment."""
    fields = text.strip().split(" ", 2)
    key = " ".join(fields[:2])
    if "\n" in text.strip() or not _PUBLIC_KEY.fullmatch(key):
        raise TrustError(
            "host_key_invalid",
            expected="a single SSH public key: type and base64",
            found=repr(text)[:120],
            remedy="send the content of /etc/ssh/ssh_host_ed25519_key.pub",
        )
    return key
