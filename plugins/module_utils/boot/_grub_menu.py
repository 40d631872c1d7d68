"""GRUB menu on disk: the entry of the next boot and its kernel arguments.

The menu is only read, because `update-grub` takes seconds and writes. The parser knows the forms
that grub-mkconfig of Debian 12 and Ubuntu 24.04 writes. Lines in all branches of an `if` count.
"""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import dataclass, field

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host

MENU, ENVIRONMENT = "/boot/grub/grub.cfg", "/boot/grub/grubenv"

_BLOCK = re.compile(r"(menuentry|submenu)\s+(.*)\{$")
# Memory tests also use the word `linux`.
KERNEL = re.compile(r"^\s*linux(?:efi|16)?\s+\S*vmlinuz\S*(.*)$", re.MULTILINE)
_DEFAULT = re.compile(r'set default="?([^"]*)"?$')
_ONCE = "${next_entry}"


@dataclass
class Entry:
    """kernels: the arguments of each kernel line. entries: of a submenu; None for a plain entry."""

    title: str
    id: str = ""
    kernels: list[tuple[str, ...]] = field(default_factory=list)
    entries: list[Entry] | None = None


@dataclass(frozen=True)
class Menu:
    """top: the first level, which holds all others. defaults: the menu's default settings, in
    order.
    """

    top: Entry
    defaults: tuple[str, ...]


def next_boot() -> Entry | None:
    """The entry that the next boot takes by default; None without a menu."""
    text = _host.kept(MENU)
    if not text:
        return None
    menu = parse(text)
    return chosen(menu, _environment(_host.kept(ENVIRONMENT) or ""))


def parse(text: str) -> Menu:
    top = Entry("", entries=[])
    defaults: list[str] = []
    # None: a block other than an entry, such as a function.
    stack: list[Entry | None] = [top]
    for row in map(str.strip, text.splitlines()):
        current = next(entry for entry in reversed(stack) if entry is not None)
        if row == "}" and len(stack) > 1:
            stack.pop()
        elif match := _BLOCK.match(row):
            entry = _entry(match[1], match[2])
            if current.entries is not None:
                current.entries.append(entry)
            stack.append(entry)
        elif row.endswith("{"):
            stack.append(None)
        elif kernel := KERNEL.match(row):
            current.kernels.append(tuple(kernel[1].split()))
        elif len(stack) == 1 and (default := _DEFAULT.match(row)):
            defaults.append(default[1])
    return Menu(top, tuple(defaults))


def chosen(menu: Menu, environment: dict[str, str]) -> Entry:
    """The entry that GRUB chooses: the single `grub-reboot` entry, else the default; the first if
    in doubt.

    A menu without entries is treated as a single entry with all its kernels.
    """
    path = next((word for word in menu.defaults[::-1] if word != _ONCE), "0")
    if path == "${saved_entry}":
        path = environment.get("prev_saved_entry") or environment.get("saved_entry", "")
    if _ONCE in menu.defaults and environment.get("next_entry"):
        path = environment["next_entry"]
    entry = menu.top
    while entry.entries:
        word, path = _first(path)
        entry = _named(entry.entries, word)
    return entry


def _named(entries: list[Entry], word: str) -> Entry:
    if word.isdigit():
        return entries[int(word)] if int(word) < len(entries) else entries[0]
    return next(
        (entry for entry in entries if word and word in (entry.title, entry.id)), entries[0]
    )


def _first(path: str) -> tuple[str, str]:
    """The first step of `submenu>entry`; a doubled sign is part of the title."""
    word, _step, rest = re.sub(r"(?<!>)>(?!>)", "\0", path, count=1).partition("\0")
    return word.replace(">>", ">"), rest


def _entry(kind: str, words: str) -> Entry:
    try:
        tokens = shlex.split(words)
    except ValueError:
        tokens = words.split()
    marks = ("$menuentry_id_option", "--id")
    ids = [after for mark, after in itertools.pairwise(tokens) if mark in marks]
    title, id_ = next(iter(tokens), ""), next(iter(ids), "")
    return Entry(title, id_, entries=[] if kind == "submenu" else None)


def _environment(text: str) -> dict[str, str]:
    rows = (row.partition("=") for row in text.splitlines() if not row.startswith("#"))
    return {name: value for name, sign, value in rows if sign}
