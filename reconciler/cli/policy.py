"""`gpuaas recovery-policy`: blocked slots that are recovered without a person."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from reconciler.cli import session, show

_PATH = "/admin/settings/recovery-policy"
Limit = Annotated[int | None, typer.Option(min=1, help="Begun within an hour, at most.")]


def mount(app: typer.Typer) -> None:
    """Add the command."""
    app.command("recovery-policy")(policy)


def policy(
    context: typer.Context,
    switch: Annotated[
        Literal["show", "on", "off"], typer.Argument(help="Off until switched on.")
    ] = "show",
    per_node: Limit = None,
    per_hour: Limit = None,
    remove_leftovers: Annotated[
        bool | None, typer.Option(help="Also where the host still holds something.")
    ] = None,
) -> None:
    """Show or set it, and what it does about each allocation with blocked slots."""
    here = session.of(context)
    now = here.client.get(_PATH)
    if switch != "show":
        given = {
            "per_node": per_node,
            "per_hour": per_hour,
            "remove_leftovers": remove_leftovers,
        }
        body = {name: now[name] if value is None else value for name, value in given.items()}
        now = here.client.put(_PATH, body | {"enabled": switch == "on"})
    show.record(here, now)
