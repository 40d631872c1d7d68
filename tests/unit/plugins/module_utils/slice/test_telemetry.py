"""Telemetry of slices on a real socket: a host's measurements, and the reports of lying guests."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_units,
    _command,
    _free_space,
    _host,
    _host_snapshot,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _refusals,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _dnsmasq,
    _guest_telemetry,
    _guest_values,
    _telemetry,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from reconciler.model.slice_telemetry import GuestValues, Snapshot
from tests.conftest import Script

pytestmark = pytest.mark.covers("SLICE-11")

A = "23bd713b-6073-4ef7-8a51-2897e902365d"
B = "7c0e9c5e-0f55-4d0e-9d2f-5f0c2a9f4c11"
STATS = (
    *("virsh", "--connect", "qemu:///system", "domstats", "--state", "--cpu-total", "--balloon"),
    *("--vcpu", "--block", "--nowait"),
)
PORTS = (
    *("ovs-vsctl", "--timeout=10", "--format=json"),
    *("--columns=name,statistics,ingress_policing_rate", "list", "Interface"),
    *("--", "--columns=name,qos", "list", "Port"),
)
HONEST = {"uptime_s": 12.5, "cpus": 4, "load_1": 0.5, "memory_total_bytes": 1 << 30}


def domain(key: str, state: int = 1) -> str:
    """As `virsh domstats` of libvirt 9 prints it, shortened."""
    return (
        f"Domain: '{_object_names.domain_name(key)}'\n"
        f"  state.state={state}\n  state.reason=1\n  cpu.time=2500000000\n  cpu.user=10000000\n"
        "  balloon.current=2097152\n  balloon.maximum=2097152\n  vcpu.current=2\n"
        "  vcpu.maximum=2\n  vcpu.0.state=1\n  block.count=2\n  block.0.name=vda\n"
        "  block.0.rd.reqs=10\n  block.0.rd.bytes=4096\n  block.0.wr.reqs=3\n"
        "  block.0.wr.bytes=512\n  block.1.rd.bytes=4\n  block.1.rd.reqs=1\n\n"
    )


def ports(*keys: str, rate: int = 0, shaped: bool = False) -> str:
    counters = [["rx_bytes", 7], ["rx_packets", 1], ["tx_bytes", 9], ["tx_dropped", 0]]
    names = [_object_names.port_name(key) for key in keys]
    rows = [[name, ["map", counters], rate] for name in names]
    qos = ["uuid", "c1b6ca3b-c32d-480d-b6d9-c8ddb6e15cab"] if shaped else ["set", []]
    tables = ([*rows, ["ovsbr0", ["map", []], 0]], [[name, qos] for name in names])
    return "\n".join(json.dumps({"data": table, "headings": []}) for table in tables)


class Qemu:
    """QEMU's end of a channel: it listens, and passes on the guest's output."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(1)
        self.host: socket.socket | None = None

    def write(self, data: bytes) -> None:
        if self.host is None:
            self.host, _ = self.listener.accept()
            self.host.setblocking(False)
        self.host.send(data)

    def close(self) -> None:
        """Close the channel, as at the end of QEMU."""
        for end in filter(None, (self.host, self.listener)):
            end.close()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A root whose path leaves room for a socket's name, which has at most 107 bytes."""
    root = Path(tempfile.mkdtemp(prefix="t"))
    monkeypatch.setattr(_host, "ROOT", root)
    yield root
    shutil.rmtree(root)


def qemu(key: str) -> Qemu:
    return Qemu(_host.path(_object_names.channel_path(key, _telemetry.CHANNEL)))


def snapshot() -> dict[str, Any]:
    text = _host.path(_telemetry.SNAPSHOT).read_bytes()
    accepted = Snapshot.read(text)
    assert isinstance(accepted, Snapshot), accepted
    parts = {part["allocation_id"]: part for part in json.loads(text)["slices"]}
    assert list(parts) == [part.allocation_id for part in accepted.slices]
    return parts


def line(**values: Any) -> bytes:
    return json.dumps({**HONEST, **values}).encode() + b"\n"


