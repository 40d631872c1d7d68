"""Tables of nftables: loaded in one transaction, listed, and in the kernel's own spelling."""

from __future__ import annotations

from functools import lru_cache

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal


def load(text: str) -> None:
    # A table may differ only because nft was upgraded, and prints it in another way since.
    as_listed.cache_clear()
    _command.run(["nft", "-f", "-"], stdin=text)


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


# For the guards of all slices of a host.
@lru_cache(maxsize=64)
def as_listed(text: str, *command: str) -> str:
    """Output of the command for a table, loaded in an empty network namespace."""
    argv = ["unshare", "--net", "sh", "-c", f"nft -f - && {' '.join(command)}"]
    return _command.run(argv, stdin=text).out
