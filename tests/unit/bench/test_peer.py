"""Hand-written peer of the provisioning benchmark: clean-up, and figures after a failure."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.command import LabError
from lab.demo import host_steps, slice_steps
from tests.bench import __main__ as bench

MIB = 1 << 20
SIZE = 16 * MIB
PLAN = {
    "disks": ["/dev/disk/by-id/nvme-eui.5e"],
    "mac": "52:54:00:00:00:0a",
    "ip": "10.100.0.10",
    "gpus": ["0000:23:00.0"],
    "fabric_vfs": ["0000:25:10.0"],
}
PROBES = [{"name": "ssh", "seconds": 100.0}, {"name": "gpu_compute", "seconds": 140.0}]
READINESS = {"seconds": 100.0, "probes": PROBES}
IMAGE = SimpleNamespace(sha256="5" * 64, size=1152 * MIB)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[str]:
    """A disk as a guest leaves it: a partition table at both ends, data up to its last byte."""
    image = tmp_path / "disk.raw"
    image.write_bytes(b"tenant" * (SIZE // 6) + b"tena")
    table = "label: gpt\nstart=1MiB, size=8MiB, type=linux\n"
    subprocess.run(["sfdisk", "-q", image], input=table.encode(), check=True)
    attach = ["losetup", "--find", "--show", "--partscan", str(image)]
    done = subprocess.run(attach, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no loop devices here: {done.stderr.strip()}")
    yield done.stdout.strip()
    subprocess.run(["losetup", "--detach", done.stdout.strip()], check=True)


def test_nothing_that_a_guest_wrote_is_left_on_the_disk(disk: str, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    # Removing a missing object fails, which must not stop the clean-up.
    for name, code in {"virsh": 1, "dhcp_release": 1, "systemctl": 0, "udevadm": 0}.items():
        program = programs / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/calls\nexit {code}\n')
        program.chmod(0o755)
    words = ["peer-of-the-test", disk, PLAN["mac"], PLAN["ip"]]
    done = subprocess.run(
        ["sh", "-s", *words],
        input=(bench.HERE / "undo.sh").read_text(),
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}:/usr/sbin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "disk.raw").read_bytes() == bytes(SIZE)
    assert list(Path("/sys/class/block", Path(disk).name).glob("loop*p*")) == []
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[:3] == [
        "virsh -q destroy peer-of-the-test",
        "virsh -q undefine peer-of-the-test",
        f"dhcp_release ovsbr0 {PLAN['ip']} {PLAN['mac']}",
    ]
    assert calls[-1] == "udevadm settle"


class Host:
    """A stage whose host runs nothing: the scripts that it was given, in order."""

    def __init__(self, folder: Path, *, fails: bool = False) -> None:
        self.folder = folder
        self.facts = {"image": IMAGE}
        self.console = SimpleNamespace(print=lambda *_words: None)
        self.fails = fails
        self.ran: list[tuple[str, ...]] = []
        (folder / "tenant_key.pub").write_text("ssh-ed25519 AAAA tenant\n")

    def profile(self) -> dict[str, Any]:
        return {"network": {"bridge": "ovsbr0"}}

    def on_host(self, *words: str, stdin: str = "", limit_s: float = 0) -> str:
        if not stdin:
            self.ran.append(words)
            return ""
        is_peer = stdin == (bench.HERE / "script.sh").read_text()
        self.ran.append(("script" if is_peer else "undo", *words[3:]))
        if is_peer and self.fails:
            raise LabError("it failed")
        return "dd_seconds 4.0\nready\n" if is_peer else ""


def test_the_peer_is_undone_also_when_it_fails(tmp_path: Path) -> None:
    host: Any = Host(tmp_path)
    assert bench.by_hand(host, PLAN)[1] == 4.0
    failing: Any = Host(tmp_path, fails=True)
    with pytest.raises(LabError):
        bench.by_hand(failing, PLAN)
    assert host.ran == failing.ran
    opens = host.ran.index(("ovs-ofctl", "add-flow", "ovsbr0", "priority=1000,actions=NORMAL"))
    closes = host.ran.index(("systemctl", "restart", "gpuaas-slice-network-baseline.service"))
    scripts = host.ran[opens + 2 : closes - 2]
    assert [name for name, *_words in scripts] == ["script", "undo"]
    assert scripts[1] == ("undo", PLAN["disks"][0], PLAN["mac"], PLAN["ip"])


def test_figures_are_kept_when_their_part_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second part fails in its first run; the figures of the first part are there."""
    output = tmp_path / "bench.json"
    output.write_text('{"tasks": {}}')
    steps = ("host", "enrol", "bootstrap", "discover", "transition", "approve", "bind", "parity")
    for name in steps:
        monkeypatch.setattr(host_steps, name, _named(name))
    monkeypatch.setattr(bench, "REPOSITORY", tmp_path)
    monkeypatch.setattr(bench, "parity", lambda _stage: {"speedup": 10.8})

    def fail(stage: Any) -> None:
        assert stage.settings == {"GPUAAS_DRIFT_INTERVAL_S": "0"}
        raise LabError("no address")

    monkeypatch.setattr(bench, "provision", fail)
    with pytest.raises(LabError):
        bench.main(output)
    assert json.loads(output.read_text()) == {"tasks": {}, "parity": {"speedup": 10.8}}


def test_a_provisioning_counts_its_modules_and_the_seconds_that_are_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in of a launch takes no time; time in which the host waited is subtracted."""
    host: Any = Host(tmp_path)
    line = "1700000010.5 host slice_vm[1]: [run=t-1-1 correlation_id=c] Invoked with slot={...}"
    other = line.replace("t-1-1", "t-2-1")
    waits = line.replace("10.5", "40.0").replace("slice_vm", "gpuaas.slice.slice_ready")
    journal = f"{line}\n1700000011 host sshd: Accepted publickey for run=t-1-1\n{other}\n{waits}\n"
    log = "2023-11-14 22:13:35.000+0000: starting up libvirt version: 9.0.0\n"
    answers = {"date": "1700000000\n", "journalctl": journal, "head": log}
    commands: list[tuple[str, ...]] = []

    def on_host(*words: str, **_more: Any) -> str:
        commands.append(words)
        return answers.get(words[0], "dd_seconds 4.0\nready\n")

    host.on_host = on_host
    host.facts = {**host.facts, "allocation": {"task_ids": ["t-1"]}}
    evidence = {"image": {"seconds": 3.0}, "readiness": READINESS, "plan": PLAN}
    evidence["domain"] = {"name": "slice"}
    monkeypatch.setattr(slice_steps, "provision", lambda _stage: evidence)
    monkeypatch.setattr(slice_steps, "release", lambda _stage: None)
    monkeypatch.setattr(bench, "RUNS", 1)
    monkeypatch.setattr(bench, "zero_share", lambda _image: 0.5)
    monkeypatch.setattr(IMAGE, "zst", "image.zst", raising=False)
    figures = bench.provision(host)
    assert figures["provision"]["ssh_round_trips"] == 2
    # The image took 3 s. QEMU began 25 s before the wait, whose last probe took 140 s.
    assert figures["provision"]["overhead_s"] == pytest.approx(-168.0, abs=1)
    assert ("journalctl", "-q", "-o", "short-unix", "--since=@1700000000") in commands
    assert ("head", "-n", "1", "/var/log/libvirt/qemu/slice.log") in commands


def _named(name: str) -> Any:
    def step(_stage: Any) -> None:
        return None

    step.__name__ = name
    return step
