"""Approved disks of slices, which the host must not act on: udev rule, LVM filter, md, boot menu.

A tenant may write an md superblock, a physical volume or a copy of a host's label on its disk. udev
reads the disk whenever its QEMU closes it, and at every boot, and would activate what it finds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _command,
    _host,
    _ledger,
    _managed_block,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _disk

# After 60-persistent-storage.rules, which names the disks; before the rules of md, LVM, btrfs and
# bcache. initramfs-tools takes every rule and all of LVM's configuration from /etc.
RULES = "/etc/udev/rules.d/62-gpuaas-slice-disks.rules"
# LVM merges it over lvm.conf.
LVM = "/etc/lvm/lvmlocal.conf"
# mdadm reads the second where the first is missing. The initramfs takes no file of its
# folder mdadm.conf.d.
MDADM, OTHER_MDADM = "/etc/mdadm/mdadm.conf", "/etc/mdadm.conf"
# os-prober mounts every filesystem that it finds, for an entry in the boot menu.
GRUB = "/etc/default/grub.d/62-gpuaas-slice-disks.cfg"
INITRAMFS_TOOLS = "/etc/initramfs-tools"
# Digest of the files that the last initramfs was built with.
BUILT = f"{_host.STATE_DIRECTORY}/slice-disks-initramfs"
# Imports every pool that it finds on any disk, by name.
ZFS_SCAN = "/etc/systemd/system/zfs-import.target.wants/zfs-import-scan.service"
_SITE_FILTER = re.compile(r"^\s*(devices/)?global_filter\s*=", re.MULTILINE)
# Keywords of mdadm may have three characters or more, in either case.
_SITE_AUTO = re.compile(r"^auto?\s+(.*)", re.MULTILINE | re.IGNORECASE)
_ARRAY = re.compile(r"^arr(?:ay?)?\s.*", re.MULTILINE | re.IGNORECASE)
# Words of an ARRAY line that must all fit an array. Numbers of disks change with a boot.
_IDENTITY = ("uuid=", "name=", "devices=", "super-minor=", "<ignore>")
_NAME = re.compile(r"/dev/(disk/by-id/[A-Za-z0-9][A-Za-z0-9._:+-]*)")
_HEAD = "# Written by the gpuaas.slice collection: the host leaves the disks of slices alone.\n"
_MENU = f"{_HEAD}GRUB_DISABLE_OS_PROBER=true\n"
# Nothing assembles or mounts the disks. They have no link but the device's own name: at boot, any
# disk with the label or UUID of the host's root could be taken for it. The type is not empty,
# because bcache probes a disk without a recognised type.
_ACTIONS = (
    'ENV{SYSTEMD_READY}="0", ENV{UDISKS_IGNORE}="1", ENV{ID_FS_TYPE}="gpuaas_slice",'
    ' ENV{ID_FS_USAGE}="", ENV{ID_PART_TABLE_TYPE}=""'
)


@dataclass(frozen=True)
class State:
    """Content of the files; "" for an absent file. filtered: whether the site has an LVM filter of
    its own, which a second one would replace. lvm, grub, initramfs: whether the host has them.
    built: digest of the files in the initramfs. zfs_scan: whether pools of any disk are imported.
    used: names of the disks that a tenant has, or that were not wiped since.
    """

    rules: str
    local: str
    menu: str
    filtered: bool
    lvm: bool
    grub: bool
    initramfs: bool
    built: str
    zfs_scan: bool
    used: tuple[str, ...] = ()
    md: bool = False
    md_file: str = MDADM
    md_text: str = ""
    md_arrays: tuple[frozenset[str], ...] = ()


def names(slots: Iterable[Mapping[str, Any]]) -> list[str]:
    """The by-id names of the slots' disks below /dev."""
    held = []
    for slot in slots:
        match = _NAME.fullmatch(str(slot.get("nvme_device", "")))
        if not match:
            raise Refusal(
                "spec_invalid",
                expected="nvme_device as /dev/disk/by-id/…",
                found=repr(slot.get("nvme_device"))[:200],
                remedy="name the disk as discovery does",
            )
        held.append(match[1])
    return sorted(held)


def rules(disks: Iterable[str]) -> str:
    """The udev rules; "" without a disk."""
    rows = [
        f'SUBSYSTEM=="block", SYMLINK=="{name}{part}", SYMLINK:="{name}{number}", {_ACTIONS}\n'
        for name in disks
        for part, number in (("", ""), ("-part*", "-part%n"))
    ]
    return _HEAD + "".join(rows) if rows else ""


