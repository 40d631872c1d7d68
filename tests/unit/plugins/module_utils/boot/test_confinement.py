"""Confinement of QEMU, by libvirt's settings and by each running process."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _confinement, _libvirt_host
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host, _object_names

from tests.unit.plugins.module_utils.boot.test_libvirt_host import SHOW, drive, systemctl_show

pytestmark = pytest.mark.covers("HOST-4", "P12")

ALLOCATION = "23bd713b-6073-4ef7-8a51-2897e902365d"
SITE = 'user = "libvirt-qemu"\n# the last line has no newline'


def apparmor() -> None:
    _host.write("/sys/kernel/security/lsm", "lockdown,capability,yama,apparmor")
    _host.write("/sys/kernel/security/apparmor/profiles", "libvirtd (enforce)\n")


def guest(*, uid: int = 64055, seccomp: int = 2, label: str = "") -> list[int]:
    _host.write("/proc/77/status", f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}\nSeccomp:\t{seccomp}\n")
    _host.write("/proc/77/attr/current", label or f"libvirt-{ALLOCATION} (enforce)\n")
    return [77]


def test_a_guest_that_libvirt_confined_passes(tree: Path) -> None:
    apparmor()
    _host.write(_confinement.QEMU, _confinement.with_settings(SITE))
    assert _confinement.problems(guest()) == []
    _host.write("/sys/kernel/security/lsm", "capability,selinux")
    _host.write("/sys/fs/selinux/enforce", "1")
    label = "system_u:system_r:svirt_t:s0:c392,c662"
    assert _confinement.problems(guest(label=label)) == []
    weak = "system_u:system_r:unconfined_t:s0"
    assert _confinement.problems(guest(label=weak)) == [f"QEMU 77 is {weak}"]
    _host.write("/sys/fs/selinux/enforce", "0")
    assert _confinement.security_module() == "", "it only writes down what it would refuse"


@pytest.mark.parametrize(
    ("weak", "named"),
    [
        ({"uid": 0}, "QEMU 77 runs as root"),
        ({"seccomp": 0}, "QEMU 77 has no seccomp filter"),
        ({"label": "unconfined"}, "QEMU 77 is unconfined"),
        ({"label": f"libvirt-{ALLOCATION} (complain)"}, "(complain)"),
        ({"label": "libvirtd (enforce)"}, "QEMU 77 is libvirtd (enforce)"),
    ],
)
def test_a_guest_that_is_not_confined_is_named(
    tree: Path, weak: dict[str, Any], named: str
) -> None:
    apparmor()
    _host.write(_confinement.QEMU, _confinement.with_settings(SITE))
    (problem,) = _confinement.problems(guest(**weak))
    assert named in problem


def test_apparmor_lets_a_guest_take_pages_of_its_numa_node(tree: Path, script: Any) -> None:
    """QEMU ended with "The nodes select no CPUs", because libnuma reads the CPUs of the node."""
    script.on(*SHOW, out=systemctl_show("inactive/enabled", "active/enabled"))
    (tree / "var/lib/libvirt").mkdir(parents=True)
    site = "  /srv/images/** r,\n"
    _host.write(_confinement.APPARMOR, site)
    assert "show_numa" not in drive().done, "libvirt has no rules of AppArmor here"
    _host.write("/etc/apparmor.d/abstractions/libvirt-qemu", "#include <local/…>\n")
    apparmor()
    assert _confinement.numa_problems() != []
    assert drive().done == ["show_numa"]
    assert _confinement.numa_problems() == []
    text = _host.path(_confinement.APPARMOR).read_text()
    assert text.startswith(site) and "node[0-9]*/cpumap r,\n" in text
    assert not drive().changed
    assert drive(state="absent").done == ["restore_apparmor", "forget_before"]
    assert _host.path(_confinement.APPARMOR).read_text() == site


def test_apparmors_compiler_is_quick_and_its_settings_come_back(tree: Path, script: Any) -> None:
    script.on(*SHOW, out=systemctl_show("inactive/enabled", "active/enabled"))
    (tree / "var/lib/libvirt").mkdir(parents=True)
    assert "tune_apparmor" not in drive().done, "a host without AppArmor"
    site = "# A comment.\nOptimize=compress-fast"
    _host.write(_confinement.COMPILER, site)
    assert drive().done == ["tune_apparmor"]
    lines = _host.path(_confinement.COMPILER).read_text().splitlines()
    settings = [line for line in lines if not line.startswith("#")]
    assert settings == ["Optimize=compress-fast", "Optimize=no-expr-simplify"]
    assert not drive().changed
    assert drive(state="absent").done == ["restore_compiler", "forget_before"]
    assert _host.path(_confinement.COMPILER).read_text() == f"{site}\n"


RULES = """profile sample {
  /{usr/,}bin/* rix,
  /{,var/}run/**/[0-9]*.pid rwk,
  /sys/devices/**/{uevent,config} r,
  deny /dev/{mem,kmem} rw,
  ptrace (read, trace) peer="{sample,other}",
}
"""
FEATURES = Path("/usr/share/apparmor-features/features")


@pytest.mark.skipif(
    not (shutil.which("apparmor_parser") and FEATURES.exists()), reason="needs apparmor_parser"
)
def test_the_quick_compiler_makes_the_same(tmp_path: Path) -> None:
    quick, plain, rules = (tmp_path / name for name in ("quick", "plain", "rules"))
    plain.write_text("# nothing\n")
    quick.write_text(_confinement.with_compiler(plain.read_text()))
    rules.write_text(RULES)
    argv = ["apparmor_parser", "--skip-cache", "--stdout", f"--features-file={FEATURES}"]
    made = [
        subprocess.run([*argv, f"--config-file={file}", rules], capture_output=True, check=True)
        for file in (plain, quick)
    ]
    assert made[0].stdout == made[1].stdout != b""


def test_a_real_process_is_read_from_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started as QEMU is, without any confinement of its own."""
    process = subprocess.Popen(["/bin/sleep", "60"], executable="/bin/sleep")
    try:
        problems = _confinement.problems([process.pid])
        assert (f"QEMU {process.pid} runs as root" in problems) is (os.getuid() == 0)
        status = dict(
            row.partition(":")[::2] for row in Path("/proc/self/status").read_text().splitlines()
        )
        filtered = status["Seccomp"].strip() == "2"
        assert (f"QEMU {process.pid} has no seccomp filter" in problems) is not filtered
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("seccomp_sandbox = 0", "seccomp_sandbox = 0"),
        ("security_default_confined=0", "security_default_confined = 0"),
        ("security_require_confined = 0  # for now", "security_require_confined = 0"),
        ('user = "root"', "runs guests as root"),
        ('security_driver = "none"', "without a security driver"),
    ],
)
def test_a_value_of_the_site_is_in_force_and_named(tree: Path, line: str, named: str) -> None:
    """libvirt takes the first of two values, so the managed block at the end does not help."""
    apparmor()
    _host.write(_confinement.QEMU, _confinement.with_settings(f"{line}\n"))
    (problem,) = _confinement.problems([])
    assert named in problem


