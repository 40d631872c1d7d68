"""Probes of the harness: tools from recordings, refusals, and results that are checked."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from reconciler.benchmark.harness import compute, disk, facts, gpu, probe, rdma
from reconciler.benchmark.harness.probe import Reason, Request, metric
from tests.unit.reconciler.benchmark.conftest import DATA

pytestmark = pytest.mark.covers("HOST-12")

ASKED = Request(label="a", kind="host", repetitions=3, seconds=1)
# Recorded from fio 3.33 with these very options on a file.
RECORDED = DATA / "fio-3.33-randread.json"

Tool = Callable[[str, str], Path]


def test_series() -> None:
    found = metric("cpu.integer", "Mstep/s", [9.0, 10.0, 12.0])
    assert (found["median"], found["spread_percent"]) == (10.0, 30.0)
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


def test_memory_is_not_taken_from_others() -> None:
    greedy = dataclasses.replace(ASKED, memory_bytes=1 << 50)
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


def test_disk_reads_what_fio_says(tool: Tool, tmp_path: Path) -> None:
    arguments = _fio(tool)
    target = tmp_path / "pci-0000:01:00.0-nvme-1"
    target.write_bytes(b"precious")
    found = disk.measure(dataclasses.replace(ASKED, fio_target=str(target)))
    assert found["tool"] == {"name": "fio", "version": "fio-3.33"}
    medians = {each["metric"]: (each["median"], each["unit"]) for each in found["metrics"]}
    assert medians["disk.read"] == (688.59, "MB/s")
    assert medians["disk.read_random"] == (168113.0, "IOPS")
    assert medians["disk.read_random_p99"][1] == "us"
    assert found["metrics"][2]["better"] == "lower"
    said = arguments.read_text().splitlines()
    assert said.count("--readonly") == said.count("--allow_file_create=0") == 6
    assert {word for word in said if "rw=" in word} == {"--rw=read", "--rw=randread"}
    escaped = str(target).replace(":", "\\:")
    assert f"--filename={escaped}" in said, "a colon would name two targets"
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
def test_disk_believes_no_run_that_wrote_or_failed(change: str, code: str) -> None:
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
            disk.measure(dataclasses.replace(ASKED, fio_target=name))
        assert caught.value.code == code, name
    assert not missing.exists()
    assert not arguments.exists(), "fio was not even started"


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed here")
def test_disk_with_the_real_fio(tmp_path: Path) -> None:
    target = tmp_path / "disk"
    target.write_bytes(bytes(range(256)) * 16384)
    found = disk.measure(dataclasses.replace(ASKED, repetitions=1, fio_target=str(target)))
    assert all(each["median"] > 0 for each in found["metrics"])
    assert target.read_bytes() == bytes(range(256)) * 16384


TABLE = """ Data ex. method : Ethernet
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      3756900          0.00               392.41             0.748463
---------------------------------------------------------------------------------------
"""


def test_rdma(tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "DEVICES", tmp_path / "infiniband")
    asked = dataclasses.replace(ASKED, rdma_peer="192.168.200.2", rdma_device="mlx5_0")
    for wrong in ({"rdma_peer": "--help"}, {"rdma_device": "-x"}):
        with pytest.raises(Reason, match="name_invalid"):
            rdma.measure(dataclasses.replace(asked, **wrong))
    with monkeypatch.context() as bare, pytest.raises(Reason, match="tool_missing"):
        bare.setattr(probe, "_path", str)
        rdma.measure(asked)
    # The real one exits with 1 after it has said its version.
    arguments = tool(
        "ib_write_bw", f'[ "$1" = --version ] && echo "Version: 6.06" && exit 1; echo "{TABLE}"'
    )
    with pytest.raises(Reason, match="device_missing"):
        rdma.measure(asked)
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    found = rdma.measure(asked)
    assert [each["median"] for each in found["metrics"]] == [392.41]
    assert found["subject"] == "mlx5_0 to 192.168.200.2"
    assert found["tool"]["version"] == "Version: 6.06"
    assert arguments.read_text().splitlines()[-2:] == ["192.168.200.2", "--version"]
    with pytest.raises(Reason, match="output_unreadable"):
        rdma.parse(TABLE.replace("Gb/sec", "MB/sec"))


def test_rdma_waits_until_the_peer_has_started_its_server_again(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """perftest's server serves one run: between two runs it is not there for a moment."""
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
    asked = dataclasses.replace(ASKED, repetitions=2, rdma_peer="192.168.200.2")
    assert rdma.measure(asked)["metrics"][0]["samples"] == [392.41, 392.41]
    tool("ib_write_bw", f"sleep 1.1; {refusal}")
    began = time.monotonic()
    with pytest.raises(Reason, match="tool_failed"):
        rdma.measure(asked)
    assert time.monotonic() - began < 5, "a run that broke in the middle is not tried again"


def test_a_tool_that_fails_says_why(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdma, "DEVICES", tmp_path)
    monkeypatch.setattr(rdma, "_SERVER_BACK_S", 0)
    (tmp_path / "mlx5_0").mkdir()
    tool("ib_write_bw", "echo ' Unable to open file descriptor for socket connection' >&2; exit 1")
    with pytest.raises(Reason) as caught:
        rdma.measure(dataclasses.replace(ASKED, rdma_peer="192.168.200.2"))
    assert (caught.value.code, caught.value.status) == ("tool_failed", "failed")
    assert "Unable to open file descriptor" in caught.value.document["found"]
    tool("slow", "exec sleep 30")
    with pytest.raises(Reason, match="tool_timeout"):
        probe.run_tool([probe.find_tool("slow", "none")], timeout=0.1)


def test_vllm(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as bare, pytest.raises(Reason, match="tool_missing"):
        bare.setattr(probe, "_path", str)
        gpu.measure_vllm(ASKED)
    line = "Throughput: 92.11 requests/s, 23580.83 total tokens/s, 11790.42 output tokens/s"
    tool(
        "vllm",
        f'[ "$1" = --version ] && echo 0.11.0 && exit; [ "$HF_HUB_OFFLINE" = 1 ] && echo "{line}"',
    )
    found = gpu.measure_vllm(ASKED)
    assert [each["median"] for each in found["metrics"]] == [11790.4]
    assert found["workload"]["model"] == "facebook/opt-125m"
    with pytest.raises(Reason, match="output_unreadable"):
        gpu.parse_vllm("Throughput: unknown")
    with pytest.raises(Reason, match="name_invalid"):
        gpu.measure_vllm(dataclasses.replace(ASKED, vllm_model="--trust-remote-code"))


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
    found = facts.collect()
    assert found["kernel_arguments"] == "intel_iommu=on hugepagesz=1G hugepages=0:256"
    assert (found["sockets"], found["threads_per_core"], found["hypervisor"]) == (2, 3, True)
    assert found["numa_nodes"] == [
        {"node": 2, "cpus": "0-23", "memory_bytes": 1 << 20},
        {"node": 10, "cpus": "24-47", "memory_bytes": 0},
    ]
    assert found["hugepages"] == [{"size_kib": 1048576, "total": 512, "free": 448}]
    assert (found["tuned_profile"], found["memory_bytes"]) == ("virtual-host", 64 << 20)
    assert found["sysctls"]["net.ipv4.tcp_rmem"] == "4096 131072 6291456"
    assert (found["governor"], found["transparent_hugepages"]) == ("", "madvise")
