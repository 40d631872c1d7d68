"""Tuned profiles: what they change, what is in force, and that nothing of them stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils import (
    _before,
    _change,
    _command,
    _host,
    _hugepages,
    _topology_host,
    _tuning,
    _tuning_profiles,
)
from ansible_collections.gpuaas.slice.plugins.module_utils._errors import Refusal

pytestmark = pytest.mark.covers("HOST-5")

NETWORK = _tuning_profiles.DEFINITIONS[_tuning_profiles.NETWORK]
ASKED: dict[str, Any] = {"tuning": [_tuning_profiles.NETWORK]}


class Kernel:
    """Sysctl values as the kernel keeps them, and the limit that a login gets."""

    def __init__(self, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tree = tree
        self.calls: list[list[str]] = []
        for key in NETWORK.sysctl:
            self.set(key, "4096 131072 6291456" if "tcp" in key else "212992")
        monkeypatch.setattr(_command, "run", self.run)

    def set(self, key: str, text: str) -> None:
        self.write(f"proc/sys/{key.replace('.', '/')}", text.replace(" ", "\t") + "\n")

    def write(self, path: str, text: str) -> None:
        (self.tree / path).parent.mkdir(parents=True, exist_ok=True)
        (self.tree / path).write_text(text)

    def run(self, argv: list[str], **_: Any) -> _command.Result:
        if argv[0] == "runuser":
            tuned = "memlock unlimited" in (_host.read(_tuning.LIMITS) or "")
            return _command.Result(0, "unlimited\nunlimited\n" if tuned else "8192\n8192\n", "")
        self.calls.append(argv)
        assert argv[:3] == ["sysctl", "-q", "-w"], argv
        self.set(*argv[3].split("=", 1))
        return _command.Result(0, "", "")

    def values(self) -> dict[str, str]:
        return {key: _tuning.value(key) for key in NETWORK.sysctl}


@pytest.fixture
def kernel(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(tree, monkeypatch)


def drive(*profiles: str) -> _change.Outcome:
    return _change.drive(_tuning.SUBJECT, {"profiles": list(profiles)}, check_mode=False)


def test_off_by_default_and_nothing_is_touched(kernel: Kernel) -> None:
    assert not drive().changed
    assert not drive(_hugepages.PROFILE).changed
    assert _tuning.problems({}) == {}


def test_values_hold_now_and_at_the_next_boot(kernel: Kernel) -> None:
    outcome = drive(_tuning_profiles.NETWORK)
    assert outcome.failure is None
    assert kernel.values() == NETWORK.sysctl
    rows = (_host.read(_tuning.SYSCTL) or "").splitlines()
    assert rows[0] == _tuning.MARKER
    assert dict(row.split(" = ") for row in rows[1:]) == NETWORK.sysctl
    assert (_host.read(_tuning.MODPROBE) or "").splitlines()[1:] == [
        "options ib_ipoib send_queue_size=4096 recv_queue_size=4096"
    ]
    assert (_host.read(_tuning.LIMITS) or "").splitlines()[1:] == [
        "* - memlock unlimited", "root - memlock unlimited"
    ]  # fmt: skip
    assert not drive(_tuning_profiles.NETWORK).changed
    assert _tuning.problems(ASKED) == {_tuning_profiles.NETWORK: []}


@pytest.mark.covers("HOST-15")
def test_what_was_there_before_comes_back(kernel: Kernel, tree: Path) -> None:
    before = kernel.values()
    drive(_tuning_profiles.NETWORK)
    # Drift on the tuned host is not what was there before.
    kernel.set("net.core.rmem_max", "1")
    assert drive(_tuning_profiles.NETWORK).done == ["set_sysctl"]
    assert drive().failure is None
    assert kernel.values() == before
    assert [
        file for path in ("etc", "var") for file in (tree / path).rglob("*.*") if file.is_file()
    ] == []
    assert not drive().changed


def test_files_alone_are_no_effect(kernel: Kernel) -> None:
    """The check reads the kernel and a login, so files that nobody has loaded do not pass."""
    drive(_tuning_profiles.NETWORK)
    kernel.set("net.ipv4.tcp_rmem", "4096 131072 6291456")
    kernel.write("sys/module/ib_ipoib/parameters/send_queue_size", "128\n")
    kernel.write("sys/module/ib_ipoib/parameters/recv_queue_size", "4096\n")
    _host.write(_tuning.LIMITS, f"{_tuning.MARKER}\n")
    assert _tuning.problems(ASKED) == {
        _tuning_profiles.NETWORK: [
            "net.ipv4.tcp_rmem is 4096 131072 6291456, not 4096 87380 134217728",
            "ib_ipoib send_queue_size is 128, not 4096, until it is loaded again",
            "memlock of a login is 8192 8192",
        ]
    }
    outcome = drive(_tuning_profiles.NETWORK)
    assert outcome.facts["pending"] == [
        "ib_ipoib send_queue_size is 128, not 4096, until it is loaded again"
    ]


def test_pages_are_counted_node_by_node(kernel: Kernel) -> None:
    profile = {"tuning": [_hugepages.PROFILE], "hugepages_1g": {"pages": 4, "reserve_mib": 1}}
    for node, pages in enumerate((2, 1)):
        folder = f"sys/devices/system/node/node{node}"
        kernel.write(f"{folder}/meminfo", f"Node {node} MemTotal: 8388608 kB\n")
        kernel.write(f"{folder}/hugepages/hugepages-1048576kB/nr_hugepages", f"{pages}\n")
    # Memory on a card, for example: a node without any gives none.
    kernel.write("sys/devices/system/node/node2/meminfo", "Node 2 MemTotal: 0 kB\n")
    assert _tuning.problems(profile) == {_hugepages.PROFILE: ["node 1 has 1 pages of 1 GiB, not 2"]}


def test_a_file_of_somebody_else_is_not_replaced_and_not_removed(kernel: Kernel) -> None:
    _host.write(_tuning.SYSCTL, "net.core.rmem_max = 1\n")
    failure = drive(_tuning_profiles.NETWORK).failure
    assert failure is not None and failure.code == "file_not_ours"
    assert not drive().changed
    assert _host.read(_tuning.SYSCTL) == "net.core.rmem_max = 1"


def test_a_limit_that_cannot_be_asked_is_not_in_force(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(_tuning_profiles.NETWORK)

    def missing(*_a: Any, **_k: Any) -> Any:
        raise Refusal("command_missing", expected="", found="", remedy="")

    monkeypatch.setattr(_command, "run", missing)
    assert _tuning.problems(ASKED) == {
        _tuning_profiles.NETWORK: ["memlock of a login is unknown: command_missing"]
    }


def test_the_question_about_the_limit_works_on_this_machine() -> None:
    """The real runuser, through PAM."""
    found = _command.run(_tuning._LOGIN).out.split()
    assert len(found) == 2
    assert all(word == "unlimited" or word.isdigit() for word in found)


def test_the_record_is_the_first_word(kernel: Kernel) -> None:
    drive(_tuning_profiles.NETWORK)
    record = _before.recalled(_tuning.RECORD) or {}
    assert record["net.core.rmem_max"] == "212992"


def test_a_profile_in_force_is_a_capability_of_the_host(kernel: Kernel) -> None:
    """Discovery says it; a profile that is asked for and not in force is none."""
    assert _topology_host.resources({})["tuning"] == []
    assert _topology_host.resources(ASKED)["tuning"] == []
    drive(_tuning_profiles.NETWORK)
    assert _topology_host.resources(ASKED)["tuning"] == [_tuning_profiles.NETWORK]
