"""`gpuaas host benchmark` and its script in scripts/ops, on this machine with small sizes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.benchmark import document
from reconciler.cli import benchmark
from reconciler.cli.main import hoist
from reconciler.db.engine import transaction
from reconciler.db.schema import allocations
from tests.unit.reconciler.api.stack import NODE, Stack
from tests.unit.reconciler.api.test_launches import activate, launch
from tests.unit.reconciler.benchmark.conftest import made, tree
from tests.unit.reconciler.benchmark.test_compare import BARE, SLICE, vm
from tests.unit.reconciler.cli.conftest import Gpuaas

SCRIPT = Path(__file__).resolve().parents[4] / "scripts" / "ops" / "gpuaas_benchmark_capture.sh"


TINY = dataclasses.replace(benchmark._QUICK, cpu_steps=10_000, memory_bytes=1 << 20)


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
    result = document.load(output)
    states = {each["probe"]: each["status"] for each in result["probes"]}
    assert (states["cpu"], states["memory"]) == ("ok", "ok")
    assert states["disk"] == states["rdma"] == "unavailable"
    virtual = result["host"]["hypervisor"]
    assert (result["label"], result["kind"]) == (output.stem, "vm" if virtual else "host")
    words = (tmp_path / "words").read_text().splitlines()
    assert 'IdentityFile="/var/lib/gpuaas/terminal/id_ed25519"' in words
    assert "StrictHostKeyChecking=yes" in words


def test_capture_here(gpuaas: Gpuaas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_QUICK", TINY)
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
    arguments = (tmp_path / "words").read_text().splitlines()
    assert {"StrictHostKeyChecking=yes", "HostKeyAlias=node-1"} <= set(arguments)
    assert f'UserKnownHostsFile="{tmp_path}/state/trust/known_hosts"' in arguments
    assert arguments[arguments.index("-l") + 1] == "root"


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
    gpuaas("host", "benchmark", "gate", off, good, "--vcpus", "24", "--vcpus", "12")
    assert (gpuaas.status, "no capture with tuning network" in gpuaas.out) == (1, True)


def test_the_matrix_from_the_machine_to_the_verdict(
    gpuaas: Gpuaas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real captures over numbers of CPUs and tuning, which is only a label and is found out."""
    monkeypatch.setattr(benchmark, "_QUICK", TINY)
    usable = os.sched_getaffinity(0)
    counts = sorted({1, len(usable)})
    files = []
    try:
        for count in counts:
            os.sched_setaffinity(0, set(sorted(usable)[:count]))
            for tuning in ("off", "network"):
                files.append(str(tmp_path / f"{tuning}-{count}.json"))
                words = ["--label", f"{tuning}-{count}", "--tuning", tuning, "--kind", "host"]
                words += ["--vcpus", str(count), "--quick", "--output", files[-1]]
                gpuaas("host", "benchmark", "capture", *words)
                assert gpuaas.status == 0, gpuaas.err
    finally:
        os.sched_setaffinity(0, usable)
    words = [word for count in counts for word in ("--vcpus", str(count))]
    words += [word for probe in ("disk", "rdma", "gpu", "vllm") for word in ("--without", probe)]
    gpuaas("host", "benchmark", "gate", *files, *words, "--output", "json")
    (answer,) = json.loads(gpuaas.out)
    assert [(cell["kind"], cell["vcpus"]) for cell in answer["cells"]] == [
        ("host", count) for count in counts
    ]
    for cell in answer["cells"]:
        assert cell["verdict"] in ("worse", "incomplete")
        assert any("no setting of the machine differs" in why for why in cell["open"])
    assert (gpuaas.status, answer["passes"]) == (1, False)


def _ssh(folder: Path, body: str) -> Path:
    """A stand-in for ssh; the words of its last call come to the file beside it."""
    ssh = folder / "ssh"
    ssh.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >"{folder}/words"\n{body}\n')
    ssh.chmod(0o755)
    return folder / "words"