def lvm_block(disks: Iterable[str]) -> str:
    """The managed block of LVM's configuration; "" without a disk."""
    # Of the characters of a by-id name, only this one would end the match.
    names = [name.replace("+", "[+]") for name in disks]
    patterns = [f'"r|^/dev/{name}(-part[0-9]+)?$|"' for name in names]
    rows = ["devices {", f"\tglobal_filter = [ {', '.join(patterns)} ]", "}"]
    return _managed_block.render(rows) if patterns else ""


def md_block() -> str:
    """The managed block of mdadm's configuration.

    The second line names no array. Without any such line the initramfs gets a list of all arrays
    that a scan of all disks finds, those of tenants too, in place of the file (Debian's hook).
    """
    nobody = ":".join(["0" * 8] * 4)
    return _managed_block.render(["AUTO -all", f"ARRAY <ignore> UUID={nobody}"])


def md_config() -> str:
    """The file that mdadm reads."""
    there = [path for path in (MDADM, OTHER_MDADM) if _host.path(path).is_file()]
    return there[0] if there else MDADM


def _has_mdadm() -> bool:
    return _host.path(MDADM).parent.is_dir()


def _md_arrays() -> tuple[frozenset[str], ...]:
    """Identities of all arrays that run on the host; without mdadm none is assembled by it."""
    if not _has_mdadm() or not re.search(r"^md\S+ :", _text("/proc/mdstat"), re.MULTILINE):
        return ()
    listed = _command.run(["mdadm", "--detail", "--scan"]).out
    lines = _identities(listed.replace("INACTIVE-ARRAY", "ARRAY"))
    return tuple(words for words in lines if _uuid(words))


def _identities(text: str) -> list[frozenset[str]]:
    """The words of each ARRAY line that say which array it is."""
    lines = [line.lower().replace('"', "").split() for line in _ARRAY.findall(text)]
    return [frozenset(word for word in words if word.startswith(_IDENTITY)) for words in lines]


def _uuid(identity: Iterable[str]) -> str:
    return next((word for word in identity if word.startswith("uuid=")), "")


def _md_lines(text: str) -> str:
    """The site's lines of mdadm's configuration, without comments, each on one line. A line that
    begins with a space continues the line before it.
    """
    site = re.sub(r"(?<!\S)#.*", "", _managed_block.without_block(text))
    return re.sub(r"\s*\n[ \t]+", " ", site)


def _is_listed(array: frozenset[str], lines: Iterable[frozenset[str]]) -> bool:
    """Whether a line names the array at every boot: by its UUID, and by nothing else that differs
    or may change. mdadm takes another line for no line of this array.
    """
    return any(_uuid(array) in words and words <= array for words in lines)


def _md_doubt(state: State) -> Refusal | None:
    """Why the block cannot be written; None where it can."""
    lines = _md_lines(state.md_text)
    # mdadm obeys the first such line alone.
    first = _SITE_AUTO.search(lines)
    if first and first[1].split() != ["-all"]:
        return Refusal(
            "md_auto_of_site",
            expected=f"no AUTO line in {state.md_file}, or `AUTO -all`",
            found=f"the site's `AUTO {first[1].strip()[:200]}`, which is kept",
            remedy="list the host's arrays in ARRAY lines and make it `AUTO -all`; udev assembles"
            " no array of the approved disks",
        )
    listed = _identities(lines)
    unlisted = [array for array in state.md_arrays if not _is_listed(array, listed)]
    if unlisted:
        return Refusal(
            "md_arrays_not_listed",
            expected=f"an ARRAY line in {state.md_file} for each array of the host, with its UUID"
            " and without another name, devices= or super-minor=",
            found=f"none for {', '.join(sorted(map(_uuid, unlisted)))[:200]}",
            remedy="write the lines of `mdadm --detail --scan` that are the host's own, each in"
            " place of an older line with its UUID, then run the bind_topology playbook again",
        )
    return None


def _md_surplus(state: State) -> Refusal | None:
    """ARRAY lines of arrays that do not run. `mkconf` lists each array that a scan of all disks
    finds, and mdadm assembles an array with such a line in spite of the block.
    """
    lines = _identities(_md_lines(state.md_text))
    listed = {_uuid(words) for words in lines if "<ignore>" not in words}
    surplus = sorted(listed - {"", *map(_uuid, state.md_arrays)})
    if not surplus:
        return None
    return Refusal(
        "md_arrays_not_running",
        expected=f"ARRAY lines in {state.md_file} of arrays that run on the host",
        found=f"lines of {', '.join(surplus)[:200]}, which may be on a tenant's disk",
        remedy="remove the lines that are not the host's own, then run the bind_topology playbook"
        " and `update-initramfs -u`",
    )


