"""Signed apt repository, with keys made by gpg and a repository that apt itself judges."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _apt_source, _openpgp
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _command,
    _errors,
    _host,
)

pytestmark = pytest.mark.covers("HOST-2")

SUBJECT = _change.Subject(
    _apt_source.observe, _apt_source.plan, _apt_source.apply, _apt_source.facts
)
KEYRING = "/usr/share/keyrings/vendor.asc"
SOURCE = "/etc/apt/sources.list.d/vendor.sources"


@dataclass
class Publisher:
    """A publisher with a signing key. home: gpg's."""

    home: Path
    fingerprint: str = ""

    def gpg(self, *words: str) -> str:
        argv = ["gpg", "--batch", "--quiet", "--homedir", str(self.home), *words]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout

    def make(self, expires: str = "never") -> Publisher:
        self.home.mkdir(mode=0o700)
        self.gpg(
            *("--passphrase", "", "--pinentry-mode", "loopback"),
            *("--quick-generate-key", f"{self.home.name}@example.org", "ed25519", "sign", expires),
        )
        rows = self.gpg("--with-colons", "--list-keys").splitlines()
        self.fingerprint = next(row.split(":")[9] for row in rows if row.startswith("fpr"))
        return self

    def key(self) -> str:
        return self.gpg("--armor", "--export", self.fingerprint)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("keys")
    yield folder
    for file in folder.iterdir():
        subprocess.run(["gpgconf", "--homedir", str(file), "--kill", "all"], check=False)


@pytest.fixture(scope="module")
def vendor(home: Path) -> Publisher:
    return Publisher(home / "vendor").make()


@pytest.fixture(scope="module")
def other_publisher(home: Path) -> Publisher:
    return Publisher(home / "stranger").make()


def params(tree: Path, publisher: Publisher, key: str, **change: Any) -> dict[str, Any]:
    (tree / "vendor.key").write_text(key)
    return {
        "name": "vendor",
        "uri": f"file://{tree}/repository",
        "suite": "jammy",
        "components": ["main"],
        "architectures": ["amd64"],
        "key_url": "file:///vendor.key",
        "fingerprint": publisher.fingerprint,
    } | change


def drive(params: dict[str, Any], *, check: bool = False) -> _change.Outcome:
    return _change.drive(SUBJECT, params, check_mode=check)


def code(outcome: _change.Outcome) -> str:
    return outcome.failure.code


def repository(tree: Path, signer: Publisher | None) -> None:
    """Make a repository with a single empty list, signed by `signer` or unsigned."""
    suite = tree / "repository/dists/jammy"
    packages = suite / "main/binary-amd64/Packages"
    packages.parent.mkdir(parents=True)
    packages.write_text("")
    digest = hashlib.sha256(b"").hexdigest()
    (suite / "Release").write_text(
        "Origin: vendor\nSuite: jammy\nCodename: jammy\nComponents: main\nArchitectures: amd64\n"
        f"Date: Sat, 01 Jan 2022 00:00:00 UTC\nSHA256:\n {digest} 0 main/binary-amd64/Packages\n"
    )
    if signer is not None:
        release = str(suite / "Release")
        signer.gpg("--clear-sign", "--output", str(suite / "InRelease"), release)


def apt_takes(tree: Path) -> bool:
    """Return whether apt itself accepts the repository by our source file and keyring."""
    source = (_host.read(SOURCE) or "").replace(KEYRING, f"{tree}{KEYRING}")
    parts = tree / "apt"
    for name in ("sources", "lists/partial", "cache/archives/partial"):
        (parts / name).mkdir(parents=True, exist_ok=True)
    (parts / "sources/vendor.sources").write_text(source + "\n")
    (parts / "status").write_text("")
    settings = {
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": f"{parts}/sources",
        "Dir::State::lists": f"{parts}/lists",
        "Dir::State::status": f"{parts}/status",
        "Dir::Cache": f"{parts}/cache",
        "APT::Sandbox::User": "root",
        "APT::Architecture": "amd64",
        "APT::Update::Error-Mode": "any",
    }
    options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    argv = ["apt-get", *options, "update"]
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"}
    )
    assert (tree / "repository").is_dir()
    return done.returncode == 0


