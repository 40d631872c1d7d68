"""Edits of files that bootstrap and the binding own entirely: detected, and repaired at once.

The writers define the list of files: it contains every file that they write onto an empty host.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _kernel_arguments
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_files,
    _boot_service,
    _boot_units,
    _host,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import _sriov_vfs
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _baseline_files
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import (
    _checks_network,
    _checks_platform,
)

pytestmark = pytest.mark.covers("HOST-4", "HOST-6", "HOST-7", "HOST-8", "HOST-10")

UP = "loaded/active/enabled/success"
UNITS = [_boot_units.NETWORK, _boot_units.FABRIC, _boot_units.BINDING, _boot_units.CLAIM]
DEVICES = {"0000:23:00.0": "1234:11e8", "0000:25:10.0": "8086:10ca"}
SETTINGS: dict[str, dict[str, Any]] = {
    _boot_units.FABRIC.name: {
        "pfs": [],
        "pf_ids": ["8086:10c9"],
        "link": "ethernet",
        "count": 1,
        "idle_vlan": 3000,
        "macs": {},
    },
    _boot_units.BINDING.name: {"devices": DEVICES},
    _boot_units.CLAIM.name: {"devices": DEVICES},
}
CHECKS = {
    _boot_units.NETWORK.name: _checks_network.network_service,
    _boot_units.FABRIC.name: _checks_network.fabric_vfs,
    _boot_units.BINDING.name: _checks_platform.vfio_binding,
    _boot_units.CLAIM.name: _checks_platform.vfio_binding,
}
CODE = f"{_boot_files.LIBRARY}/{_boot_files.PACKAGE.replace('.', '/')}"


@pytest.fixture
def host(parity: Any, machine: Any) -> Any:
    """A slice host with an approved slot, whose files are as they were written."""
    machine.file("/proc/cmdline", "intel_iommu=on iommu=pt")
    for name in _kernel_arguments.MODULES:
        machine.folder(f"/sys/module/{name}")
    machine.file("/etc/initramfs-tools/modules", "# site\nnvme\n")
    machine.file("/etc/gpuaas/slice-mode.json", '{"mode": "slice"}')
    machine.pci("0000:23:00.0", "1234:11e8", driver="vfio-pci", config="\x34\x12")
    card = {"class": "0x020000", "sriov_numvfs": "1", "sriov_totalvfs": "7"}
    machine.pci("0000:25:00.0", "8086:10c9", driver="igb", **card)
    machine.pci("0000:25:10.0", "8086:10ca", driver="vfio-pci", config="\x86\x80")
    machine.function("0000:25:00.0", 0, "0000:25:10.0")
    parity.identified({"address": parity.mac})
    parity.units(baseline=UP, fabric=UP, binding=UP, claim=UP)
    parity.boots()
    SETTINGS[_boot_units.NETWORK.name] = _baseline_files.settings(parity.profile["network"])
    for unit in UNITS:
        parity.installed(unit, **SETTINGS[unit.name])
    return parity


def look(host: Any, check: Callable[[Any], Any]) -> tuple[str, str]:
    result = check(host.facts(host.slot))
    return result.status, result.detail


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_services_as_they_were_installed_pass(host: Any, unit: _boot_service.Unit) -> None:
    assert look(host, CHECKS[unit.name])[0] == "PASS"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_each_file_of_a_service_is_looked_at(host: Any, unit: _boot_service.Unit) -> None:
    files = [unit.path, unit.program] + ([] if unit.borrowed else [unit.settings_path])
    # Its own code, and the code that it shares with the others.
    names = (unit.module, "core._host", "core._errors")
    code = [f"{CODE}/{name.replace('.', '/')}.py" for name in names]
    for path in (*files, *code):
        file = _host.path(path)
        text, mode = file.read_text(), file.stat().st_mode
        for edited in (f"{text}# edited\n", "", None):
            if edited is None:
                file.unlink()
            else:
                file.write_text(edited)
            status, detail = look(host, CHECKS[unit.name])
            assert (status, path in detail) == ("FAIL", True), detail
        file.write_text(text)
        file.chmod(mode)
        assert look(host, CHECKS[unit.name])[0] == "PASS"
    for path in (*files, *code):
        _host.path(path).write_text("edited\n")
    assert look(host, CHECKS[unit.name])[0] == "FAIL"
    # A single repair for all of them.
    host.installed(unit, **SETTINGS[unit.name])
    assert look(host, CHECKS[unit.name])[0] == "PASS"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
@pytest.mark.parametrize("folder", ["/etc/systemd/system", "/etc/systemd/system.control"])
def test_what_systemctl_edit_adds_is_looked_at_and_repaired(
    host: Any, machine: Any, script: Any, unit: _boot_service.Unit, folder: str
) -> None:
    path = f"{folder}/{unit.service}.d/override.conf"
    machine.file(path, "[Service]\nExecStart=\nExecStart=/bin/true\n")
    assert look(host, CHECKS[unit.name]) == ("FAIL", f"{path} changes {unit.service}")
    host.installed(unit, **SETTINGS[unit.name])
    assert look(host, CHECKS[unit.name])[0] == "PASS"
    assert not _host.path(path).parent.exists()


def test_a_program_that_may_not_be_run_is_no_program(host: Any) -> None:
    program = _host.path(_boot_units.NETWORK.program)
    program.chmod(0o644)
    problem = f"{_boot_units.NETWORK.program} has mode 0644, not 0755"
    assert look(host, _checks_network.network_service) == ("FAIL", problem)


def test_code_without_a_record_is_not_believed(host: Any) -> None:
    """An older release set up the host; another bootstrap and binding write the record."""
    _host.remove(_boot_files.RECORD)
    for unit in UNITS:
        status, detail = look(host, CHECKS[unit.name])
        assert status == "FAIL"
        problem = f"{_boot_files.RECORD} does not say what code {unit.service} was given"
        assert problem in detail.split("; ")
    _host.write(_boot_files.RECORD, "[")
    assert look(host, _checks_network.network_service)[0] == "FAIL"
    for unit in UNITS:
        host.installed(unit, **SETTINGS[unit.name])
    assert [look(host, check)[0] for check in CHECKS.values()] == ["PASS"] * len(CHECKS)


def test_a_newer_release_alone_is_no_edit(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parity does not compare its own code, because the services of a release agree with each
    other."""
    monkeypatch.setattr(
        _boot_service, "sources", lambda module: {module: "new", "core._host": "new as well"}
    )
    assert [look(host, check)[0] for check in CHECKS.values()] == ["PASS"] * len(CHECKS)
    host.installed(_boot_units.BINDING, **SETTINGS[_boot_units.BINDING.name])
    # The shared code was written anew for all of them.
    assert _host.read(f"{CODE}/core/_host.py") == "new as well"
    assert [look(host, check)[0] for check in CHECKS.values()] == ["PASS"] * len(CHECKS)


