"""Worked slice of docs/hosts.md, "Provisioning by hand": the commands that the page prints."""

from __future__ import annotations

import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INVENTORY = ROOT / "inventory"

_PAGE = (ROOT / "docs" / "hosts.md").read_text()
_SECTION = _PAGE.partition("\n## Provisioning by hand\n")[2].partition("\n## ")[0]
# Blocks of code are the odd parts.
_LINES = [line for block in _SECTION.split("```")[1::2] for line in block.splitlines()]
# Words of each command, in the order of the page.
COMMANDS = [shlex.split(line, comments=True) for line in _LINES if line.startswith("ansible")]


def subject(words: list[str]) -> str:
    """Return the playbook of a command, without its folder, or the module of an ad-hoc command."""
    assert words[1:3] == ["-i", "inventory/example"], words
    if words[0] == "ansible":
        return words[words.index("-m") + 1].removeprefix("gpuaas.slice.")
    return Path(words[3]).stem
