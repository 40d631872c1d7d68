"""Unreadable files: where a file decides, an unreadable file never counts as a missing file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import (
    _grub_menu,
    _host_certificate,
    _host_tuning,
    _hugepages,
    _kernel_arguments,
    _slice_mode,
    _tuning_opt_in,
    _vfio_bind,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _accounts,
    _boot_service,
    _boot_units,
    _change,
    _file_edits,
    _host,
    _host_mode,
    _ledger,
    _object_names,
    _pci,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import (
    _disk,
    _fstab_entries,
    _image_clone,
    _mounting,
    _usage,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import _ipoib_address
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _netplan,
    _ovs_nat,
    _slice_network,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import (
    _checks_network,
    _checks_platform,
    _host_facts,
    _slice_remnants,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _dnsmasq,
    _libvirt,
    _pinning,
    _slice_absence,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.tenant import (
    _pool_workers,
    _tenant_account,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.topology import (
    _host_resources,
    _nvme_disks,
)
from ansible_collections.gpuaas.slice.plugins.modules import baremetal_tenant, host_baseline

ALLOCATION = "23bd713b-6073-4ef7-8a51-2897e902365d"
RECORDED = {"allocation_id": ALLOCATION, "fence": 1, "state": "recorded"}
KERNEL = {"arguments": ["iommu=pt"], "state": "present", "in_effect": False}
ASKED = _host_facts.Request(profile={"network": {}}, slots=())
TENANT = _tenant_account.Traces(accounts=("alice",))


def baseline() -> object:
    return host_baseline.observe(RECORDED)


def certificate() -> object:
    # sshd gets the earlier file back if it does not accept the new file.
    return _host_certificate.apply({"certificate": "x"}, None)


def unmount() -> None:
    _mounting.unmount(
        _change.Step("unmount", "/share", before={"devt": "259:1", "place": "/share"})
    )


def boot_entry() -> object:
    _host.write(_grub_menu.MENU, "menuentry 'Linux' {\n\tlinux /boot/vmlinuz\n}\n")
    return _grub_menu.next_boot()


def agent() -> object:
    _host.write(_checks_platform.ENROLMENT, "GPUAAS_API_URL=https://api\n")
    return _checks_platform.node_agent(_host_facts.Facts(ASKED))


def ipoib() -> object:
    request = _host_facts.Request(profile={"network": {}, "fabric": {}})
    return _checks_network.ipoib_netplan(_host_facts.Facts(request))


CASES: dict[str, tuple[str, Callable[[], object], str]] = {
    "a complete clone, which a second run would write over": (
        f"{_image_clone.DIRECTORY}/slot-0.json", lambda: _image_clone.finished("slot-0"),
        "clone_record_unreadable",
    ),
    "the CPUs and memory that an allocation has": (
        f"{_pinning.DIRECTORY}/{ALLOCATION}.json", lambda: _pinning.recorded(ALLOCATION),
        "host_plan_unreadable",
    ),
    "the proof of a disk": (
        f"{_ledger.PROOFS}/eui.1.json", lambda: _ledger.takeover("eui.1"), "proof_unreadable",
    ),
    "the first look at a machine": (
        host_baseline._file(ALLOCATION), baseline, "baseline_unreadable",
    ),
    "the devices that a boot binds": (
        _vfio_bind.SETTINGS, _vfio_bind.recorded, "binding_record_unreadable",
    ),
    "the word that a host is for slices": (
        _host_mode.MARKER, lambda: _slice_mode.observe({}), "file_unreadable",
    ),
    "accounts": ("/etc/passwd", _accounts.users, "file_unreadable"),
    "accounts that ended": (
        "/etc/shadow", lambda: baremetal_tenant._open(TENANT), "file_unreadable",
    ),
    "leases": (_dnsmasq.LEASES, _dnsmasq.leases, "file_unreadable"),
    "a reservation": (
        f"{_dnsmasq.DIRECTORY}/gpuaas-slice-x", _dnsmasq.reservations, "file_unreadable",
    ),
    "the site's own address of the fabric": (
        _ipoib_address.FILE, lambda: _ipoib_address.observe({"state": "absent"}), "file_unreadable",
    ),
    "the site's own modules of the initramfs": (
        _kernel_arguments.INITRAMFS_MODULES,
        lambda: _kernel_arguments.observe(KERNEL),
        "file_unreadable",
    ),
    "what slice mode left of the fabric": (
        _ipoib_address.FILE,
        lambda: list(_slice_remnants._ipoib(_host_facts.Facts(ASKED))),
        "file_unreadable",
    ),
    "the site's own tuning": (
        _host_tuning.FILES[0], lambda: _host_tuning.observe({}), "file_unreadable",
    ),
    "what was opted in to on this host": (
        _tuning_opt_in.FILE, _tuning_opt_in.recorded, "tuning_record_unreadable",
    ),
    "the certificate that sshd has": (_host_certificate.FILE, certificate, "file_unreadable"),
    "mounts": ("/proc/self/mountinfo", _usage.mounts, "file_unreadable"),
    "a mount that is to go": ("/proc/self/mountinfo", unmount, "file_unreadable"),
    "swap": ("/proc/swaps", _usage._swaps, "file_unreadable"),
    "what the next boot mounts": (_fstab_entries.FILE, _fstab_entries.text, "file_unreadable"),
    "the entry that the next boot takes": (_grub_menu.ENVIRONMENT, boot_entry, "file_unreadable"),
    "what a boot service goes by": (
        _boot_units.BINDING.settings_path,
        lambda: _host_facts.kept(_boot_units.BINDING.settings_path), "settings_unreadable",
    ),
    "the enrolment": (
        _checks_platform.ENROLMENT, lambda: _host_facts.Facts(ASKED).enrolment,
        "file_unreadable",
    ),
    "the host's certificate": (_checks_platform.CERTIFICATE, agent, "file_unreadable"),
    "the address of the fabric": (_ipoib_address.FILE, ipoib, "file_unreadable"),
}  # fmt: skip

GPU = "0000:43:00.0"
ASKED_OF_SLICES = _host_facts.Request(profile={"network": {"bridge": "br0"}}, slots=())


def remnants(
    look: Callable[[_host_facts.Facts], Any],
) -> Callable[[], object]:
    return lambda: list(look(_host_facts.Facts(ASKED_OF_SLICES)))


def listings(*kinds: str) -> Callable[[], object]:
    return lambda: [_object_names.files(kind) for kind in kinds]


# Folders, and files in folders that cannot be searched. Without them there is nothing to see.
PLACES: dict[str, tuple[str, Callable[[], object]]] = {
    **{
        f"{kind}: {folder}": (folder, listings(kind))
        for kind, (folder, _end) in _object_names._FILES.items()
    },
    "logs of QEMU": (_object_names._FILES["console"][0], _object_names.qemu_logs),
    "plans": (_pinning.DIRECTORY, lambda: _pinning.taken("")),
    "QEMU processes": ("/proc", lambda: _libvirt.processes("")),
    "arguments of a process": ("/proc/12/cmdline", lambda: _libvirt.processes("")),
    "processes of a tenant": ("/proc", lambda: _accounts.processes(1000)),
    "user of a process": ("/proc/12/status", lambda: _accounts.processes(1000)),
    "open files": ("/proc", lambda: list(_host.open_files())),
    "open files of a process": ("/proc/12/fd", lambda: list(_host.open_files())),
    "definitions of domains": ("/run/libvirt/qemu", remnants(_slice_remnants._domains)),
    "barred services": ("/etc/systemd/system", remnants(_slice_remnants._quiet)),
    "units": ("/etc/systemd/system", remnants(_slice_remnants._files)),
    "enabled units": ("/etc/systemd/system/a.wants", remnants(_slice_remnants._files)),
    "the only other unit": ("/etc/systemd/system", _boot_service._units_left),
    "units of an earlier release": ("/etc/systemd/system", _ovs_nat._old),
    "what must be gone": ("/etc/gone", lambda: _slice_remnants._file("/etc/gone/file")),
    "models": (str(Path(_pool_workers.MODELS).parent), _pool_workers.has_models),
    "workers": (_pool_workers._WANTS, _pool_workers.enabled),
    "reservations of an earlier release": ("/etc/dnsmasq.d", _slice_network.stale_reservations),
    "arguments of the kernel": ("/etc/default/grub.d", _kernel_arguments._defaults),
    "NUMA nodes": (_hugepages._NODES, _hugepages._memory),
    "NUMA nodes that are shown": (_host_resources.NODES, _host_resources._nodes),
    "netplan": ("/etc/netplan", lambda: _netplan.judge().links),
    "names of disks": ("/dev/disk/by-id", _disk._links),
    "paths of disks": ("/dev/disk", _nvme_disks._aliases),
    "NVIDIA devices": ("/dev", _checks_platform._nvidia_holders),
    "virtual functions": (f"{_pci.DEVICES}/{GPU}", lambda: _pci.functions(GPU)),
}


def unreadable(absolute: str) -> None:
    """Make a folder or file that exists, and cannot be opened."""
    place = _host.path(absolute)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(place.name)


def refusal(ask: Callable[[], object]) -> str:
    with pytest.raises(Refusal) as caught:
        ask()
    return caught.value.code


@pytest.mark.covers("I13")
@pytest.mark.parametrize("name", CASES)
def test_unreadable_is_not_absent(tree: Path, script: Any, name: str) -> None:
    file, ask, code = CASES[name]
    place = tree / file.lstrip("/")
    place.mkdir(parents=True)
    assert refusal(ask) == code
    place.rmdir()
    place.symlink_to(place.name)
    assert refusal(ask) == code
    assert script.calls == []


@pytest.mark.covers("I13", "I17")
@pytest.mark.parametrize("name", PLACES)
def test_an_unreadable_folder_is_not_an_empty_one(tree: Path, script: Any, name: str) -> None:
    folder, ask = PLACES[name]
    unreadable(folder)
    assert refusal(ask) == "file_unreadable"
    assert script.calls == []


def test_a_network_interface_with_unreadable_users_has_users(tree: Path, script: Any) -> None:
    unreadable("/sys/class/net/eth0")
    assert refusal(lambda: _vfio_bind._interface_users("eth0")) == "file_unreadable"


@pytest.mark.covers("I13", "I17")
def test_a_process_that_cannot_be_read_is_not_absent(tree: Path) -> None:
    unreadable("/proc/12/cmdline")
    answer = _slice_absence._answer(lambda: _slice_absence._processes(ALLOCATION))
    assert (answer["absent"], answer["known"]) == (False, False)


def test_what_a_tenant_hides_from_root_is_left_of_the_tenant(tree: Path) -> None:
    unreadable("/tmp")
    unreadable("/home")
    assert _tenant_account._owned(("/tmp", "/var/tmp"), 1000) == ("/tmp",)
    assert _tenant_account._unreadable("/home/alice") == ["/home/alice"]
    _host.path("/home").unlink()
    assert _tenant_account._unreadable("/home/alice") == []


def test_no_function_that_hides_errors_is_used() -> None:
    """They turn an error into an empty folder or a missing file."""
    hides = re.compile(r"r?i?glob\(|os\.path\.(l?exists|is[a-z]+)\(|os\.walk\([^,]*\)")
    plugins = Path(_host.__file__).parents[2]
    uses = [
        f"{file.name}: {line.strip()}"
        for file in sorted(plugins.rglob("*.py"))
        for line in file.read_text().splitlines()
        if hides.search(line)
    ]
    assert uses == []


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][2] != "file_unreadable"])
@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_what_is_no_record_is_not_an_empty_one(tree: Path, name: str, text: str) -> None:
    file, ask, code = CASES[name]
    _host.write(file, text)
    assert refusal(ask) == code


@pytest.mark.covers("CTRL-15")
def test_a_host_whose_mode_cannot_be_read_takes_no_tenant_of_the_whole(tree: Path) -> None:
    (tree / _host_mode.MARKER.lstrip("/")).mkdir(parents=True)
    (refusal,) = _host_mode.not_ordinary()
    assert (refusal.code, refusal.found) == ("node_in_slice_mode", "mode unreadable")


def test_one_broken_plan_does_not_hide_whose_it_is(tree: Path) -> None:
    _host.write(f"{_pinning.DIRECTORY}/{ALLOCATION}.json", "{")
    with pytest.raises(Refusal, match=ALLOCATION):
        _pinning.taken("")


@pytest.mark.covers("HOST-10")
def test_a_file_that_must_not_be_there_and_cannot_be_read_is_no_pass(tree: Path) -> None:
    file = "/etc/modprobe.d/x.conf"
    assert _file_edits.unlike(file, None) == []
    _host.path(file).mkdir(parents=True)
    assert _file_edits.unlike(file, None) == [f"file_unreadable: {file}: Is a directory"]


def test_the_word_of_another_file_decides_for_dnsmasq_unless_that_is_a_folder(tree: Path) -> None:
    network = {"bridge": "br0", "address": "10.0.0.1/24", "subnet": "10.0.0.0/24"}
    _host.path("/etc/dnsmasq.d/folder").mkdir(parents=True)
    assert "bind-dynamic" in _baseline_files.dnsmasq(network)
    _host.path("/etc/dnsmasq.d/libvirt").symlink_to("libvirt")
    assert refusal(lambda: _baseline_files.dnsmasq(network)) == "file_unreadable"


@pytest.mark.covers("HOST-9")
def test_where_our_own_state_lies_is_known_or_nothing_is_judged(tree: Path) -> None:
    assert _usage._own_devices() == set()
    _host.path("/var/lib/libvirt").parent.mkdir(parents=True)
    _host.path("/var/lib/libvirt").symlink_to("libvirt")
    assert refusal(_usage._own_devices) == "file_unreadable"


@pytest.mark.covers("HOST-10")
def test_a_guest_that_the_system_keeps_from_being_played_is_one_answer_for_all_checks(
    tree: Path,
) -> None:
    lock = _host.path("/run/gpuaas/parity/.lock")
    lock.mkdir(parents=True)
    network = {"bridge": "br0", "address": "10.0.0.1/24", "subnet": "10.0.0.0/24"}
    profile = {"network": {**network, "egress_probe": "192.0.2.1"}}
    facts = _host_facts.Facts(_host_facts.Request(profile=profile))
    assert refusal(lambda: facts.guest) == "probe_failed"
    lock.rmdir()
    assert "Is a directory" in facts.guest_problem
