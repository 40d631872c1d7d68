"""Generator of every role's README.md from the role's files.

`python -m scripts.role_readme` writes roles/*/README.md; a test compares. The sources are
meta/argument_specs.yml (which ansible-doc also shows), defaults/main.yml where the specification
names no default, and the playbooks that use the role.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
COMMAND = "python -m scripts.role_readme"

# Longer defaults break a table's layout; defaults/main.yml shows them with their comments.
_LONGEST_DEFAULT = 60
_MARKUP = re.compile(r"\b(?:C|V|O|RV|E|P|M|I|B|U|L)\((?:[^()\\]|\\.)*\)")


def markdown(text: str) -> str:
    """Convert Ansible's documentation markup to Markdown."""
    return _MARKUP.sub(lambda match: _inline(match.group()), " ".join(text.split()))


def _inline(marked: str) -> str:
    kind, _, rest = marked.partition("(")
    body = re.sub(r"\\(.)", r"\1", rest[:-1])
    match kind:
        case "I":
            return f"*{body}*"
        case "B":
            return f"**{body}**"
        case "U":
            return f"<{body}>"
        case "L":
            title, _, address = body.partition(",")
            return f"[{title.strip()}]({address.strip()})"
        case _:
            return f"`{body}`"


def roles(root: Path = ROOT) -> list[Path]:
    """Return the folder of every role, by name."""
    return sorted(path.parent.parent for path in root.glob("roles/*/meta/argument_specs.yml"))


def readme(role: Path) -> str:
    """Return the whole README.md of a role."""
    defaults = _load(role / "defaults" / "main.yml")
    specs = _load(role / "meta" / "argument_specs.yml")["argument_specs"]
    lines = [f"<!-- Generated from meta/argument_specs.yml by `{COMMAND}`; edit that file. -->"]
    lines += [f"# {role.name}", "", f"{markdown(specs['main']['short_description'])}."]
    for entry, spec in specs.items():
        if entry != "main":
            lines += ["", f"## {entry}", "", f"{markdown(spec['short_description'])}."]
        for paragraph in _paragraphs(spec["description"]):
            lines += ["", markdown(paragraph)]
        rows = list(_rows(spec.get("options", {}), defaults))
        if rows:
            lines += ["", "| variable | type | default | meaning |", "|---|---|---|---|", *rows]
    users = [f"`gpuaas.slice.{path.stem}`" for path in _playbooks(role)]
    if users:
        lines += ["", f"In use in {', '.join(users)}."]
    return "\n".join(lines) + "\n"


def _rows(
    options: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    """Return a row for each option, followed by a row for each key of a dictionary."""
    for name, option in options.items():
        cells = (
            f"`{prefix}{name}`",
            _type(option),
            _default(name, option, {} if prefix else defaults),
            _meaning(option),
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        dotted = f"{prefix}{name}{'[]' if option.get('type') == 'list' else ''}."
        yield from _rows(option.get("options", {}), defaults, dotted)


def _type(option: Mapping[str, Any]) -> str:
    kind = option.get("type", "str")
    return f"list of {option['elements']}" if "elements" in option else str(kind)


def _default(name: str, option: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    if option.get("required"):
        return "**required**"
    value = option.get("default", defaults.get(name))
    if value is None:
        return ""
    text = value if isinstance(value, str) and value else json.dumps(value)
    return f"`{text}`" if len(text) <= _LONGEST_DEFAULT else "see `defaults/main.yml`"


def _meaning(option: Mapping[str, Any]) -> str:
    text = markdown(" ".join(_paragraphs(option["description"])))
    choices = ", ".join(f"`{choice}`" for choice in option.get("choices", ()))
    return f"{text} One of {choices}." if choices else text


def _paragraphs(text: str | list[str]) -> list[str]:
    return [text] if isinstance(text, str) else text


def _playbooks(role: Path) -> list[Path]:
    """Return the playbooks that call the role by its full name."""
    name = re.compile(rf"\bgpuaas\.slice\.{re.escape(role.name)}\b")
    folder = role.parent.parent / "playbooks"
    return [path for path in sorted(folder.glob("*.yml")) if name.search(path.read_text())]


def _load(path: Path) -> dict[str, Any]:
    return (yaml.safe_load(path.read_text()) or {}) if path.exists() else {}


if __name__ == "__main__":
    for folder in roles():
        (folder / "README.md").write_text(readme(folder))
