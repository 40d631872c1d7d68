"""Names of the control plane: a block of /etc/hosts, and the reachability of an address."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _api_names

pytestmark = pytest.mark.covers("HOST-14")

NAMES = {"api.gpuaas.example": "192.0.2.20"}


def drive(names: dict[str, str] = NAMES) -> _change.Outcome:
    return _change.drive(_api_names.SUBJECT, {"names": names}, check_mode=False)


def code(outcome: _change.Outcome) -> str:
    assert outcome.failure is not None and not outcome.done
    return outcome.failure.code


@pytest.mark.parametrize("site", ["127.0.0.1 localhost\n", "127.0.0.1 localhost", ""])
def test_a_block_comes_is_replaced_and_goes(tree: Path, site: str) -> None:
    _host.write(_api_names.HOSTS, site)
    assert drive().done == ["write_block"]
    text = _host.path(_api_names.HOSTS).read_text()
    assert text.startswith(site)
    assert [row.split() for row in text.splitlines() if "api" in row] == [
        ["192.0.2.20", "api.gpuaas.example"]
    ]
    assert not drive().changed
    drive({"api.gpuaas.example": "192.0.2.21"})
    assert "192.0.2.20" not in _host.path(_api_names.HOSTS).read_text()
    drive({})
    assert _host.read(_api_names.HOSTS) == site.strip()
    assert not drive({}).changed


def test_cloud_inits_template_has_it_too_where_it_writes_the_file(tree: Path) -> None:
    """Some images do this by default, and the next boot would remove the block."""
    _host.write(_api_names.HOSTS, "# configured 'manage_etc_hosts' as True.\n127.0.0.1 localhost\n")
    _host.write(_api_names.TEMPLATE, "## template:jinja\n127.0.0.1 localhost\n")
    assert drive().done == ["write_block", "write_block"]
    assert "api.gpuaas.example" in (_host.read(_api_names.TEMPLATE) or "")
    _host.write(_api_names.HOSTS, "127.0.0.1 localhost\n")
    assert drive().done == ["write_block"]


@pytest.mark.parametrize(
    "names",
    [
        {"api\n192.0.2.1 evil": "192.0.2.20"},
        {"-x": "192.0.2.20"},
        {"api": "192.0.2.20 evil"},
        {"api": "api.other"},
        {"API": "192.0.2.20"},
    ],
)
def test_a_name_cannot_add_lines(tree: Path, names: dict[str, str]) -> None:
    assert code(drive(names)) == "api_name_invalid"
    assert _host.read(_api_names.HOSTS) is None


def test_a_line_of_the_site_that_would_win_is_named(tree: Path) -> None:
    _host.write(_api_names.HOSTS, "198.51.100.9\tother api.gpuaas.example # old\n")
    outcome = drive()
    assert code(outcome) == "api_name_taken"
    assert outcome.failure and "198.51.100.9" in outcome.failure.found
    _host.write(_api_names.HOSTS, "192.0.2.20 api.gpuaas.example\n")
    assert drive().failure is None


def test_an_answer_is_an_answer_also_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real sockets: a listening port, and the next port, which is closed."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert _api_names.unreachable("127.0.0.1", port) == ""
    assert _api_names.unreachable("127.0.0.1", port) == ""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(113, "No route to host"), "no route to host 192.0.2.20"),
        (TimeoutError(), "no answer from 192.0.2.20 port 443 within 3 s"),
    ],
)
def test_a_failed_connection_names_address_and_reason(
    monkeypatch: pytest.MonkeyPatch, error: OSError, message: str
) -> None:
    def connect(*_a: Any, **_k: Any) -> Any:
        raise error

    monkeypatch.setattr(socket, "create_connection", connect)
    assert _api_names.unreachable("192.0.2.20", 443) == message


def test_names_are_asked_of_the_host_itself() -> None:
    assert "127.0.0.1" in _api_names.addresses("localhost")
    assert _api_names.addresses("no-such-name.invalid") == []


@pytest.mark.parametrize("lost", ["begin", "end"])
def test_half_a_block_takes_no_line_of_the_site_with_it(tree: Path, lost: str) -> None:
    hosts = _host.path(_api_names.HOSTS)
    _host.write(_api_names.HOSTS, "127.0.0.1 localhost\n")
    drive()
    block = hosts.read_text().partition("localhost\n")[2]
    half = hosts.read_text().replace(f"# gpuaas.slice: {lost}\n", "")
    hosts.write_text(f"{half}192.0.2.7 site\n")
    assert drive().failure is None
    rows = "127.0.0.1 localhost\n192.0.2.20\tapi.gpuaas.example\n192.0.2.7 site\n"
    assert hosts.read_text() == rows + block
    assert not drive().changed


def test_lines_of_the_site_keep_every_byte(tree: Path) -> None:
    site = b"127.0.0.1 localhost # B\xfcro\r\n"
    _host.write(_api_names.HOSTS, "")
    _host.path(_api_names.HOSTS).write_bytes(site)
    assert drive().done == ["write_block"]
    assert _host.path(_api_names.HOSTS).read_bytes().startswith(site)
    drive({})
    assert _host.path(_api_names.HOSTS).read_bytes() == site


def test_a_table_of_names_that_cannot_be_read_is_not_written_over(tree: Path) -> None:
    _host.path(_api_names.HOSTS).mkdir(parents=True)
    with pytest.raises(_change.Refusal, match="file_unreadable"):
        drive()
