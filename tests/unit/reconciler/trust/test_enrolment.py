"""The enrolment script as a host runs it."""

from __future__ import annotations

import socket
import ssl
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from reconciler.trust import ca, keygen
from reconciler.trust.certificates import Signature, certify, read_certificate
from reconciler.trust.enrolment import EnrolmentRequest, answer, read_pin, userdata
from reconciler.trust.keygen import TrustError
from tests.unit.reconciler.trust.conftest import TOKEN, Api, Host, Reply
from tests.unit.reconciler.trust.test_keygen import PLAIN

pytestmark = pytest.mark.covers("HOST-13")


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    """A private CA made by openssl; beside it a certificate of this machine from it."""
    return _authority(tmp_path / "private")


def _authority(folder: Path) -> Path:
    folder.mkdir()
    ec = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    new = ["openssl", "req", "-x509", *ec]
    subject = ["-subj", "/CN=private ca", "-keyout", "ca.key", "-out", "ca.pem"]
    served = ["-subj", "/CN=api", "-keyout", "api.key", "-out", "api.pem"]
    signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "subjectAltName=IP:127.0.0.1"]
    constraint = ["-addext", "basicConstraints=critical,CA:FALSE"]
    for words in ([*new, *subject], [*new, *served, *signed, *constraint]):
        subprocess.run(words, cwd=folder, check=True, capture_output=True)
    return folder / "ca.pem"


