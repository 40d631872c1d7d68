"""Probes of a guest over its channel: the real guest program, and guests that lie or flood."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host, _object_names
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _guest_probes, _readiness
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.covers("SLICE-3", "SLICE-5")

ONE = "23bd713b-6073-4ef7-8a51-2897e902365d"
GPU = {"gpu_compute": {"driver": "cuda", "gpus": 1}}
GOOD = {"gpus": 1, "memory_bytes": 1 << 30}

Guest = Callable[[socket.socket, dict[str, Any]], None]

# Data of tests.
RECORDED = Path(__file__).parents[4] / "data/h200"


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket on which QEMU listens, below a root that is short enough for its address."""
    with tempfile.TemporaryDirectory(dir="/tmp") as root, socket.socket(socket.AF_UNIX) as server:
        monkeypatch.setattr(_host, "ROOT", Path(root))
        path = _host.path(_object_names.channel_path(ONE, "readiness"))
        path.parent.mkdir(parents=True)
        server.bind(str(path))
        server.listen()
        yield server


def ask(
    probes: dict[str, Any] = GPU, deadline: float = 60.0, alive: Callable[[], bool] = lambda: True
) -> _readiness.Results:
    return answers_of(probes, dict.fromkeys(probes, deadline), alive)


def answers_of(
    probes: dict[str, Any],
    deadlines: dict[str, float],
    alive: Callable[[], bool] = lambda: True,
) -> _readiness.Results:
    inquiry = _readiness.Inquiry(ONE, probes, deadlines, start=time.monotonic())
    with contextlib.closing(inquiry):
        return inquiry.results(alive)


@contextlib.contextmanager
def guest(server: socket.socket, *behaviours: Guest) -> Iterator[None]:
    """A guest that has read the request, and then does anything, once for each connection."""

    def serve() -> None:
        for behaviour in behaviours:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    request = json.loads(connection.makefile("rb").readline())
                    behaviour(connection, request)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield
    thread.join(10)


def line(nonce: str, **changes: Any) -> bytes:
    answer = {"probe": "gpu_compute", "ok": True, "detail": "", "values": GOOD}
    return json.dumps({"nonce": nonce, **answer, **changes}).encode() + b"\n"


def test_an_answer_under_the_nonce_passes(channel: socket.socket) -> None:
    """Rubbish from before the connection and an old answer are passed over."""

    def answers(connection: socket.socket, request: dict[str, Any]) -> None:
        old = line("0" * 32, ok=False, values={})
        connection.sendall(b'lf a line"}\n' + old + line(request["nonce"]))

    with guest(channel, answers):
        result = ask()["gpu_compute"]
    assert (result["ok"], result["values"], result["deadline_s"]) == (True, GOOD, 60.0)


def test_the_first_answer_counts(channel: socket.socket) -> None:
    def answers(connection: socket.socket, request: dict[str, Any]) -> None:
        failed = line(request["nonce"], ok=False, detail="error 802", values={})
        connection.sendall(failed + line(request["nonce"]))

    with guest(channel, answers):
        result = ask()["gpu_compute"]
    assert (result["ok"], result["detail"]) == (False, "error 802")


def test_a_connection_that_breaks_is_made_again_under_the_same_nonce(
    channel: socket.socket,
) -> None:
    nonces = []

    def hangs_up(connection: socket.socket, request: dict[str, Any]) -> None:
        nonces.append(request["nonce"])

    def answers(connection: socket.socket, request: dict[str, Any]) -> None:
        nonces.append(request["nonce"])
        connection.sendall(line(request["nonce"]))

    with guest(channel, hangs_up, answers):
        assert ask()["gpu_compute"]["ok"]
    assert len(nonces) == 2
    assert len(set(nonces)) == 1


RDMA = {"probe": "rdma", "values": {"devices": 2, "active_ports": 1}}


@pytest.mark.parametrize(
    ("settings", "answer", "detail"),
    [
        ({"driver": "cuda", "gpus": 2}, {}, "1 GPUs compute, expected 2"),
        ({"functions": 2}, RDMA, "1 ports are active, expected 2"),
        ({"functions": 1}, RDMA, ""),
        # A card of the site's own may have a second port.
        ({"functions": 1}, RDMA | {"values": {"devices": 2, "active_ports": 2}}, ""),
    ],
)
def test_fewer_devices_than_the_slice_has_fail(
    channel: socket.socket, settings: dict[str, Any], answer: dict[str, Any], detail: str
) -> None:
    def answers(connection: socket.socket, request: dict[str, Any]) -> None:
        connection.sendall(line(request["nonce"], **answer))

    name = answer.get("probe", "gpu_compute")
    with guest(channel, answers):
        result = ask({name: settings})[name]
    assert (result["ok"], result["detail"]) == (not detail, detail)


