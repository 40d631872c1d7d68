"""Readiness gate, against a DHCP lease file, a neighbour table and a real socket."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _object_names
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _dnsmasq
from ansible_collections.gpuaas.slice.plugins.modules import slice_ready as module

from reconciler.runs import contract
from tests.unit.reconciler.benchmark.sshd import Boot, boot

__all__ = ["boot"]
pytestmark = pytest.mark.covers("SLICE-5")

ONE = "23bd713b-6073-4ef7-8a51-2897e902365d"
MAC, IP = "52:54:00:64:00:0d", "10.100.0.13"
PARAMS: dict[str, Any] = {
    "allocation_id": ONE,
    "mac": MAC,
    "ip": IP,
    "bridge": "ovsbr0",
    "port": 22,
    "deadline": 5,
    "guest_runtime": {},
    "gpus": 1,
    "functions": 0,
    "judged": True,
    "tenant_code": False,
}
KEY = "ssh-ed25519 " + "A" * 68


class Guest:
    """Visible state of a guest, on a clock that jumps a second at each read."""

    def __init__(self, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tree = tree
        self.put(f"run/libvirt/qemu/{_object_names.domain_name(ONE)}.pid", "77")
        (tree / "proc/77").mkdir(parents=True)
        clock = itertools.count()
        monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
        monkeypatch.setattr(module.time, "sleep", lambda _seconds: None)
        monkeypatch.setattr(module._libvirt, "state", lambda _name: module._libvirt.State("paused"))
        monkeypatch.setattr(module, "speaks_ssh", lambda _ip, _port: self.ssh)
        monkeypatch.setattr(module, "host_keys", lambda _ip, _port: self.keys)
        self.ssh, self.keys = False, [KEY]

    def put(self, path: str, text: str) -> None:
        file = self.tree / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def lease(self, mac: str, ip: str) -> None:
        self.put(_dnsmasq.LEASES, f"1 {mac} {ip} trainer *\n")


@pytest.fixture
def guest(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Guest:
    return Guest(tree, monkeypatch)


class Inquiry:
    """Probes of a guest that answers at once. asked: the settings and deadlines of each inquiry."""

    asked: list[tuple[Any, Any]]
    results_of: dict[str, Any]

    def __init__(self, _id: str, probes: Any, deadlines: Any, *, start: float) -> None:
        self.asked.append((probes, deadlines))
        self.deadlines = deadlines

    def listen(self, _seconds: float) -> None:
        self.asked.append(("listened", None))

    def results(self, alive: Any) -> dict[str, Any]:
        assert alive()
        row = {**self.results_of, "seconds": 3.0}
        return {"gpu_compute": {**row, "deadline_s": self.deadlines["gpu_compute"]}}

    def close(self) -> None:
        pass


@pytest.fixture
def inquiry(monkeypatch: pytest.MonkeyPatch) -> type[Inquiry]:
    monkeypatch.setattr(module._readiness, "Inquiry", Inquiry)
    Inquiry.asked, Inquiry.results_of = [], {"ok": True, "detail": "", "values": {}}
    return Inquiry


def code(readiness: dict[str, Any]) -> str:
    rows = module.probes(PARAMS, readiness, None)
    refusal = module.verdict(PARAMS, readiness | {"probes": rows})
    return refusal.code if refusal else ""


def test_ready(guest: Guest) -> None:
    guest.lease(MAC, IP)
    guest.ssh = True
    facts = module.wait(PARAMS, once=False)
    assert (facts["lease_state"], facts["actual_ip"], code(facts)) == ("bound", IP, "")


def test_the_host_key_is_recorded_and_ssh_without_one_is_not_ready(guest: Guest) -> None:
    guest.lease(MAC, IP)
    guest.ssh = True
    assert module.wait(PARAMS, once=True)["host_keys"] == [KEY]
    guest.keys = []
    facts = module.wait(PARAMS, once=True)
    assert (facts["ssh_ready"], facts["host_keys"], code(facts)) == (False, [], "readiness_failed")


@pytest.mark.parametrize(
    ("ok", "tenant_code", "code"),
    [(True, True, ""), (False, True, "readiness_failed"), (False, False, "probe_failed")],
)
def test_a_probe_in_the_guest_decides_with_its_name_and_remedy(
    guest: Guest, inquiry: type[Inquiry], ok: bool, tenant_code: bool, code: str
) -> None:
    """A guest in which no code of its tenant has run fails by the site's doing."""
    guest.lease(MAC, IP)
    guest.ssh = True
    detail = "" if ok else "cuInit: error 802"
    inquiry.results_of = {"ok": ok, "detail": detail, "values": {}}
    runtime = {"source": "baked", "driver": "570-server", "probes": {"gpu_compute": 900, "rdma": 2}}
    given = {"gpus": 2, "functions": 2, "tenant_code": tenant_code}
    module_run = Module(check_mode=False, guest_runtime=runtime, **given)
    _change.attend(module_run, module.watch)
    # The deadline of the launch is a limit of every probe.
    asked_of = {"gpu_compute": {"driver": "570-server", "gpus": 2}, "rdma": {"functions": 2}}
    assert inquiry.asked == [(asked_of, {"gpu_compute": 5, "rdma": 2})]
    rows = module_run.answer["readiness"]["probes"]
    names = ["address", "lease", "ssh", "gpu_compute"]
    assert [(row["name"], row["ok"]) for row in rows] == [(n, True) for n in names[:3]] + [
        ("gpu_compute", ok)
    ]
    assert module_run.answer["failed"] is not ok
    if not ok:
        error = module_run.answer["error"]
        assert (error["code"], error["found"]) == (code, "gpu_compute: cuInit: error 802")
        assert error["expected"] == "gpu_compute within 5 s"
        assert "driver" in error["remedy"]
    inquiry.asked.clear()
    checked = Module(check_mode=True, guest_runtime=runtime)
    _change.attend(checked, module.watch)
    assert not inquiry.asked


