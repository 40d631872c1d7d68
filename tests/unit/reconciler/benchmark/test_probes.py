"""Probes with recorded tools, refusals, and checked results."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from reconciler.benchmark.harness import compute, disk, facts, gpu, probe, rdma
from reconciler.benchmark.harness.probe import Reason, Request, metric
from tests.unit.reconciler.benchmark.conftest import DATA

pytestmark = pytest.mark.covers("HOST-12")

REQUEST = Request(label="a", kind="host", repetitions=3, seconds=1)
# Recorded from fio 3.33 with the same options on a file.
RECORDED = DATA / "fio-3.33-randread.json"

Tool = Callable[[str, str], Path]


def test_series() -> None:
    result = metric("cpu.integer", "Mstep/s", [9.0, 10.0, 12.0])
    assert (result["median"], result["spread_percent"]) == (10.0, 30.0)
    for wrong in ([], [0.0], [-1.0], [float("nan")], [float("inf")]):
        with pytest.raises(Reason, match="measurement_invalid"):
            metric("cpu.integer", "Mstep/s", wrong)


@pytest.mark.parametrize("steps", [1, 2, 1000, 65537])
def test_cpu_work_has_a_known_result(steps: int) -> None:
    value = 0
    for _ in range(steps):
        value = (value * 6364136223846793005 + 1442695040888963407) % 2**64
    assert compute.jumped(steps) == value
    compute.integer(steps)
    compute.floating(steps)


def test_a_cpu_that_miscalculates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "jumped", lambda _steps: 1)
    with pytest.raises(Reason, match="result_wrong"):
        compute.integer(10)


def test_memory_must_be_available() -> None:
    greedy = dataclasses.replace(REQUEST, memory_bytes=1 << 50)
    with pytest.raises(Reason, match="memory_short"):
        compute.measure_memory(greedy)


def _fio(tool: Tool) -> Path:
    return tool(
        "fio",
        f"""case "$*" in
  --version) echo fio-3.33 ;;
  *--readonly*) echo "note: the clock is slow"; cat '{RECORDED}' ;;
  *) exit 9 ;;