def test_the_answers_of_an_h200_are_read(channel: socket.socket) -> None:
    recorded = (RECORDED / "readiness.jsonl").read_bytes().splitlines()
    works, hidden, no_rdma = (json.loads(row) for row in recorded)

    def answers(connection: socket.socket, request: dict[str, Any]) -> None:
        for row in (works, no_rdma):
            connection.sendall(json.dumps(row | {"nonce": request["nonce"]}).encode() + b"\n")

    def without_gpu(connection: socket.socket, request: dict[str, Any]) -> None:
        connection.sendall(json.dumps(hidden | {"nonce": request["nonce"]}).encode() + b"\n")

    probes = {"gpu_compute": {"driver": "580-server-open", "gpus": 1}, "rdma": {}}
    with guest(channel, answers):
        results = ask(probes)
    assert results["gpu_compute"]["ok"] and not results["rdma"]["ok"]
    assert results["gpu_compute"]["values"]["memory_bytes"] > 140 * 10**9
    with guest(channel, without_gpu):
        assert ask()["gpu_compute"]["detail"].endswith("CUDA_ERROR_NO_DEVICE")


HOSTILE = {
    "no answer": b"",
    "wrong nonce": line("f" * 32),
    "unknown probe": line("NONCE", probe="root_shell"),
    "probe that was not asked": line("NONCE", probe="rdma"),
    "probe that is a list": line("NONCE", probe=["gpu_compute"]),
    "not a number": line("NONCE", values={"gpus": float("nan"), "memory_bytes": 1}),
    "infinite": b'{"nonce": "NONCE", "probe": "gpu_compute", "ok": true, "detail": "",'
    b' "values": {"gpus": 1e999, "memory_bytes": 1}}\n',
    "huge": line("NONCE", values={"gpus": 10**4000, "memory_bytes": 1}),
    "negative": line("NONCE", values={"gpus": -1, "memory_bytes": 1}),
    "true for a number": line("NONCE", values={"gpus": True, "memory_bytes": 1}),
    "number in a text": line("NONCE", values={"gpus": "1", "memory_bytes": 1}),
    "other numbers": line("NONCE", values={**GOOD, "load": 1}),
    "missing number": line("NONCE", values={"gpus": 1}),
    "one for ok": line("NONCE", ok=1),
    "list": b"[1]\n",
    "deep": b"[" * 60_000 + b"\n",
    "binary": bytes(range(256)) + b"\n",
    "surrogate": line("NONCE", ok="\ud800"),
}


@pytest.mark.covers("P2")
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_answer_does_not_count(channel: socket.socket, text: bytes) -> None:
    def lies(connection: socket.socket, request: dict[str, Any]) -> None:
        connection.sendall(text.replace(b"NONCE", request["nonce"].encode()))
        connection.recv(1)

    with guest(channel, lies):
        result = ask(deadline=0.3)["gpu_compute"]
    assert (result["ok"], result["detail"]) == (False, "no answer within 0.3 s")


@pytest.mark.covers("P2")
@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        (b"x" * 4096, "a line of more than 65536 bytes from the guest"),
        (line("f" * 32, detail="x" * 65_000), "more than 1048576 bytes from the guest"),
        (b"\n", "17 lines from the guest"),
    ],
)
def test_a_flood_ends_the_reading_at_once(
    channel: socket.socket, piece: bytes, reason: str
) -> None:
    def floods(connection: socket.socket, request: dict[str, Any]) -> None:
        while True:
            connection.sendall(piece)

    begin = time.monotonic()
    with guest(channel, floods):
        result = ask(deadline=60)["gpu_compute"]
    assert not result["ok"]
    assert result["detail"].startswith(reason)
    assert time.monotonic() - begin < 30


def test_answers_of_any_size_are_bounded_together(
    channel: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_readiness, "TOTAL_BYTES", 200_000)

    def repeats(connection: socket.socket, request: dict[str, Any]) -> None:
        while True:
            connection.sendall(line(request["nonce"]))

    with guest(channel, repeats):
        result = ask({**GPU, "rdma": {}})
    assert result["gpu_compute"]["ok"]
    assert result["rdma"]["detail"] == "more than 200000 bytes from the guest"


