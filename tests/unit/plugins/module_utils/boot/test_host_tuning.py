"""Tuned profiles: their changes, their effect, and their complete removal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import (
    _host_tuning,
    _hugepages,
    _tuning_opt_in,
    _tuning_profiles,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _command,
    _host,
    _host_snapshot,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.topology import _host_resources

pytestmark = pytest.mark.covers("HOST-5")

NETWORK = _tuning_profiles.DEFINITIONS[_tuning_profiles.NETWORK]
ASKED: dict[str, Any] = {"tuning": [_tuning_profiles.NETWORK]}


class Kernel:
    """Sysctl values as the kernel keeps them, and the limit of a login."""

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
            tuned = "memlock unlimited" in (_host.read(_host_tuning.LIMITS) or "")
            return _command.Result(0, "unlimited\nunlimited\n" if tuned else "8192\n8192\n", "")
        self.calls.append(argv)
        assert argv[:3] == ["sysctl", "-q", "-w"], argv
        self.set(*argv[3].split("=", 1))
        return _command.Result(0, "", "")

    def values(self) -> dict[str, str]:
        return {key: _host_tuning.value(key) for key in NETWORK.sysctl}


@pytest.fixture
def kernel(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(tree, monkeypatch)


def drive(*profiles: str, check: bool = False, **more: Any) -> _change.Outcome:
    params = {"profiles": list(profiles), **more}
    return _change.drive(_host_tuning.SUBJECT, params, check_mode=check)


def written_files(tree: Path) -> list[Path]:
    """Return every file that the tuning code writes."""
    return [file for path in ("etc", "var") for file in (tree / path).rglob("*") if file.is_file()]


def test_off_by_default_and_nothing_is_touched(kernel: Kernel) -> None:
    assert not drive().changed
    assert not drive(_hugepages.PROFILE).changed
    assert _host_tuning.problems({}) == {}


def test_values_hold_now_and_at_the_next_boot(kernel: Kernel) -> None:
    outcome = drive(_tuning_profiles.NETWORK)
    assert outcome.failure is None
    assert kernel.values() == NETWORK.sysctl
    rows = (_host.read(_host_tuning.SYSCTL) or "").splitlines()
    assert rows[0] == _host_tuning.MARKER
    assert dict(row.split(" = ") for row in rows[1:]) == NETWORK.sysctl
    assert (_host.read(_host_tuning.MODPROBE) or "").splitlines()[1:] == [
        "options ib_ipoib send_queue_size=4096 recv_queue_size=4096"
    ]
    assert (_host.read(_host_tuning.LIMITS) or "").splitlines()[1:] == [
        "* - memlock unlimited", "root - memlock unlimited"
    ]  # fmt: skip
    assert not drive(_tuning_profiles.NETWORK).changed
    assert _host_tuning.problems(ASKED) == {_tuning_profiles.NETWORK: []}


@pytest.mark.covers("HOST-15")
def test_what_was_there_before_comes_back(kernel: Kernel, tree: Path) -> None:
    before = kernel.values()
    drive(_tuning_profiles.NETWORK)
    # Drift on the tuned host must not count as the host's earlier value.
    kernel.set("net.core.rmem_max", "1")
    assert drive(_tuning_profiles.NETWORK).done == ["set_sysctl"]
    assert drive().failure is None
    assert kernel.values() == before
    assert written_files(tree) == []
    assert not drive().changed


def test_files_alone_are_no_effect(kernel: Kernel) -> None:
    """The check reads the kernel and a login, so files that are not loaded do not pass."""
    drive(_tuning_profiles.NETWORK)
    kernel.set("net.ipv4.tcp_rmem", "4096 131072 6291456")
    kernel.write("sys/module/ib_ipoib/parameters/send_queue_size", "128\n")
    kernel.write("sys/module/ib_ipoib/parameters/recv_queue_size", "4096\n")
    _host.write(_host_tuning.LIMITS, f"{_host_tuning.MARKER}\n")
    assert _host_tuning.problems(ASKED) == {
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
    # A node without memory, for example on a card, gives no pages.
    kernel.write("sys/devices/system/node/node2/meminfo", "Node 2 MemTotal: 0 kB\n")
    assert _host_tuning.problems(profile) == {
        _hugepages.PROFILE: ["node 1 has 1 pages of 1 GiB, not 2"]
    }


def test_a_file_of_somebody_else_is_not_replaced_and_not_removed(kernel: Kernel) -> None:
    _host.write(_host_tuning.SYSCTL, "net.core.rmem_max = 1\n")
    failure = drive(_tuning_profiles.NETWORK).failure
    assert failure.code == "file_not_ours"
    assert not drive().changed
    assert _host.read(_host_tuning.SYSCTL) == "net.core.rmem_max = 1"


def test_a_limit_that_cannot_be_asked_is_not_in_force(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(_tuning_profiles.NETWORK)

    def missing(*_a: Any, **_k: Any) -> Any:
        raise Refusal("command_missing", expected="", found="", remedy="")

    monkeypatch.setattr(_command, "run", missing)
    assert _host_tuning.problems(ASKED) == {
        _tuning_profiles.NETWORK: ["memlock of a login is unknown: command_missing"]
    }


def test_the_question_about_the_limit_works_on_this_machine() -> None:
    """The real runuser, through PAM."""
    limits = _command.run(_host_tuning._LOGIN).out.split()
    assert len(limits) == 2
    assert all(word == "unlimited" or word.isdigit() for word in limits)


def test_the_record_is_the_first_word(kernel: Kernel) -> None:
    drive(_tuning_profiles.NETWORK)
    record = _host_snapshot.recall(_host_tuning.RECORD) or {}
    assert record["net.core.rmem_max"] == "212992"


def test_a_profile_in_force_is_a_capability_of_the_host(kernel: Kernel) -> None:
    """Discovery reports it; a requested profile that is not in force is no capability."""
    assert _host_resources.resources({})["tuning"] == []
    assert _host_resources.resources(ASKED)["tuning"] == []
    drive(_tuning_profiles.NETWORK)
    assert _host_resources.resources(ASKED)["tuning"] == [_tuning_profiles.NETWORK]


def test_what_is_opted_in_to_is_recorded_by_the_plan_that_applies_it(
    kernel: Kernel, tree: Path
) -> None:
    foretold = drive(opted_in=[_tuning_profiles.NETWORK], check=True)
    assert (foretold.changed, written_files(tree)) == (True, [])
    outcome = drive(opted_in=[_tuning_profiles.NETWORK])
    assert outcome.failure is None
    assert outcome.plan == foretold.plan
    assert outcome.plan.steps[0] == _change.Step(
        "write_file", _host_tuning.OPTED_IN, None, '{"profiles": ["network-buffers"]}\n'
    )
    assert outcome.facts["profiles"] == [_tuning_profiles.NETWORK]
    assert not drive(opted_in=[_tuning_profiles.NETWORK]).changed


def test_what_was_opted_in_to_is_a_capability_and_outlives_a_run_with_the_profile_alone(
    kernel: Kernel,
) -> None:
    drive(opted_in=[_tuning_profiles.NETWORK])
    # Playbook and repair make this call, without knowledge of the operator's choice.
    outcome = drive()
    assert (outcome.changed, outcome.facts["profiles"]) == (False, [_tuning_profiles.NETWORK])
    assert kernel.values() == NETWORK.sysctl
    assert _host_resources.resources({})["tuning"] == [_tuning_profiles.NETWORK]
    kernel.set("net.core.rmem_max", "1")
    assert _host_resources.resources({})["tuning"] == []
    assert _host_tuning.problems({}) == {
        _tuning_profiles.NETWORK: ["net.core.rmem_max is 1, not 268435456"]
    }
    _host.remove(_host_tuning.MODPROBE)
    assert _host_tuning.edited({}) == [f"{_host_tuning.MODPROBE} is missing"]
    assert drive().failure is None
    assert (_host_tuning.problems({}), _host_tuning.edited({})) == (
        {_tuning_profiles.NETWORK: []},
        [],
    )


def test_what_is_asked_for_twice_is_written_once(kernel: Kernel) -> None:
    drive(_tuning_profiles.NETWORK)
    text = _host.read(_host_tuning.SYSCTL)
    outcome = drive(_tuning_profiles.NETWORK, opted_in=[_tuning_profiles.NETWORK])
    assert outcome.done == ["write_file"] and outcome.plan.steps[0].subject == _host_tuning.OPTED_IN
    assert not drive(_tuning_profiles.NETWORK).changed
    assert _host.read(_host_tuning.SYSCTL) == text


def test_pages_that_were_opted_in_to_are_asked_of_the_boot(kernel: Kernel) -> None:
    profile: dict[str, Any] = {"kernel_arguments": [], "tuning": [_tuning_profiles.NETWORK]}
    _host.write(_host_tuning.OPTED_IN, json.dumps({"profiles": [_hugepages.PROFILE]}))
    assert _host_resources.boot_params(profile)["tuning"] == [
        _tuning_profiles.NETWORK, _hugepages.PROFILE
    ]  # fmt: skip
    # On a bare-metal machine the record is a remnant and requests nothing.
    ordinary = _host_resources.boot_params(profile, "baremetal")
    assert (ordinary["tuning"], ordinary["state"]) == ([_tuning_profiles.NETWORK], "absent")


@pytest.mark.parametrize("back", [{"opted_in": []}, {"state": "absent"}], ids=repr)
@pytest.mark.parametrize("also", [[], ["hugepages-2m"]], ids=repr)
@pytest.mark.covers("HOST-15")
def test_what_is_taken_back_leaves_nothing_whatever_the_record_names(
    kernel: Kernel, tree: Path, back: dict[str, Any], also: list[str]
) -> None:
    before = kernel.values()
    drive(opted_in=[_tuning_profiles.NETWORK])
    if also:
        _host.write(
            _host_tuning.OPTED_IN, json.dumps({"profiles": [_tuning_profiles.NETWORK, *also]})
        )
    record = _host.kept(_host_tuning.OPTED_IN)
    foretold = drive(**back, check=True)
    assert _host.kept(_host_tuning.OPTED_IN) == record
    outcome = drive(**back)
    assert (outcome.failure, outcome.plan) == (None, foretold.plan)
    assert outcome.plan.steps[0] == _change.Step("remove_file", _host_tuning.OPTED_IN, record, None)
    assert (written_files(tree), kernel.values()) == ([], before)
    assert not drive(**back).changed


def test_the_way_back_takes_what_is_named_as_well(kernel: Kernel, tree: Path) -> None:
    before = kernel.values()
    drive(_tuning_profiles.NETWORK)
    assert drive(_tuning_profiles.NETWORK, state="absent").failure is None
    assert (written_files(tree), kernel.values()) == ([], before)


def test_another_word_takes_the_place_of_the_one_before(kernel: Kernel, tree: Path) -> None:
    drive(opted_in=[_tuning_profiles.NETWORK])
    kernel.write("proc/cpuinfo", "flags : pdpe1gb\n")
    kernel.write("proc/sys/kernel/osrelease", "6.8.0-51-generic\n")
    assert drive(opted_in=[_hugepages.PROFILE]).failure is None
    assert _tuning_opt_in.recorded() == (_hugepages.PROFILE,)
    assert written_files(tree) == [tree / _host_tuning.OPTED_IN.lstrip("/")]
    # The operator cannot take back a profile that the hardware profile requests.
    drive(_tuning_profiles.NETWORK, opted_in=[])
    assert _host_tuning.problems(ASKED) == {_tuning_profiles.NETWORK: []}


def test_a_recorded_name_that_means_nothing_here_is_refused_by_name(
    kernel: Kernel, tree: Path
) -> None:
    drive(opted_in=[_tuning_profiles.NETWORK])
    _host.write(_host_tuning.OPTED_IN, '{"profiles": ["network-buffers", "hugepages-2m"]}')
    there = {file: file.read_text() for file in written_files(tree)}
    kernel.calls.clear()
    outcome = drive()
    assert outcome.failure.code == "tuning_unknown"
    assert (outcome.failure.found, _host_tuning.OPTED_IN in outcome.failure.expected) == (
        "hugepages-2m", True
    )  # fmt: skip
    assert ({file: file.read_text() for file in written_files(tree)}, kernel.calls) == (there, [])
    assert _host_tuning.problems({})["hugepages-2m"] == [
        "this collection has no tuned profile hugepages-2m"
    ]
    assert _host_resources.resources({})["tuning"] == [_tuning_profiles.NETWORK]


@pytest.mark.parametrize("text", ["", "{", "{}", '{"profiles": "x"}', '{"profiles": [1]}'])
def test_on_a_record_that_cannot_be_read_nothing_is_done(
    kernel: Kernel, tree: Path, text: str
) -> None:
    drive(opted_in=[_tuning_profiles.NETWORK])
    _host.write(_host_tuning.OPTED_IN, text)
    there = written_files(tree)
    kernel.calls.clear()
    looks = (
        drive,
        lambda: _host_resources.resources({}),
        lambda: _host_tuning.edited({}),
        lambda: _host_resources.boot_params({"kernel_arguments": []}),
    )
    for look in looks:
        with pytest.raises(Refusal) as caught:
            look()
        assert caught.value.code == "tuning_record_unreadable"
        assert _host_tuning.OPTED_IN in caught.value.found
    assert (written_files(tree), kernel.calls) == (there, [])


@pytest.mark.covers("HOST-15")
@pytest.mark.parametrize("text", ["", "{", '{"profiles": "x"}'])
@pytest.mark.parametrize("word", [{"opted_in": []}, {"state": "absent"}], ids=repr)
def test_a_record_that_cannot_be_read_is_no_bar_to_who_wants_nothing_of_it(
    kernel: Kernel, tree: Path, text: str, word: dict[str, Any]
) -> None:
    """Otherwise the way back would fail half-way, on a host that has already left slice mode."""
    drive(opted_in=[_tuning_profiles.NETWORK])
    _host.write(_host_tuning.OPTED_IN, text)
    assert drive(**word).failure is None
    assert written_files(tree) == []


@pytest.mark.parametrize("text", ["", "{"])
def test_a_record_that_cannot_be_read_is_written_anew_by_who_says_what_it_holds(
    kernel: Kernel, tree: Path, text: str
) -> None:
    _host.write(_host_tuning.OPTED_IN, text)
    assert drive(opted_in=[_tuning_profiles.NETWORK]).failure is None
    assert _tuning_opt_in.recorded() == (_tuning_profiles.NETWORK,)


def test_pages_that_this_machine_cannot_give_are_not_recorded(kernel: Kernel, tree: Path) -> None:
    """A recorded request would fail every later bootstrap."""
    kernel.write("proc/cpuinfo", "flags : fpu\n")
    outcome = drive(opted_in=[_hugepages.PROFILE])
    assert outcome.failure.code == "hugepages_unsupported"
    assert written_files(tree) == []


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("", None),
        (",", None),
        ("none", []),
        ("network-buffers,", ["network-buffers"]),
        ("network-buffers,hugepages-1g,network-buffers", ["network-buffers", "hugepages-1g"]),
    ],
)
def test_the_operators_word(value: str, names: list[str] | None) -> None:
    assert _tuning_opt_in.setting(value) == names


@pytest.mark.parametrize("value", ["none,network-buffers", "hugepages-2m", " network-buffers"])
def test_a_word_that_means_nothing_is_refused(value: str) -> None:
    with pytest.raises(Refusal, match="setting_invalid"):
        _tuning_opt_in.setting(value)
