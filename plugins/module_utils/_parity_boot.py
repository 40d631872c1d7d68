"""Whether the next boot will have what this one was given: the boot menu, early modules, initramfs.

A menu that lacks an argument is a failure. A menu that is right, while the files that the next
`update-grub` makes it from are not, is a warning: nothing is lost until somebody runs that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils import _boot_menu, _grub, _written


def menu_problems(state: _grub.State) -> list[str]:
    """What the entry that the next boot takes lacks."""
    entry = _boot_menu.next_boot()
    if entry is None:
        return [f"{_boot_menu.MENU} is missing: no boot menu to look at"]
    where = f"entry {entry.title!r} of {_boot_menu.MENU}"
    if not entry.kernels:
        return [f"the next boot takes {where}, which starts no kernel of this host"]
    lost = [word for kernel in entry.kernels for word in _grub.lacking(state.arguments, kernel)]
    return [f"the next boot would lose {word}: {where}" for word in dict.fromkeys(lost)]


def settings_doubts(params: Mapping[str, Any], state: _grub.State) -> list[str]:
    """What is wrong with the files that the menu is made from."""
    wanted = _grub.wanted(params, state)[_grub.DROP_IN]
    doubts = _written.unlike(_grub.DROP_IN, wanted)
    lost = _grub.lacking(state.arguments, _grub.all_given())
    return [*doubts, *([f"the next update-grub would lose {' '.join(lost)}"] if lost else [])]


def module_problems(params: Mapping[str, Any], state: _grub.State) -> list[str]:
    """What keeps the drivers of GPUs away in the first seconds, before a service of ours runs."""
    files = _grub.wanted(params, state)
    whole = (_grub.MODULES_LOAD, _grub.SOFT_DEPENDENCIES)
    problems = [found for path in whole for found in _written.unlike(path, files[path])]
    # The site may add to this list, and the next build takes that in beside ours.
    if _grub.BLOCK not in (state.files[_grub.INITRAMFS_MODULES] or ""):
        problems.append(f"{_grub.INITRAMFS_MODULES} lacks our modules")
    if state.initramfs in ("", _grub.DUE):
        problems.append("the initramfs was not built with our modules")
    return problems