def test_a_text_of_the_guest_is_cut_and_has_no_control_characters(channel: socket.socket) -> None:
    def answers(connection: socket.socket, request: dict[str, Any]) -> None:
        text = "\x1b[2J\u202e\nXid 79 " + "x" * 5000
        connection.sendall(line(request["nonce"], ok=False, detail=text, values={}))

    with guest(channel, answers):
        detail = ask()["gpu_compute"]["detail"]
    assert detail.startswith("[2JXid 79 x")
    assert detail.isprintable()
    assert len(detail) <= 300


def test_a_guest_is_heard_while_something_else_of_it_is_waited_for(channel: socket.socket) -> None:
    """The guest gets the request when its service starts; its answer waits for the host."""

    def answers(connection: socket.socket, request: dict[str, Any]) -> None:
        connection.sendall(line(request["nonce"]))

    deadlines, start = {"gpu_compute": 60.0}, time.monotonic()
    with contextlib.closing(_readiness.Inquiry(ONE, GPU, deadlines, start=start)) as inquiry:
        with guest(channel, answers):
            inquiry.listen(0.01)
            time.sleep(0.5)
            inquiry.listen(10)
        before = time.monotonic()
        result = inquiry.results(lambda: True)["gpu_compute"]
        assert result["ok"] and result["seconds"] <= round(before - start, 1)
        # The answer does not shorten a wait.
        inquiry.listen(0.3)
        assert time.monotonic() - before >= 0.3


@pytest.mark.covers("P2")
def test_a_guest_that_floods_meanwhile_takes_no_time_of_the_wait(channel: socket.socket) -> None:
    def floods(connection: socket.socket, request: dict[str, Any]) -> None:
        while True:
            connection.sendall(b"\n")

    deadlines = {"gpu_compute": 60.0}
    inquiry = _readiness.Inquiry(ONE, GPU, deadlines, start=time.monotonic())
    with guest(channel, floods):
        for _turn in range(5):
            inquiry.listen(0.2)
    result = inquiry.results(lambda: True)["gpu_compute"]
    assert (result["ok"], result["detail"]) == (False, "17 lines from the guest that are no answer")


def test_a_guest_that_has_ended_is_not_waited_for(channel: socket.socket) -> None:
    result = ask(deadline=60, alive=lambda: False)["gpu_compute"]
    assert (result["ok"], result["detail"]) == (False, "the guest's QEMU has ended")


def test_each_probe_has_its_own_deadline(tree: Path) -> None:
    """Nothing listens at all."""
    begin = time.monotonic()
    result = answers_of({**GPU, "rdma": {}}, {"gpu_compute": 0.2, "rdma": 0.6})
    assert [row["ok"] for row in result.values()] == [False, False]
    assert result["gpu_compute"]["detail"] == "no answer within 0.2 s"
    assert 0.6 <= time.monotonic() - begin < 30


documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@pytest.mark.covers("P2")
@given(
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(("probe", "ok", "detail", "values"), documents),
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_document_of_a_guest_breaks_the_reader(document: dict[str, Any]) -> None:
    exchange = _readiness._Exchange(ONE, GPU, {})
    text = json.dumps({"nonce": exchange._nonce, "probe": "gpu_compute", **document}).encode()
    parsed = exchange._parsed(text)
    assert parsed is None or parsed[0] == "gpu_compute"


@contextlib.contextmanager
def program(channel: socket.socket) -> Iterator[threading.Event]:
    """The guest program as a process; the event is set once it has said something. A terminal
    stands for the virtio port, joined to the socket as QEMU joins both.
    """
    master, slave = os.openpty()
    tty.setraw(slave)
    stop, answered = threading.Event(), threading.Event()

    def join() -> None:
        connection, _ = channel.accept()
        with connection:
            while not stop.is_set():
                for ready in select.select([master, connection], [], [], 0.1)[0]:
                    if ready == master:
                        connection.sendall(os.read(master, 4096))
                        answered.set()
                    elif data := connection.recv(4096):
                        os.write(master, data)
                    else:
                        return

    argv = [sys.executable, "-I", _guest_probes.__file__, os.ttyname(slave)]
    process = subprocess.Popen(argv)
    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    try:
        yield answered
    finally:
        stop.set()
        process.kill()
        process.wait()
        thread.join()
        os.close(master)
        os.close(slave)


def test_the_guest_program_answers_each_probe(channel: socket.socket) -> None:
    """This machine has no GPU and no RDMA tools, and a server to connect to."""
    with socket.create_server(("127.0.0.1", 0)) as outside, program(channel):
        target = f"127.0.0.1:{outside.getsockname()[1]}"
        result = ask({"egress": {"target": target}, **GPU, "rdma": {}}, deadline=60)
    assert result["egress"]["ok"], result
    assert result["egress"]["values"]["seconds"] < 10
    assert not result["gpu_compute"]["ok"]
    assert "libcuda.so.1" in result["gpu_compute"]["detail"]
    assert not result["rdma"]["ok"]
    assert "ibv_devinfo" in result["rdma"]["detail"]


def test_a_request_that_waited_for_the_guest_has_the_time_that_is_left(
    channel: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host repeats its request while the guest boots; the guest takes the newest."""
    monkeypatch.setattr(_readiness, "_RESEND_S", 0.5)
    requests: list[dict[str, Any]] = []

    def answers(connection: socket.socket, request: dict[str, Any]) -> None:
        time.sleep(2)
        requests.append(request)
        requests.extend(map(json.loads, connection.recv(65536).splitlines()))
        connection.sendall(line(request["nonce"]))

    with guest(channel, answers):
        assert ask(deadline=60)["gpu_compute"]["ok"]
    left = [request["probes"]["gpu_compute"]["within_s"] for request in requests]
    assert left[0] <= 60 and left[0] - left[-1] > 0.4 and left == sorted(left, reverse=True)
    assert len({request["nonce"] for request in requests}) == 1


def test_what_may_still_pass_is_tried_until_its_deadline(channel: socket.socket) -> None:
    with socket.socket() as late, program(channel) as answered:
        late.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{late.getsockname()[1]}"

        def listen() -> None:
            """Begin after the first try, which has ended when the other probe answers."""
            assert answered.wait(90)
            time.sleep(1)
            late.listen()

        listening = threading.Thread(target=listen)
        listening.start()
        result = ask({"egress": {"target": target}, **GPU}, deadline=120)
        listening.join()
    assert result["egress"]["ok"], result
    # Another probe does not wait for it, and a lasting failure is not tried again.
    assert result["gpu_compute"]["seconds"] <= result["egress"]["seconds"]
    with socket.socket() as never, program(channel):
        never.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{never.getsockname()[1]}"
        result = ask({"egress": {"target": target}}, deadline=_guest_probes._MARGIN_S + 5)
    # The reason comes before the deadline.
    assert "ConnectionRefusedError" in result["egress"]["detail"]
    assert result["egress"]["seconds"] >= 5


class Library:
    """NVIDIA's driver library with two GPUs of 1 GiB. results: by function, 0 for success."""

    def __init__(self, memory: bytes = b"\xa5", **results: int) -> None:
        self._memory, self._results = memory, results

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._called(name, *arguments)

    def _called(self, name: str, *arguments: Any) -> int:
        if name == "cuGetErrorName":
            arguments[1]._obj.value = b"CUDA_ERROR_SYSTEM_NOT_READY"
        elif name == "cuDeviceGetCount":
            arguments[0]._obj.value = 2
        elif name == "cuDeviceTotalMem_v2":
            arguments[0]._obj.value = 1 << 30
        elif name == "cuMemcpyDtoH_v2":
            arguments[0].raw = self._memory * arguments[2].value
        return self._results.get(name, 0)


@pytest.mark.parametrize(
    ("library", "detail"),
    [
        (Library(), ""),
        # nvidia-smi passes meanwhile, as on a board without a wait for its Fabric Manager.
        (Library(cuInit=802), "cuInit: error 802 CUDA_ERROR_SYSTEM_NOT_READY"),
        (Library(b"\0"), "GPU 0 does not keep what is written to its memory"),
    ],
)
def test_a_gpu_computes_if_cuda_starts_and_its_memory_keeps(
    monkeypatch: pytest.MonkeyPatch, library: Library, detail: str
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: library)
    monkeypatch.setattr(_guest_probes, "_SAMPLE_BYTES", 4096)
    values = {} if detail else {"gpus": 2, "memory_bytes": 2 << 30}
    answer = {"ok": not detail, "detail": detail, "values": values}
    again = {"again": True} if "SYSTEM_NOT_READY" in detail else {}
    assert _guest_probes.run("gpu_compute", {"driver": "580-server-open"}) == answer | again


def test_a_stand_in_that_only_keeps_what_is_written_does_not_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_guest_probes, "_DEVICES", tmp_path)
    for address, device in (("0000:01:00.0", "0x11e8"), ("0000:02:00.0", "0x1000")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "vendor").write_text("0x1234\n")
        (tmp_path / address / "device").write_text(f"{device}\n")
        (tmp_path / address / "resource0").write_bytes(bytes(4096))
        (tmp_path / address / "config").write_bytes(bytes(64))
    answer = _guest_probes.run("gpu_compute", {"driver": "edu"})
    assert (answer["ok"], answer["detail"]) == (False, "0000:01:00.0 computes 10 for 10!")


# Output of ibv_devinfo (rdma-core: libibverbs/examples/devinfo.c), shortened.
DEVINFO = """\
hca_id:\tmlx5_0
\ttransport:\t\t\tInfiniBand (0)
\tphys_port_cnt:\t\t\t1
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_ACTIVE (4)

hca_id:\tmlx5_1
\ttransport:\t\t\tInfiniBand (0)
\tphys_port_cnt:\t\t\t1
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_{second}

"""


@pytest.mark.parametrize(
    ("second", "end", "detail"),
    [
        ("ACTIVE (4)", 0, ""),
        ("INIT (2)", 0, "2 RDMA devices, 1 of 2 ports active"),
        ("ACTIVE (4)", 255, "ibv_devinfo ends with 255: Failed to get IB devices list"),
    ],
)
def test_rdma_devices_and_active_ports_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: str, end: int, detail: str
) -> None:
    output = DEVINFO.format(second=second)
    program = tmp_path / "ibv_devinfo"
    program.write_text(
        f"#!/bin/sh\nprintf '%s' '{output}'\necho Failed to get IB devices list >&2\nexit {end}\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    answer = _guest_probes.run("rdma", {"functions": 2})
    assert (answer["ok"], answer["detail"]) == (not detail, detail)
    assert answer["values"] == ({} if detail else {"devices": 2, "active_ports": 2})
    # The subnet manager may bring a link up later, and no wait makes a driver answer.
    assert answer.get("again", False) == ("ports active" in detail)
    none = program.read_text().replace("PORT_ACTIVE", "PORT_DOWN")
    program.write_text(none.replace("exit 255", "exit 0"))
    assert _guest_probes.run("rdma", {})["detail"] == "2 RDMA devices, 0 of 1 ports active"


def test_a_repeated_request_gets_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def apart(probes: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        ran.extend(probes)
        yield from ((name, {"ok": True, "detail": "", "values": {}}) for name in probes)

    monkeypatch.setattr(_guest_probes, "_apart", apart)
    service, sent = _guest_probes.Service(), []
    request = json.dumps({"nonce": "a", "probes": {"rdma": {}, "unknown": {}}}).encode()
    for text in (b"rubbish", b"{}", request, request):
        service.handle(text, sent.append)
    assert ran == ["rdma"]
    assert len(sent) == 2
    assert sent[0] == sent[1]


# Runs probes that are given by their code. Processes share its output, so each line is one write:
# with PYTHONUNBUFFERED `print` takes two.
APART = """\
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
import _guest_probes as guest
guest._TIMEOUT_S = float(sys.argv[3])
port = os.open("/dev/null", os.O_RDONLY)

def hang(_settings):
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(600)

def crash(_settings):
    os.abort()

def quick(_settings):
    try:
        os.fstat(port)
    except OSError:
        return {"seconds": 1}

def late(_settings):
    time.sleep(3)
    return {}

guest.PROBES = {name: globals()[name] for name in sys.argv[2].split(",")}
for name, result in guest._apart(dict.fromkeys(guest.PROBES, {})):
    os.write(1, json.dumps([name, result]).encode() + b"\\n")
"""


def apart(probes: str, limit: str) -> list[str]:
    argv = [sys.executable, "-c", APART, str(Path(_guest_probes.__file__).parent), probes, limit]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()


def test_probes_run_side_by_side_and_keep_no_file_of_the_service() -> None:
    """A waiting probe delays no other probe. A hanging probe must not hold the port."""
    answers = [json.loads(text) for text in apart("late,quick", "60")]
    passed = {"ok": True, "detail": ""}
    assert answers == [
        ["quick", {**passed, "values": {"seconds": 1}}],
        ["late", {**passed, "values": {}}],
    ]


@pytest.mark.covers("P2")
def test_a_probe_that_hangs_or_crashes_fails_alone() -> None:
    lines = apart("hang,crash,quick", "10")
    # A busy machine may not have started it by then.
    pids = [text for text in lines if text.isdecimal()]
    answers = (json.loads(text) for text in lines if text not in pids)
    details = {name: result["detail"] for name, result in answers}
    late = "no answer within 10 s"
    assert details == {"quick": "", "crash": "ended without an answer", "hang": late}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):
            assert Path(f"/proc/{pid}/cmdline").read_text() == "", "it runs on"


def test_the_probes_of_host_and_guest_are_the_same() -> None:
    assert set(_guest_probes.PROBES) == set(_readiness.PROBES) == set(_readiness.REMEDIES)
