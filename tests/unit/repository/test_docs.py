"""Pages and the program's own texts: each `gpuaas` command exists, and links lead somewhere."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from reconciler.cli.main import app, hoist
from scripts import docs_site

ROOT = Path(__file__).resolve().parents[3]
PAGES = docs_site.pages()
TEXTS = {name: file.read_text(encoding="utf-8") for name, file in PAGES.items()}
_FENCES = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SPANS = re.compile(r"`(gpuaas [^`]+)`")
_LINKS = re.compile(r"\]\(([^)\s]+)\)")


PROGRAM: Any = get_command(app)


class Unknown(Exception):
    """A command that the program would refuse."""


def commands(text: str) -> Iterator[tuple[str, bool]]:
    """Each command line of `gpuaas`, and whether it is whole: in running text it may be short."""
    for block in _FENCES.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip().startswith("gpuaas "):
                yield line.strip(), True
    for span in _SPANS.findall(_FENCES.sub("", text)):
        yield re.sub(r"\s+", " ", span), False


def words(line: str) -> list[str]:
    """Words of a command without its redirections; `a|b` is `a`, and `[--option X]` is given."""
    line = re.split(r"\s(?:>>?|\||<|&)(?:\s|$)", line)[0]
    line = re.sub(r"\$\(.*?\)", "X", line)
    line = re.sub(r"[\[\]…]|\.\.\.", " ", line)
    split = shlex.split(line, comments=True)[1:]
    return hoist([re.sub(r"^([\w-]+)\|.*", r"\1", word) for word in split])


def parse(given: list[str], whole: bool) -> None:
    """Parse as the program does, but convert no values: they are examples. Raises Unknown."""
    command, parent = PROGRAM, None
    while True:
        context = command.context_class(
            command, info_name=command.name, parent=parent, **command.context_settings
        )
        try:
            values, rest, _ = command.make_parser(context).parse_args(args=list(given))
        except Exception as error:
            raise Unknown(getattr(error, "message", error)) from error
        if whole:
            for parameter in command.params:
                if parameter.required and not parameter.envvar and not values.get(parameter.name):
                    raise Unknown(f"no {parameter.name}")
        if not hasattr(command, "commands"):
            if rest and not context.allow_extra_args:
                raise Unknown(f"unexpected {rest}")
            return
        if not rest and not whole:
            return
        if not rest or rest[0] not in command.commands:
            raise Unknown(f"no command {rest[:1]}")
        command, parent, given = command.commands[rest[0]], context, list(rest[1:])


def test_each_command_is_one_of_the_program() -> None:
    wrong, count = [], 0
    for name, text in TEXTS.items():
        for line, whole in commands(text):
            # The plan names commands to come; objects of AWX have names that begin like a command.
            if name == "plan.md" or (name == "awx.md" and not whole):
                continue
            count += 1
            try:
                parse(words(line), whole)
            except Unknown as error:
                wrong.append(f"{name}: {line}: {error}")
    assert wrong == []
    assert count > 100


def test_each_command_that_the_program_names_exists() -> None:
    """Remedies of refusals above all. A placeholder in the place of a command may be any."""
    wrong, count = [], 0
    for file in (*(ROOT / "reconciler").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")):
        for text in _strings(ast.parse(file.read_text(encoding="utf-8"))):
            for line in _SPANS.findall(text):
                count += 1
                try:
                    parse(words(line), whole=False)
                except Unknown as error:
                    if str(error) != f"no command {[_PLACEHOLDER]}":
                        wrong.append(f"{file.name}: {line}: {error}")
    assert wrong == []
    assert count > 100


_PLACEHOLDER = "placeholder"


def _strings(tree: ast.AST) -> Iterator[str]:
    """Texts of a module, those of f-strings as a whole."""
    if isinstance(tree, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else None for part in tree.values)
        yield "".join(_PLACEHOLDER if part is None else str(part) for part in parts)
        return
    if isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        yield tree.value
    for child in ast.iter_child_nodes(tree):
        yield from _strings(child)


def leaves(command: Any, path: str = "gpuaas") -> Iterator[tuple[str, Any]]:
    """Commands that act, with their words."""
    for name, each in getattr(command, "commands", {}).items():
        yield from leaves(each, f"{path} {name}")
    if not hasattr(command, "commands"):
        yield path, command


def test_each_option_says_what_it_is() -> None:
    silent = [
        f"{path}: {parameter.opts[0]}"
        for path, command in leaves(PROGRAM)
        for parameter in command.params
        if not (getattr(parameter, "help", None) or "").strip()
    ]
    assert silent == []


def test_each_command_is_on_a_page() -> None:
    """With an example, or in a sentence that explains its use."""
    shown = {line for text in TEXTS.values() for line, _ in commands(text)}
    alone = [
        path
        for path, _ in leaves(PROGRAM)
        if not any(re.match(rf"{path}(?![\w-])", line) for line in shown)
    ]
    assert alone == []


@pytest.mark.parametrize(
    "line",
    [
        "gpuaas nodes change n1 --adress x",
        "gpuaas nodes polish n1",
        "gpuaas recover",
        "gpuaas check a",
    ],
)
def test_a_command_that_the_program_refuses_is_named(line: str) -> None:
    with pytest.raises(Unknown):
        parse(words(line), whole=True)


def test_links_between_pages_lead_somewhere() -> None:
    anchors = {name: set(_anchors(text)) for name, text in TEXTS.items()}
    wrong = []
    for name, text in TEXTS.items():
        for link in _LINKS.findall(_FENCES.sub("", docs_site.linked(name, text))):
            path, _, anchor = link.partition("#")
            if "://" in path:
                continue
            target = (
                (Path("/", name).parent / path).resolve().relative_to("/").as_posix()
                if path
                else name
            )
            if (docs_site.DOCS / target).suffix == ".png" and (docs_site.DOCS / target).exists():
                continue
            if target not in TEXTS or (anchor and anchor not in anchors[target]):
                wrong.append(f"{name}: {link}")
    assert wrong == []


def test_each_page_is_in_the_navigation_once() -> None:
    config = yaml.safe_load((ROOT / "scripts" / "docs_site.yml").read_text())

    def files(nav: Any) -> Iterator[str]:
        for entry in nav:
            yield from [entry] if isinstance(entry, str) else files(*entry.values())

    listed = [*files(config["nav"]), *config["not_in_nav"].split()]
    assert sorted(listed) == sorted(TEXTS), "list each page of docs/ in scripts/docs_site.yml"


def test_the_architecture_leads_to_few_files_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rows = re.compile(r"^\| (?!folder|to change)(.+?) \| (.+) \|$", re.MULTILINE)
    folders = rows.findall(text.partition("## Map")[2])
    entries = rows.findall(text.partition("## To change X, open Y")[2])
    assert len(folders) - len(entries) == 10, "the map has ten lines"
    wrong = []
    for subject, places in entries:
        named = [name for name in re.findall(r"`([^`]+)`", places) if re.search(r"/|\.py$", name)]
        if not 1 <= len(named) <= 3:
            wrong.append(f"{subject}: {len(named)} places")
        roots = (ROOT, ROOT / "reconciler", ROOT / "plugins" / "module_utils")
        wrong += [name for name in named if not any(any(root.glob(name)) for root in roots)]
    assert wrong == []


def _anchors(text: str) -> Iterator[str]:
    for heading in re.findall(r"^#+ (.+)$", _FENCES.sub("", text), re.MULTILINE):
        yield re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
