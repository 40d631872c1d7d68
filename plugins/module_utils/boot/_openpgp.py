"""OpenPGP key files: fingerprints, and the extraction of one key into its own keyring.

gpg runs in a temporary home directory, so no key of the host's user is read or left there.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

# The whole fingerprint of a version 4 or 6 key. Shorter ids can be made to collide on purpose.
FINGERPRINT = re.compile(r"[0-9A-F]{40}|[0-9A-F]{64}")

_PRIMARY = ("pub", "sec")
_USELESS = {"r": "revoked", "e": "expired", "i": "invalid", "d": "disabled"}


@dataclass(frozen=True)
class Key:
    """A primary key. problem: the reason why it can no longer sign, or ""."""

    fingerprint: str
    problem: str = ""


def normal(fingerprint: str) -> str:
    """A fingerprint with spaces or colons, normalized to an upper-case word."""
    return re.sub(r"[\s:]", "", fingerprint).upper().removeprefix("0X")


def keys(file: Path) -> list[Key]:
    """The primary keys of a key file, armoured or not; [] when it holds none."""
    with _home() as gpg:
        done = _command.run([*gpg, "--with-colons", "--show-keys", "--", str(file)], ok=(0, 2))
    return _parsed(done.out)


def only(file: Path, fingerprint: str) -> str:
    """The armoured key with this fingerprint, the file's only key.

    A second key in the file would be trusted along with it, so it is refused.
    """
    file_keys = keys(file)
    if [key.fingerprint for key in file_keys] != [fingerprint]:
        raise Refusal(
            "key_fingerprint_mismatch",
            expected=f"one key, {fingerprint}",
            found=", ".join(key.fingerprint for key in file_keys) or "no OpenPGP key",
            remedy="compare the fingerprint with the publisher's over another way; nothing was"
            " trusted",
        )
    if file_keys[0].problem:
        raise Refusal(
            "key_not_valid",
            expected=f"a key that is in force, {fingerprint}",
            found=file_keys[0].problem,
            remedy="get the publisher's present key and its fingerprint",
        )
    with _home() as gpg:
        _command.run([*gpg, "--import", "--", str(file)])
        return _command.run([*gpg, "--armor", "--export", fingerprint]).out


@contextmanager
def _home() -> Iterator[list[str]]:
    with tempfile.TemporaryDirectory(prefix="gpuaas-gpg-") as folder:
        yield ["gpg", "--batch", "--quiet", "--no-autostart", "--homedir", folder]


def _parsed(listing: str) -> list[Key]:
    parsed: list[Key] = []
    validity = None
    for row in listing.splitlines():
        fields = row.split(":")
        if fields[0] in _PRIMARY:
            validity = fields[1]
        elif fields[0] == "fpr" and validity is not None:
            # The first fingerprint after a primary key belongs to it; those of subkeys follow.
            parsed.append(Key(fields[9].upper(), _USELESS.get(validity[:1], "")))
            validity = None
    return parsed