def test_apt_believes_the_repository_under_this_key_only(
    tree: Path, vendor: Publisher, other_publisher: Publisher
) -> None:
    apt_params = params(tree, vendor, vendor.key())
    checked = drive(apt_params, check=True)
    assert checked.changed and not (tree / "usr").exists()
    outcome = drive(apt_params)
    assert outcome.done == ["trust_key", "write_source"] and outcome.failure is None
    assert outcome.document()["diff"] == checked.document()["diff"]
    assert f"Signed-By: {KEYRING}\n" in (tree / SOURCE[1:]).read_text()
    assert not drive(apt_params).changed
    repository(tree, vendor)
    assert apt_takes(tree)
    repository_file = tree / "repository/dists/jammy/InRelease"
    repository_file.write_text(repository_file.read_text().replace("2022", "2023"))
    assert not apt_takes(tree)
    repository_file.unlink()
    assert not apt_takes(tree)
    release = str(repository_file.with_name("Release"))
    other_publisher.gpg("--clear-sign", "--output", str(repository_file), release)
    assert not apt_takes(tree)


def test_a_key_with_another_fingerprint_is_not_trusted(
    tree: Path, vendor: Publisher, other_publisher: Publisher
) -> None:
    outcome = drive(params(tree, vendor, other_publisher.key()))
    assert code(outcome) == "key_fingerprint_mismatch"
    assert not (tree / KEYRING[1:]).exists() and not (tree / SOURCE[1:]).exists()
    # A second key in the file would be trusted as well.
    assert code(drive(params(tree, vendor, vendor.key() + other_publisher.key()))) == (
        "key_fingerprint_mismatch"
    )
    assert code(drive(params(tree, vendor, "<html>not a key</html>"))) == "key_fingerprint_mismatch"


@pytest.mark.parametrize(("size", "why"), [(None, "key_unreachable"), (2**21, "key_not_valid")])
def test_a_key_that_cannot_be_had_is_named_as_one(
    tree: Path, vendor: Publisher, size: int | None, why: str
) -> None:
    apt_params = params(tree, vendor, "x" * (size or 1))
    if size is None:
        (tree / "vendor.key").unlink()
    outcome = drive(apt_params)
    assert (code(outcome), outcome.done) == (why, [])
    assert "a key of at most" in str(outcome.failure) and "/vendor.key" in str(outcome.failure)
    assert (_host.read(SOURCE), _host.read(KEYRING)) == (None, None)


def test_an_expired_key_signs_nothing(tree: Path, home: Path) -> None:
    old = Publisher(home / "old").make("seconds=1")
    apt_params = params(tree, old, old.key())
    while not _openpgp.keys(tree / "vendor.key")[0].problem:
        pass
    assert code(drive(apt_params)) == "key_not_valid"


def test_a_foreign_key_in_our_keyring_is_replaced(
    tree: Path, vendor: Publisher, other_publisher: Publisher
) -> None:
    apt_params = params(tree, vendor, vendor.key())
    drive(apt_params)
    (tree / KEYRING[1:]).write_text(vendor.key() + other_publisher.key())
    assert drive(apt_params).done == ["trust_key"]
    assert [key.fingerprint for key in _openpgp.keys(tree / KEYRING[1:])] == [vendor.fingerprint]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("sources.list", "deb [arch=amd64 trusted=yes] http://other.example.org/x jammy main\n"),
        ("sources.list.d/a.list", "deb [ allow-insecure=yes ] http://other.example.org/x j main\n"),
        ("sources.list.d/a.sources", "Types: deb\nURIs: http://o.example.org/\nTrusted: true\n"),
    ],
)
def test_no_source_may_go_unsigned(tree: Path, vendor: Publisher, file: str, text: str) -> None:
    (tree / "etc/apt/sources.list.d").mkdir(parents=True)
    (tree / "etc/apt" / file).write_text(text)
    apt_params = params(tree, vendor, vendor.key())
    assert code(drive(apt_params)) == "unauthenticated_source"
    assert not (tree / KEYRING[1:]).exists()
    # An option that is switched off, or a disabled source, allows nothing.
    off = text.replace("trusted=yes", "trusted=no").replace("insecure=yes", "insecure=no")
    (tree / "etc/apt" / file).write_text(off.replace("Trusted: true", "Enabled: no\nTrusted: true"))
    assert drive(apt_params).failure is None


