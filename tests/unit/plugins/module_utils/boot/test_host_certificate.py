"""Renewal of a host's certificate: certificates are real, sshd and systemd are scripted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _host_certificate
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host

from reconciler.trust import ca, keygen
from reconciler.trust.certificates import read_certificate

pytestmark = pytest.mark.covers("HOST-13")

NODE = "node-7"
CHECK, RELOAD = ("sshd", "-t"), ("systemctl", "try-reload-or-restart", "ssh")
SERVED = f"port 22\nhostcertificate {_host_certificate.FILE}\n"


@pytest.fixture(scope="module")
def trust(tmp_path_factory: pytest.TempPathFactory) -> ca.Trust:
    return ca.open_trust(tmp_path_factory.mktemp("state"))


def key(folder: Path) -> str:
    keygen.new_key(folder / "key", "root@host")
    return (folder / "key.pub").read_text()


@pytest.fixture
def old_certificate(trust: ca.Trust, tree: Path, tmp_path: Path, script: Any) -> str:
    """An enrolled host: its key, and a certificate that is good for another day."""
    _host.write(_host_certificate.KEY, key(tmp_path))
    old = ca.certify_host(trust, _host.read(_host_certificate.KEY) or "", NODE, days=1)
    _host.write(_host_certificate.FILE, old + "\n")
    script.on("sshd", "-T", out=SERVED)
    return old


def renewed(trust: ca.Trust, node_id: str = NODE, host_key: str = "") -> str:
    return ca.certify_host(trust, host_key or _host.read(_host_certificate.KEY) or "", node_id)


def drive(certificate: str, *, check: bool = False) -> _change.Outcome:
    params = {"node_id": NODE, "certificate": certificate}
    return _change.drive(_host_certificate.SUBJECT, params, check_mode=check)


def installed() -> str | None:
    return _host.read(_host_certificate.FILE)


def test_a_new_certificate_takes_the_place_of_the_old_once(
    trust: ca.Trust, old_certificate: str, script: Any
) -> None:
    new = renewed(trust)
    assert drive(new, check=True).changed
    assert installed() == old_certificate
    script.on(*CHECK).on(*RELOAD)
    done = drive(new)
    assert (done.done, done.failure) == (["install_certificate"], None)
    assert installed() == new
    assert done.facts["certificate"] == {
        "serial": str(read_certificate(new).serial),
        "principals": [NODE],
        "valid_until": read_certificate(new).valid_before.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    assert script.calls[-3:-1] == [CHECK, RELOAD]
    again = drive(new)
    assert (again.changed, again.failure) == (False, None)


@pytest.mark.parametrize("refuses", [CHECK, RELOAD])
def test_sshd_keeps_the_old_one_when_it_does_not_take_the_new(
    trust: ca.Trust, old_certificate: str, script: Any, refuses: tuple[str, ...]
) -> None:
    for command in (CHECK, RELOAD):
        script.on(*command, rc=1 if command == refuses else 0, err="line 3: bad")
    failed = drive(renewed(trust))
    assert failed.failure.code == "certificate_not_taken"
    assert "line 3: bad" in failed.failure.found
    assert installed() == old_certificate


def test_a_certificate_that_a_killed_run_left_is_shown_by_sshd_in_the_end(
    trust: ca.Trust, old_certificate: str, script: Any
) -> None:
    """sshd would present the old certificate until it expires, and then clients refuse the host."""
    new = renewed(trust)
    with pytest.raises(AssertionError):  # CHECK is not scripted yet: the run ends there.
        drive(new)
    assert installed() == new
    script.on(*CHECK).on(*RELOAD)
    assert drive(new).done == ["install_certificate"]
    assert script.calls[-3:-1] == [CHECK, RELOAD]
    assert not drive(new).changed


def test_only_this_hosts_own_certificate_is_taken(
    trust: ca.Trust, old_certificate: str, script: Any, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    bad = {
        "certificate_of_another_key": renewed(trust, host_key=key(tmp_path / "other")),
        "certificate_of_another_node": renewed(trust, "node-8"),
        "certificate_unreadable": "ssh-ed25519-cert-v01@openssh.com AAAA",
    }
    for code, text in bad.items():
        refused = drive(text)
        assert refused.failure.code == code
    user = ca.operator_identity(trust).certificate.read_text()
    failure = drive(user).failure
    assert failure.code == "certificate_unreadable"
    assert installed() == old_certificate


def test_a_renewal_neither_shortens_the_validity_nor_changes_the_authority(
    trust: ca.Trust, old_certificate: str, script: Any, tmp_path: Path
) -> None:
    """Variables of an earlier run could do both; then every client would refuse the host."""
    new, other = renewed(trust), ca.open_trust(tmp_path / "other")
    script.on(*CHECK).on(*RELOAD)
    assert drive(new).failure is None
    older = drive(old_certificate)
    assert older.failure.code == "certificate_older"
    assert "one until " in older.failure.found
    foreign = drive(renewed(other))
    assert foreign.failure.code == "certificate_of_another_authority"
    assert installed() == new


def test_a_host_that_never_enrolled_is_told_to(
    trust: ca.Trust, old_certificate: str, script: Any
) -> None:
    script.answers[("sshd", "-T")] = []
    script.on("sshd", "-T", out="port 22\n")
    refused = drive(renewed(trust))
    assert refused.failure.code == "certificate_not_served"


def test_a_certificate_without_an_end_is_refused_and_replaced(
    trust: ca.Trust, old_certificate: str, script: Any, tmp_path: Path
) -> None:
    """Its renewal would never be due. Such a certificate, once installed, can still be replaced."""
    (tmp_path / "subject.pub").write_text(_host.read(_host_certificate.KEY) or "")
    words = ["-I", "by hand", "-n", NODE, "-V", "always:forever", "-z", "7", "-h"]
    keygen.run("-q", "-s", str(trust.host_authority), *words, str(tmp_path / "subject.pub"))
    endless = (tmp_path / "subject-cert.pub").read_text().strip()
    refused = drive(endless)
    assert refused.failure.code == "certificate_unreadable"
    assert "no date" in refused.failure.found
    assert installed() == old_certificate

    _host.write(_host_certificate.FILE, endless + "\n")
    new = renewed(trust)
    assert drive(new, check=True).facts == {"certificate": {}}
    script.on(*CHECK).on(*RELOAD)
    assert drive(new).failure is None
    assert installed() == new
