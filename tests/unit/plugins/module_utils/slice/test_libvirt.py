"""Calls of virsh, and the parsing of its answers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _libvirt

from tests.conftest import Script

pytestmark = pytest.mark.covers("SLICE-6")

VIRSH = ("virsh", "--connect", "qemu:///system")
LOOK = (*VIRSH, "domstats", "--state", "--nowait")
DESCRIBE = (*VIRSH, "domstats --state --nowait a; dumpxml --inactive a")


def stats(**counters: tuple[int, int]) -> str:
    return "".join(
        f"Domain: '{name}'\n  state.state={state}\n  state.reason={reason}\n\n"
        for name, (state, reason) in counters.items()
    )


def definition(name: str, rest: str = "") -> str:
    return f"<domain type='kvm'>\n  <name>{name}</name>\n{rest}</domain>\n\n"


@pytest.fixture(autouse=True)
def no_waiting(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "test"):
        _host.write(f"/etc/libvirt/qemu/{name}.xml", "<domain/>")
    monkeypatch.setattr(_libvirt.time, "sleep", lambda _seconds: None)


def test_domains_and_their_states(script: Script) -> None:
    script.on(*LOOK, out=stats(a=(1, 1), b=(5, 0), c=(3, 11), d=(99, 0)))
    words = {name: state.name for name, state in _libvirt.states().items()}
    assert words == {"a": "running", "b": "shut off", "c": "paused", "d": "state 99"}


def test_no_domains(script: Script) -> None:
    script.on(*LOOK, out="\n")
    assert _libvirt.states() == {}


def test_the_reason_tells_a_pause_on_purpose_from_a_disk_error(script: Script) -> None:
    script.on(*LOOK, out=stats(started=(3, 11), broken=(3, 5)))
    states = _libvirt.states()
    assert states["started"].reason in _libvirt.PAUSED_ON_PURPOSE
    assert states["broken"].reason not in _libvirt.PAUSED_ON_PURPOSE


def test_a_domain_is_asked_for_alone(script: Script) -> None:
    """A query of all domains waits while libvirt starts another domain."""
    script.on(*LOOK, "a", out=stats(a=(1, 1)))
    assert _libvirt.state("a") == _libvirt.State("running", 1)
    assert LOOK not in script.calls


def test_a_domain_that_is_not_found_is_looked_for_in_all(script: Script) -> None:
    script.on(*LOOK, "b", rc=1, err="error: failed to get domain 'b'")
    # It may also end between virsh's look and the query.
    script.on(*LOOK, "ending", out="\n")
    for _ in range(2):
        script.on(*LOOK, out=stats(a=(1, 1)))
    script.on(*LOOK, rc=1, err="error: Disconnected")
    assert (_libvirt.state("b"), _libvirt.state("ending")) == (None, None)
    with pytest.raises(Refusal, match="command_failed"):
        _libvirt.state("b")


def test_state_and_definitions_are_read_by_one_program(script: Script) -> None:
    # Text of an administrator in a definition is not taken for libvirt's answer about the state.
    text = definition("a", "  <description>x\n  state.state=5\n  </description>\n")
    script.on(*DESCRIBE, out=stats(a=(1, 1)) + text)
    script.on(*VIRSH, f"{DESCRIBE[-1]}; dumpxml a", out=stats(a=(3, 5)) + text + definition("a"))
    running, paused = _libvirt.State("running", 1), _libvirt.State("paused", 5)
    assert _libvirt.described("a") == (running, [text.strip()])
    assert _libvirt.described("a", live=True) == (paused, [text.strip(), definition("a").strip()])
    assert len(script.calls) == 2


def test_a_domain_that_is_described_in_part_is_asked_for_again(script: Script) -> None:
    """A domain may exist although libvirt does not find it, so it does not count as undefined."""
    script.on(*DESCRIBE, rc=1, err="error: failed to get domain 'a'")
    script.on(*LOOK, out=stats(b=(1, 1))).on(*LOOK, out=stats(a=(5, 0)))
    assert _libvirt.described("a") == (None, [])
    script.on(*VIRSH, "dumpxml", "--inactive", "a", out="<domain/>")
    assert _libvirt.described("a") == (_libvirt.State("shut off"), ["<domain/>"])
    assert script.calls.count(DESCRIBE) == 2
    _host.remove("/etc/libvirt/qemu/a.xml")
    assert _libvirt.described("a") == (_libvirt.State("shut off"), ["<domain/>"])
    assert script.calls.count(DESCRIBE) == 2, "libvirt has no definition of it, and a list shows it"
    _host.write("/etc/libvirt/qemu/a.xml", "<domain/>")
    script.answers[DESCRIBE] = []
    script.on(*DESCRIBE, rc=1, out=stats(a=(1, 1)))
    assert _libvirt.described("a") == (_libvirt.State("running", 1), ["<domain/>"])
    script.answers[LOOK] = []
    script.answers[DESCRIBE] = []
    script.on(*DESCRIBE, rc=1).on(*LOOK, rc=1, err="error: Disconnected")
    with pytest.raises(Refusal, match="Disconnected"):
        _libvirt.described("a")


def test_definitions_of_plain_names_are_read_by_one_program(script: Script) -> None:
    """A domain's number is no name: virsh gives the definition of the domain with that number."""
    names = ["slice-a", "slice-b", "5", "of the site; list"]
    together = "dumpxml --inactive slice-a; dumpxml --inactive slice-b; dumpxml --inactive 5"
    script.on(*VIRSH, together, out=definition("slice-a") * 2 + definition("slice-b"), rc=1)
    for name in names[2:]:
        script.on(*VIRSH, "dumpxml", "--inactive", name, out="<domain/>")
    texts = [definition(name).strip() for name in names[:2]]
    expected = dict(zip(names, [*texts, "<domain/>", "<domain/>"], strict=True))
    assert _libvirt.definitions(names) == expected
    assert len(script.calls) == 3


