"""Kernel arguments, VFIO modules and the initramfs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import (
    _kernel_arguments,
    _tuning_opt_in,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

pytestmark = pytest.mark.covers("HOST-4")

ARGUMENTS = ["intel_iommu=on", "iommu=pt"]


class Machine:
    """update-grub, update-initramfs, modprobe and reboots of a host."""

    def __init__(self, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tree, self.calls = tree, []
        self.boots = 0
        # The program that fails, without any effect.
        self.broken = ""
        # Inputs of the last built image.
        self.built: dict[str, bytes] = {}
        self.write("etc/default/grub", 'GRUB_CMDLINE_LINUX="console=ttyS0"\n')
        self.write("etc/initramfs-tools/modules", "# site\nnvme\n")
        self.write("sys/firmware/acpi/tables/DMAR", "")
        self.write("dev/kvm", "")
        (tree / "sys/kernel/iommu_groups/0").mkdir(parents=True)
        self.make_menu()
        self.reboot()
        monkeypatch.setattr(_command, "run", self.run)

    def write(self, path: str, text: str) -> None:
        file = self.tree / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def given(self) -> str:
        """Return the kernel arguments that a shell reads from GRUB's files."""
        value = ""
        drop_ins = sorted((self.tree / "etc/default/grub.d").glob("*.cfg"))
        for file in [self.tree / "etc/default/grub", *drop_ins]:
            for line in file.read_text().splitlines():
                if line.startswith("GRUB_CMDLINE_LINUX="):
                    value = line.split("=", 1)[1].strip('"').replace("$GRUB_CMDLINE_LINUX", value)
        return value

    def make_menu(self) -> None:
        entry = f"\tlinux\t/boot/vmlinuz-6.1 root=UUID=x ro {self.given()}\n"
        self.write("boot/grub/grub.cfg", entry + "\tlinux\t/boot/memtest86+x64.bin\n" + entry)

    def reboot(self) -> None:
        self.boots += 1
        entry = (self.tree / "boot/grub/grub.cfg").read_text().splitlines()[0].split(None, 1)[1]
        self.write("proc/cmdline", f"BOOT_IMAGE={entry}\n")
        self.write("proc/sys/kernel/random/boot_id", f"boot-{self.boots}\n")

    def run(self, argv: list[str], **_: Any) -> _command.Result:
        self.calls.append(argv[0])
        if argv[0] == self.broken:
            raise Refusal("command_failed", expected="", found="", remedy="")
        if argv == ["update-grub"]:
            self.make_menu()
        elif argv[0] == "modprobe":
            for name in argv[2:]:
                (self.tree / "sys/module" / name).mkdir(parents=True, exist_ok=True)
        else:
            assert argv == ["update-initramfs", "-u", "-k", "all"], argv
            inputs = ("etc/modprobe.d/gpuaas-vfio.conf", "etc/initramfs-tools/modules")
            files = {name: self.tree / name for name in inputs}
            self.built = {name: file.read_bytes() for name, file in files.items() if file.is_file()}
        return _command.Result(0, "", "")


@pytest.fixture
def machine(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tree, monkeypatch)


def drive(arguments: list[str] = ARGUMENTS, **more: Any) -> _change.Outcome:
    params = {"arguments": arguments, "state": "present", "in_effect": False, **more}
    return _change.drive(_kernel_arguments.SUBJECT, params, check_mode=False)


def code(outcome: _change.Outcome) -> str:
    return outcome.failure.code


def test_configures_then_needs_a_reboot_then_nothing(machine: Machine) -> None:
    outcome = drive()
    assert outcome.failure is None
    assert machine.calls == ["update-grub", "update-initramfs", "modprobe"]
    assert outcome.facts["reboot_required"]
    assert outcome.facts["reboot_reasons"] == [
        "not booted with intel_iommu=on",
        "not booted with iommu=pt",
        "initramfs built since the boot",
    ]
    assert code(drive(in_effect=True)) == "reboot_required"
    machine.reboot()
    proved = drive(in_effect=True)
    assert proved.failure is None and proved.plan.steps == ()
    assert not proved.facts["reboot_required"]