def test_what_the_host_measures_without_the_guest(host: Path, script: Script) -> None:
    script.on(*STATS, out=domain(A) + domain(B, 5) + "Domain: 'of-the-site'\n  state.state=1\n")
    script.on(*PORTS, out=ports(A))
    mac, ip = "52:54:00:64:00:0a", "10.100.0.10"
    _host.write(f"{_dnsmasq.DIRECTORY}/{A}", f"{mac},id:*,{ip},12h\n")
    _host.write(_dnsmasq.LEASES, f"{int(time.time()) + 60} {mac} {ip} * *\n")
    _telemetry.Collector().round({}, 0)
    parts = snapshot()
    assert set(parts) == {A, B}
    assert parts[A] == {
        "allocation_id": A,
        "guest": None,
        "host": {
            "state": "running",
            "cpu_s": 2.5,
            "vcpus": 2,
            "memory_bytes": 2 << 30,
            "disk_read_bytes": 4100,
            "disk_written_bytes": 512,
            "disk_reads": 11,
            "disk_writes": 3,
            # Packets sent by the guest are received by the switch.
            "sent_bytes": 7,
            "sent_packets": 1,
            "received_bytes": 9,
            "received_dropped_packets": 0,
            "address_leased": True,
        },
    }
    assert parts[B]["host"]["state"] == "shut off"
    _host.write(_dnsmasq.LEASES, f"{int(time.time()) - 1} {mac} {ip} * *\n")
    _telemetry.Collector().round({}, 0)
    assert snapshot()[A]["host"]["address_leased"] is False


@pytest.mark.parametrize("large", [False, True])
def test_where_the_memory_of_a_slice_is(host: Path, script: Script, *, large: bool) -> None:
    """Files as Linux 6.1 writes them, shortened. Guests on small pages are counted by the control
    group; numa_maps, whose reader counts each page, is asked for large ones only.
    """
    script.on(*STATS, out=domain(A) + domain(B, 5))
    script.on(*PORTS, out=ports(A))
    scope = "/machine.slice/machine-qemu\\x2d1\\x2dgpuaas\\x2d23bd713b.scope"
    files = {
        f"/run/libvirt/qemu/{_object_names.domain_name(A)}.pid": "77",
        "/proc/77/status": f"VmRSS:\t 900 kB\nHugetlbPages:\t {3 << 20 if large else 0} kB\n",
        "/proc/77/cgroup": f"0::{scope}/libvirt/emulator\n",
        f"/sys/fs/cgroup{scope}/memory.numa_stat": (
            "anon N0=4096 N1=8192\nfile N0=1 N1=1\nshmem N0=0 N1=100\nanon_thp N0=9 N1=9\n"
        ),
        "/proc/77/numa_maps": (
            "7f0 bind:1 file=/anon_hugepage\\040(deleted) huge anon=3 dirty=3 N0=1 N1=2"
            " kernelpagesize_kB=1048576\n"
            "7f1 default anon=1 dirty=1 N0=1 kernelpagesize_kB=4\n"
        ),
    }
    for path, text in files.items():
        _host.write(path, text)
    _telemetry.Collector().round({}, 0)
    slices = snapshot()
    measured = slices[A]["host"]
    huge = 1 << 30 if large else 0
    assert measured["large_pages_bytes"] == 3 * huge
    assert measured["node_memory_bytes"] == [4096 + huge, 8292 + 2 * huge]
    # A stopped slice has no memory.
    assert "node_memory_bytes" not in slices[B]["host"]


def test_a_source_that_fails_is_named_and_costs_the_others_nothing(
    host: Path, script: Script
) -> None:
    script.on(*STATS, out=domain(A))
    script.on(*PORTS, rc=1, err="database connection failed")
    _telemetry.Collector().round({}, 0)
    assert json.loads(_host.read(_telemetry.SNAPSHOT) or "")["problems"] == ["switch"]
    assert snapshot()[A]["host"]["cpu_s"] == 2.5