@pytest.mark.skipif(not shutil.which("virsh"), reason="needs virsh")
def test_a_real_virsh_goes_on_after_a_command_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """With libvirt's driver for tests, which has a single domain and needs no daemon."""
    monkeypatch.setattr(_libvirt, "_VIRSH", (shutil.which("virsh"), "-c", "test:///default"))
    assert _libvirt.described("none") == (None, [])
    life, definitions = _libvirt.described("test", live=True)
    assert (life, len(definitions)) == (_libvirt.state("test"), 2)
    assert _libvirt.definitions(["none", "test"]) == {"test": definitions[0]}


def test_a_domain_that_goes_meanwhile_has_no_definition(script: Script) -> None:
    """A release of its slice may end between the list of all domains and this query."""
    together = "dumpxml --inactive a; dumpxml --inactive gone"
    script.on(*VIRSH, together, out=definition("a"), rc=1)
    for name in ("gone", "b"):
        script.on(*VIRSH, "dumpxml", "--inactive", name, rc=1, err="no answer")
    script.on(*LOOK, "gone", rc=1).on(*LOOK, out=stats(a=(1, 1)))
    assert _libvirt.definitions(["a", "gone"]) == {"a": definition("a").strip()}
    script.on(*LOOK, "b", out=stats(b=(1, 1)))
    with pytest.raises(Refusal, match="no answer"):
        _libvirt.definitions(["b"])


def test_a_guest_that_powers_off_is_graceful(script: Script) -> None:
    script.on(*LOOK, "a", out=stats(a=(1, 1))).on(*LOOK, "a", out=stats(a=(5, 1)))
    script.on(*VIRSH, "shutdown", "a")
    assert _libvirt.shut_down("a", deadline=30, check=list)
    assert script.calls.count((*VIRSH, "shutdown", "a")) == 1


def test_a_guest_that_ignores_the_request_is_not(script: Script) -> None:
    script.on(*LOOK, "a", out=stats(a=(1, 1)))
    script.on(*VIRSH, "shutdown", "a")
    assert not _libvirt.shut_down("a", deadline=0.01, check=list)


