"""Kernel arguments and early modules of a slice host, as configured and as booted.

A configured argument takes effect only after update-grub, update-initramfs and a reboot.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.boot import (
    _grub_menu,
    _hugepages,
    _tuning_opt_in,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _command,
    _host,
    _managed_block,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

DROP_IN = "/etc/default/grub.d/60-gpuaas-slice.cfg"
MODULES_LOAD = "/etc/modules-load.d/gpuaas-vfio.conf"
SOFT_DEPENDENCIES = "/etc/modprobe.d/gpuaas-vfio.conf"
INITRAMFS_MODULES = "/etc/initramfs-tools/modules"
INITRAMFS_RECORD = f"{_host.STATE_DIRECTORY}/initramfs.json"
GRUB_PENDING = f"{_host.STATE_DIRECTORY}/grub-update-pending"
_INITRAMFS_INPUTS = (SOFT_DEPENDENCIES, INITRAMFS_MODULES)
# Recorded in place of a digest between the change of an input and the next build.
DUE = "a build is due"
MODULES = ("vfio", "vfio_iommu_type1", "vfio_pci")

# With any of these arguments the kernel creates no IOMMU group, whatever the others are.
_SWITCHED_OFF = ("intel_iommu=off", "amd_iommu=off", "iommu=off")

# The managed block of INITRAMFS_MODULES; the rest of the file is the site's.
BLOCK = _managed_block.render(MODULES)
_HOST_DRIVERS = ("nvidia", "nvidia_drm", "nouveau")
_ARGUMENT = re.compile(r"[A-Za-z0-9_.,:=@+/-]+")

Params = Mapping[str, Any]


@dataclass(frozen=True)
class State:
    """arguments: the requested arguments, fitted to this machine's IOMMU. given: by other GRUB
    files.

    files: content of the managed files, None when absent. entries: arguments of GRUB's menu
    entries. next_boot: arguments of the entry that boots by default; another entry may be the
    site's own or another system's, which update-grub does not change. stray: entry arguments whose
    only source is an older menu or the managed drop-in. initramfs: digest of the inputs of the last
    build. built_in_boot: boot id of that build. rebuilt: whether an image is newer than that build,
    so another program built it.
    """

    arguments: tuple[str, ...]
    given: tuple[str, ...]
    running: tuple[str, ...]
    files: Mapping[str, str | None]
    entries: tuple[tuple[str, ...], ...]
    next_boot: tuple[tuple[str, ...], ...]
    stray: tuple[str, ...]
    grub_pending: bool
    initramfs: str
    built_in_boot: str
    rebuilt: bool
    boot_id: str
    modules: tuple[str, ...]
    kvm: bool
    iommu_groups: int


def fitted(arguments: Iterable[str]) -> list[str]:
    """`arguments` for this machine's IOMMU, without those for the other vendor's.

    On AMD the kernel turns the IOMMU on by default, so Intel's argument has no counterpart. The
    firmware's table decides, not the CPU vendor: a virtual machine may have an Intel IOMMU under an
    AMD CPU.
    """
    other = "intel_iommu=" if _is_amd() else "amd_iommu="
    return [a for a in arguments if not a.startswith(other)]


def running() -> list[str]:
    """Arguments of the running kernel."""
    return (_host.read("/proc/cmdline") or "").split()


def lacking(arguments: Iterable[str], there: Iterable[str]) -> list[str]:
    """Arguments that do not hold in `there`; of a repeated argument the last counts."""
    last = {a.partition("=")[0]: a for a in there}
    # Huge pages are ordered pairs of size and count, so only their presence can be checked.
    present = set(there)
    held = {a for a in present if _paired(a) or last[a.partition("=")[0]] == a}
    return [a for a in arguments if a not in held]


def observe(params: Params) -> State:
    record = _record()
    arguments = (*fitted(params["arguments"]), *_hugepages.arguments(_huge(params)))
    menu = _text(_grub_menu.MENU) or ""
    entries = tuple(tuple(line.split()) for line in _grub_menu.KERNEL.findall(menu))
    return State(
        arguments=arguments,
        given=tuple(_given(_others())),
        running=tuple(running()),
        files={p: _text(p) for p in (DROP_IN, MODULES_LOAD, SOFT_DEPENDENCIES, INITRAMFS_MODULES)},
        entries=entries,
        next_boot=tuple(next_entry.kernels) if (next_entry := _grub_menu.next_boot()) else (),
        stray=tuple(_stray(arguments, entries)),
        grub_pending=_host.path(GRUB_PENDING).exists(),
        initramfs=record.get("inputs", ""),
        built_in_boot=record.get("boot_id", ""),
        rebuilt=_rebuilt(),
        boot_id=_host.identity()["boot_id"],
        modules=tuple(_loaded()),
        kvm=_host.path("/dev/kvm").exists(),
        iommu_groups=_count("/sys/kernel/iommu_groups"),
    )


def plan(params: Params, state: State) -> _change.Plan:
    files = desired_files(params, state)
    steps = [
        _change.Step("write_file", path, state.files.get(path), text)
        for path, text in files.items()
        if state.files.get(path) != text
    ]
    if _grub_is_stale(params, state, steps):
        steps.append(_change.Step("update_grub", "boot menu", "old arguments", "new arguments"))
    present = params["state"] == "present"
    if _initramfs_is_stale(params, state, steps):
        after = inputs(files)
        steps.append(_change.Step("update_initramfs", "initramfs", state.initramfs, after))
    absent_modules = [m for m in MODULES if m not in state.modules]
    if present and absent_modules:
        steps.append(_change.Step("load_modules", "modules", list(state.modules), list(MODULES)))
    blockers = _unsafe(state.arguments)
    if present:
        blockers += _hugepages.refusals(_huge(params))
    if params["in_effect"]:
        blockers += _not_in_effect(params, state)
    return _change.Plan(tuple(steps), tuple(blockers))


def apply(params: Params, step: _change.Step) -> None:
    if step.name == "write_file":
        if step.subject == DROP_IN:
            # This marker survives a crash before update-grub. With the drop-in alone, the step
            # would then look complete.
            _host.write(GRUB_PENDING, "")
        if step.subject in _INITRAMFS_INPUTS and _rebuilt():
            # The same marker for update-initramfs.
            _remember_build(DUE, _record().get("boot_id", ""))
        if step.after is None:
            _host.remove(step.subject)
        else:
            _host.write(step.subject, _written(params, step))
    elif step.name == "update_grub":
        _command.run(["update-grub"], timeout=300)
        _host.remove(GRUB_PENDING)
    elif step.name == "update_initramfs":
        _command.run(["update-initramfs", "-u", "-k", "all"], timeout=900)
        kept = step.after if params["state"] == "present" else ""
        _remember_build(kept, _host.identity()["boot_id"])
    elif step.name == "load_modules":
        _command.run(["modprobe", "--all", *MODULES])


def facts(params: Params, state: State) -> dict[str, Any]:
    reasons = reboot_reasons(params, state)
    return {
        "arguments": list(state.arguments),
        "running": list(state.running),
        "reboot_required": bool(reasons),
        "reboot_reasons": reasons,
        "kvm": state.kvm,
        "iommu_groups": state.iommu_groups,
        "identity": _host.identity(),
    }


def forecast(params: Params, state: State) -> State:
    """`state` as the plan leaves it, as far as a reboot depends on it."""
    names = {step.name for step in plan(params, state).steps}
    if "update_grub" in names:
        kept = [word for entry in state.entries for word in entry if word not in state.stray]
        ours = state.arguments if params["state"] == "present" else ()
        state = dataclasses.replace(state, entries=((*kept, *ours),))
    if "update_initramfs" in names:
        state = dataclasses.replace(state, built_in_boot=state.boot_id)
    return state


SUBJECT = _change.Subject(observe, plan, apply, facts, forecast)


def reboot_reasons(params: Params, state: State) -> list[str]:
    """Reasons why a configured setting is not in force; [] when this boot has all of them."""
    reasons = []
    ours = [a for a in state.running if _sets_pages(a)]
    if params["state"] == "present":
        reasons += [f"not booted with {a}" for a in lacking(state.arguments, state.running)]
    else:
        ours = [a for a in state.arguments if a in state.running] + ours
    # The site's own arguments are in the menu too, and stay.
    menu = {a for entry in state.entries for a in entry}
    reasons += [f"still booted with {a}" for a in dict.fromkeys(ours) if menu and a not in menu]
    if state.built_in_boot and state.built_in_boot == state.boot_id:
        reasons.append("initramfs built since the boot")
    return reasons


def desired_files(params: Params, state: State) -> dict[str, str | None]:
    """Content of the managed files; None for a file that must be absent."""
    if params["state"] == "absent":
        text = state.files.get(INITRAMFS_MODULES)
        ours = dict.fromkeys((DROP_IN, MODULES_LOAD, SOFT_DEPENDENCIES))
        # A file that contains only the managed block did not exist before.
        rest = (_without_block(text) or None) if has_block(text) else text
        return {**ours, INITRAMFS_MODULES: rest}
    # All or nothing, because a partial list would leave the order to other files.
    needed = state.arguments and lacking(state.arguments, state.given)
    return {
        DROP_IN: _drop_in(state.arguments) if needed else None,
        MODULES_LOAD: "".join(f"{module}\n" for module in MODULES),
        SOFT_DEPENDENCIES: "".join(f"softdep {d} pre: vfio-pci\n" for d in _HOST_DRIVERS),
        INITRAMFS_MODULES: _with_block(state.files.get(INITRAMFS_MODULES)),
    }


def _drop_in(arguments: Iterable[str]) -> str:
    words = " ".join(arguments)
    return (
        "# Written by the gpuaas.slice collection; changed by its playbooks only.\n"
        f'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX {words}"\n'
    )


def _grub_is_stale(params: Params, state: State, steps: list[_change.Step]) -> bool:
    if state.grub_pending or any(step.subject == DROP_IN for step in steps):
        return True
    if params["state"] == "absent":
        return bool(state.stray)
    return not state.next_boot or any(lacking(state.arguments, e) for e in state.next_boot)


def _initramfs_is_stale(params: Params, state: State, steps: list[_change.Step]) -> bool:
    """Whether an image must be built, because its inputs changed or it may contain another
    program's edit.
    """
    if params["state"] == "absent":
        return bool(state.initramfs)
    if state.initramfs != inputs(desired_files(params, state)):
        return True
    # Without a foreign build since then, the images never contained the edit, and a mere repair
    # needs no reboot.
    return state.rebuilt and any(step.subject in _INITRAMFS_INPUTS for step in steps)


def _unsafe(arguments: Iterable[str]) -> list[Refusal]:
    """GRUB's files are shell scripts: an argument must be inert in them."""
    return [
        Refusal(
            "argument_invalid",
            expected="kernel arguments of letters, digits and _ . , : = @ + / -",
            found=repr(argument),
            remedy="correct kernel_arguments of the hardware profile",
        )
        for argument in arguments
        if not _ARGUMENT.fullmatch(argument)
    ]