def test_a_foreign_entry_of_the_boot_menu_is_no_failure(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry of the site, or of a system found by os-prober: update-grub cannot change it."""
    foreign = (
        "menuentry 'Rescue' {\n\tlinux /rescue/vmlinuz-5.4 root=/dev/sdz1 ro\n}\n"
        "menuentry 'Debian (on /dev/sdb2)' {\n\tlinux /boot/vmlinuz-6.1 root=/dev/sdb2\n}\n"
    )
    ours = "menuentry 'Host' {\n\tlinux /boot/vmlinuz-6.1 root=UUID=x ro ARGUMENTS\n}\n"

    def make_menu() -> None:
        text = 'set default="0"\n' + ours.replace("ARGUMENTS", machine.given()) + foreign
        machine.write("boot/grub/grub.cfg", text)

    monkeypatch.setattr(machine, "make_menu", make_menu)
    machine.make_menu()
    assert drive().failure is None
    assert machine.calls.count("update-grub") == 1
    again = drive()
    assert again.failure is None and not again.plan.steps
    # The host's own entry is judged as before.
    machine.write("boot/grub/grub.cfg", ours.replace("ARGUMENTS", "") + foreign)
    assert [step.name for step in drive().plan.steps] == ["update_grub"]


@pytest.mark.parametrize(
    ("broken", "more"),
    [
        ("update-grub", []),
        ("update-initramfs", []),
        ("modprobe", ["initramfs built since the boot"]),
    ],
)
def test_a_run_that_failed_gives_the_reasons_that_are_true(
    machine: Machine, broken: str, more: list[str]
) -> None:
    """The reasons are not those of the plan, and not those from before the completed steps."""
    machine.broken = broken
    failed = drive()
    assert code(failed) == "command_failed"
    unbooted = [f"not booted with {word}" for word in ARGUMENTS]
    assert failed.facts["reboot_reasons"] == [*unbooted, *more]


def test_a_way_back_that_failed_does_not_say_that_the_menu_is_the_sites(machine: Machine) -> None:
    drive()
    machine.reboot()
    machine.broken = "update-grub"
    failed = drive(state="absent")
    assert code(failed) == "command_failed"
    assert failed.facts["reboot_reasons"] == []
    machine.broken = ""
    assert "still booted with iommu=pt" in drive(state="absent").facts["reboot_reasons"]


def test_the_initramfs_has_vfio_before_any_driver_of_a_gpu(machine: Machine) -> None:
    """Compared literally, because modprobe and initramfs-tools read these files."""
    drive()
    assert _host.path("/etc/modprobe.d/gpuaas-vfio.conf").read_text().splitlines() == [
        "softdep nvidia pre: vfio-pci",
        "softdep nvidia_drm pre: vfio-pci",
        "softdep nouveau pre: vfio-pci",
    ]
    modules = ["vfio", "vfio_iommu_type1", "vfio_pci"]
    early = _host.path("/etc/initramfs-tools/modules").read_text().splitlines()
    assert [row for row in early if not row.startswith("#")] == ["nvme", *modules]
    assert _host.path("/etc/modules-load.d/gpuaas-vfio.conf").read_text().split() == modules
    # The image is built after these files were written.
    assert machine.built == {
        name: (machine.tree / name).read_bytes()
        for name in ("etc/modprobe.d/gpuaas-vfio.conf", "etc/initramfs-tools/modules")
    }


@pytest.mark.covers("HOST-10")
@pytest.mark.parametrize(
    "path", [_kernel_arguments.SOFT_DEPENDENCIES, _kernel_arguments.INITRAMFS_MODULES]
)
def test_an_edit_that_no_image_has_is_undone_without_a_build(machine: Machine, path: str) -> None:
    drive()
    machine.reboot()
    machine.calls.clear()
    text = _host.path(path).read_text()
    machine.write(path.lstrip("/"), text.replace("vfio", "vfi0"))
    repaired = drive()
    assert (repaired.failure, repaired.done) == (None, ["write_file"])
    assert _host.path(path).read_text() == text
    assert (machine.calls, repaired.facts["reboot_required"]) == ([], False)


@pytest.mark.parametrize("mark", ["begin", "end"])
def test_half_a_block_is_mended_in_one_run(machine: Machine, mark: str) -> None:
    drive()
    file = _host.path(_kernel_arguments.INITRAMFS_MODULES)
    text = file.read_text().replace(f"# gpuaas.slice: {mark}\n", "")
    file.write_text(f"{text}site_driver\n")
    assert drive().failure is None
    assert file.read_text().endswith(f"site_driver\n{_kernel_arguments.BLOCK}")
    assert drive().plan.steps == ()


@pytest.mark.covers("HOST-10", "HOST-15")
@pytest.mark.parametrize("state", ["present", "absent"])
def test_an_edit_that_an_image_may_have_is_built_away(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    drive()
    machine.reboot()
    machine.write(_kernel_arguments.SOFT_DEPENDENCIES.lstrip("/"), "# nothing\n")
    # A kernel package has built an image since.
    machine.write("boot/initrd.img-6.1", "x")
    later = _host.path(_kernel_arguments.INITRAMFS_RECORD).stat().st_mtime + 60
    os.utime(machine.tree / "boot/initrd.img-6.1", (later, later))
    run = machine.run

    def dies(argv: list[str], **more: Any) -> _command.Result:
        if argv[0] == "update-initramfs":
            raise KeyboardInterrupt
        return run(argv, **more)

    # It also survives a crash between the file and the build.
    monkeypatch.setattr(_command, "run", dies)
    with pytest.raises(KeyboardInterrupt):
        drive(state=state)
    monkeypatch.setattr(_command, "run", run)
    repaired = drive(state=state)
    assert (repaired.failure, repaired.done) == (None, ["update_initramfs"])
    assert "initramfs built since the boot" in repaired.facts["reboot_reasons"]
    assert drive(state=state).plan.steps == ()


@pytest.mark.covers("HOST-10")
@pytest.mark.parametrize("lost", ["menu", "drop-in", "both"])
def test_a_boot_menu_that_somebody_made_is_made_anew(machine: Machine, lost: str) -> None:
    drive()
    machine.reboot()
    machine.calls.clear()
    drop_in = _host.path(_kernel_arguments.DROP_IN)
    text = drop_in.read_text()
    if lost != "menu":
        drop_in.write_text("# nothing\n")
    if lost != "drop-in":
        machine.write("boot/grub/grub.cfg", "\tlinux\t/boot/vmlinuz-6.1 root=UUID=x ro quiet\n")
    repaired = drive()
    assert (repaired.failure, machine.calls) == (None, ["update-grub"])
    assert not repaired.facts["reboot_required"]
    assert "intel_iommu=on iommu=pt" in (_host.read("/boot/grub/grub.cfg") or "")
    assert drop_in.read_text() == text
    assert drive().plan.steps == ()


@pytest.mark.covers("HOST-15")
def test_a_menu_that_still_has_ours_is_made_anew_on_the_way_back(machine: Machine) -> None:
    drive()
    _host.remove(_kernel_arguments.DROP_IN)
    machine.calls.clear()
    restored = drive(state="absent")
    assert (restored.failure, machine.calls[0]) == (None, "update-grub")
    assert "iommu" not in (_host.read("/boot/grub/grub.cfg") or "")
    assert drive(state="absent").plan.steps == ()


@pytest.mark.covers("HOST-15")
@pytest.mark.parametrize("path", ["etc/default/grub", "etc/grub.d/40_custom"])
def test_a_menu_with_the_sites_own_argument_is_left(machine: Machine, path: str) -> None:
    machine.write("boot/grub/grub.cfg", "\tlinux\t/boot/vmlinuz-6.1 root=UUID=x iommu=pt\n")
    machine.write(path, 'GRUB_CMDLINE_LINUX_DEFAULT="iommu=pt"\n')
    assert drive(state="absent").plan.steps == ()


def test_site_lines_of_the_initramfs_keep_every_byte(machine: Machine) -> None:
    file, site = _host.path(_kernel_arguments.INITRAMFS_MODULES), b"# B\xfcro\nnvme\n"
    file.write_bytes(site)
    assert drive().failure is None
    assert file.read_bytes() == site + _kernel_arguments.BLOCK.encode()
    drive(state="absent")
    assert file.read_bytes() == site


@pytest.mark.parametrize("ours", ["", _kernel_arguments.BLOCK.rstrip("\n")])
def test_a_last_line_without_its_end_is_no_part_of_ours(machine: Machine, ours: str) -> None:
    file = _host.path(_kernel_arguments.INITRAMFS_MODULES)
    file.write_text(f"{ours}\nnvme" if ours else "nvme")
    assert drive().failure is None
    assert file.read_text() == f"nvme\n{_kernel_arguments.BLOCK}"
    drive(state="absent")
    assert file.read_text() == "nvme\n"


def test_a_block_that_lost_its_last_line_end_is_ours(machine: Machine) -> None:
    file = _host.path(_kernel_arguments.INITRAMFS_MODULES)
    file.write_text("nvme\n" + _kernel_arguments.BLOCK.rstrip("\n"))
    drive(state="absent")
    assert file.read_text() == "nvme\n"


def test_a_second_block_takes_no_line_of_the_site_with_it(machine: Machine) -> None:
    file = _host.path(_kernel_arguments.INITRAMFS_MODULES)
    half = _kernel_arguments.BLOCK.replace("# gpuaas.slice: end\n", "")
    file.write_text(f"{half}site_driver\n{_kernel_arguments.BLOCK}")
    assert drive().failure is None
    assert "site_driver" in file.read_text().splitlines()


@pytest.mark.covers("HOST-15")
def test_absent_takes_everything_back_once(machine: Machine) -> None:
    drive()
    machine.calls.clear()
    assert drive(state="absent").failure is None
    assert machine.calls == ["update-grub", "update-initramfs"]
    assert "iommu" not in machine.given()
    assert drive(state="absent").plan.steps == ()


def test_a_list_that_only_we_made_goes_and_an_empty_one_stays(machine: Machine) -> None:
    (machine.tree / "etc/initramfs-tools/modules").write_text("")
    assert drive(state="absent").plan.steps == ()
    (machine.tree / "etc/initramfs-tools/modules").unlink()
    drive()
    drive(state="absent")
    assert not (machine.tree / "etc/initramfs-tools/modules").exists()


def test_absent_on_a_plain_host_does_nothing(machine: Machine) -> None:
    (machine.tree / "etc/initramfs-tools/modules").unlink()
    assert drive(state="absent").plan.steps == ()


def test_arguments_that_the_site_gives_need_no_drop_in(machine: Machine) -> None:
    machine.write("etc/default/grub", 'GRUB_CMDLINE_LINUX="intel_iommu=on iommu=pt quiet"\n')
    assert drive().failure is None
    assert _host.read(_kernel_arguments.DROP_IN) is None
    assert "update-grub" in machine.calls  # the menu did not have them yet


def test_a_later_plain_assignment_forgets_what_came_before(machine: Machine) -> None:
    machine.write("etc/default/grub", 'GRUB_CMDLINE_LINUX="intel_iommu=on iommu=pt"\n')
    machine.write("etc/default/grub.d/50-cloudimg.cfg", 'GRUB_CMDLINE_LINUX="quiet"\n')
    assert drive().failure is None
    assert _host.read(_kernel_arguments.DROP_IN) is not None


def test_an_opposite_argument_of_the_site_is_overruled(machine: Machine) -> None:
    machine.write("etc/default/grub", 'GRUB_CMDLINE_LINUX="intel_iommu=off iommu=pt"\n')
    assert drive().failure is None
    machine.reboot()
    assert not drive().facts["reboot_required"]


def test_a_menu_that_was_not_updated_is_noticed(machine: Machine) -> None:
    drive()
    _host.write(_kernel_arguments.GRUB_PENDING, "")
    assert [step.name for step in drive().plan.steps] == ["update_grub"]
    assert drive().plan.steps == ()


def test_the_firmwares_table_decides_about_intels_argument(machine: Machine) -> None:
    machine.write("proc/cpuinfo", "vendor_id : AuthenticAMD\n")
    assert _kernel_arguments.fitted(ARGUMENTS) == ARGUMENTS
    (machine.tree / "sys/firmware/acpi/tables/DMAR").unlink()
    assert _kernel_arguments.fitted(ARGUMENTS) == ["iommu=pt"]
    machine.write("proc/cpuinfo", "vendor_id : GenuineIntel\n")
    assert _kernel_arguments.fitted(ARGUMENTS) == ARGUMENTS
    machine.write("sys/firmware/acpi/tables/IVRS", "")
    assert _kernel_arguments.fitted(ARGUMENTS) == ["iommu=pt"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [("dev/kvm", "kvm_missing"), ("sys/kernel/iommu_groups/0", "iommu_missing")],
)
def test_in_effect_means_behaviour(machine: Machine, path: str, expected: str) -> None:
    drive()
    machine.reboot()
    target = machine.tree / path
    target.rmdir() if target.is_dir() else target.unlink()
    assert code(drive(in_effect=True)) == expected


@pytest.mark.parametrize("argument", ['a"b', "$(reboot)", "a b", "`id`", "a\nb", "\\"])
def test_an_argument_is_inert_in_grubs_shell_files(machine: Machine, argument: str) -> None:
    assert code(drive([argument])) == "argument_invalid"
    assert machine.calls == []


def test_modules_built_into_the_kernel_count_as_loaded(machine: Machine) -> None:
    machine.write("proc/sys/kernel/osrelease", "6.8.0\n")
    machine.write("lib/modules/6.8.0/modules.builtin", "kernel/drivers/vfio/pci/vfio-pci.ko\n")
    (machine.tree / "sys/module/vfio").mkdir(parents=True)
    (machine.tree / "sys/module/vfio_iommu_type1").mkdir()
    drive()
    assert "modprobe" not in machine.calls


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ("hugepagesz=1G hugepages=0:256 hugepagesz=2M hugepages=64", []),
        ("hugepagesz=1G", ["hugepages=0:256"]),
        ("", ["hugepagesz=1G", "hugepages=0:256"]),
    ],
)
def test_pairs_of_huge_pages_are_not_a_contradiction(there: str, expected: list[str]) -> None:
    assert (
        _kernel_arguments.lacking(["hugepagesz=1G", "hugepages=0:256"], there.split()) == expected
    )


def test_a_broken_record_of_the_initramfs_means_building_again(machine: Machine) -> None:
    drive()
    _host.write(_kernel_arguments.INITRAMFS_RECORD, "[")
    assert [step.name for step in drive().plan.steps] == ["update_initramfs"]


def test_an_unreadable_value_of_the_site_gives_nothing(machine: Machine) -> None:
    machine.write("etc/default/grub", 'GRUB_CMDLINE_LINUX="intel_iommu=on iommu=pt\n')
    assert "write_file" in drive().done


@pytest.mark.covers("HOST-15")
def test_absent_needs_a_reboot_and_asks_for_no_iommu(machine: Machine) -> None:
    machine.write("etc/default/grub", 'GRUB_CMDLINE_LINUX="iommu=pt"\n')
    drive()
    machine.reboot()
    assert drive(state="absent").facts["reboot_reasons"] == [
        # iommu=pt belongs to the site and stays.
        "still booted with intel_iommu=on",
        "initramfs built since the boot",
    ]
    assert code(drive(state="absent", in_effect=True)) == "reboot_required"
    machine.reboot()
    (machine.tree / "dev/kvm").unlink()
    proved = drive(state="absent", in_effect=True)
    assert (proved.failure, proved.facts["reboot_required"]) == (None, False)


def memory(machine: Machine, *nodes: int) -> None:
    machine.write("proc/cpuinfo", "flags : fpu vmx pdpe1gb\n")
    machine.write("proc/sys/kernel/osrelease", "5.16.0-1-generic\n")
    for number, gib in enumerate(nodes):
        text = f"Node {number} MemTotal:  {gib << 20} kB\nNode {number} MemFree: 1 kB\n"
        machine.write(f"sys/devices/system/node/node{number}/meminfo", text)


TUNED: dict[str, Any] = {
    "tuning": ["hugepages-1g"],
    "hugepages_1g": {"pages": 5, "reserve_mib": 1024},
}


@pytest.mark.covers("HOST-5")
def test_huge_pages_are_asked_per_node_and_go_again(machine: Machine) -> None:
    memory(machine, 4, 4)
    assert drive(**TUNED).failure is None
    pages = "default_hugepagesz=1G hugepagesz=1G hugepages=0:3,1:2"
    assert machine.given().endswith(f"intel_iommu=on iommu=pt {pages}")
    machine.reboot()
    assert drive(in_effect=True, **TUNED).plan.steps == ()
    assert drive().facts["reboot_required"]
    assert "hugepages" not in machine.given()


@pytest.mark.covers("HOST-5")
def test_pages_that_were_opted_in_to_outlive_a_run_with_the_profile_alone(machine: Machine) -> None:
    memory(machine, 4, 4)
    assert drive(**TUNED).failure is None
    machine.reboot()
    machine.write(_tuning_opt_in.FILE.lstrip("/"), '{"profiles": ["hugepages-1g"]}')
    outcome = drive(tuning=[], hugepages_1g=TUNED["hugepages_1g"], in_effect=True)
    assert (outcome.failure, outcome.changed) == (None, False)
    # They go when the opt-in is taken back, which the forecast has not done yet, and on the way
    # back.
    for word in ({"opted_in": []}, {"state": "absent"}):
        params = {"arguments": ARGUMENTS, "state": "present", **word}
        assert _kernel_arguments.observe(params).arguments == tuple(ARGUMENTS)
    machine.write(_tuning_opt_in.FILE.lstrip("/"), "{")
    with pytest.raises(Refusal, match="tuning_record_unreadable"):
        drive()
    assert "hugepages" in machine.given()


@pytest.mark.covers("HOST-5")
def test_without_the_profile_no_page_is_taken(machine: Machine) -> None:
    memory(machine, 4)
    drive(tuning=["network-buffers"], hugepages_1g=TUNED["hugepages_1g"])
    assert "hugepages" not in machine.given()


@pytest.mark.covers("HOST-5")
@pytest.mark.parametrize(
    ("nodes", "settings", "refused"),
    [
        ((4, 3), {"pages": 5, "reserve_mib": 1025}, "hugepages_leave_no_reserve"),
        ((256, 256), None, "hugepages_leave_no_reserve"),  # 8 x 64 GiB out of 512 leave none
        ((272, 272), None, ""),
    ],
)
def test_every_node_keeps_the_hosts_reserve(
    machine: Machine, nodes: tuple[int, ...], settings: dict[str, int] | None, refused: str
) -> None:
    memory(machine, *nodes)
    outcome = drive(tuning=["hugepages-1g"], hugepages_1g=settings)
    assert (outcome.failure.code if outcome.failure else "") == refused
    assert bool(outcome.done) == (not refused)


@pytest.mark.covers("HOST-5")
def test_processors_without_such_pages_are_refused(machine: Machine) -> None:
    memory(machine, 4, 4)
    machine.write("proc/cpuinfo", "flags : fpu vmx\n")
    assert code(drive(**TUNED)) == "hugepages_unsupported"


@pytest.mark.covers("HOST-5")
@pytest.mark.parametrize("release", ["5.15.0-119-generic", "4.18.0-553.el8", "", "unknown"])
def test_a_kernel_that_would_take_no_page_at_all_is_refused(machine: Machine, release: str) -> None:
    memory(machine, 4, 4)
    machine.write("proc/sys/kernel/osrelease", f"{release}\n")
    outcome = drive(**TUNED)
    assert code(outcome) == "hugepages_unsupported" and outcome.done == []
    assert outcome.failure is not None and (release or "osrelease") in outcome.failure.found
    machine.write("proc/sys/kernel/osrelease", "6.1.0-37-amd64\n")
    assert drive(**TUNED).failure is None