esac""",
    )


def test_disk_figures_of_fio(tool: Tool, tmp_path: Path) -> None:
    arguments = _fio(tool)
    target = tmp_path / "pci-0000:01:00.0-nvme-1"
    target.write_bytes(b"precious")
    result = disk.measure(dataclasses.replace(REQUEST, fio_target=str(target)))
    assert result["tool"] == {"name": "fio", "version": "fio-3.33"}
    medians = {each["metric"]: (each["median"], each["unit"]) for each in result["metrics"]}
    assert medians["disk.read"] == (688.59, "MB/s")
    assert medians["disk.read_random"] == (168113.0, "IOPS")
    assert medians["disk.read_random_p99"][1] == "us"
    assert result["metrics"][2]["better"] == "lower"
    words = arguments.read_text().splitlines()
    assert words.count("--readonly") == words.count("--allow_file_create=0") == 6
    assert {word for word in words if "rw=" in word} == {"--rw=read", "--rw=randread"}
    escaped = str(target).replace(":", "\\:")
    assert f"--filename={escaped}" in words, "a colon would name two targets"
    assert target.read_bytes() == b"precious"


@pytest.mark.parametrize("pattern", ["write", "randwrite", "rw", "trim", "read --rw=write", ""])
def test_disk_never_writes(pattern: str) -> None:
    with pytest.raises(Reason, match="write_refused"):
        disk.arguments("/usr/bin/fio", "/dev/nvme0n1", pattern, 1)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ('"write" : {\n        "io_bytes" : 0', "target_written"),
        ('"trim" : {\n        "io_bytes" : 0', "target_written"),
        ('"error" : 0', "tool_failed"),
    ],
)
def test_disk_refuses_a_run_that_wrote_or_failed(change: str, code: str) -> None:
    text = RECORDED.read_text()
    assert text.count(change) == 1
    with pytest.raises(Reason, match=code):
        disk.parse(text.replace(change, f"{change[:-1]}4096"))


@pytest.mark.parametrize("text", ["", "fio: cannot open", "{}", '{"jobs": []}', '{"jobs": 1}'])
def test_disk_needs_fios_json(text: str) -> None:
    with pytest.raises(Reason, match="output_unreadable"):
        disk.parse(text)


def test_disk_targets(tool: Tool, tmp_path: Path) -> None:
    arguments = _fio(tool)
    folder, missing = tmp_path / "folder", tmp_path / "missing"
    folder.mkdir()
    for name, code in (
        ("", "not_requested"),
        ("nvme0n1", "target_invalid"),
        ("-", "target_invalid"),
        ("/dev/nvme0n1\n--rw=write", "target_invalid"),
        ("/dev/zero", "target_invalid"),
        (str(folder), "target_invalid"),
        (str(missing), "target_missing"),
    ):
        with pytest.raises(Reason) as caught:
            disk.measure(dataclasses.replace(REQUEST, fio_target=name))
        assert caught.value.code == code, name
    assert not missing.exists()
    assert not arguments.exists(), "fio was not started"


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed here")
def test_disk_with_the_real_fio(tmp_path: Path) -> None:
    target = tmp_path / "disk"
    target.write_bytes(bytes(range(256)) * 16384)
    result = disk.measure(dataclasses.replace(REQUEST, repetitions=1, fio_target=str(target)))
    assert all(each["median"] > 0 for each in result["metrics"])
    assert target.read_bytes() == bytes(range(256)) * 16384


TABLE = """ Data ex. method : Ethernet
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      3756900          0.00               392.41             0.748463
---------------------------------------------------------------------------------------
"""


def test_rdma(tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "DEVICES", tmp_path / "infiniband")
    request = dataclasses.replace(REQUEST, rdma_peer="192.168.200.2", rdma_device="mlx5_0")
    for wrong in ({"rdma_peer": "--help"}, {"rdma_device": "-x"}):
        with pytest.raises(Reason, match="name_invalid"):
            rdma.measure(dataclasses.replace(request, **wrong))
    with monkeypatch.context() as bare, pytest.raises(Reason, match="tool_missing"):
        bare.setattr(probe, "_path", str)
        rdma.measure(request)
    # The real program prints its version and exits with 1.
    arguments = tool(
        "ib_write_bw", f'[ "$1" = --version ] && echo "Version: 6.06" && exit 1; echo "{TABLE}"'
    )
    with pytest.raises(Reason, match="device_missing"):
        rdma.measure(request)
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    result = rdma.measure(request)
    assert [each["median"] for each in result["metrics"]] == [392.41]
    assert result["subject"] == "mlx5_0 to 192.168.200.2"
    assert result["tool"]["version"] == "Version: 6.06"
    assert arguments.read_text().splitlines()[-2:] == ["192.168.200.2", "--version"]
    with pytest.raises(Reason, match="output_unreadable"):
        rdma.parse(TABLE.replace("Gb/sec", "MB/sec"))


def test_rdma_waits_for_the_restart_of_the_peers_server(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """perftest's server serves one run and is then away for a moment."""
    monkeypatch.setattr(rdma, "DEVICES", tmp_path / "infiniband")
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    # Refuses every other call.
    refusal = '{ echo " Couldn\'t connect to 192.168.200.2:18515" >&2; exit 1; }'
    tool(
        "ib_write_bw",
        f"""[ "$1" = --version ] && echo 'Version: 6.06' && exit 1
[ -e "$0.back" ] || {{ : >"$0.back"; {refusal}; }}
rm "$0.back"; echo "{TABLE}\"""",
    )
    request = dataclasses.replace(REQUEST, repetitions=2, rdma_peer="192.168.200.2")
    assert rdma.measure(request)["metrics"][0]["samples"] == [392.41, 392.41]
    arguments = tool("ib_write_bw", f"sleep 1.1; {refusal}")
    arguments.unlink()
    with pytest.raises(Reason, match="tool_failed"):
        rdma.measure(request)
    assert arguments.read_text().count("-D") == 1, "an interrupted run is not repeated"