def test_what_opens_our_own_file_is_rewritten_and_hides_no_strangers(
    tree: Path, vendor: Publisher, other_publisher: Publisher
) -> None:
    apt_params = params(tree, vendor, vendor.key())
    drive(apt_params)
    source, expected = tree / SOURCE[1:], (tree / SOURCE[1:]).read_text()
    opened = f"{expected}Trusted: yes\n"
    source.write_text(opened)
    other = source.with_name("a.sources")
    other.write_text("Types: deb\nURIs: http://o.example.org/\nTrusted: yes\n")
    outcome = drive(apt_params)
    assert code(outcome) == "unauthenticated_source" and source.read_text() == opened
    assert outcome.failure and SOURCE not in outcome.failure.found
    other.unlink()
    assert drive(apt_params, check=True).document()["diff"]["before"] == {SOURCE: opened}
    assert drive(apt_params).done == ["write_source"] and source.read_text() == expected
    # The source is closed even if the key is not available.
    source.write_text(opened)
    (tree / KEYRING[1:]).unlink()
    assert code(drive(params(tree, vendor, other_publisher.key()))) == "key_fingerprint_mismatch"
    assert source.read_text() == expected


def test_apts_own_settings_may_not_open_it_either(
    tree: Path, vendor: Publisher, script: Any
) -> None:
    script.on("apt-config", "dump", out='APT::Get "";\nAPT::Get::AllowUnauthenticated "1";\n')
    assert code(drive(params(tree, vendor, vendor.key()))) == "unauthenticated_source"


def test_the_repository_is_named_once(tree: Path, vendor: Publisher) -> None:
    apt_params = params(tree, vendor, vendor.key())
    (tree / "etc/apt/sources.list.d").mkdir(parents=True)
    (tree / "etc/apt/sources.list.d/old.list").write_text(f"deb {apt_params['uri']}/ jammy main\n")
    assert code(drive(apt_params)) == "source_defined_elsewhere"


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"fingerprint": "34D8786F"}, "fingerprint_invalid"),
        ({"uri": "https://user:secret@example.org/x"}, "source_invalid"),
        ({"uri": "http://example.org/x\nTrusted: yes"}, "source_invalid"),
        ({"suite": "jammy [trusted=yes]"}, "source_invalid"),
        ({"name": "../../evil"}, "source_invalid"),
        ({"components": ["main", "-x"]}, "source_invalid"),
    ],
)
def test_what_would_not_be_a_plain_entry(
    tree: Path, vendor: Publisher, change: dict[str, Any], refusal: str
) -> None:
    assert code(drive(params(tree, vendor, vendor.key(), **change))) == refusal


def test_a_fingerprint_may_be_written_as_people_do(tree: Path, vendor: Publisher) -> None:
    spaced = " ".join(vendor.fingerprint[at : at + 4] for at in range(0, 40, 4)).lower()
    assert drive(params(tree, vendor, vendor.key(), fingerprint=spaced)).failure is None


def test_no_gpg_is_said_so(tree: Path, vendor: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    apt_params = params(tree, vendor, vendor.key())
    monkeypatch.setattr(_command, "_PATH", str(tree))
    with pytest.raises(_errors.Refusal, match="command_missing"):
        drive(apt_params)
