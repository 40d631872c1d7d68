"""Idle check: a host with any tenant must not be restarted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host, _ledger, _object_names
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.modules import host_idle as module

pytestmark = pytest.mark.covers("HOST-1", "HOST-4")

TENANT, OTHER = "23bd713b", "9c0e1b52"
ANY: dict[str, Any] = {"allocations": [], "boot_id": ""}
RESTART, BOOTSTRAP = {"before": "restart"} | ANY, {"before": "bootstrap"} | ANY


def process(tree: Path, pid: int, *arguments: str) -> None:
    folder = tree / "proc" / str(pid)
    folder.mkdir(parents=True)
    (folder / "cmdline").write_text("\0".join(arguments))


def refusal(params: dict[str, Any]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        module.look(params)
    return caught.value


@pytest.mark.covers("CTRL-12")
def test_machines_are_found_without_libvirt(tree: Path) -> None:
    process(tree, 7, "/usr/bin/qemu-img", "convert", "a", "b")
    process(tree, 8, "/bin/sh", "-c", "qemu-system-x86_64")
    assert module.look(RESTART)["idle"]
    process(tree, 9, "/usr/bin/qemu-system-x86_64", "-name", "guest=stranger")
    failure = refusal(RESTART)
    assert (failure.code, failure.found) == ("host_in_use", "qemu-system-x86_64 9")
    # Bootstrap repairs a slice host under its VMs, as long as it does not restart the host.
    assert module.look(BOOTSTRAP)["idle"]


def test_a_tenant_of_the_whole_machine_has_no_qemu(tree: Path) -> None:
    _ledger.hold(_ledger.MACHINE, fence=1, allocation_id=TENANT, disk_identity="")
    failure = refusal(RESTART)
    assert (failure.code, failure.found) == ("host_in_use", f"the whole machine leased by {TENANT}")
    assert refusal(BOOTSTRAP).code == "machine_leased"
    _ledger.mark_dirty(_ledger.MACHINE, fence=1, disk_identity="")
    _ledger.release(_ledger.MACHINE, fence=1)
    for params in (RESTART, BOOTSTRAP):
        assert "an unnamed allocation" in refusal(params).found


@pytest.mark.covers("I15")
def test_a_leased_slot_whose_guest_is_off_is_somebodys(tree: Path) -> None:
    for slot, holder in (("slot-0", TENANT), ("slot-1", OTHER), ("slot-2", TENANT)):
        _ledger.hold(slot, fence=1, allocation_id=holder, disk_identity="")
    _ledger.release("slot-2", fence=1)
    process(tree, 9, "/usr/bin/qemu-system-x86_64")
    users = f"qemu-system-x86_64 9, slot-0 leased by {TENANT}, slot-1 leased by {OTHER}"
    assert refusal(RESTART).found == users
    assert module.look(BOOTSTRAP)["idle"]


def test_the_slices_of_a_confirmed_restart_do_not_count(tree: Path) -> None:
    first, second = (f"{start}-6073-4ef7-8a51-2897e902365d" for start in (TENANT, OTHER))
    boot = tree / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("b1\n")
    for number, key in enumerate((first, second)):
        _ledger.hold(f"slot-{number}", fence=1, allocation_id=key, disk_identity="")
        name = f"guest={_object_names.domain_name(key)},debug-threads=on"
        process(tree, 8 + number, "/usr/bin/qemu-system-x86_64", "-name", name)
    confirmed = RESTART | {"allocations": [first, second], "boot_id": "b1"}
    assert module.look(confirmed)["identity"]["boot_id"] == "b1"
    late = refusal(confirmed | {"boot_id": "b0"})
    assert late.code == "boot_changed", "a run of an earlier boot restarts nothing"
    users = refusal(confirmed | {"allocations": [first]}).found
    assert users == f"qemu-system-x86_64 9, slot-1 leased by {second}"


@pytest.mark.covers("I13")
def test_a_ledger_that_cannot_be_read_says_nothing_of_nobody(tree: Path) -> None:
    _host.write(f"{_ledger.DIRECTORY}/machine.json", "{")
    for params in (RESTART, BOOTSTRAP):
        assert refusal(params).code == "ledger_unreadable"


def test_what_libvirt_asks_a_qemu_is_no_machine(tree: Path) -> None:
    probe = ["/usr/bin/qemu-system-x86_64", "-S", "-no-user-config", "-nodefaults", "-nographic"]
    process(tree, 7, *probe, "-machine", "none,accel=kvm:tcg", "-qmp", "unix:/x", "-daemonize")
    assert module.look(RESTART)["idle"]
    process(tree, 8, "/usr/bin/qemu-system-x86_64", "-machine", "q35", "-name", "none")
    assert refusal(RESTART).found == "qemu-system-x86_64 8"
