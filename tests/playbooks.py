"""Text of the collection's playbooks, with the task files that they include."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "playbooks"
_INCLUDED = re.compile(r"include_tasks: (tasks/\w+\.yml)$", re.MULTILINE)


def text(playbook: str) -> str:
    """Return the playbook and each task file that it includes, as text."""
    own = (FOLDER / f"{playbook}.yml").read_text()
    files = dict.fromkeys(_INCLUDED.findall(own))
    return own + "".join((FOLDER / file).read_text() for file in files)
