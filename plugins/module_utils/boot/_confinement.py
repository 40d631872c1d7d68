"""Confinement of QEMU: security module, seccomp filter, unprivileged user, limited console logs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _host,
    _managed_block,
    _object_names,
)

QEMU = "/etc/libvirt/qemu.conf"
LOGGING = "/etc/libvirt/virtlogd.conf"
# What AppArmor's profile of each guest allows beyond libvirt's own rules.
APPARMOR = "/etc/apparmor.d/local/abstractions/libvirt-qemu"
_LIBVIRTS = "/etc/apparmor.d/abstractions/libvirt-qemu"
# Settings of AppArmor's compiler, which libvirt starts five times before a guest runs. The compiler
# minimizes what it makes in any case. Without a simplification before that, it makes the same in
# half the time.
COMPILER = "/etc/apparmor/parser.conf"
_QUICKLY = "Optimize=no-expr-simplify"
# QEMU takes pages of 1 GiB by threads on the CPUs of their NUMA node, which libnuma reads here.
# Without it, QEMU ends with "The nodes select no CPUs" (seen with Debian 12).
_NUMA = "  /sys/devices/system/node/node[0-9]*/cpumap r,"
_SECURITY = "/sys/kernel/security"
_ROOT = ("root", "+0", "0")
# virtlogd's defaults: bytes of a log before it is rotated, and rotated logs that are kept.
_LOG_SIZE, _LOG_BACKUPS = 2 << 20, 3
# Largest logs of one guest's console, so that those of a host's eight guests fit on its disk.
_CONSOLE_MIB = 256


def security_module() -> str:
    """The kernel's security module that confines guests, `apparmor` or `selinux`; "" without one.

    AppArmor counts only with the profile of libvirtd, without which libvirt does not use it.
    """
    active = (_host.read(f"{_SECURITY}/lsm") or "").split(",")
    profiles = _host.read(f"{_SECURITY}/apparmor/profiles") or ""
    if "apparmor" in active and "libvirtd " in f"{profiles} ":
        return "apparmor"
    enforced = _host.read("/sys/fs/selinux/enforce") == "1"
    return "selinux" if "selinux" in active and enforced else ""


def with_settings(text: str) -> str:
    """qemu.conf with the managed block. libvirt uses the first value, so the site's values win."""
    rows = ['stdio_handler = "logd"', "seccomp_sandbox = 1", "security_default_confined = 1"]
    # Without a security module libvirt would refuse to start any guest.
    rows += ["security_require_confined = 1"] if security_module() else []
    return _managed_block.with_block(text, _managed_block.render(rows))


def with_access(text: str) -> str:
    """The site's rules of AppArmor for guests with the managed block, if libvirt reads them."""
    if not _host.path(_LIBVIRTS).is_file():
        return text
    return _managed_block.with_block(text, _managed_block.render([_NUMA]))


def with_compiler(text: str) -> str:
    """The settings of AppArmor's compiler with the managed block; a host without them has none."""
    return _managed_block.with_block(text, _managed_block.render([_QUICKLY])) if text else text


def numa_problems() -> list[str]:
    """Why AppArmor would keep a guest from pages of its NUMA node."""
    if security_module() != "apparmor" or _NUMA.strip() in (_host.read(APPARMOR) or ""):
        return []
    return [f"{APPARMOR} lacks {_NUMA.strip()}"]


def problems(guests: Iterable[int]) -> list[str]:
    """Settings and running guests of this host that are not confined. guests: QEMU processes."""
    module = security_module()
    refusals = (
        [] if module else ["the kernel confines no guest: neither AppArmor nor SELinux is used"]
    )
    settings = _settings(QEMU)
    for name, required in (
        ("seccomp_sandbox", ("1",)),
        ("security_default_confined", ("1",)),
        ("security_require_confined", ("1",) if module else ("", "0", "1")),
    ):
        if settings.get(name, "") not in required:
            refusals.append(f"{QEMU} has {name} = {settings.get(name, 'nothing')}")
    if settings.get("user") in _ROOT or settings.get("security_driver") == "none":
        refusals.append(f"{QEMU} runs guests as root or without a security driver")
    return refusals + [text for pid in guests for text in _of_process(pid, module)]


def console_problems(guests: Iterable[int]) -> list[str]:
    """Ways in which the console log of a guest could fill the host's disk."""
    refusals = []
    if _settings(QEMU).get("stdio_handler") == "file":
        refusals.append(
            f'{QEMU} has stdio_handler = "file": QEMU writes console logs without a limit'
        )
    refusals += _log_problems(_settings(LOGGING))
    logs = set(_object_names.files("console"))
    for pid in guests:
        if logs & {name for _pid, name in _host.open_files(pid)}:
            refusals.append(f"QEMU {pid} writes its console log itself, without a limit")
    return refusals


def _log_problems(settings: Mapping[str, str]) -> list[str]:
    """Why virtlogd would let a console log grow too large."""
    size_text = settings.get("max_size", str(_LOG_SIZE))
    backups_text = settings.get("max_backups", str(_LOG_BACKUPS))
    shown = f"{LOGGING} has max_size = {size_text} and max_backups = {backups_text}"
    if not (size_text.isdecimal() and backups_text.isdecimal()):
        return [f"{shown}, which are not both numbers"]
    if int(size_text) == 0:
        return [f"{shown}: a size of 0 is no limit"]
    if int(size_text) * (1 + int(backups_text)) > _CONSOLE_MIB << 20:
        return [f"{shown}: more than {_CONSOLE_MIB} MiB for the console of one guest"]
    return []


def _of_process(pid: int, module: str) -> Iterator[str]:
    status = dict(
        line.partition(":")[::2] for line in (_host.read(f"/proc/{pid}/status") or "").splitlines()
    )
    if not status:
        return  # it ended during the scan
    if "0" in status.get("Uid", "0").split():
        yield f"QEMU {pid} runs as root"
    if status.get("Seccomp", "").strip() != "2":
        yield f"QEMU {pid} has no seccomp filter"
    label = (_host.read(f"/proc/{pid}/attr/current") or "").strip("\0\n ")
    confined = (
        re.fullmatch(r"libvirt-[0-9a-f-]{36} \(enforce\)", label)
        if module == "apparmor"
        else re.search(r":svirt(_tcg)?_t:", label)
    )
    if module and not confined:
        yield f"QEMU {pid} is {label or 'without a label'}"


def _settings(path: str) -> dict[str, str]:
    """First value of each setting of a libvirt configuration file."""
    values: dict[str, str] = {}
    for line in (_host.read(path) or "").splitlines():
        name, equals, value = line.partition("=")
        if equals and re.fullmatch(r"\w+", name.strip()):
            values.setdefault(name.strip(), value.partition("#")[0].strip().strip('"'))
    return values