def test_the_record_is_for_root_alone(host: Any) -> None:
    assert stat.S_IMODE(_host.path(_boot_files.RECORD).stat().st_mode) == 0o600


def test_the_bindings_settings_name_the_approved_devices_and_no_others(host: Any) -> None:
    path, devices = _boot_units.BINDING.settings_path, {"0000:23:00.0": "ffff:ffff"}
    host.installed(_boot_units.BINDING, devices=devices)
    assert look(host, _checks_platform.vfio_binding) == (
        "FAIL",
        f"0000:25:10.0 is not in {path}; "
        f"0000:23:00.0 is ffff:ffff in {path}, and 1234:11e8 on the host",
    )
    # The audio function of an approved GPU is bound with it.
    host.installed(_boot_units.BINDING, devices={**DEVICES, "0000:23:00.1": "10de:22ba"})
    assert look(host, _checks_platform.vfio_binding)[0] == "PASS"
    host.installed(_boot_units.BINDING, devices={**DEVICES, "0000:02:00.0": "8086:1533"})
    status, detail = look(host, _checks_platform.vfio_binding)
    assert status == "WARN"
    assert detail == f"0000:02:00.0 of {path} is of no approved slot, and would be bound at boot"


EARLY = [
    _kernel_arguments.MODULES_LOAD,
    _kernel_arguments.SOFT_DEPENDENCIES,
    _kernel_arguments.INITRAMFS_MODULES,
]


@pytest.mark.parametrize("path", EARLY)
@pytest.mark.parametrize("how", ["edited", "emptied", "gone"])
def test_the_files_of_early_modules_are_looked_at(host: Any, path: str, how: str) -> None:
    check = _checks_platform.vfio_modules
    assert look(host, check)[0] == "PASS"
    file = _host.path(path)
    if how == "edited":
        file.write_text(file.read_text().replace("vfio", "vfi0"))
    elif how == "emptied":
        file.write_text("")
    else:
        file.unlink()
    status, detail = look(host, check)
    assert (status, path in detail) == ("FAIL", True)


def test_what_the_site_adds_to_the_initramfs_is_the_sites(host: Any, machine: Any) -> None:
    text = _host.path(_kernel_arguments.INITRAMFS_MODULES).read_text()
    machine.file(_kernel_arguments.INITRAMFS_MODULES, f"raid1\n{text}dm_mod\n")
    assert look(host, _checks_platform.vfio_modules)[0] == "PASS"