@pytest.mark.covers("SLICE-8")
def test_what_only_drift_detection_repairs_is_named(host: Path, script: Script) -> None:
    script.on(*STATS, out=domain(A) + domain(B))
    for limit in ({"rate": 1000, "shaped": True}, {"rate": 1000}, {"rate": 1000, "shaped": True}):
        script.on(*PORTS, out=ports(A, B, **limit))  # type: ignore[arg-type]
    network = {"bridge": "ovsbr0", "address": "10.100.0.1/24", "subnet": "10.100.0.0/24"}
    for path in (_boot_units.NETWORK.path, _boot_units.NETWORK.settings_path):
        _host.write(path, "{}")
    _host.write(_baseline_files.DNSMASQ, _baseline_files.dnsmasq(network))
    _host.write(_baseline_files.SYSCTL, _baseline_files.SYSCTLS)
    record = _host_snapshot.file_of(_host_snapshot.GPU_SERVICES)
    _host.write(record, '{"dcgm.service": {"active": true, "file": "enabled"}}')
    active, full = ["gpuaas-slice-network-baseline.service"], list[Refusal]()

    def run(argv: list[str], **options: Any) -> _command.Result:
        if argv[:2] != ["systemctl", "show"]:
            return script.run(argv, **options)
        names = argv[argv.index("--") + 1 :]
        states = ["active" if name in active else "inactive" for name in names]
        return _command.Result(0, "\n\n".join(f"ActiveState={state}" for state in states), "")

    collector = _telemetry.Collector()

    def differs() -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_command, "run", run)
            patch.setattr(_refusals, "rows", lambda _settings: [])
            patch.setattr(_free_space, "full", lambda: full)
            collector.round(network, 0)
        assert snapshot()
        return list(json.loads(_host.read(_telemetry.SNAPSHOT) or "")["differs"])

    assert differs() == []
    assert differs() == ["limit_missing"]
    active[:] = ["dcgm.service"]
    assert differs() == ["guardian_stopped", "gpu_service_active"]
    _host.write(_baseline_files.DNSMASQ, "# edited\n")
    for code in ("host_read_only", "host_disk_full", "host_disk_full"):
        full.append(Refusal(code, expected="a", found="b", remedy="c"))
    assert differs()[2:] == ["network_file", "host_disk_full", "host_read_only"]
    _host.write(record, "{")
    assert differs() == []
    assert json.loads(_host.read(_telemetry.SNAPSHOT) or "")["problems"] == ["baseline"]
    _host.remove(record)
    full.clear()
    active[:] = ["gpuaas-slice-network-baseline.service"]
    _host.write(_baseline_files.DNSMASQ, _baseline_files.dnsmasq(network))
    assert differs() == []
    # A guardian without its settings restores nothing, and reports no error itself.
    _host.write(_boot_units.FABRIC.path, "x")
    assert differs() == ["guardian_stopped", "network_file"]
    active.append(_boot_units.FABRIC.service)
    assert differs() == ["network_file"]
    # A loss of power may leave empty settings.
    _host.write(_boot_units.FABRIC.settings_path, "")
    assert differs() == ["network_file"]
    _host.write(_boot_units.FABRIC.settings_path, "{}")
    assert differs() == []
    network.clear()
    assert differs() == ["network_file"]


@pytest.fixture
def pair(host: Path, script: Script) -> Iterator[tuple[_telemetry.Collector, Qemu, Qemu]]:
    """Two running slices with their channels, connected."""
    script.on(*STATS, out=domain(A) + domain(B)).on(*PORTS, out=ports(A, B))
    collector, guests = _telemetry.Collector(), (qemu(A), qemu(B))
    collector.round({}, 0)
    collector.round({}, 1)
    yield (collector, *guests)
    collector._follow(set())
    for guest in guests:
        guest.close()