def _over_tls(api: Api, authority: Path) -> str:
    """From now on the server speaks TLS with the certificate beside the CA."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.with_name("api.pem"), authority.with_name("api.key"))
    api.server.socket = context.wrap_socket(api.server.socket, server_side=True)
    return api.url.replace("http:", "https:")


def certifying(trust: ca.Trust) -> Reply:
    return lambda body: (200, answer(trust, EnrolmentRequest.parse(body)))


@pytest.mark.covers("HOST-14")
def test_a_name_that_no_dns_knows_leads_to_the_given_address(
    host: Host, api: Api, trust: ca.Trust
) -> None:
    api.reply = certifying(trust)
    url = api.url.replace("127.0.0.1", "api.gpuaas.invalid")
    failed = host.run(userdata(url, "node-1", TOKEN, insecure=True))
    assert failed.returncode and "no route to host against api.gpuaas.invalid" in failed.stdout
    done = host.run(userdata(url, "node-1", TOKEN, address="127.0.0.1", insecure=True))
    assert done.returncode == 0, done
    # The host remembers the name: its certificate and its parity are about the name.
    assert "GPUAAS_API_NAME=api.gpuaas.invalid" in host.text("etc/gpuaas/enrolment.env")
    with pytest.raises(TrustError, match="enrolment_invalid"):
        userdata(url, "node-1", TOKEN, address="1'; reboot; '")


def test_no_token_goes_over_plain_http(host: Host, api: Api, trust: ca.Trust) -> None:
    """Only to this machine itself; a name that resolves to it is not believed."""
    api.reply = certifying(trust)
    url = api.url.replace("127.0.0.1", "127.0.0.1.gpuaas.invalid")
    done = host.run(userdata(url, "node-1", TOKEN, address="127.0.0.1"))
    assert done.returncode == 1
    assert "enrolment failed" in host.text("syslog")
    assert api.requests == []
    _no_trace(host, done)


def test_a_host_is_enrolled(host: Host, api: Api, trust: ca.Trust) -> None:
    api.reply = certifying(trust)

    done = host.run(userdata(api.url, "node-1", TOKEN))

    assert done.returncode == 0, done
    ((path, body),) = api.requests
    assert path == "/api/v1/nodes/node-1/enrol"
    assert (body["token"], body["node_id"]) == (TOKEN, "node-1")
    certificate = read_certificate(host.text("etc/ssh/ssh_host_ed25519_key-cert.pub"))
    assert (certificate.kind, certificate.principals) == ("host", ("node-1",))
    assert host.text("etc/ssh/gpuaas_user_ca.pub").strip() == ca.user_ca(trust)
    assert host.text("etc/ssh/gpuaas_principals/root") == "gpuaas-operator\n"
    settings = host.text("etc/ssh/sshd_config.d/60-gpuaas.conf")
    assert f"AuthorizedPrincipalsFile {host.root}/etc/ssh/gpuaas_principals/%u" in settings
    assert host.text("systemctl") == "try-reload-or-restart ssh\n"
    assert host.text("syslog") == "node certificate enrolled\n"
    assert host.text("etc/gpuaas/enrolment.env") == (
        f"GPUAAS_NODE_ID=node-1\nGPUAAS_API_URL={api.url}\nGPUAAS_API_NAME=127.0.0.1\n"
    )
    assert (host.root / "etc/gpuaas/enrolment.env").stat().st_mode & 0o777 == 0o600
    assert (host.root / "etc/ssh/ssh_host_ed25519_key").stat().st_mode & 0o777 == 0o600
    assert (host.root / "etc/ssh/gpuaas_principals/root").stat().st_mode & 0o777 == 0o644
    _no_trace(host, done)


@pytest.mark.covers("HOST-7")
@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("[]", ("", "")),
        ("exit 1", ("", "")),
        ('[{"ifname": "ibp65s0", "addr_info": [{}]}]', ("", "")),
        (
            '[{"ifname": "eth0", "addr_info": [{"local": "192.0.2.1", "prefixlen": 24}]},'
            ' {"ifname": "ibp3s0"},'
            ' {"ifname": "ibp65s0", "addr_info": [{"local": "10.20.0.7", "prefixlen": 16}]}]',
            ("ibp65s0", "10.20.0.7/16"),
        ),
    ],
)
def test_an_address_on_the_fabric_is_told(
    host: Host, api: Api, trust: ca.Trust, shown: str, expected: tuple[str, str]
) -> None:
    api.reply = certifying(trust)
    program = host.root / "bin" / "ip"
    program.write_text(f"#!/bin/sh\necho '{shown}'\n" if shown[0] == "[" else "#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    done = host.run(userdata(api.url, "node-1", TOKEN))
    assert done.returncode == 0, done
    ((_path, body),) = api.requests
    assert (body["fabric_interface"], body["fabric_address"]) == expected


@pytest.mark.covers("ECO-3")
def test_a_machine_of_maas_fetches_its_script_with_a_ticket(
    host: Host, api: Api, trust: ca.Trust
) -> None:
    script = userdata(api.url, "n1", TOKEN)
    # The service starts, has too many at once, and ends its connections.
    enrols, starting = certifying(trust), [(503, "{}"), (429, "{}"), None]

    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        if "ticket" not in body:
            return enrols(body)
        answer = starting.pop() if starting else (200, script)
        assert answer, "the connection ends without an answer"
        return answer

    api.reply = reply
    fetch = userdata(api.url, "n1", "ticket-canary-0123456789", ticket=True)
    done = host.run(fetch)
    assert done.returncode == 0, done.stderr
    *fetches, enrolment = api.requests
    wish = ("/api/v1/nodes/n1/userdata", {"ticket": "ticket-canary-0123456789"})
    assert fetches == [wish] * 4
    assert (enrolment[0], enrolment[1]["token"]) == ("/api/v1/nodes/n1/enrol", TOKEN)
    assert "ticket-canary" not in host.text("arguments")


@pytest.mark.covers("ECO-3")
@pytest.mark.parametrize("answer", [(401, "{}"), (200, "<html>"), (200, ""), (302, "")])
def test_an_answer_that_is_no_script_is_not_run(
    host: Host, api: Api, answer: tuple[int, str]
) -> None:
    api.reply = lambda _body: answer
    done = host.run(userdata(api.url, "n1", TOKEN, ticket=True))
    assert (done.returncode, len(api.requests)) == (1, 1)
    assert "script" in host.text("syslog")


def _no_trace(host: Host, done: subprocess.CompletedProcess[str]) -> None:
    """The token is nowhere: not in a file, an argument, an environment or a line of output."""
    assert TOKEN not in done.stdout + done.stderr
    for path in host.root.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path


def test_a_stale_token_and_an_expired_certificate_are_named(
    host: Host, api: Api, trust: ca.Trust
) -> None:
    key = host.root / "etc/ssh/ssh_host_ed25519_key"
    keygen.new_key(key, "host")
    start, end = datetime(2020, 1, 1, tzinfo=UTC), datetime(2020, 2, 1, tzinfo=UTC)
    past = Signature("node-1", ("node-1",), start, end, 1, host=True)
    public = key.with_name(key.name + ".pub").read_text()
    old = certify(trust.host_authority, public, past)
    key.with_name(key.name + "-cert.pub").write_text(old + "\n")
    api.reply = lambda _body: (401, {"code": "token_invalid"})

    done = host.run(userdata(api.url, "node-1", TOKEN))

    assert done.returncode == 1
    expired, refused = host.text("syslog").splitlines()
    assert expired.startswith("local certificate expired (2020-02-01")
    assert refused == "401 token_invalid"
    assert not (host.root / "etc/gpuaas").exists()
    assert not (host.root / "etc/ssh/sshd_config.d/60-gpuaas.conf").exists()
    _no_trace(host, done)

    api.reply = certifying(trust)
    assert host.run(userdata(api.url, "node-1", TOKEN)).returncode == 0
    assert public.split()[1] in api.requests[-1][1]["host_key"], "the host keeps its key"


def test_a_reconciler_out_of_reach_is_named(host: Host) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        done = host.run(userdata(url, "node-1", TOKEN))
    assert done.returncode == 1
    assert host.text("syslog").startswith("no route to host against 127.0.0.1: ")
    _no_trace(host, done)


def test_over_tls_only_the_pinned_ca_counts(
    host: Host, api: Api, trust: ca.Trust, authority: Path, tmp_path: Path
) -> None:
    api.reply = certifying(trust)
    url = _over_tls(api, authority)
    other = _authority(tmp_path / "other")
    for pin in ("", read_pin(other)):
        done = host.run(userdata(url, "node-1", TOKEN, ca=pin))
        assert done.returncode == 1
        assert "certificate" in host.text("syslog").splitlines()[-1]
        assert api.requests == [], "the token went to a server that nobody vouched for"
    # A file with both authorities, and a private key that must not leave it.
    authority.write_text("# ours\n" + other.read_text() + authority.read_text().strip())
    with authority.open("a") as handle:
        handle.write("\n" + authority.with_name("ca.key").read_text())
    script = userdata(url, "node-1", TOKEN, ca=read_pin(authority))
    assert "PRIVATE KEY" not in script
    done = host.run(script)
    assert done.returncode == 0, done
    assert "--capath" in host.text("arguments"), "the machine's folder of CAs is left out"
    assert host.text("syslog").endswith("node certificate enrolled\n")
    _no_trace(host, done)


def test_a_pin_that_would_protect_nothing_is_refused(tmp_path: Path, authority: Path) -> None:
    assert read_pin(None) == ""
    (tmp_path / "empty").write_text("# soon\n")
    (tmp_path / "broken").write_text(authority.read_text().replace("M", "A"))
    for name in ("missing", "empty", "broken"):
        with pytest.raises(TrustError, match="enrolment_ca_unreadable"):
            read_pin(tmp_path / name)
    with pytest.raises(TrustError, match="enrolment_pin_without_tls"):
        userdata("http://api.lab", "node-1", TOKEN, ca=read_pin(authority))
    with pytest.raises(TrustError, match="enrolment_invalid"):
        userdata("https://api.lab", "node-1", TOKEN, ca="'; id; '")


@pytest.mark.parametrize(
    ("obstacle", "words"),
    [("broken", "sshd refuses its configuration: line 3: bad"), ("no-include", "is missing")],
)
def test_sshd_is_asked_before_it_is_reloaded(
    host: Host, api: Api, trust: ca.Trust, obstacle: str, words: str
) -> None:
    api.reply = certifying(trust)
    (host.root / obstacle).touch()
    done = host.run(userdata(api.url, "node-1", TOKEN))
    assert done.returncode == 1
    assert words in host.text("syslog")
    assert not (host.root / "systemctl").exists()
    settings = host.root / "etc/ssh/sshd_config.d/60-gpuaas.conf"
    assert settings.exists() is (obstacle == "no-include")


@pytest.mark.parametrize("fault", ["another key", "another node", "no sense", "hostile principal"])
def test_an_answer_that_does_not_fit_is_not_installed(
    host: Host, api: Api, trust: ca.Trust, tmp_path: Path, fault: str
) -> None:
    keygen.new_key(tmp_path / "other", "other")
    other = (tmp_path / "other.pub").read_text()

    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        if fault == "another key":
            body["host_key"] = other
        if fault == "another node":
            body["node_id"] = "node-2"
        document = answer(trust, EnrolmentRequest.parse(body))
        if fault == "no sense":
            document["certificate"] = "ssh-ed25519-cert-v01@openssh.com AAAA\nPermitRootLogin yes"
        if fault == "hostile principal":
            document["principals"] = ["gpuaas-operator\nroot"]
        return 200, document

    api.reply = reply
    assert host.run(userdata(api.url, "node-1", TOKEN)).returncode == 1
    assert not (host.root / "etc/ssh/sshd_config.d/60-gpuaas.conf").exists()


@pytest.mark.covers("P2")
@pytest.mark.parametrize(
    "change",
    [
        {"api_url": "http://x/';id;'"},
        {"api_url": "ftp://x"},
        {"node_id": "a'b"},
        {"token": "short"},
        {"token": "0123456789abcdef'; id"},
        {"user": "$(id)"},
    ],
)
def test_no_value_ends_its_quotes(change: dict[str, str]) -> None:
    values = {"api_url": "http://x", "node_id": "n", "token": TOKEN, "user": "root"} | change
    with pytest.raises(TrustError, match="enrolment_invalid") as caught:
        userdata(values["api_url"], values["node_id"], values["token"], user=values["user"])
    assert "token" not in change or change["token"] not in str(caught.value)


@pytest.mark.parametrize("field", ["token", "node_id", "machine_id", "boot_id", "hostname"])
@pytest.mark.parametrize("value", [None, 7, "{{ id }} $(reboot)\nforged"])
def test_what_a_host_says_is_checked(field: str, value: object) -> None:
    body = {
        "token": TOKEN,
        "node_id": "node-1",
        "host_key": PLAIN,
        "machine_id": "0" * 32,
        "boot_id": "01234567-89ab-cdef-0123-456789abcdef",
        "hostname": "gpu-1",
    }
    assert TOKEN not in repr(EnrolmentRequest.parse(body))
    with pytest.raises(TrustError):
        EnrolmentRequest.parse(body | {field: value})