def test_through_another_machine(
    gpuaas: Gpuaas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = _ssh(tmp_path, "exit 255")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(tmp_path / "state"))
    words = ["host", "benchmark", "capture", "--label", "a", "--output", str(tmp_path / "a.json")]
    gpuaas(*words, "--via", "ubuntu@j22u15")
    assert "host_missing" in gpuaas.err
    gpuaas(*words, "--via", "a b", "--host", "10.100.0.10")
    assert "via_invalid" in gpuaas.err
    words += ["--host", "10.100.0.10", "--user", "gpuuser", "--via", "ubuntu@j22u15:2222"]
    gpuaas(*words)
    assert (gpuaas.status, "target_unreachable" in gpuaas.err) == (1, True)
    (carrier,) = (line for line in log.read_text().splitlines() if "ProxyCommand=" in line)
    assert "-p 2222 -l ubuntu -W '[%h]:%p' -- j22u15" in carrier
    assert "StrictHostKeyChecking=yes" in carrier and "HostKeyAlias" not in carrier
    # With the node's id it is the host that has to show its certificate, not the guest.
    gpuaas(*words, "--node-id", "node-1")
    lines = log.read_text().splitlines()
    (carrier,) = (line for line in lines if "ProxyCommand=" in line)
    assert "HostKeyAlias=node-1" in carrier
    assert "HostKeyAlias=node-1" not in lines


def test_the_machine_of_an_allocation(
    selling: Stack, gpuaas: Gpuaas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reconciler's records hold its address and its host key."""
    monkeypatch.setattr(benchmark, "_QUICK", TINY)
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILw6MHUfBS0BkklFB8Qsked8rLaWhYoJ7HQ8JG+KpgdX"
    log = _ssh(
        tmp_path,
        "for last; do :; done\n"
        'for word; do case "$word" in UserKnownHostsFile=*) file=${word#*\\"} ;; esac; done\n'
        f'cp "${{file%\\"}}" "{tmp_path}/trusted"\n'
        'exec sh -c "$last"',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(tmp_path / "state"))
    output = tmp_path / "a.json"
    launched = launch(selling).json()["id"]
    words = ["host", "benchmark", "capture", "--label", "vm", "--kind", "vm", "--quick"]
    words += ["--output", str(output), "--allocation", launched]
    gpuaas.at(selling)(*words)
    assert (gpuaas.status, "no_slice_vm" in gpuaas.err) == (1, True), "it is not there yet"
    activate(selling, launched)
    recorded = {"username": "tenant", "host_keys": [key]}
    with transaction(selling.engine) as conn:
        conn.execute(sa.update(allocations).values(connection=recorded))
    gpuaas(*words, "--host", "192.0.2.1")
    assert (gpuaas.status, "way_ambiguous" in gpuaas.err) == (1, True)
    gpuaas(*words)
    assert gpuaas.status == 0, gpuaas.err
    assert document.load(output)["label"] == "vm"
    shown = selling.client("admin").get(f"admin/allocations/{launched}").json()
    lines = log.read_text().splitlines()
    assert {"StrictHostKeyChecking=yes", f"HostKeyAlias={launched}"} <= set(lines)
    assert (tmp_path / "trusted").read_text() == f"{launched} {key}\n"
    address, program = lines[-2:]
    assert (address, program) == (shown["claims"][0]["private_ip"], "python3 -I -B -")
    assert lines[lines.index("-l") + 1] == shown["username"]
    (carrier,) = (line for line in lines if "ProxyCommand=" in line)
    assert f"HostKeyAlias={NODE}" in carrier and carrier.endswith("-- 192.0.2.7")


def test_a_captures_output_is_its_own() -> None:
    line = "host benchmark capture --output a.json --label x"
    assert hoist(line.split()) == line.split()
    assert hoist(["host", "benchmark", "gate", "a", "--output", "json"])[:2] == ["--output", "json"]
