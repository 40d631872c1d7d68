"""Terminal output: tables for people, JSON for programs, errors with their remedy."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from reconciler.cli import session
from reconciler.model.errors import Problem
from reconciler.model.storable import printable

Record = Mapping[str, Any]


def rows(records: Iterable[Record], *columns: str) -> None:
    """A list as a table. A column may be a path such as `connection.host`."""
    records = list(records)
    if in_json(records):
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(plain(column.rpartition(".")[2]), overflow="fold")
    for row in records:
        table.add_row(*(plain(_at(row, column)) for column in columns))
    _out().print(table)


def timeline(newest_first: Sequence[Record]) -> None:
    """Events in reading order, oldest first; JSON keeps the order of the service."""
    if in_json(newest_first):
        return
    lines = [
        {"at": row["at"], "what": row["type"], "happened": _description(row)}
        for row in reversed(newest_first)
    ]
    rows(lines, "at", "what", "happened")


def _description(row: Record) -> str:
    if row["type"] == "progress":
        step = row["document"]
        code = f" {step['code']}" if step.get("code") else ""
        return f"{row['kind']}: {step.get('event', '')}{code} {step.get('task', '')}"
    reason = f": {row['reason']}" if row["reason"] else ""
    if row["type"] == "audit":
        return f"{row['actor']} {row['action']}{reason}"
    change = f"{row['entity']} {row['entity_id']} {row['source']} -> {row['target']}"
    return f"{change} ({row['event']} by {row['actor']}){reason}"


def record(item: Record) -> None:
    """A single record, field by field, without empty fields."""
    if in_json(item):
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in item.items():
        if value not in (None, "", [], {}):
            table.add_row(plain(name), plain(value))
    _out().print(table)


def is_json() -> bool:
    """Whether the command's output is JSON."""
    return session.current().output == "json"


def in_json(content: Any) -> bool:
    """Print the content if the command's output is JSON. Returns whether it is."""
    if not is_json():
        return False
    sys.stdout.write(json.dumps(content, indent=1) + "\n")
    return True


def line(text: str) -> None:
    """A remark on standard error; standard output holds only the answer."""
    sys.stderr.write(clean(text) + "\n")


def more(page: Record, limit: int) -> None:
    """Say that the service has more than the rows of a page."""
    if page["next"]:
        line(f"the newest {limit}; --limit shows more")


@contextmanager
def waiting(subject: str, command: str) -> Iterator[None]:
    """Say, when a person interrupts the wait, that the work goes on, and how to look at it."""
    try:
        yield
    except KeyboardInterrupt:
        line(f"{subject} goes on without this command; `{command}` shows it")
        raise


def failure(problem: Problem, *, as_json: bool) -> None:
    """An error with expectation, finding and remedy."""
    if as_json:
        sys.stderr.write(json.dumps(problem.document(), indent=1) + "\n")
        return
    console = Console(stderr=True, highlight=False)
    console.print(plain(f"error: {problem.code}"), style="bold red")
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, text in (
        ("expected", problem.expected),
        ("found", problem.found),
        ("what to do", problem.remedy),
    ):
        table.add_row(f"  {name}", plain(text))
    console.print(table)


def plain(value: Any) -> Text:
    """Text without markup or control sequences, because hosts and tenants control some of it."""
    if isinstance(value, dict | list):
        value = json.dumps(value)
    return Text(clean("" if value is None else str(value)))


def clean(text: str) -> str:
    """Printable characters, tabs and line ends only."""
    return printable(text, "\n\t")


def _at(row: Record, path: str) -> Any:
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _out() -> Console:
    # In a pipe each row is a single line, whatever its length.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 1000)