def _not_in_effect(params: Params, state: State) -> list[Refusal]:
    blockers = [
        Refusal(
            "reboot_required",
            expected="this boot to run with the configured arguments and initramfs",
            found="; ".join(reasons),
            remedy="reboot the host, or allow it: slice_allow_reboot=true",
        )
        for reasons in [reboot_reasons(params, state)]
        if reasons
    ]
    if params["state"] == "absent":
        return blockers
    if not state.kvm:
        blockers.append(
            Refusal(
                "kvm_missing",
                expected="/dev/kvm",
                found="no such device",
                remedy="enable virtualization in the firmware (ProcVirtualization)",
            )
        )
    if not state.iommu_groups:
        switched_off = [word for word in _SWITCHED_OFF if word in state.running]
        blockers.append(
            Refusal(
                "iommu_missing",
                expected="IOMMU groups in /sys/kernel/iommu_groups",
                found=", ".join(["none", *(f"booted with {word}" for word in switched_off)]),
                remedy="enable VT-d or AMD-Vi in the firmware and boot with the kernel arguments,"
                " without those that switch it off",
            )
        )
    return blockers


def all_given() -> list[str]:
    """Arguments that the next `update-grub` would put into the menu, including the managed
    drop-in's.
    """
    return _given(_defaults())