def test_the_probes_are_asked_while_ssh_is_waited_for(
    guest: Guest, inquiry: type[Inquiry], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as the guest has its address. Their results count only if the guest is reachable."""
    runtime = {"driver": "570-server", "probes": {"gpu_compute": 900}}
    sleeps: list[float] = []
    monkeypatch.setattr(module.time, "sleep", sleeps.append)
    for address, listened in (("10.100.0.99", False), (IP, True)):
        guest.lease(MAC, address)
        silent = Module(check_mode=False, guest_runtime=runtime)
        _change.attend(silent, module.watch)
        assert silent.answer["error"]["code"] == "readiness_failed"
        assert [row["name"] for row in silent.answer["readiness"]["probes"]] == [*module._OUTSIDE]
        assert (("listened", None) in inquiry.asked, bool(sleeps)) == (listened, not listened)
        sleeps.clear()
    # A guest that has run before is asked when it is reachable: it may have no probes any more.
    inquiry.asked.clear()
    _change.attend(Module(check_mode=False, guest_runtime=runtime, judged=False), module.watch)
    assert ("listened", None) not in inquiry.asked


def test_a_guest_that_answers_does_not_shorten_the_pause(
    guest: Guest, inquiry: type[Inquiry], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a guest could make the host probe its SSH without pause."""
    reads = itertools.count()
    sleeps: list[float] = []
    monkeypatch.setattr(module.time, "monotonic", lambda: next(reads) / 100)
    monkeypatch.setattr(module.time, "sleep", sleeps.append)
    guest.lease(MAC, IP)
    runtime = {"driver": "570-server", "probes": {"gpu_compute": 900}}
    _change.attend(Module(check_mode=False, guest_runtime=runtime, deadline=1), module.watch)
    assert ("listened", None) in inquiry.asked
    assert min(sleeps) == pytest.approx(module._CLOSE_SECONDS - 0.01)


def test_a_guest_with_its_address_is_looked_at_often_until_it_speaks(
    guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer versions of sshd refuse an address that connects often without a login."""
    sleeps: list[float] = []
    monkeypatch.setattr(module.time, "sleep", sleeps.append)
    module.wait(PARAMS, once=False)
    guest.lease(MAC, IP)
    module.wait(PARAMS, once=False)
    guest.ssh, guest.keys = True, []
    module.wait(PARAMS, once=False)
    assert [pause for pause, _same in itertools.groupby(sleeps)] == [1.0, 0.2, 1.0]


def test_a_later_start_reports_the_probes_and_fails_by_none(
    guest: Guest, inquiry: type[Inquiry]
) -> None:
    """The tenant is root in the guest and may have removed them; that costs two minutes."""
    guest.lease(MAC, IP)
    guest.ssh = True
    inquiry.results_of = {"ok": False, "detail": "no answer within 121 s", "values": {}}
    runtime = {"driver": "570-server", "probes": {"gpu_compute": 900}}
    for deadline, longest in ((900, 121), (100, 100)):
        later = Module(check_mode=False, guest_runtime=runtime, judged=False, deadline=deadline)
        _change.attend(later, module.watch)
        (_settings, deadlines) = inquiry.asked.pop()
        assert (later.answer["failed"], deadlines) == (False, {"gpu_compute": longest})
        # The contract of runs refuses parts of a second.
        assert type(deadlines["gpu_compute"]) is int
        assert not later.answer["readiness"]["probes"][-1]["ok"]
    guest.keys = []
    later = Module(check_mode=False, guest_runtime=runtime, judged=False)
    _change.attend(later, module.watch)
    assert later.answer["error"]["code"] == "readiness_failed"


@pytest.mark.parametrize("probes", [{"root_shell": 5}, {"rdma": 0}, {"rdma": "x"}])
def test_an_unknown_probe_or_deadline_is_refused(guest: Guest, probes: dict[str, Any]) -> None:
    module_run = Module(check_mode=False, guest_runtime={"probes": probes})
    _change.attend(module_run, module.watch)
    assert module_run.answer["error"]["code"] == "spec_invalid"


def test_a_deadline_without_a_lease(guest: Guest) -> None:
    facts = module.wait(PARAMS, once=False)
    assert (facts["lease_state"], facts["actual_ip"]) == ("none", "")
    assert code(facts) == "readiness_failed"
    assert facts["seconds"] >= 5


def test_another_address_is_a_mismatch(guest: Guest) -> None:
    guest.lease(MAC, "10.100.0.99")
    guest.ssh = True
    facts = module.wait(PARAMS, once=False)
    assert (facts["lease_state"], facts["actual_ip"]) == ("mismatch", "10.100.0.99")
    assert code(facts) == "readiness_failed"


def test_an_address_without_a_lease_is_only_offered(guest: Guest) -> None:
    guest.put("proc/net/arp", f"head\n{IP} 0x1 0x2 {MAC} * ovsbr0\n")
    guest.ssh = True
    assert module.wait(PARAMS, once=True)["lease_state"] == "offered"


def test_a_qemu_that_is_gone_ends_the_wait(guest: Guest) -> None:
    (guest.tree / "proc/77").rmdir()
    facts = module.wait({**PARAMS, "deadline": 10**9}, once=False)
    assert not facts["domain_active"]
    assert code(facts) == "readiness_failed"


def test_one_look_in_check_mode(guest: Guest) -> None:
    assert module.wait({**PARAMS, "deadline": 10**9}, once=True)["seconds"] <= 1


class Module:
    """The parts of an AnsibleModule that the driver needs."""

    def __init__(self, *, check_mode: bool, **changes: Any) -> None:
        self.params = {**PARAMS, **changes}
        self.check_mode = check_mode
        self.answer: dict[str, Any] = {}

    def exit_json(self, **values: Any) -> None:
        self.answer = {"failed": False, **values}

    def fail_json(self, **values: Any) -> None:
        self.answer = {"failed": True, **values}


@pytest.mark.parametrize(("check_mode", "seconds"), [(True, 1), (False, 5)])
def test_the_driver_says_how_long_to_look(guest: Guest, check_mode: bool, seconds: int) -> None:
    module_run = Module(check_mode=check_mode)
    _change.attend(module_run, module.watch)
    assert (module_run.answer["failed"], module_run.answer["error"]["code"]) == (
        True,
        "readiness_failed",
    )
    readiness = module_run.answer["readiness"]
    assert (readiness["seconds"], readiness["console_tail"]) == (seconds, [])
    assert readiness["domain_state"] == "paused"


def test_a_silent_libvirt_takes_no_other_evidence_away(
    guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(_name: str) -> None:
        raise Refusal("command_failed", expected="an answer", found="none", remedy="look")

    monkeypatch.setattr(module._libvirt, "state", silent)
    guest.put(_object_names.console_path(ONE), "Kernel panic\n")
    module_run = Module(check_mode=False)
    _change.attend(module_run, module.watch)
    readiness = module_run.answer["readiness"]
    assert module_run.answer["error"]["code"] == "readiness_failed"
    assert (readiness["domain_state"], readiness["console_tail"]) == ("unknown", ["Kernel panic"])


def test_a_bad_address_is_refused_before_any_look(guest: Guest) -> None:
    module_run = Module(check_mode=False, mac="no mac")
    _change.attend(module_run, module.watch)
    assert module_run.answer["failed"]
    assert "readiness" not in module_run.answer


def test_the_consoles_end_is_shown_without_control_characters(guest: Guest) -> None:
    guest.put(_object_names.console_path(ONE), "boot\r\n\x1b[0mlogin:\n" + "x\n" * 50)
    tail = module.console_tail(ONE)
    assert len(tail) == 40
    assert "\x1b" not in "".join(tail)


@pytest.mark.covers("I13")
def test_a_guest_that_writes_long_lines_on_its_console_fails_by_its_tenant(guest: Guest) -> None:
    """A result that is too large would be no result: its slots would wait for a person, and the
    launch would not count for its project.
    """
    guest.put(_object_names.console_path(ONE), ("\U0001f980" * 50_000 + "\n") * 50)
    module_run = Module(check_mode=False)
    _change.attend(module_run, module.watch)
    answer = module_run.answer
    result = {
        "schema": 1,
        "playbook": "provision_slice",
        "ok": False,
        "step": "Wait until it is ready",
        "error": answer["error"],
        "evidence": {"readiness": answer["readiness"], "disk_written": True, "leftovers": True},
    }
    assert contract.check_result(result)["error"]["code"] == "readiness_failed"


@pytest.mark.parametrize(("banner", "ready"), [(b"SSH-2.0-x\r\n", True), (b"HTTP/1.1\r\n", False)])
def test_only_an_ssh_server_counts(
    monkeypatch: pytest.MonkeyPatch, banner: bytes, ready: bool
) -> None:
    monkeypatch.setattr(module, "_CONNECT_SECONDS", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(banner)

        thread = threading.Thread(target=serve)
        thread.start()
        assert module.speaks_ssh("127.0.0.1", server.getsockname()[1]) is ready
        thread.join()


def test_a_closed_port_is_not_ready() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert not module.speaks_ssh("127.0.0.1", port)


def test_the_guests_host_keys_are_read_over_its_port(boot: Boot) -> None:
    guest = boot("guest", login="none")
    assert module.host_keys("127.0.0.1", guest.port) == [guest.key]


def test_a_guest_that_sends_its_keys_without_end_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """ssh-keyscan waits as long as anything comes. No key is the tenant's doing, a program that
    hangs would be the host's.
    """
    monkeypatch.setattr(module, "_SCAN_SECONDS", 3)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                # A packet of which most is still to come.
                connection.sendall(b"SSH-2.0-x\r\n" + (30_004).to_bytes(4, "big"))
                while True:
                    connection.sendall(b"\x04")
                    time.sleep(0.2)

        thread = threading.Thread(target=serve)
        thread.start()
        assert module.host_keys("127.0.0.1", server.getsockname()[1]) == []
        thread.join()


def test_a_guest_without_ssh_has_no_keys() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert module.host_keys("127.0.0.1", closed.getsockname()[1]) == []
