"""Text of the collection's playbooks, with the task files that they include."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "playbooks"
_INCLUDED = re.compile(r"include_tasks: (tasks/\w+\.yml)$", re.MULTILINE)


def text(playbook: str) -> str:
    """Return the playbook and each task file that it includes, as text."""
    text = (FOLDER / f"{playbook}.yml").read_text()
    files = dict.fromkeys(_INCLUDED.findall(text))
    return text + "".join((FOLDER / file).read_text() for file in files)
