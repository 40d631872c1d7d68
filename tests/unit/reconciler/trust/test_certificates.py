"""SSH certificates against the real ssh-keygen, which signs the same and reads our signatures."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from pathlib import Path

import pytest

from reconciler.trust import keygen
from reconciler.trust.certificates import Signature, certify, read_certificate
from reconciler.trust.keygen import TrustError
from tests.unit.reconciler.trust.test_keygen import COMPRESSED

pytestmark = pytest.mark.covers("HOST-13")

START, END = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), datetime(2027, 6, 7, 8, 9, 10, tzinfo=UTC)
SERIAL = 2**63 + 5
# A site may bring its own authority: every type and format of file that ssh-keygen -s reads.
AUTHORITIES = {
    "ed25519": ["-t", "ed25519"],
    "rsa": ["-t", "rsa", "-b", "2048"],
    "rsa pem": ["-t", "rsa", "-b", "2048", "-m", "PEM"],
    "ecdsa": ["-t", "ecdsa", "-b", "384"],
    "ecdsa pkcs8": ["-t", "ecdsa", "-b", "256", "-m", "PKCS8"],
}
SUBJECTS = {"ed25519": ["ed25519"], "rsa": ["rsa", "-b", "2048"], "ecdsa": ["ecdsa", "-b", "521"]}


def pair(path: Path, *words: str) -> str:
    """A new pair of keys; its public half without comment."""
    keygen.run("-q", "-N", "", "-C", "", *words, "-f", str(path))
    return keygen.public_key(path.with_name(f"{path.name}.pub").read_text())


def signature(*, host: bool) -> Signature:
    names = ("node-1", "gpu-7") if host else ("gpuaas-operator",)
    return Signature("node node-1", names, START, END, SERIAL, host)


def shown(path: Path, certificate: str) -> list[str]:
    """The fields that `ssh-keygen -L` prints, without the name of the file."""
    path.write_text(certificate + "\n")
    return keygen.run("-L", "-f", str(path)).splitlines()[1:]


def by_ssh_keygen(folder: Path, authority: Path, key: str, signature: Signature) -> str:
    """The same certificate made by `ssh-keygen -s`."""
    (folder / "subject.pub").write_text(key + "\n")
    times = f"{signature.valid_after:%Y%m%d%H%M%S}:{signature.valid_before:%Y%m%d%H%M%S}"
    kind = ["-h"] if signature.host else []
    names = ",".join(signature.principals)
    words = ["-I", signature.key_id, "-n", names, "-V", times, "-z", str(signature.serial), *kind]
    keygen.run("-q", "-s", str(authority), *words, str(folder / "subject.pub"))
    return (folder / "subject-cert.pub").read_text().strip()


@pytest.mark.parametrize("host", [True, False], ids=["host", "user"])
@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("authority", AUTHORITIES)
def test_ssh_keygen_signs_the_same_fields(
    tmp_path: Path, authority: str, subject: str, host: bool
) -> None:
    ca = tmp_path / "ca"
    pair(ca, *AUTHORITIES[authority])
    key = pair(tmp_path / "key", "-t", *SUBJECTS[subject])
    request = signature(host=host)
    ours = certify(ca, key, request)
    theirs = by_ssh_keygen(tmp_path, ca, key, request)
    assert shown(tmp_path / "ours", ours) == shown(tmp_path / "theirs", theirs)
    assert read_certificate(ours) == read_certificate(theirs)


def test_every_field_is_read(tmp_path: Path) -> None:
    pair(tmp_path / "ca", "-t", "ed25519")
    key = pair(tmp_path / "key", "-t", "ed25519")
    info = read_certificate(certify(tmp_path / "ca", key, signature(host=True)))
    assert (info.kind, info.key_id, info.serial) == ("host", "node node-1", SERIAL)
    assert info.principals == ("node-1", "gpu-7")
    assert (info.valid_after, info.valid_before) == (START, END)


def test_a_certificate_that_was_changed_or_is_none_is_not_read(tmp_path: Path) -> None:
    pair(tmp_path / "ca", "-t", "ed25519")
    key = pair(tmp_path / "key", "-t", "ed25519")
    kind, text = certify(tmp_path / "ca", key, signature(host=True)).split()
    blob = base64.b64decode(text)
    forged = base64.b64encode(blob.replace(b"gpu-7", b"gpu-8")).decode()
    cut = base64.b64encode(blob[:-1]).decode()
    for line in (f"{kind} {forged}", f"{kind} {cut}", f"{kind} AAAA", kind, "", key):
        with pytest.raises(TrustError, match="certificate_invalid"):
            read_certificate(line)


def test_a_key_with_a_compressed_point_gets_no_certificate(tmp_path: Path) -> None:
    pair(tmp_path / "ca", "-t", "ed25519")
    with pytest.raises(TrustError, match="keygen_failed"):
        certify(tmp_path / "ca", COMPRESSED, signature(host=True))


@pytest.mark.parametrize("times", ["always:forever", "always:20300101", "20200101:forever"])
def test_a_certificate_without_a_limit_is_not_read(tmp_path: Path, times: str) -> None:
    pair(tmp_path / "ca", "-t", "ed25519")
    pair(tmp_path / "key", "-t", "ed25519")
    words = ["-q", "-s", str(tmp_path / "ca"), "-I", "by hand", "-n", "node-1", "-V", times]
    keygen.run(*words, str(tmp_path / "key.pub"))
    with pytest.raises(TrustError, match="certificate_invalid"):
        read_certificate((tmp_path / "key-cert.pub").read_text())


def test_an_authority_that_cannot_be_used_signs_nothing(tmp_path: Path) -> None:
    key = pair(tmp_path / "key", "-t", "ed25519")
    ca = tmp_path / "ca"
    keygen.run("-q", "-N", "a passphrase", "-t", "ed25519", "-f", str(ca))
    with pytest.raises(TrustError, match="keygen_failed"):
        certify(ca, key, signature(host=True))
    (tmp_path / "empty").touch(mode=0o600)
    for file in (tmp_path / "empty", tmp_path / "nothing"):
        with pytest.raises(TrustError, match="keygen_failed"):
            certify(file, key, signature(host=True))
    pair(tmp_path / "open", "-t", "ed25519")
    (tmp_path / "open").chmod(0o640)
    with pytest.raises(TrustError, match="mode 640"):
        certify(tmp_path / "open", key, signature(host=True))
