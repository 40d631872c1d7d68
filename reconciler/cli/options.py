"""Options that commands share, and documents in files that options name."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Collection
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from reconciler.model.errors import Problem

Reason = Annotated[str, typer.Option(help="Kept in the audit log.")]
Yes = Annotated[bool, typer.Option(help="Do not ask.")]
Command = TypeVar("Command", bound=Callable[..., None])


def with_options(
    group: type[Any], *, optional: bool = False, without: Collection[str] = ()
) -> Callable[[Command], Command]:
    """Replace `**parameters` of a command by an option for each field of the dataclass.

    The type of a field is Annotated with its typer.Option. optional: options that are left out are
    None, whatever the default of the field.
    """

    def decorate(command: Command) -> Command:
        hints = get_type_hints(group, include_extras=True)
        signature = inspect.signature(command, eval_str=True)
        *parameters, _rest = signature.parameters.values()
        for field in fields(group):
            if field.name in without:
                continue
            kind, option = get_args(hints[field.name])
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            if optional:
                kind, default = kind | None, None
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=Annotated[kind, option],
                )
            )
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def at_terminal() -> bool:
    """Whether a person can answer. Python has no input at all if the caller has closed it."""
    return sys.stdin is not None and sys.stdin.isatty()


def confirm(question: str, *, instead: str = "--yes") -> None:
    """Ask a person before an act that nothing takes back; the command ends without a yes.

    instead: the option that stands for the answer. Problem `confirmation_missing` without a person.
    """
    agreed = None
    if sys.stdin is not None:
        try:
            agreed = typer.confirm(question, err=True)
        except typer.Abort:
            # Interrupted at a terminal. Anywhere else the input has ended: no person answers there.
            if at_terminal():
                raise
            sys.stderr.write("\n")
    if agreed is None:
        raise Problem(
            "confirmation_missing",
            422,
            expected=f"an answer to the question, or {instead}",
            found="no input to read it from",
            remedy=f"repeat the command with {instead} once a person has decided",
        )
    if not agreed:
        raise typer.Abort


def read_text(file: Path, expected: str, remedy: str) -> str:
    """The text in an operator's file; Problem `file_invalid`."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no text"
        raise file_invalid(file, reason, expected, remedy) from error


def file_invalid(file: Path, found: str | None, expected: str, remedy: str) -> Problem:
    """The refusal of an operator's file."""
    return Problem("file_invalid", 422, expected=expected, found=f"{file}: {found}", remedy=remedy)


def read_json(file: Path, code: str, expected: str, remedy: str) -> Any:
    """The JSON document in an operator's file; Problem `code` when it cannot be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Problem(
            code,
            422,
            expected=f"{expected} in {file}",
            found=f"{type(error).__name__}: {error}",
            remedy=remedy,
        ) from error
