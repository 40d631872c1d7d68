"""Shared options, errors, and modules that a command must not load."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

import lab.cli
from reconciler.cli import output
from reconciler.cli.main import hoist
from reconciler.cli.output import clean
from reconciler.cli.session import DEFAULT_API, Session, begin
from reconciler.client import Client
from reconciler.model.errors import Problem
from tests.standin.bmc import authority
from tests.unit.reconciler.api.stack import Stack
from tests.unit.reconciler.cli.conftest import Gpuaas


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("nodes list", "nodes list"),
        ("nodes list --output json", "--output json nodes list"),
        ("nodes --api=http://x list", "--api=http://x nodes list"),
        ("lab ssh -- ls --output json", "lab ssh -- ls --output json"),
        ("--output json lab up", "--output json lab up"),
        ("nodes show -- --output", "nodes show -- --output"),
        ("nodes list --output", "--output nodes list"),
        ("nodes list -o json", "--output json nodes list"),
        ("ssh a -o ProxyCommand=none", "ssh a -o ProxyCommand=none"),
        ("ssh a kubectl get pods -o json", "ssh a kubectl get pods -o json"),
    ],
)
def test_shared_options_stand_anywhere(line: str, expected: str) -> None:
    assert hoist(line.split()) == expected.split()


def test_a_command_loads_only_what_it_needs() -> None:
    code = "import sys, reconciler.cli.main; print(*sys.modules)"
    code += "; import reconciler.pools.worker; print(*sys.modules)"
    code += "; import reconciler.gateway.web; print(*sys.modules)"
    command, worker, terminals = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    heavy = {"fastapi", "uvicorn", "ansible_runner", "lab", "jsonschema"}
    assert (heavy | {"httpx", "sqlalchemy", "pydantic"}).isdisjoint(command.split())
    assert (heavy | {"alembic", "redis"}).isdisjoint(worker.split())
    assert "asyncssh" not in terminals.split()


def test_which_version_it_is(gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no settings can be read."""
    monkeypatch.setenv("GPUAAS_CONFIG_FILE", "/none")
    assert (gpuaas("--version"), gpuaas.status) == (f"gpuaas {version('gpuaas-slice')}\n", 0)


def test_an_error_says_what_to_do(new: Stack, gpuaas: Gpuaas) -> None:
    gpuaas.at(new)("nodes", "show", "none")
    assert (gpuaas.status, gpuaas.out) == (1, "")
    for word in ("node_not_found", "expected", "found", "what to do"):
        assert word in gpuaas.err
    gpuaas("nodes", "show", "none", "-o", "json")
    assert json.loads(gpuaas.err)["code"] == "node_not_found"


def test_no_token_no_service(tmp_path: Path, gpuaas: Gpuaas) -> None:
    missing = tmp_path / "missing"
    gpuaas("nodes", "list", "--token-file", str(missing))
    assert (gpuaas.status, "token_file_unreadable" in gpuaas.err) == (1, True)
    missing.write_text("x")
    gpuaas("nodes", "list", "--token-file", str(missing), "--api", "http://127.0.0.1:9")
    assert (gpuaas.status, "reconciler_unreachable" in gpuaas.err) == (1, True)


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("http://gpuaas.example", False),
        ("http://127.0.0.1.evil.example", False),
        ("http://127.0.0.1@evil.example", False),
        ("gpuaas.example:8080", False),
        ("ftp://127.0.0.1", True),
        ("http://[::1]:9", True),
        ("http://localhost:9", True),
        ("https://127.0.0.1:9", True),
    ],
)
def test_a_token_goes_over_the_network_with_tls_only(
    tmp_path: Path, gpuaas: Gpuaas, url: str, *, sent: bool
) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    gpuaas("nodes", "list", "--token-file", str(token), "--api", url)
    assert gpuaas.status == 1
    assert ("api_without_tls" in gpuaas.err) is not sent, gpuaas.err
    assert "secret" not in gpuaas.err


