"""Programs are started with argument lists, and data never stands where an option may."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.repository import sources

pytestmark = pytest.mark.covers("P2")

ROOT = sources.ROOT
OURS = [*(ROOT / "plugins").rglob("*.py"), *(ROOT / "reconciler").rglob("*.py")]
SHELLS = {"sh", "bash", "/bin/sh", "/bin/bash", "dash"}
STARTERS = {"run", "Popen", "call", "check_call", "check_output"}
# Programs without a mark for the end of their options. The form of their data is checked.
WITHOUT_A_MARK = {"ip", "ovs-vsctl", "ovs-ofctl", "iptables", "conntrack", "dhcp_release"}
# Words that are no data: names of our own units, and texts made of constants.
OWN_WORDS = {
    "core/_boot_service.py: systemctl … unit.service",
    "network/_nft.py: 'sh' -c f'nft -f - && {_NEXT.join(commands)}'",
    "network/_ovs_nat.py: systemctl … step.subject",
    "network/_ovs_nat_removal.py: systemctl … step.subject",
    "topology/_firmware_inventory.py: nvidia-smi … query",
}
# Tasks of Ansible that give a text to a shell.
FREE_FORM = {"shell", "raw", "script"}


def in_python(text: str) -> Iterator[str]:
    """Each start of a shell, and each word of data that a program could take for an option."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in {"os.system", "os.popen", "subprocess.getoutput"} or name.endswith("_shell"):
                yield name
            for keyword in node.keywords:
                if keyword.arg in {"shell", "use_unsafe_shell"}:
                    yield f"{name}({keyword.arg}=…)"
            last = name.rpartition(".")[2]
            if last in STARTERS and node.args and isinstance(node.args[0], ast.List):
                yield from _exposed(node.args[0].elts)
        elif isinstance(node, ast.List):
            words = [ast.unparse(each) for each in node.elts]
            for shell, option, script in zip(words, words[1:], node.elts[2:], strict=False):
                plain = isinstance(script, ast.Constant | ast.Name)
                if shell.strip("'") in SHELLS and option == "'-c'" and not plain:
                    yield f"{shell} -c {ast.unparse(script)}"


def _exposed(words: list[ast.expr]) -> Iterator[str]:
    """Data after a plain word. Constants, data after `--` or after an option are safe."""
    program = words[0].value if isinstance(words[0], ast.Constant) else ""
    before: Any = ""
    for word in words[1:] if program not in WITHOUT_A_MARK else ():
        if isinstance(word, ast.Constant):
            if word.value == "--":
                return
            before = word.value
            continue
        name = word.id if isinstance(word, ast.Name) else getattr(word, "attr", "")
        begins = isinstance(word, ast.JoinedStr) and isinstance(word.values[0], ast.Constant)
        safe = begins or name.isupper() or isinstance(word, ast.Starred)
        if not safe and not str(before).startswith("-"):
            yield f"{program} … {ast.unparse(word)}"
        before = ""


def in_yaml(document: Any) -> Iterator[str]:
    """Each task that gives a text to a shell, or a command as text with a template."""
    if isinstance(document, list):
        for each in document:
            yield from in_yaml(each)
    elif isinstance(document, dict):
        for key, value in document.items():
            name = str(key).rpartition(".")[2]
            builtin = str(key) in {name, f"ansible.builtin.{name}"}
            shell = name in FREE_FORM and isinstance(value, str | dict)
            text = name == "command" and "{{" in str(value) and "argv" not in value
            if builtin and (shell or text):
                yield f"{key}: {value}"
            else:
                yield from in_yaml(value)


@pytest.mark.parametrize(
    "text",
    [
        "os.system(f'ip link show {name}')",
        "subprocess.run(line, shell=True)",
        "module.run_command(line, use_unsafe_shell=True)",
        "asyncio.create_subprocess_shell(line)",
        "words = ['sh', '-c', f'cat {path}']",
        "words = [*front, 'bash', '-c', 'cat ' + path]",
        "_command.run(['umount', place])",
        "_command.run(['mount', '-t', kind, origin, '--', place])",
        "subprocess.run(['systemctl', 'restart', unit.service])",
        "subprocess.run([program, row['name']])",
    ],
)
def test_a_start_that_data_can_change_is_seen(text: str) -> None:
    assert list(in_python(text))


@pytest.mark.parametrize(
    "text",
    [
        "_command.run(['umount', '--', place])",
        "_command.run(['mount', '-t', kind, '--', origin, place])",
        "_command.run(['systemctl', 'restart', SERVICE])",
        "_command.run(['nvme', f'--namespace={number}'])",
        "_command.run(['ip', 'link', 'set', 'dev', card.interface, 'up'])",
        "words = ['sh', '-c', _SCRIPT]",
    ],
)
def test_a_plain_argument_list_is_none(text: str) -> None:
    assert list(in_python(text)) == []


def test_a_task_with_a_text_for_a_shell_is_seen() -> None:
    argv = {"ansible.builtin.command": {"argv": ["cat", "--", "{{ path }}"]}}
    assert list(in_yaml([{"tasks": [argv, {"shell": None, "command": "uname -r"}]}])) == []
    for task in ({"ansible.builtin.shell": "cat"}, {"command": "cat {{ path }}"}, {"raw": "id"}):
        assert len(list(in_yaml([{"block": [task]}]))) == 1


def test_no_data_reaches_a_shell_or_the_place_of_an_option() -> None:
    assert len(OURS) > 300
    exposed = {
        f"{path.parent.name}/{path.name}: {row}"
        for path in OURS
        for row in in_python(path.read_text())
    }
    books = [path for folder in ("playbooks", "roles") for path in (ROOT / folder).rglob("*.yml")]
    assert len(books) > 60
    exposed |= {
        f"{path.relative_to(ROOT)}: {row}"
        for path in books
        for document in sources.documents(path.read_text())
        for row in in_yaml(document)
    }
    assert exposed == OWN_WORDS