def _defaults() -> list[str]:
    """GRUB's files of settings, in the order in which it reads them."""
    names = _host.matching("/etc/default/grub.d", "*.cfg")
    return ["/etc/default/grub", *(f"/etc/default/grub.d/{name}" for name in names)]


def _others() -> list[str]:
    return [path for path in _defaults() if path != DROP_IN]


def _stray(arguments: Iterable[str], entries: Iterable[Iterable[str]]) -> list[str]:
    """Managed arguments in the menu that no other input file of `update-grub` contains."""
    words = dict.fromkeys(word for entry in entries for word in entry)
    mine = [word for word in words if word in arguments or _sets_pages(word)]
    scripts = [f"/etc/grub.d/{name}" for name in _host.listed("/etc/grub.d")]
    texts = [_host.read(path) or "" for path in (*_others(), *scripts)] if mine else []
    return [word for word in mine if not any(word in text for text in texts)]


def _given(paths: Iterable[str]) -> list[str]:
    arguments: list[str] = []
    for path in paths:
        text = _host.read(path) or ""
        for value in re.findall(r"^\s*GRUB_CMDLINE_LINUX=(.*)$", text, re.MULTILINE):
            words = _words(value)
            # A plain assignment discards the values of earlier files.
            arguments = (
                arguments + words if any("GRUB_CMDLINE_LINUX" in w for w in words) else words
            )
    return arguments


