"""`gpuaas host benchmark` and the script of the seed, on this machine with small sizes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from reconciler.benchmark import document
from reconciler.cli import benchmark
from reconciler.cli.main import hoist
from tests.unit.reconciler.benchmark.conftest import made, tree
from tests.unit.reconciler.benchmark.test_compare import BARE, SLICE, vm
from tests.unit.reconciler.cli.conftest import Gpuaas

SCRIPT = Path(__file__).resolve().parents[4] / "scripts" / "ops" / "gpuaas_benchmark_capture.sh"


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    def save(name: str, capture: dict[str, Any]) -> str:
        document.save(capture, tmp_path / name)
        return str(tmp_path / name)

    return save


def test_the_script_with_the_flags_of_the_seed(tmp_path: Path) -> None:
    """Over a stand-in for ssh that runs the words here."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" >"{tmp_path}/words"\n'
        'for last; do :; done\nexec sh -c "$last"\n'
    )
    ssh.chmod(0o755)
    output = tmp_path / "dist" / "benchmarks" / "slice-vm-j22u15-s01.json"
    done = subprocess.run(
        [
            SCRIPT,
            *("--host", "10.100.0.10", "--user", "gpuuser"),
            *("--ssh-key", "/var/lib/gpuaas/terminal/id_ed25519"),
            *("--label", "slice-vm-j22u15-s01", "--output", str(output)),
            *("--fio-target", "/dev/gpuaas-none", "--rdma-peer", "10.0.0.1"),
            *("--rdma-device", "mlx5_0", "--quick"),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = document.load(output)
    states = {each["probe"]: each["status"] for each in found["probes"]}
    assert (states["cpu"], states["memory"]) == ("ok", "ok")
    assert states["disk"] == states["rdma"] == "unavailable"
    virtual = found["host"]["hypervisor"]
    assert (found["label"], found["kind"]) == (output.stem, "vm" if virtual else "host")
    words = (tmp_path / "words").read_text().splitlines()
    assert 'IdentityFile="/var/lib/gpuaas/terminal/id_ed25519"' in words
    assert "StrictHostKeyChecking=yes" in words


def test_capture_here(gpuaas: Gpuaas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = dataclasses.replace(benchmark._QUICK, cpu_steps=10_000, memory_bytes=1 << 20)
    monkeypatch.setattr(benchmark, "_QUICK", quick)
    output = tmp_path / "a.json"
    words = ("host", "benchmark", "capture", "--label", "a", "--tuning", "network", "--quick")
    gpuaas(*words, "--output", str(output))
    assert gpuaas.status == 0, gpuaas.err
    assert document.load(output)["tuning"] == "network"
    assert f"written: {output}" in gpuaas.err
    for wrong, code in (
        (("--label", "\x1b"), "label_invalid"),
        (("--tuning", "A"), "tuning_invalid"),
    ):
        gpuaas(*words, "--output", str(output), *wrong)
        assert (gpuaas.status, code in gpuaas.err) == (1, True)


def test_an_enrolled_node_is_reached_by_its_certificate(
    gpuaas: Gpuaas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >"{tmp_path}/words"\nexit 255\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(tmp_path / "state"))
    output = tmp_path / "a.json"
    words = ("host", "benchmark", "capture", "--label", "a", "--output", str(output))
    gpuaas(*words, "--node-id", "node-1")
    assert "host_missing" in gpuaas.err, "the certificate would be for another machine"
    gpuaas(*words, "--node-id", "node-1", "--host", "192.0.2.1")
    assert (gpuaas.status, "target_unreachable" in gpuaas.err) == (1, True)
    assert not output.exists()
    said = (tmp_path / "words").read_text().splitlines()
    assert {"StrictHostKeyChecking=yes", "HostKeyAlias=node-1"} <= set(said)
    assert f'UserKnownHostsFile="{tmp_path}/state/trust/known_hosts"' in said
    assert said[said.index("-l") + 1] == "root"


def test_compare(gpuaas: Gpuaas, saved: Any, tmp_path: Path) -> None:
    files = (saved("a.json", BARE), saved("b.json", SLICE))
    svg, html = tmp_path / "out" / "c.svg", tmp_path / "c.html"
    gpuaas("host", "benchmark", "compare", *files, "--svg", str(svg), "--html", str(html))
    assert gpuaas.status == 0, gpuaas.err
    for word in ("slice-vm-j22u15-s01", "-43.0 % worse", "+0.0 % same", "prototype"):
        assert word in gpuaas.out
    assert tree(svg.read_text()).tag.endswith("svg")
    assert html.read_text().startswith("<!doctype html>")
    gpuaas("host", "benchmark", "compare", *files, "--output", "json")
    (fp64,) = (row for row in json.loads(gpuaas.out)["rows"] if row["metric"] == "gpu.fp64")
    assert fp64["cells"][1]["delta_percent"] == -2.1
    gpuaas("host", "benchmark", "compare", files[0])
    assert (gpuaas.status, "captures_few" in gpuaas.err) == (1, True)


def test_hostile_labels_do_not_reach_the_terminal(gpuaas: Gpuaas, saved: Any) -> None:
    label = "[red]x\x1b]0;title\x07"
    files = [saved(f"{name}.json", made(label, {"cpu.integer": [1.0]})) for name in "ab"]
    gpuaas("host", "benchmark", "compare", *files)
    assert gpuaas.status == 0
    assert "[red]x" in gpuaas.out
    assert "\x1b" not in gpuaas.out + gpuaas.err


def test_gate(gpuaas: Gpuaas, saved: Any) -> None:
    off = saved("off.json", vm("off"))
    good = saved("good.json", vm("network", rdma__write=[380.0]))
    gpuaas("host", "benchmark", "gate", off, good)
    assert (gpuaas.status, "network: passes" in gpuaas.err) == (0, True)
    bad = saved("bad.json", vm("hugepages", vllm__throughput=[7000.0]))
    gpuaas("host", "benchmark", "gate", off, good, bad, "--output", "json")
    assert gpuaas.status == 1
    assert [each["passes"] for each in json.loads(gpuaas.out)] == [False, True]
    gpuaas("host", "benchmark", "gate", off, "--without", "gpu")
    assert gpuaas.status == 1
    gpuaas("host", "benchmark", "gate", off, good, "--without", "sound")
    assert "probe_unknown" in gpuaas.err


def test_a_captures_output_is_its_own() -> None:
    line = "host benchmark capture --output a.json --label x"
    assert hoist(line.split()) == line.split()
    assert hoist(["host", "benchmark", "gate", "a", "--output", "json"])[:2] == ["--output", "json"]
