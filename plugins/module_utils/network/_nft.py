"""Tables of nftables: loaded in one transaction, listed, and in the kernel's own spelling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

# Text of a table, and the words of the command that lists it.
Table = tuple[str, ...]
# What the kernel prints of tables, for the guards of all slices of a host.
_PRINTED: dict[Table, str] = {}
_MOST = 64
# Between the outputs of several commands, none of which contains it, and between the commands.
_END, _NEXT = "\0", r" && printf '\0' && "


def load(text: str) -> None:
    # A table may differ only because nft was upgraded, and prints it in another way since.
    forget()
    _command.run(["nft", "-f", "-"], stdin=text)


def forget() -> None:
    """Have the kernel print all tables again."""
    _PRINTED.clear()


def without(family: str, table: str) -> str:
    """Statements that remove a table."""
    # Adding first makes the removal of a missing table succeed.
    return f"table {family} {table}\ndelete table {family} {table}\n"


def listed(command: list[str]) -> str | None:
    """What nft prints of a table; None without the table."""
    try:
        printed = _command.run(command, ok=(0, 1))
    except Refusal as refusal:
        if refusal.code != "command_missing":
            raise
        # nft makes the table, so a host without nft cannot have it.
        return None
    return printed.out if printed.rc == 0 else None


def as_listed(table: Table) -> str:
    """Output of the command for a table, loaded in an empty network namespace."""
    if table not in _PRINTED:
        _print([table])
    return _PRINTED[table]


def prepare(tables: Iterable[Table]) -> None:
    """Have tables of different names printed by one start of the programs, for `as_listed`.

    A table that the kernel refuses spoils the others, so each is then left to `as_listed`, which
    names it.
    """
    due = [table for table in dict.fromkeys(tables) if table not in _PRINTED]
    try:
        if len(due) > 1:
            _print(due)
    except Refusal as refusal:
        if refusal.code in _command.HUNG:
            raise


def _print(tables: Sequence[Table]) -> None:
    commands = list(dict.fromkeys(" ".join(command) for _text, *command in tables))
    argv = ["unshare", "--net", "sh", "-c", f"nft -f - && {_NEXT.join(commands)}"]
    out = _command.run(argv, stdin="".join(text for text, *_words in tables)).out
    printed = dict(zip(commands, out.split(_END), strict=True))
    if len(_PRINTED) > _MOST:
        _PRINTED.clear()
    _PRINTED.update({table: printed[" ".join(table[1:])] for table in tables})
