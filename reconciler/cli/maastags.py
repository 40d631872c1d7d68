"""The tags of a machine in MAAS as they are typed: nothing said is not the same as none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

Tags = Annotated[
    list[str] | None,
    typer.Option(
        "--maas-tag", help='The machine\'s tags in MAAS; may be repeated, "" when it has none.'
    ),
]


def said(words: Sequence[str] | None) -> list[str] | None:
    """What the option says; None when it was not given, [] for one that is empty."""
    return [word for word in words if word] if words else None
