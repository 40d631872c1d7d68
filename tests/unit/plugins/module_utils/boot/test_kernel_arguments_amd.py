"""Kernel arguments of a host with an AMD IOMMU, beside the site's own arguments."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _grub_menu, _kernel_arguments
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import (
    _check,
    _checks_platform,
    _host_facts,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.topology import _host_resources

from tests.unit.plugins.module_utils.boot import test_kernel_arguments

pytestmark = pytest.mark.covers("HOST-4", "HOST-10")

# A profile is written for both makers.
ARGUMENTS = ["intel_iommu=on", "amd_iommu=on", "iommu=pt"]
INTELS = ["intel_iommu=on", "iommu=pt"]
# Menu as Debian's 10_linux makes it; the second entry is the recovery entry.
_MENU = """\
menuentry 'Debian' --class debian {{
\tlinux\t/boot/vmlinuz-6.1.0 root=UUID=x ro {all} {default}
}}
menuentry 'Debian (recovery mode)' {{
\tlinux\t/boot/vmlinuz-6.1.0 root=UUID=x ro single {all}
}}
"""
# update-grub reads its files like this: a shell sources them, in this order.
_SOURCE = '. "$1"; for f in "$2"/*.cfg; do [ -e "$f" ] && . "$f"; done; printf "%s\\n" "$3"'


class Epyc(test_kernel_arguments.Machine):
    """A recorded EPYC server: IVRS and no DMAR, two IOMMUs, and GRUB's files read by a shell."""

    def __init__(self, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(tree, monkeypatch)
        (tree / "sys/firmware/acpi/tables/DMAR").unlink()
        self.write("sys/firmware/acpi/tables/IVRS", "")
        self.write("proc/cpuinfo", "vendor_id\t: AuthenticAMD\nflags\t\t: fpu svm npt pdpe1gb\n")
        for number in range(2):
            real = tree / f"sys/devices/pci0000:{number}0/0000:{number}0:00.2/iommu/ivhd{number}"
            real.mkdir(parents=True)
            link = tree / f"sys/class/iommu/ivhd{number}"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(Path("../../..") / real.relative_to(tree))
        self.site("quiet")

    def site(self, text: str, *, default: str = "", path: str = "etc/default/grub") -> None:
        """Set the site's own arguments, with which the host has booted."""
        rows = f'GRUB_CMDLINE_LINUX="{text}"\nGRUB_CMDLINE_LINUX_DEFAULT="{default}"\n'
        self.write(path, rows)
        self.make_menu()
        self.reboot()

    def make_menu(self) -> None:
        given = {
            key: self._shell(f"$GRUB_CMDLINE_LINUX{suffix}")
            for key, suffix in (("all", ""), ("default", "_DEFAULT"))
        }
        self.write(_grub_menu.MENU.lstrip("/"), _MENU.format(**given))

    def _shell(self, word: str) -> str:
        folder = self.tree / "etc/default"
        script = _SOURCE.replace('"$3"', f'"{word}"')
        argv = ["sh", "-e", "-c", script, "sh", str(folder / "grub"), str(folder / "grub.d")]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()

    def reboot(self) -> None:
        self.boots += 1
        line = (self.tree / _grub_menu.MENU.lstrip("/")).read_text().splitlines()[1]
        self.write("proc/cmdline", f"BOOT_IMAGE={line.split(None, 1)[1]}\n")
        self.write("proc/sys/kernel/random/boot_id", f"boot-{self.boots}\n")

    def files(self) -> dict[str, str]:
        """Return the arguments in the site's GRUB files."""
        sources = [self.tree / "etc/default/grub", *(self.tree / "etc/default").glob("grub.d/*")]
        ours = _host.path(_kernel_arguments.DROP_IN)
        return {file.name: file.read_text() for file in sources if file != ours}


@pytest.fixture
def epyc(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Epyc:
    return Epyc(tree, monkeypatch)


def drive(**more: Any) -> _change.Outcome:
    return test_kernel_arguments.drive(ARGUMENTS, **more)


def facts() -> _host_facts.Facts:
    """Return the facts with a profile that was written for Intel."""
    network = {"bridge": "ovsbr0", "address": "10.100.0.1/24", "subnet": "10.100.0.0/24"}
    profile = {"name": "epyc", "kernel_arguments": INTELS, "network": network}
    return _host_facts.Facts(_host_facts.Request(profile=profile))


@pytest.mark.parametrize(
    ("there", "default", "written"),
    [
        ("quiet", "", "amd_iommu=on iommu=pt"),
        ("amd_iommu=on", "", "amd_iommu=on iommu=pt"),
        ("amd_iommu=on iommu=pt", "", None),
        # The recovery entry lacks these.
        ("", "amd_iommu=on iommu=pt", "amd_iommu=on iommu=pt"),
        # Left from a machine with another board; the kernel ignores it.
        ("intel_iommu=on iommu=pt", "", "amd_iommu=on iommu=pt"),
        ("intel_iommu=on amd_iommu=on iommu=pt", "quiet", None),
        ("amd_iommu=off iommu=nopt", "", "amd_iommu=on iommu=pt"),
    ],
)
def test_what_is_there_is_kept_and_the_second_run_does_nothing(
    epyc: Epyc, there: str, default: str, written: str | None
) -> None:
    epyc.site(there, default=default)
    before, menu = epyc.files(), _host.read(_grub_menu.MENU)
    assert drive().failure is None
    text = _host.read(_kernel_arguments.DROP_IN)
    assert (text and text.splitlines()[-1]) == (
        written and f'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX {written}"'
    )
    assert epyc.files() == before
    epyc.reboot()
    words = (_host.read("/proc/cmdline") or "").split()
    assert [word for word in there.split() if word not in words] == []
    assert words.count("intel_iommu=on") == there.count("intel_iommu=on")
    epyc.calls.clear()
    again = drive(in_effect=True)
    assert (again.failure, again.plan.steps, epyc.calls) == (None, (), [])
    assert not again.facts["reboot_required"]
    assert drive(state="absent").failure is None
    assert (epyc.files(), _host.read(_grub_menu.MENU)) == (before, menu)


def test_a_drop_in_of_ours_with_intels_argument_is_written_anew(epyc: Epyc) -> None:
    """After a move of the disk, or from an earlier profile."""
    _host.write(
        _kernel_arguments.DROP_IN,
        'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX intel_iommu=on iommu=pt"\n',
    )
    epyc.make_menu()
    epyc.reboot()
    assert drive().failure is None
    assert "intel_iommu" not in (_host.read(_kernel_arguments.DROP_IN) or "")
    assert "intel_iommu" not in (_host.read(_grub_menu.MENU) or "")
    assert drive().plan.steps == ()


def test_a_later_file_of_the_site_that_forgets_ours_is_no_success(epyc: Epyc) -> None:
    epyc.write("etc/default/grub.d/99-site.cfg", 'GRUB_CMDLINE_LINUX="quiet"\n')
    failure = drive().failure
    assert failure.code == "verify_failed"


def test_arguments_for_amd_are_not_for_intel(epyc: Epyc) -> None:
    assert _kernel_arguments.fitted(ARGUMENTS) == ["amd_iommu=on", "iommu=pt"]
    # Also on AMD CPUs, in a virtual machine with Intel's IOMMU.
    epyc.write("sys/firmware/acpi/tables/DMAR", "")
    assert _kernel_arguments.fitted(ARGUMENTS) == INTELS


@pytest.mark.parametrize("word", ["amd_iommu=off", "iommu=off"])
def test_an_argument_that_switches_it_off_is_named(epyc: Epyc, word: str) -> None:
    epyc.site(word)
    (epyc.tree / "sys/kernel/iommu_groups/0").rmdir()
    drive()
    epyc.reboot()
    failure = drive(in_effect=True).failure
    assert failure.code == "iommu_missing"
    assert failure.found == f"none, booted with {word}"
    result = _checks_platform.iommu_groups(facts())
    assert result == _check.failed("the kernel has made no IOMMU group")


def test_parity_and_discovery_ask_an_amd_host_for_no_argument_of_intels(epyc: Epyc) -> None:
    look = _checks_platform.kernel_cmdline
    result = look(facts())
    assert result.status == "FAIL"
    assert "iommu=pt is not in /proc/cmdline" in result.detail
    assert "the next boot would lose iommu=pt" in result.detail
    assert "intel_iommu" not in result.detail
    test_kernel_arguments.drive(INTELS)
    assert look(facts()).status == "FAIL"
    epyc.reboot()
    assert look(facts()) == _check.passed("iommu=pt")
    assert _checks_platform.iommu_groups(facts()).detail == "1 groups"
    assert _checks_platform.reboot_required(facts()).status == "PASS"
    params = _host_resources.boot_params({"kernel_arguments": INTELS})
    kernel = _host_resources.kernel(params, _kernel_arguments.observe(params))
    assert (kernel.arguments, kernel.reboot_reasons) == ({"iommu=pt": True}, ())


def test_parity_takes_leftovers_of_the_other_maker_for_what_they_are(epyc: Epyc) -> None:
    epyc.site("intel_iommu=on iommu=pt")
    assert test_kernel_arguments.drive(INTELS).failure is None
    epyc.reboot()
    assert _checks_platform.kernel_cmdline(facts()) == _check.passed("iommu=pt")
    # A later argument of the site reverses it, and the later argument counts.
    epyc.site("iommu=pt iommu=nopt")
    assert "iommu=pt is not in /proc/cmdline" in _checks_platform.kernel_cmdline(facts()).detail
