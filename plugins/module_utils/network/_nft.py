"""Tables of nftables: loaded in one transaction, listed, and in the kernel's own spelling."""

from __future__ import annotations

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

# A table's text and the command that prints it.
Listing = tuple[str, ...]
# What the command prints. For the guards of all slices of a host.
_PRINTED: dict[Listing, str] = {}
_MOST, _BETWEEN = 64, "----"


def load(text: str) -> None:
    # A table may differ only because nft was upgraded, and prints it in another way since.
    forget_printed()
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


def as_listed(*listing: str) -> str:
    """Output of the command for a table, loaded in an empty network namespace."""
    if listing not in _PRINTED:
        _print([listing])
    return _PRINTED[listing]


def prepare(*listings: Listing) -> None:
    """Have several tables printed in one namespace, for calls of `as_listed`."""
    if missing := [listing for listing in listings if listing not in _PRINTED]:
        try:
            _print(missing)
        except Refusal as refusal:
            # `as_listed` names the table that the kernel refuses.
            if refusal.code != "command_failed":
                raise


def forget_printed() -> None:
    _PRINTED.clear()


def _print(listings: list[Listing]) -> None:
    if len(_PRINTED) + len(listings) > _MOST:
        forget_printed()
    commands = [" ".join(command) for _text, *command in listings]
    shell = " && ".join(["nft -f -", f" && echo {_BETWEEN} && ".join(commands)])
    texts = "".join(text for text, *_words in listings)
    printed = _command.run(["unshare", "--net", "sh", "-c", shell], stdin=texts).out
    _PRINTED.update(zip(listings, printed.split(f"{_BETWEEN}\n"), strict=True))