def _words(value: str) -> list[str]:
    """Words of a shell value. An unreadable value gives no words, so that the managed value is
    written.
    """
    try:
        return " ".join(shlex.split(value, comments=True)).split()
    except ValueError:
        return []


def _loaded() -> list[str]:
    absent = [m for m in MODULES if not _host.path(f"/sys/module/{m}").is_dir()]
    if not absent:
        return list(MODULES)
    # A module without parameters that is built into the kernel has no folder in /sys/module.
    release = _host.read("/proc/sys/kernel/osrelease") or ""
    built_in = _host.read(f"/lib/modules/{release}/modules.builtin") or ""
    names = {line.rpartition("/")[2].removesuffix(".ko") for line in built_in.splitlines()}
    return [m for m in MODULES if m not in absent or {m, m.replace("_", "-")} & names]


def _is_amd() -> bool:
    tables = "/sys/firmware/acpi/tables"
    if _host.path(f"{tables}/DMAR").exists():
        return False
    if _host.path(f"{tables}/IVRS").exists():
        return True
    return "AuthenticAMD" in (_host.read("/proc/cpuinfo") or "")


def _with_block(text: str | None) -> str:
    return _managed_block.with_block(text or "", BLOCK)


def has_block(text: str | None) -> bool:
    """Whether a list of initramfs modules contains the managed block."""
    return _managed_block.BEGIN in (text or "").splitlines()


def _without_block(text: str | None) -> str:
    return _managed_block.without_block(text or "")


def inputs(files: Mapping[str, str | None]) -> str:
    """Digest of the managed files that an initramfs includes."""
    relevant = [files[p] or "" for p in _INITRAMFS_INPUTS]
    return hashlib.sha256("\0".join(relevant).encode()).hexdigest()


def _rebuilt() -> bool:
    """Whether another program built an image; a kernel package does so with the files' content at
    that time.
    """
    record, folder = _host.path(INITRAMFS_RECORD), _host.path("/boot")
    if not (record.exists() and folder.is_dir()):
        return True
    built = record.stat().st_mtime
    images = _host.matching("/boot", "initrd.img-*")
    return any((folder / name).stat().st_mtime > built for name in images)


def _remember_build(of: str, boot_id: str) -> None:
    record = {"inputs": of, "boot_id": boot_id}
    _host.write(INITRAMFS_RECORD, json.dumps(record) + "\n")


def _written(params: Params, step: _change.Step) -> str:
    """New content of the step's file. In a file shared with the site, the site's bytes stay
    unchanged.
    """
    file = _host.path(step.subject)
    if step.subject != INITRAMFS_MODULES or not file.exists():
        return str(step.after)
    text = file.read_bytes().decode("utf-8", "surrogateescape")
    return _with_block(text) if params["state"] == "present" else _without_block(text)


def _record() -> dict[str, str]:
    try:
        kept = json.loads(_host.read(INITRAMFS_RECORD) or "{}")
        return {str(k): str(v) for k, v in kept.items()}
    except (ValueError, AttributeError):
        return {}  # an unreadable record counts as never built: an extra build is harmless


def _text(absolute: str) -> str | None:
    # Unmodified text, because the managed files are compared byte by byte. An unreadable file is
    # not overwritten.
    if _host.kept(absolute) is None:
        return None
    return _host.path(absolute).read_text(errors="replace")


def _paired(argument: str) -> bool:
    return argument.startswith(("hugepages=", "hugepagesz="))


def _sets_pages(argument: str) -> bool:
    return _paired(argument) or argument.startswith("default_hugepagesz=")


def _huge(params: Params) -> _hugepages.Request | None:
    """Pages including the opt-ins of this host, unless the state is absent.

    opted_in: replaces the names that the host has recorded.
    """
    names = params.get("tuning") or []
    if params["state"] == "present":
        names = _tuning_opt_in.names(names, params.get("opted_in"))
    return _hugepages.request(names, params.get("hugepages_1g"))


def _count(absolute: str) -> int:
    folder = _host.path(absolute)
    return sum(1 for _entry in folder.iterdir()) if folder.is_dir() else 0
