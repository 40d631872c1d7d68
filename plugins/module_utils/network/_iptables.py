"""Rules of this collection in chains of iptables that the site uses too.

The site's rules are neither flushed nor moved. Our rules of a chain change in one transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command

MARK = "-m comment --comment gpuaas-slice"


def listed(chain: str, table: str = "") -> list[str]:
    """The rules of a chain as `iptables -S` writes them. table: "" for the filter."""
    words = ["-t", table] if table else []
    out = _command.run(["iptables", "--wait", "10", *words, "-S", chain]).out
    return [line.strip() for line in out.splitlines() if line.startswith("-A ")]


def changes(
    chain: str, rules: Sequence[str], theirs: Sequence[str], ours: Sequence[str], place: int
) -> list[str]:
    """Commands that put `ours` behind the first `place` rules of the site; [] if they are there.

    rules: of the chain. theirs: those of them that are the site's; the rest is replaced.
    """
    if list(rules) == [*theirs[:place], *ours, *theirs[place:]]:
        return []
    return [
        *(rule.replace("-A", "-D", 1) for rule in rules if rule not in theirs),
        *(
            rule.replace(f"-A {chain}", f"-I {chain} {n}", 1)
            for n, rule in enumerate(ours, place + 1)
        ),
    ]


def commit(lines: Collection[str], table: str = "filter") -> None:
    if lines:
        text = "\n".join([f"*{table}", *lines, "COMMIT", ""])
        _command.run(["iptables-restore", "--noflush", "--wait", "10"], stdin=text)