def test_a_ca_of_the_sites_own_is_named_by_a_variable(
    tmp_path: Path, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    certificate, key = authority(tmp_path, "proxy", "IP:127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as proxy:
        proxy.socket = context.wrap_socket(proxy.socket, server_side=True)
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        url = f"https://127.0.0.1:{proxy.server_port}"
        gpuaas("nodes", "list", "--token-file", str(token), "--api", url)
        assert "reconciler_unreachable" in gpuaas.err and "SSL_CERT_FILE" in gpuaas.err
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        gpuaas("nodes", "list", "--token-file", str(token), "--api", url)
        assert "status 501" in gpuaas.err, "the other side answers now"
        proxy.shutdown()


@pytest.mark.parametrize("url", ["http://[::1", "https://[x]", "http://127.0.0.1:port"])
def test_an_address_with_a_slip_is_named(tmp_path: Path, gpuaas: Gpuaas, url: str) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    gpuaas("nodes", "list", "--token-file", str(token), "--api", url)
    assert (gpuaas.status, "api_address_invalid" in gpuaas.err) == (1, True), gpuaas.err


@pytest.mark.parametrize("word", ["", ".", "..", "a?b", "a#b", "a b", "\x1b[2J", "\udcff"])
def test_a_word_that_is_no_id_leads_to_no_other_route(
    new: Stack, gpuaas: Gpuaas, word: str
) -> None:
    """A script with an empty variable would be told that it has revoked a token."""
    gpuaas.at(new)
    for words in (("token", "revoke", word), ("nodes", "show", word), ("tasks", "follow", word)):
        gpuaas(*words)
        assert (gpuaas.status, "name_invalid" in gpuaas.err) == (1, True), (words, gpuaas.err)
        assert "\x1b" not in gpuaas.err


@pytest.mark.parametrize("text", ['{"x": NaN}', r'{"x": "\ud800"}'])
def test_what_no_document_can_hold_is_refused_by_the_service(
    selling: Stack, gpuaas: Gpuaas, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "file.json"
    file.write_text(text)
    gpuaas.at(selling)("jobs", "submit", "m", str(file), "--project", "demo")
    assert (gpuaas.status, "input_invalid" in gpuaas.err) == (1, True), gpuaas.err
    gpuaas("projects", "add", "\udcff")
    assert (gpuaas.status, "request_invalid" in gpuaas.err) == (1, True), gpuaas.err
    gpuaas("audit", "--action", "\udcff")
    assert (gpuaas.status, "name_invalid" in gpuaas.err) == (1, True), gpuaas.err


def test_an_answer_that_leads_elsewhere_is_no_success() -> None:
    def redirect(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(301, headers={"Location": "https://portal.example/"})

    api = Client("https://gpuaas.example", "token")
    api.close()
    transport = httpx.MockTransport(redirect)
    api._http = httpx.Client(transport=transport, base_url="https://gpuaas.example")
    for act in (lambda: api.delete("/tokens/x"), lambda: list(api.events("/admin/tasks/x/events"))):
        with pytest.raises(Problem, match="http_error"):
            act()
    api.close()


@pytest.mark.parametrize(
    "page",
    [{}, {"items": 5, "next": ""}, {"items": [5], "next": ""}, {"items": [], "next": "again"}],
)
def test_a_list_of_another_form_is_no_traceback(
    tmp_path: Path, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch, page: dict[str, Any]
) -> None:
    """The last page repeats without end."""
    transport = httpx.MockTransport(lambda _request: httpx.Response(200, json=page))
    http = httpx.Client(base_url="http://api.example", transport=transport)
    monkeypatch.setattr("reconciler.client.httpx.Client", lambda **_options: http)
    (tmp_path / "token").write_text("x")
    gpuaas("nodes", "list", "--token-file", str(tmp_path / "token"), "--output", "json")
    assert (gpuaas.status, json.loads(gpuaas.err)["code"]) == (1, "http_error")


@pytest.mark.parametrize(
    "words",
    [("tasks", "watch", "t"), ("nodes", "bootstrap", "n1"), ("start", "x", "--project", "p")],
)
def test_an_object_without_its_fields_is_no_traceback(
    tmp_path: Path, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    page = {"items": [{"id": "p", "name": "p"}], "next": None}
    transport = httpx.MockTransport(lambda _request: httpx.Response(200, json=page))
    http = httpx.Client(base_url="http://api.example", transport=transport)
    monkeypatch.setattr("reconciler.client.httpx.Client", lambda **_options: http)
    (tmp_path / "token").write_text("x")
    gpuaas(*words, "--token-file", str(tmp_path / "token"), "--output", "json")
    document = json.loads(gpuaas.err)
    assert (gpuaas.status, document["code"]) == (1, "http_error")
    assert "an answer of the reconciler with `" in document["expected"]


def test_a_wait_survives_a_restart_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that never answered is missed at once, and nothing but a GET is repeated."""
    answers: list[httpx.Response | Exception] = []

    def answer(_request: httpx.Request) -> httpx.Response:
        match answers.pop(0):
            case Exception() as failure:
                raise failure
            case response:
                return response

    refused, cut_off = httpx.ConnectError("refused"), httpx.ReadError("cut off")
    pauses: list[float] = []
    monkeypatch.setattr("reconciler.client.time.sleep", pauses.append)
    api = Client("https://gpuaas.example", "token")
    api.close()
    transport = httpx.MockTransport(answer)
    api._http = httpx.Client(transport=transport, base_url="https://gpuaas.example")
    answers += [refused]
    with pytest.raises(Problem, match="reconciler_unreachable"):
        api.get("/projects")
    proxied, done = httpx.Response(502, text="Bad Gateway"), httpx.Response(200, json={"n": 2})
    answers += [httpx.Response(200, json={"n": 1}), cut_off, refused, proxied, done]
    assert [api.get("/projects"), api.get("/projects")] == [{"n": 1}, {"n": 2}]
    assert len(pauses) == 3
    # An error of the service about its database, and a service that hangs, end the request.
    away = {"code": "database_away", "expected": "a", "found": "b", "remedy": "c"}
    for last in (httpx.Response(503, json=away), httpx.ReadTimeout("silent")):
        answers += [last]
        with pytest.raises(Problem, match=r"database_away|reconciler_unreachable"):
            api.get("/projects")
    for act in (lambda: api.delete("/tokens/x"), lambda: api.post("/projects")):
        answers += [refused]
        with pytest.raises(Problem, match="reconciler_unreachable"):
            act()
    assert answers == []
    api.close()


def test_a_stream_survives_a_restart_behind_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the event `end` ends it: a proxy may close the connection of a service that stops."""
    answers: list[httpx.Response] = []
    monkeypatch.setattr("reconciler.client.time.sleep", lambda _seconds: None)
    api = Client("https://gpuaas.example", "token")
    api.close()
    transport = httpx.MockTransport(lambda _request: answers.pop(0))
    api._http = httpx.Client(transport=transport, base_url="https://gpuaas.example")

    def part(*names: str) -> httpx.Response:
        text = "".join(f"event: {name}\nid: 1.1\ndata: {{}}\n\n" for name in names)
        return httpx.Response(200, text=text, headers={"Content-Type": "text/event-stream"})

    def read() -> list[str]:
        return [event.name for event in api.events("/admin/tasks/x/events")]

    away = httpx.Response(502, text="Bad Gateway")
    answers += [away]
    with pytest.raises(Problem, match="http_error"):
        read()
    answers += [part("state"), away, part(), part("progress", "end")]
    assert (read(), answers) == (["state", "progress", "end"], [])
    answers += [part("state"), *[away] * 16]
    with pytest.raises(Problem, match="status 502"):
        read()
    # A proxy may limit the time of a request, and a task may have no news for longer.
    quiet = httpx.Response(200, text=": nothing new\n\n", headers=part().headers)
    answers[:] = [part("state"), *[quiet] * 20, part("end")]
    assert (read(), answers) == (["state", "end"], [])
    answers[:] = [part("state"), httpx.Response(200, text="<h1>Log in</h1>")]
    with pytest.raises(Problem, match="http_error"):
        read()
    api.close()


def test_a_proxy_of_the_environment_does_not_get_a_token_to_this_machine(
    tmp_path: Path, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(0)
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", "")
        gpuaas("nodes", "list", "--token-file", str(token), "--api", "http://127.0.0.1:9")
        assert "reconciler_unreachable" in gpuaas.err
        with pytest.raises(BlockingIOError):
            proxy.accept()


@pytest.mark.parametrize(
    ("listen", "url"),
    [
        ("127.0.0.1:18080", "http://127.0.0.1:18080"),
        ("0.0.0.0:80", "http://127.0.0.1:80"),
        ("[::]:8080", "http://[::1]:8080"),
        ("nonsense", DEFAULT_API),
        (None, DEFAULT_API),
    ],
)
def test_the_file_that_says_which_site_it_is_says_where_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listen: str | None, url: str
) -> None:
    file = tmp_path / "gpuaas.env"
    file.write_text(f"GPUAAS_LISTEN={listen}\n" if listen else "GPUAAS_WORKERS=none\n")
    monkeypatch.setenv("GPUAAS_CONFIG_FILE", str(file))
    assert Session().url == url
    assert Session("https://gpuaas.example").url == "https://gpuaas.example"


def test_a_wrong_command_line_is_exit_2(gpuaas: Gpuaas) -> None:
    gpuaas("nodes", "explode")
    assert gpuaas.status == 2


def test_hosts_cannot_write_to_the_terminal() -> None:
    assert clean("a\x1b[2Jb\r\x07\nc") == "a\N{REPLACEMENT CHARACTER}[2Jb" + (
        "\N{REPLACEMENT CHARACTER}" * 2 + "\nc"
    )


def test_nor_can_names_and_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """A guest names the fields of its telemetry; a service names the code of its refusal."""
    begin(Session())
    name = "\x1b[2J[bold]a[/b]"
    output.record({name: 1})
    output.rows([{name: 1}], name)
    problem = Problem(name, expected=name, found=name, remedy=name)
    output.failure(problem, as_json=False)
    shown, errors = capsys.readouterr()
    for text, times in ((shown, 2), (errors, 4)):
        assert "\x1b" not in text
        assert text.count("[2J[bold]a[/b]") == times


def test_lab_is_handed_on(monkeypatch: pytest.MonkeyPatch, gpuaas: Gpuaas) -> None:
    seen: list[object] = []
    monkeypatch.setattr(lab.cli, "app", lambda args, prog_name: seen.append((args, prog_name)))
    gpuaas("lab", "up", "--fresh", "--help")
    assert seen == [(["up", "--fresh", "--help"], "gpuaas lab")]


@pytest.mark.parametrize(
    ("held", "problem"),
    [
        ("", "an empty file"),
        ("secret-1 secret-2", "2 words"),
        ("\x7f", "1 words"),
        (None, "No such"),
    ],
)
def test_what_is_no_token_is_named_and_not_shown(
    tmp_path: Path, gpuaas: Gpuaas, held: str | None, problem: str
) -> None:
    file = tmp_path / "token"
    if held is not None:
        file.write_text(held)
    gpuaas("nodes", "list", "--token-file", str(file), "--api", "http://127.0.0.1:9")
    assert (gpuaas.status, "token_file_unreadable" in gpuaas.err) == (1, True)
    assert problem in gpuaas.err and "secret" not in gpuaas.err


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (200, "<h1>Log\nin</h1>"),
        (200, ""),
        (200, "null"),
        (200, "[]"),
        (200, "[" * 100_000),
        (500, "[" * 100_000),
        (502, "<h1>Bad\nGateway</h1>"),
        (404, '["no problem"]'),
        (404, '{"code": "x"}'),
    ],
)
def test_what_stands_before_the_service_is_no_traceback(
    tmp_path: Path, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch, status: int, text: str
) -> None:
    kind = {"Content-Type": "text/html"}

    def portal(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, text=text, headers=kind)

    http = httpx.Client(base_url="http://api.example", transport=httpx.MockTransport(portal))
    monkeypatch.setattr("reconciler.client.httpx.Client", lambda **_options: http)
    (tmp_path / "token").write_text("x")
    gpuaas("nodes", "list", "--token-file", str(tmp_path / "token"), "--output", "json")
    document = json.loads(gpuaas.err)
    assert (gpuaas.status, document["code"]) == (1, "http_error")
    assert document["found"].startswith(f"status {status}, text/html: ")
    assert "\n" not in document["found"] and "GPUAAS_API" in document["remedy"]
