"""Programs and playbooks of the repository, parsed for the commands that they contain.

Each language is parsed, so that separated words still form a command: a list over several lines in
Python, an `argv` in YAML, Python inside a generated shell script.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.unit.repository import commands

ROOT = Path(__file__).resolve().parents[3]
SUFFIXES = {".py", ".yml", ".yaml", ".sh", ".j2"}

# Modules whose `force` does the same as `-F`, by their last name.
_FORCING = {"filesystem", "lvg", "lvol", "parted", "luks_device", "zfs", "zpool", "mount"}
_CARRIED = re.compile(r"= r'''(.*?)'''", re.DOTALL)


class _Loader(yaml.SafeLoader):
    """YAML loader that accepts Ansible's tags, which do not matter here."""


def _untagged(loader: yaml.SafeLoader, _suffix: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return loader.construct_scalar(node)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    assert isinstance(node, yaml.MappingNode)
    return loader.construct_mapping(node, deep=True)


_Loader.add_multi_constructor("!", _untagged)


def files(root: Path = ROOT) -> list[Path]:
    """Files that git has or would take: programs by suffix or first line, and the Makefile."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(words, cwd=root, check=True, capture_output=True, text=True).stdout
    paths = (root / name for name in sorted(set(listed.split("\0"))) if name)
    return [path for path in paths if path.is_file() and _is_program(path)]


def forced(path: Path) -> list[str]:
    """Return the forced variants in a file, each once, in order."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".py" or text.startswith(("#!/usr/bin/env python", "#!/usr/bin/python")):
        every = in_python(text)
    elif path.suffix in {".yml", ".yaml"}:
        every = in_yaml(text)
    else:
        every = in_shell(text)
    return list(dict.fromkeys(every))


def in_python(text: str) -> Iterator[str]:
    """Read lists and calls as words, and every string as a shell would."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.BinOp)):
            yield from commands.in_words(list(_words(node)))
        elif isinstance(node, ast.Call):
            yield from commands.in_words([word for arg in node.args for word in _words(arg)])
        elif isinstance(node, (ast.Constant, ast.JoinedStr)):
            yield from commands.in_text(_string(node) or "")


def documents(text: str) -> Iterator[Any]:
    """The documents of a YAML file, whatever tags its values have."""
    yield from yaml.load_all(text, Loader=_Loader)


def in_yaml(text: str) -> Iterator[str]:
    """Read every string and every list of words, and modules with `force`."""
    for document in documents(text):
        yield from _in_data(document)


def in_shell(text: str) -> Iterator[str]:
    """Read the shell's commands, and the Python sources that a generated script contains."""
    yield from commands.in_text(re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE))
    for carried in _CARRIED.findall(text):
        try:
            yield from in_python(carried)
        except SyntaxError:
            continue  # data instead of a source; its text has been read above


def _in_data(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield from commands.in_text(data)
    elif isinstance(data, list):
        # The words of a single command; a line among them is read separately below.
        words = [commands.plain(word) if isinstance(word, str) else "" for word in data]
        yield from commands.in_words([commands.ANY if " " in word else word for word in words])
        for item in data:
            yield from _in_data(item)
    elif isinstance(data, dict):
        for key, value in data.items():
            module = str(key).rpartition(".")[2]
            if module in _FORCING and isinstance(value, dict) and value.get("force") not in _NO:
                yield f"{module} force={value['force']}"
            yield from _in_data(value)


_NO = (None, False, "no", "false", "False")


def _words(node: ast.expr) -> Iterator[str]:
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        for element in node.elts:
            yield from _words(element)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from (*_words(node.left), *_words(node.right))
    elif isinstance(node, ast.IfExp):
        yield from (*_words(node.body), *_words(node.orelse))
    elif isinstance(node, ast.Starred):
        yield from _words(node.value)
    else:
        text = _string(node)
        yield commands.ANY if text is None else text


def _string(node: ast.expr) -> str | None:
    """Return a string's text, with a placeholder for parts known only at run time."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_string(part) or commands.ANY for part in node.values)
    return None


def _is_program(path: Path) -> bool:
    if path.suffix in SUFFIXES or path.name == "Makefile":
        return True
    with path.open("rb") as file:
        return file.read(2) == b"#!"