def read() -> State:
    local, md_file = _text(LVM), md_config()
    site = _managed_block.without_block(local) + "\n" + _text("/etc/lvm/lvm.conf")
    return State(
        rules=_text(RULES),
        local=local,
        menu=_text(GRUB),
        filtered=_SITE_FILTER.search(site) is not None,
        lvm=_host.path("/etc/lvm").is_dir(),
        grub=_host.path(GRUB).parent.is_dir(),
        initramfs=_host.path(INITRAMFS_TOOLS).is_dir(),
        built=_text(BUILT).strip(),
        zfs_scan=_host.path(ZFS_SCAN).is_symlink(),
        used=tuple(
            _disk.by_id_of(entry.disk_identity).removeprefix("/dev/")
            for entry in _ledger.entries()
            if entry.disk_identity and entry.used
        ),
        md=_has_mdadm(),
        md_file=md_file,
        md_text=_text(md_file),
        md_arrays=_md_arrays(),
    )


def problems(slots: Iterable[Mapping[str, Any]]) -> list[str]:
    """Files that do not keep the host from acting on the disks of these slots."""
    params, state = {"slots": list(slots)}, read()
    files = [f"{step.subject} is not what bind_topology writes" for step in _steps(params, state)]
    scan = params["slots"] and state.zfs_scan
    return [*files, *(["zfs-import-scan.service imports pools of any disk"] if scan else [])]


def _text(path: str) -> str:
    file = _host.path(path)
    return file.read_text(errors="surrogateescape") if file.is_file() else ""


def _steps(params: _change.Params, state: State) -> list[_change.Step]:
    disks = names(params["slots"])
    # A slot may be written off with its tenant's bytes. Without slots the host is given back.
    disks = sorted({*disks, *state.used}) if disks else []
    steps = []
    if state.rules != (text := rules(disks)):
        steps.append(_change.Step("write_rules", RULES, state.rules, text))
    block = lvm_block(disks) if state.lvm and not state.filtered else ""
    if (before := _managed_block.block_of(state.local)) != block:
        steps.append(_change.Step("filter_lvm", LVM, before, block))
    arrays = md_block() if state.md and disks and not _md_doubt(state) else ""
    if (before := _managed_block.block_of(state.md_text)) != arrays:
        steps.append(_change.Step("limit_mdadm", state.md_file, before, arrays))
    # Without slots nothing is built; the next build by another program leaves the files out.
    digest = _digest(text, block, *([arrays] if arrays else []))
    if state.initramfs and disks and (steps or state.built != digest):
        steps.append(_change.Step("update_initramfs", "initramfs", state.built, digest))
    menu = _MENU if state.grub and disks else ""
    if state.menu != menu:
        steps.append(_change.Step("quiet_os_prober", GRUB, state.menu, menu))
    return steps


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def plan(params: _change.Params, state: State) -> _change.Plan:
    doubt = Refusal(
        "lvm_filter_of_site",
        expected="no global_filter in LVM's configuration",
        found="the site has one, which is kept",
        remedy="have it reject the approved disks; udev activates none of their volumes",
    )
    scan = Refusal(
        "zfs_imports_any_pool",
        expected="ZFS to import the pools of its cache file only",
        found="zfs-import-scan.service is enabled, which a tenant can give a pool of any name",
        remedy="disable it: systemctl disable zfs-import-scan.service",
    )
    md = (_md_doubt(state), _md_surplus(state)) if state.md else ()
    rows = (doubt if state.filtered else None, scan if state.zfs_scan else None, *md)
    doubts = tuple(row for row in rows if row and params["slots"])
    return _change.Plan(tuple(_steps(params, state)), doubts=doubts)


def apply(_params: _change.Params, step: _change.Step) -> None:
    if step.name == "update_initramfs":
        _command.run(["update-initramfs", "-u", "-k", "all"], timeout=900)
        _host.write(BUILT, f"{step.after}\n")
        return
    if step.subject == GRUB:
        _put(GRUB, step.after)
        return
    # Another program may have built the image from other content since the last build.
    _host.remove(BUILT)
    if step.subject == RULES:
        _put(RULES, step.after)
        _command.run(["udevadm", "control", "--reload"])
    else:
        site = _managed_block.without_block(_text(step.subject))
        _put(step.subject, _managed_block.with_block(site, step.after) if step.after else site)


def _put(path: str, text: str) -> None:
    if text:
        _host.write(path, text)
    else:
        _host.remove(path)


SUBJECT = _change.Subject(lambda _params: read(), plan, apply)