LIES = {
    "negative": line(load_1=-1, gpus=[{"index": -1}]),
    "not numbers": line(load_1="1", cpus=True, xid=None, memory_total_bytes=[1]),
    "too large": line(load_1=1e300, cpus=2**70, memory_total_bytes=2**60),
    "no finite number": b'{"load_1": NaN, "uptime_s": Infinity, "load_5": 1e999}\n',
    "fraction of bytes": line(memory_total_bytes=0.5),
    "huge integer": b'{"cpus": ' + b"9" * 5000 + b"}\n",
    "forged labels": line(allocation_id=A, source="host", state="running", host={"cpu_s": 1}),
    "forged words": line(cuda='ready"} 1\ngpuaas_slice_cpu_s{allocation="x'),
    "too many GPUs": line(gpus=[{"index": number} for number in range(1000)]),
    "GPUs of other types": line(gpus=[1, None, [], {"index": "0"}, {"index": 1.0}]),
    "no object": b"[1]\n",
    "no JSON": b"\xff\xfe{\n",
    "deep": b"[" * 60000 + b"\n",
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_lie_reaches_nobody_else(
    pair: tuple[_telemetry.Collector, Qemu, Qemu], lie: bytes
) -> None:
    collector, liar, other = pair
    other.write(line())
    liar.write(lie)
    collector.round({}, 2)
    collector.round({}, _telemetry.EVERY)
    parts = snapshot()
    age_s = parts[B]["guest"].pop("age_s")
    assert parts[B]["guest"] == {**HONEST, "gpus": []} and 0 <= age_s < 60
    guest = parts[A]["guest"] or {}
    assert guest.keys() <= {*_guest_values.GUEST, "age_s", "cuda", "gpus"}
    assert len(guest.get("gpus", [])) <= _guest_values.GPUS and "cuda" not in guest
    assert parts[A]["host"] == {**parts[B]["host"]}


def test_a_line_without_end_is_dropped_and_the_next_one_counts(
    pair: tuple[_telemetry.Collector, Qemu, Qemu],
) -> None:
    collector, liar, _other = pair
    channel = collector._channels[A]
    for _ in range(20):
        liar.write(b'{"cpus": 7, ' + b" " * 40_000)
        collector.round({}, 1)
        assert len(channel._pending) <= _guest_values.LONGEST
    liar.write(b'"load_1": 1}\n')
    collector.round({}, 1)
    assert channel.values is None, "the end of a dropped line is no line"
    liar.write(line())
    collector.round({}, 1)
    assert channel.values == {**HONEST, "gpus": []}


def test_a_flood_of_lines_costs_as_much_as_one(
    pair: tuple[_telemetry.Collector, Qemu, Qemu], monkeypatch: pytest.MonkeyPatch
) -> None:
    collector, liar, _other = pair
    parsed: list[bytes] = []
    accept = _guest_values.accept
    monkeypatch.setattr(_guest_values, "accept", lambda line: parsed.append(line) or accept(line))
    liar.write(b"".join(line(cpus=number) for number in range(100)) + b"\n\n")
    collector.round({}, 1)
    assert len(parsed) == 1
    assert (collector._channels[A].values or {})["cpus"] == 99


def test_a_silent_guest_and_one_that_ended_leave_no_values(
    pair: tuple[_telemetry.Collector, Qemu, Qemu], script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector, guest, _other = pair
    guest.write(line())
    collector.round({}, 1)
    late = time.time() + _telemetry.SILENT_S + 1
    monkeypatch.setattr(_telemetry.time, "time", lambda: late)
    collector.round({}, _telemetry.EVERY)
    assert snapshot()[A]["guest"] is None
    # The machine starts again with a new QEMU: the host connects again.
    assert guest.host is not None
    guest.host.close()
    guest.host = None
    collector.round({}, 1)
    collector.round({}, 1)
    guest.write(line(cpus=1))
    collector.round({}, 1)
    assert (collector._channels[A].values or {})["cpus"] == 1
    script.answers[STATS] = []
    script.on(*STATS, out=domain(A, 5))
    collector.round({}, _telemetry.EVERY)
    assert collector._channels == {} and set(snapshot()) == {A}


def test_a_libvirt_that_starts_another_slice_takes_no_values_away(
    pair: tuple[_telemetry.Collector, Qemu, Qemu], script: Script
) -> None:
    collector, guest, _other = pair
    guest.write(line())
    collector.round({}, 1)
    script.answers[STATS] = []
    script.on(*STATS, rc=1, err="late").on(*STATS, out=domain(A) + domain(B))
    for _round in range(2):
        collector.round({}, _telemetry.EVERY)
    assert snapshot()[A]["guest"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
GPU = st.dictionaries(st.sampled_from(sorted(_guest_values.GPU)), JSON)
NAMED = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(_guest_values.GUEST, JSON)
    | {"cuda": JSON | st.just("ready"), "gpus": JSON | st.lists(GPU, max_size=20)},
)


@settings(max_examples=150)
@given(st.one_of(st.binary(max_size=200), NAMED.map(lambda value: json.dumps(value).encode())))
def test_whatever_a_guest_writes_the_reconciler_takes_what_is_left(written: bytes) -> None:
    values = _guest_values.accept(written)
    if values is not None:
        GuestValues.model_validate_json(json.dumps({**values, "age_s": 1.0}))


def test_both_sides_have_the_same_names_and_limits() -> None:
    """Both accept a value at its limit, and refuse a larger value."""
    names = {*_guest_values.GUEST, "cuda", "gpus", "age_s", "source"}
    assert names == set(GuestValues.model_fields)
    highest = {**_guest_values.GUEST, "gpus": [{**_guest_values.GPU}]}
    values = _guest_values.accept(json.dumps(highest).encode())
    assert values == highest
    GuestValues.model_validate_json(json.dumps({**highest, "age_s": 1.0}))
    for name, limit in _guest_values.GUEST.items():
        more = {name: limit * 2, "age_s": 1.0}
        assert name not in (_guest_values.accept(json.dumps(more).encode()) or {name})
        with pytest.raises(ValueError, match=name):
            GuestValues.model_validate_json(json.dumps(more))


# The first line is from an H100 with driver 580.159.04. The second has the words that nvidia-smi
# writes where a GPU has no value; not run on hardware.
SMI = """\
0, 0, 0, 81559, 33, 72.28, 0, 0
1, [N/A], 1024, 81559, 33, [Unknown Error], [N/A], [N/A]
"""


def test_the_guest_reads_its_gpus_and_says_what_the_host_accepts() -> None:
    rows = _guest_telemetry.parse_gpus(SMI)
    assert rows[1]["memory_used_bytes"] == 1 << 30 and rows[0]["power_w"] == 72.28
    assert set(rows[0]) == set(_guest_values.GPU)
    assert "utilisation_percent" not in rows[1] and "ecc_corrected" not in rows[1]
    data = {**_guest_telemetry.machine(), "cuda": _guest_telemetry.cuda(), "gpus": rows, "xid": 79}
    assert _guest_values.accept(json.dumps(data).encode()) == data
    assert data.keys() == {*_guest_values.GUEST, "cuda", "gpus"}


def test_the_last_error_of_the_driver_is_that_of_the_kernels_log() -> None:
    """Lines of a real H200, one a read: its programs left their memory."""
    lines = (Path(__file__).parents[4] / "data/h200/kernel-log.txt").read_bytes().splitlines()
    log, kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with log, kernel:
        log.setblocking(False)
        for line in lines:
            kernel.send(line)
        assert _guest_telemetry.last_xid(log.fileno(), 43) == 31
        assert _guest_telemetry.last_xid(log.fileno(), 31) == 31


def test_a_driver_that_hangs_in_the_kernel_takes_no_other_value_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing kills its process, and no further one is started beside it."""
    starts = tmp_path / "starts"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho x >> {starts}\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    starts.touch()
    with monkeypatch.context() as kernel:
        kernel.setattr(_guest_telemetry, "_SMI_S", 1.0)
        kernel.setattr(subprocess.Popen, "kill", lambda _process: None)
        began = time.monotonic()
        assert (_guest_telemetry.gpus(), _guest_telemetry.gpus()) == ([], [])
        assert time.monotonic() - began < 20
    end = time.monotonic() + 60
    while not starts.read_text() and time.monotonic() < end:
        time.sleep(0.02)
    assert starts.read_text() == "x\n"
    held = _guest_telemetry._held["nvidia-smi"]
    held.kill()
    held.wait()
    program.write_text(f"#!/bin/sh\necho '{SMI.splitlines()[0]}'\n")
    assert [row["index"] for row in _guest_telemetry.gpus()] == [0]