def test_a_qemu_that_does_not_answer_is_no_obstacle_to_taking_its_power(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise no release of its slice would ever end."""

    def run(argv: list[str], **more: Any) -> _command.Result:
        if "shutdown" in argv:
            raise Refusal("command_timeout", expected="", found="still running", remedy="")
        return script.run(argv, **more)

    monkeypatch.setattr(_command, "run", run)
    script.on(*LOOK, "a", out=stats(a=(1, 1)))
    assert not _libvirt.shut_down("a", deadline=0.01, check=list)


def test_a_guest_that_was_asked_to_power_off_did_not_do_so_by_itself(script: Script) -> None:
    script.on(*LOOK, "a", out=stats(a=(1, 1)))
    for act in (("shutdown", "a"), ("start", "a", "--paused")):
        script.on(*VIRSH, *act)
    assert not _libvirt.shut_down("a", deadline=0.01, check=list)
    # The run may be lost before it sees the guest off.
    script.on(*LOOK, out=stats(a=(5, 1), b=(5, 1)))
    assert {key: s.off_by_guest for key, s in _libvirt.states().items()} == {"a": False, "b": True}
    _libvirt.start_paused("a", timeout=1)
    assert _libvirt.states()["a"].off_by_guest


def test_a_guest_that_powers_off_late_is_waited_for(script: Script) -> None:
    """Its stop was lost; a start that found it running would start nothing."""
    script.on(*LOOK, "a", out=stats(a=(1, 1)))
    script.on(*VIRSH, "shutdown", "a")

    def lost() -> None:
        if (*VIRSH, "shutdown", "a") in script.calls:
            raise Refusal("stale_fence", expected="a", found="b", remedy="c")

    with pytest.raises(Refusal, match="stale_fence"):
        _libvirt.shut_down("a", deadline=30, check=lost)
    assert _libvirt.stops("a") and not _libvirt.stops("b")
    for state in ((1, 1), (1, 1), (5, 1)):
        script.on(*DESCRIBE, out=stats(a=state) + definition("a"))
    with pytest.raises(Refusal, match="stale_fence"):
        _libvirt.settled("a", lost)
    off = _libvirt.State("shut off", 1, stop_requested=True)
    assert _libvirt.settled("a", list) == (off, [definition("a").strip()])


def test_a_guest_that_ignores_the_request_runs_on(script: Script) -> None:
    script.on(*LOOK, "a", out=stats(a=(1, 1)))
    script.on(*VIRSH, "shutdown", "a")
    assert not _libvirt.shut_down("a", deadline=0.01, check=list)
    script.on(*DESCRIBE, out=stats(a=(1, 1)) + definition("a"))
    assert _libvirt.settled("a", list)[0] == _libvirt.State("running", 1, stop_requested=True)
    assert not _libvirt.stops("a")


@pytest.mark.covers("I10")
def test_a_guest_that_a_later_run_has_started_is_left_alone(script: Script) -> None:
    """The earlier run still waits for the shutdown that it requested."""

    def overtaken() -> None:
        if (*VIRSH, "shutdown", "a") in script.calls:
            raise Refusal("stale_fence", expected="a", found="b", remedy="c")

    script.on(*LOOK, "a", out=stats(a=(1, 1)))
    script.on(*VIRSH, "shutdown", "a")
    with pytest.raises(Refusal, match="stale_fence"):
        _libvirt.shut_down("a", deadline=30, check=overtaken)
    with pytest.raises(Refusal, match="stale_fence"):
        _libvirt.destroy("a", check=overtaken)
    assert script.calls.count((*VIRSH, "shutdown", "a")) == 1


def test_power_is_taken_until_it_is_off(script: Script) -> None:
    script.on(*VIRSH, "destroy", "a", rc=1).on(*VIRSH, "destroy", "a")
    script.on(*LOOK, "a", out=stats(a=(1, 1))).on(*LOOK, "a", out=stats(a=(5, 2)))
    _libvirt.destroy("a", check=list)


def test_power_that_cannot_be_taken_is_refused(script: Script) -> None:
    script.on(*VIRSH, "destroy", "a", rc=1)
    script.on(*LOOK, "a", out=stats(a=(4, 0)))
    with pytest.raises(Refusal, match="domain_not_stopped"):
        _libvirt.destroy("a", check=list, deadline=-1)


@pytest.mark.parametrize(("xml", "options"), [("<nvram/>", ("--nvram",)), ("<os/>", ())])
def test_undefine_takes_the_nvram_when_there_is_one(
    script: Script, xml: str, options: tuple[str, ...]
) -> None:
    script.on(*VIRSH, "dumpxml", "--inactive", "a", out=xml)
    script.on(*VIRSH, "undefine", "a", *options, rc=1).on(*VIRSH, "undefine", "a", *options)
    _libvirt.undefine("a")
    assert script.calls[-1] == (*VIRSH, "undefine", "a", *options)


def test_undefine_gives_up_after_its_attempts(script: Script) -> None:
    script.on(*VIRSH, "dumpxml", "--inactive", "a", out="")
    script.on(*VIRSH, "undefine", "a", rc=1, err="busy")
    with pytest.raises(Refusal, match="busy"):
        _libvirt.undefine("a")


def test_processes_are_found_past_libvirt(tree: Path) -> None:
    for pid, arguments in {
        "12": "/usr/bin/qemu-system-x86_64\0-name\0guest=slice-a,debug-threads=on\0",
        "13": "/usr/bin/grep\0slice-a\0",
        "14": "/usr/bin/qemu-system-x86_64\0-name\0guest=slice-b\0",
    }.items():
        (tree / "proc" / pid).mkdir(parents=True)
        (tree / "proc" / pid / "cmdline").write_text(arguments)
    (tree / "proc" / "15").mkdir()
    assert _libvirt.processes("slice-a") == {12: "qemu-system-x86_64"}


def test_the_pid_of_a_dead_qemu_does_not_count(tree: Path) -> None:
    (tree / "run/libvirt/qemu").mkdir(parents=True)
    (tree / "run/libvirt/qemu/a.pid").write_text("77")
    assert _libvirt.qemu_pid("a") is None
    (tree / "proc/77").mkdir(parents=True)
    assert _libvirt.qemu_pid("a") == 77