def test_a_kernel_without_a_security_module_is_named_and_still_starts_guests(tree: Path) -> None:
    text = _confinement.with_settings(SITE)
    _host.write(_confinement.QEMU, text)
    assert "require_confined" not in text
    assert _confinement.problems([]) == [
        "the kernel confines no guest: neither AppArmor nor SELinux is used"
    ]
    # AppArmor is in the kernel, and libvirt does not use it, because its profile is not loaded.
    _host.write("/sys/kernel/security/lsm", "capability,apparmor")
    assert _confinement.security_module() == ""


def test_a_console_log_without_a_limit_is_named(tree: Path) -> None:
    assert _confinement.console_problems(guest()) == []
    _host.write(_confinement.QEMU, 'stdio_handler = "file"\n')
    _host.write(_confinement.LOGGING, "#max_size = 2097152\nmax_size = 0\n")
    path = _object_names.console_path(ALLOCATION)
    _host.write(path, "")
    (tree / "proc/77/fd").mkdir()
    (tree / "proc/77/fd/9").symlink_to(path)
    named = "; ".join(_confinement.console_problems(guest()))
    for part in ("stdio_handler", "max_size = 0", "QEMU 77 writes its console log itself"):
        assert part in named


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ("max_size = 1099511627776", "more than 256 MiB"),
        ("max_backups = 1000000", "more than 256 MiB"),
        ("max_size = 134217728\nmax_backups = 2", "more than 256 MiB"),
        ("max_size = 0\nmax_backups = 0", "a size of 0 is no limit"),
        ("max_size = -1", "not both numbers"),
        ("max_backups = many", "not both numbers"),
        ("max_size = 134217728\nmax_backups = 1", ""),
        ("max_size = 2097152", ""),
    ],
)
@pytest.mark.usefixtures("tree")
def test_console_logs_that_could_fill_the_disk_are_named(lines: str, named: str) -> None:
    _host.write(_confinement.LOGGING, f"{lines}\n")
    problems = _confinement.console_problems([])
    assert len(problems) == bool(named)
    assert all(named in problem for problem in problems)


def test_the_role_writes_its_block_and_takes_it_back(tree: Path, script: Any) -> None:
    apparmor()
    show = ("systemctl", "show", "--timestamp=unix")
    properties = "--property=ActiveState,UnitFileState,ActiveEnterTimestamp,NeedDaemonReload"
    units = ("--", "libvirtd.service", "libvirtd.socket")
    block = "ActiveState=active\nUnitFileState=enabled"
    script.on(*show, properties, *units, out=f"{block}\n\n{block}")
    script.on("systemctl", "try-restart", "libvirtd.service")
    (tree / "var/lib/libvirt").mkdir(parents=True, mode=0o755)
    _host.write(_confinement.QEMU, SITE, 0o600)

    def drive(state: str) -> list[str]:
        params = {"directory": "/var/lib/libvirt", "state": state}
        outcome = _change.drive(_libvirt_host.SUBJECT, params, check_mode=False)
        assert outcome.failure is None, outcome.failure
        return outcome.done

    assert drive("present") == ["remember_before", "confine_guests"]
    assert drive("present") == []
    assert _confinement.problems([]) == []
    assert (tree / _confinement.QEMU.lstrip("/")).stat().st_mode & 0o777 == 0o600
    assert drive("absent") == ["restore_qemu_settings", "forget_before"]
    assert (_host.read(_confinement.QEMU) or "").strip() == SITE
