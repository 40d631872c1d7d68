"""Playbooks run by hand: tags, batches of hosts, and -b with a user that only SSH knows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.playbooks import FOLDER

pytestmark = pytest.mark.covers("ECO-1")

ROOT = Path(__file__).resolve().parents[2]
# Writes a line for each command to run as another user, and runs it as the present user.
BECOME = """#!/bin/sh
echo "$@" >>"{log}"
while [ "${{1#-}}" != "$1" ]; do [ "$1" = -u ] && shift; shift; done
exec "$@"
"""


def play(*words: str | Path, hosts: str = "localhost,") -> str:
    """The output of ansible-playbook, which may fail."""
    done = subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", "-i", hosts, *words],
        env={
            **{name: value for name, value in os.environ.items() if "ANSIBLE" not in name},
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "build" / "collections"),
            "ANSIBLE_PIPELINING": "1",
            "ANSIBLE_SHOW_CUSTOM_STATS": "1",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def bootstrap(*words: str) -> list[str]:
    """Names of the tasks that would be played."""
    listed = play(FOLDER / "bootstrap.yml", "--list-tasks", *words)
    return re.findall(r"^      (.+?)\tTAGS", listed, re.MULTILINE)


def test_no_play_decides_for_its_caller_whether_it_becomes_root() -> None:
    """The keyword `become` of a play outranks -b, even if a missing user makes it false."""
    for playbook in FOLDER.glob("*.yml"):
        for part in yaml.safe_load(playbook.read_text()):
            assert "become" not in part, playbook


def test_every_play_that_reads_a_profile_takes_the_values_of_a_single_host() -> None:
    reading = [
        text
        for file in FOLDER.glob("*.yml")
        if "file', slice_profile_file" in (text := file.read_text())
    ]
    assert reading and all("combine(slice_profile_overrides" in text for text in reading)


def test_no_play_restarts_a_group_of_hosts_at_once() -> None:
    batches = set()
    for playbook in FOLDER.glob("*.yml"):
        text = playbook.read_text()
        if "slice_allow_reboot" in text:
            assert {part.get("serial") for part in yaml.safe_load(text)} != {None}, playbook
            batches |= {part["serial"] for part in yaml.safe_load(text)}
        elif "ansible.builtin.reboot" in text:
            assert [part["serial"] for part in yaml.safe_load(text)] == [1], playbook
    (batch,) = batches
    assert batch.startswith("{{ slice_serial | default(slice_allow_reboot ")


@pytest.mark.parametrize(("word", "becomes"), [((), False), (("-b",), True)])
def test_b_makes_root_of_a_user_whom_only_ssh_knows(
    tmp_path: Path, word: tuple[str, ...], becomes: bool
) -> None:
    program = tmp_path / "become"
    program.write_text(BECOME.format(log=tmp_path / "log"))
    program.chmod(0o755)
    profile = ROOT / "profiles" / "lab.yml"
    settings = [f"ansible_become_exe={program}", f"ansible_python_interpreter={sys.executable}"]
    output = play(
        FOLDER / "discover.yml", "-c", "local", "--become-user", "daemon", *word,
        *(x for text in (*settings, f"slice_profile_file={profile}") for x in ("-e", text)),
    )  # fmt: skip
    assert "failed=0" in output, output
    assert (tmp_path / "log").exists() is becomes


def test_a_part_of_bootstrap_is_played_by_its_tag() -> None:
    # Whatever part is played, the machine of a tenant is refused, and an expected plan holds.
    first = ["Refuse a machine that a tenant has as a whole", "Look at what bootstrap will change"]
    first += ["Report the plan", "Change nothing for a plan"]
    assert bootstrap()[:4] == first
    network = ["Establish the slice network", "Measure the slices"]
    assert bootstrap("--tags", "network,telemetry") == [*first, *network]
    tags = play(FOLDER / "bootstrap.yml", "--list-tags")
    parts = "always, boot, fabric, libvirt, module_cache, names, network, packages, telemetry"
    assert f"TASK TAGS: [{parts}, tuning]" in tags


@pytest.mark.parametrize("run", [{}, {"slice_run": {"node_id": "node-1"}}], ids=["hand", "run"])
def test_a_slice_that_is_left_fails_the_playbook_by_hand_only(
    run: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without libvirt's programs its machines cannot be read, which counts as left."""
    monkeypatch.setenv("PATH", str(tmp_path))
    slot = {"slot_id": "slot-0", "nvme_device": "/dev/none", "gpu_pci_address": "0000:ff:1f.7"}
    slot |= {"management_mac": "52:54:00:00:00:01", "private_ip": "10.100.0.10"}
    variables = {
        "slice_profile": {"network": {"bridge": "ovsbr0"}},
        "slice_allocation": {"id": "0f8fad5b-d9cb-469f-a165-70867728950e"},
        "slice_slots": [slot],
        **run,
    }
    output = play(FOLDER / "verify_absent.yml", *HERE, "-e", json.dumps(variables))
    assert ("failed=0" in output) is bool(run), output
    assert ('"code": "not_absent"' in output) is not bool(run), output


# Check mode, because bootstrap would change this machine.
HERE = ("-c", "local", "-C", "-e", f"ansible_python_interpreter={sys.executable}")


def played(profile: dict[str, object], *words: str) -> str:
    variables = json.dumps({"slice_profile": profile})
    return play(FOLDER / "bootstrap.yml", *HERE, "-e", variables, *words)


def test_a_part_that_fails_fails_the_playbook() -> None:
    """Ansible takes a failure for rescued if no task of the rescue has the tag."""
    # A value of a single host stands beside the profile that its group shares.
    overrides = json.dumps({"slice_profile_overrides": {"network": {"tmfifo": "neither"}}})
    shared = f"slice_profile_file={ROOT}/profiles/lab.yml"
    words = ("-e", shared, "-e", overrides, "--tags", "network")
    output = play(FOLDER / "bootstrap.yml", *HERE, *words)
    assert "rescued=1" in output and "failed=1" in output, output
    assert '"ok": false' in output and "'neither'" in output


def test_a_part_puts_no_host_into_slice_mode_and_reports_nothing() -> None:
    parts = "boot,fabric,libvirt,module_cache,names,network,packages,telemetry,tuning"
    for words in (("--tags", "names"), ("--skip-tags", parts)):
        output = played({"name": "lab"}, *words)
        assert "failed=0" in output and "slice_result" not in output, output
        shown = re.findall(r"^TASK \[(.+?)\] \*+\n(\w+)", output, re.MULTILINE)
        done = [name for name, state in shown if state != "skipping"]
        assert done == ["Refuse a machine that a tenant has as a whole"]


@pytest.mark.parametrize(
    ("words", "tried"),
    [
        (("slice_allow_reboot=true",), 1),
        (("slice_allow_reboot=false",), 2),
        (("slice_allow_reboot=true", "slice_serial=2"), 2),
    ],
)
def test_hosts_that_may_reboot_go_one_after_the_other(words: tuple[str, ...], tried: int) -> None:
    """A failure ends the play before the next host. Nothing listens on port 1."""
    output = play(
        FOLDER / "bootstrap.yml", "-e", "ansible_host=127.0.0.1", "-e", "ansible_port=1",
        "-e", "{slice_profile: {}}", *(part for word in words for part in ("-e", word)),
        hosts="slicehost1,slicehost2,",
    )  # fmt: skip
    assert output.count("unreachable=1") == tried, output