def test_errors_of_tools(tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "DEVICES", tmp_path)
    monkeypatch.setattr(rdma, "_SERVER_BACK_S", 0)
    (tmp_path / "mlx5_0").mkdir()
    tool("ib_write_bw", "echo ' Unable to open file descriptor for socket connection' >&2; exit 1")
    with pytest.raises(Reason) as caught:
        rdma.measure(dataclasses.replace(REQUEST, rdma_peer="192.168.200.2"))
    assert (caught.value.code, caught.value.status) == ("tool_failed", "failed")
    assert "Unable to open file descriptor" in caught.value.document["found"]
    tool("slow", "exec sleep 30")
    with pytest.raises(Reason, match="tool_timeout"):
        probe.run_tool([probe.find_tool("slow", "none")], timeout=0.1)


def test_vllm(tool: Tool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    with monkeypatch.context() as bare, pytest.raises(Reason, match="tool_missing"):
        bare.setattr(probe, "_path", str)
        gpu.measure_vllm(REQUEST)
    line = "Throughput: 92.11 requests/s, 23580.83 total tokens/s, 11790.42 output tokens/s"
    tool(
        "vllm",
        '[ "$1" = --version ] && echo 0.11.0 && exit\n'
        'caches=${VLLM_CACHE_ROOT:-$HOME} && mkdir -p "$caches/kernels"\n'
        f'echo "$caches" >"{tmp_path}/caches"; [ "$HF_HUB_OFFLINE" = 1 ] && echo "{line}"',
    )
    result = gpu.measure_vllm(REQUEST)
    caches = Path((tmp_path / "caches").read_text().strip())
    assert not home.exists() and not caches.exists(), "nothing is left"
    assert [each["median"] for each in result["metrics"]] == [11790.4]
    assert result["workload"]["model"] == "facebook/opt-125m"
    with pytest.raises(Reason, match="output_unreadable"):
        gpu.parse_vllm("Throughput: unknown")
    with pytest.raises(Reason, match="name_invalid"):
        gpu.measure_vllm(dataclasses.replace(REQUEST, vllm_model="--trust-remote-code"))


def test_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {
        "proc/cpuinfo": "model name\t: INTEL(R) XEON(R) PLATINUM 8570\nphysical id\t: 0\n"
        "flags\t\t: fpu hypervisor\n\nphysical id\t: 1\n",
        "proc/cmdline": "root=LABEL=x secret=1 intel_iommu=on hugepagesz=1G hugepages=0:256",
        "proc/meminfo": "MemTotal:       65536 kB\n",
        "proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t6291456\n",
        "sys/devices/system/cpu/cpu0/topology/thread_siblings_list": "0-1,112",
        "sys/devices/system/node/node10/cpulist": "24-47",
        "sys/devices/system/node/node2/cpulist": "0-23",
        "sys/devices/system/node/node2/meminfo": "Node 2 MemTotal:       1024 kB\n",
        "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages": "512",
        "sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages": "448",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        "etc/tuned/active_profile": "virtual-host\n",
    }
    for name, text in tree.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(facts, "ROOT", tmp_path)
    host = facts.collect()
    assert host["kernel_arguments"] == "intel_iommu=on hugepagesz=1G hugepages=0:256"
    assert (host["sockets"], host["threads_per_core"], host["hypervisor"]) == (2, 3, True)
    assert host["numa_nodes"] == [
        {"node": 2, "cpus": "0-23", "memory_bytes": 1 << 20},
        {"node": 10, "cpus": "24-47", "memory_bytes": 0},
    ]
    assert host["hugepages"] == [{"size_kib": 1048576, "total": 512, "free": 448}]
    assert (host["tuned_profile"], host["memory_bytes"]) == ("virtual-host", 64 << 20)
    assert host["sysctls"]["net.ipv4.tcp_rmem"] == "4096 131072 6291456"
    assert (host["governor"], host["transparent_hugepages"]) == ("", "madvise")