def test_an_initramfs_that_was_never_built_is_none(host: Any, machine: Any) -> None:
    for inputs in ("", _kernel_arguments.DUE):
        machine.file(
            _kernel_arguments.INITRAMFS_RECORD, json.dumps({"inputs": inputs, "boot_id": "x"})
        )
        assert look(host, _checks_platform.vfio_modules) == (
            "FAIL",
            "the initramfs was not built with our modules",
        )


@pytest.mark.parametrize(
    ("path", "old", "new", "expected"),
    [
        # The next boot loses it.
        ("/boot/grub/grub.cfg", " iommu=pt", "", ("FAIL", "the next boot would lose iommu=pt")),
        ("/boot/grub/grub.cfg", "iommu=pt", "iommu=pt iommu=off", ("FAIL", "would lose iommu=pt")),
        ("/boot/grub/grub.cfg", "linux", "chainloader", ("FAIL", "starts no kernel of this host")),
        # It is correct now, but the next update-grub would write a wrong menu.
        (
            _kernel_arguments.DROP_IN,
            " iommu=pt",
            "",
            ("WARN", "the next update-grub would lose iommu=pt"),
        ),
        (_kernel_arguments.DROP_IN, "pt", "pt quiet", ("WARN", "is not what bootstrap writes")),
    ],
)
def test_the_boot_menu_before_the_next_boot(
    host: Any, path: str, old: str, new: str, expected: tuple[str, str]
) -> None:
    check = _checks_platform.kernel_cmdline
    assert look(host, check)[0] == "PASS"
    file = _host.path(path)
    file.write_text(file.read_text().replace(old, new))
    status, detail = look(host, check)
    assert (status, path in detail, expected[1] in detail) == (expected[0], True, True), detail


def test_another_default_than_ours_is_what_counts(host: Any, machine: Any) -> None:
    plain = "menuentry 'Rescue' {\n linux /boot/vmlinuz root=x\n}\n"
    check, menu = _checks_platform.kernel_cmdline, _host.path("/boot/grub/grub.cfg")
    text = menu.read_text()
    menu.write_text(f"{text}{plain}")
    assert look(host, check)[0] == "PASS"
    menu.write_text(f'set default="Rescue"\n{text}{plain}')
    status, detail = look(host, check)
    assert status == "FAIL"
    assert "the next boot would lose intel_iommu=on: entry 'Rescue'" in detail
    menu.write_text(f'set default="${{saved_entry}}"\n{text}{plain}')
    assert look(host, check)[0] == "PASS"
    machine.file("/boot/grub/grubenv", "saved_entry=Rescue\n")
    assert look(host, check)[0] == "FAIL"


def test_a_later_file_of_grub_that_forgets_ours_is_a_warning(host: Any, machine: Any) -> None:
    machine.file("/etc/default/grub.d/99-site.cfg", 'GRUB_CMDLINE_LINUX="quiet"\n')
    assert look(host, _checks_platform.kernel_cmdline) == (
        "WARN",
        "the next update-grub would lose intel_iommu=on iommu=pt",
    )


def test_what_the_site_gives_itself_needs_no_file_of_ours(host: Any, machine: Any) -> None:
    machine.file("/etc/default/grub", 'GRUB_CMDLINE_LINUX="intel_iommu=on iommu=pt"\n')
    _host.remove(_kernel_arguments.DROP_IN)
    assert look(host, _checks_platform.kernel_cmdline)[0] == "PASS"


def test_no_boot_menu_is_no_proof(host: Any) -> None:
    _host.remove("/boot/grub/grub.cfg")
    status, detail = look(host, _checks_platform.kernel_cmdline)
    assert (status, detail) == (
        "FAIL",
        "/boot/grub/grub.cfg is missing: no boot menu to look at",
    )


def test_the_fabrics_settings_are_those_of_its_role(host: Any) -> None:
    params = {"pf_ids": ["8086:10c9"], "link": "ethernet", "count": 1, "pfs": [], "macs": {}}
    params["idle_vlan"] = 3000
    assert _sriov_vfs.settings(params) == SETTINGS[_boot_units.FABRIC.name]


def test_looking_writes_nothing(host: Any, tree: Path) -> None:
    def files() -> dict[str, tuple[int, int]]:
        present = (file for file in tree.rglob("*") if file.is_file())
        return {str(f): (f.stat().st_mtime_ns, f.stat().st_ino) for f in present}

    before = files()
    for check in (
        *CHECKS.values(),
        _checks_platform.kernel_cmdline,
        _checks_platform.vfio_modules,
    ):
        look(host, check)
    assert files() == before
