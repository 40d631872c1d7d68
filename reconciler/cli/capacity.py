"""`gpuaas explain`: where a launch would go, and why not elsewhere."""

from __future__ import annotations

from typing import Annotated

import typer

from reconciler.cli import session, show


def mount(app: typer.Typer) -> None:
    """Add the command."""
    app.command("explain")(explain)


def explain(
    context: typer.Context,
    gpus: Annotated[int, typer.Option(min=1, help="Of the slice.")] = 1,
    region: str = "",
    pool: str = "",
    node: Annotated[str, typer.Option(help="Only this one.")] = "",
) -> None:
    """Judge a request as a launch would; nothing is reserved."""
    here = session.of(context)
    wanted = {"region": region, "pool": pool, "node_id": node}
    query = {name: value for name, value in wanted.items() if value}
    found = here.client.get("/admin/placement/explain", gpus=gpus, **query)
    if here.output == "json":
        show.document(found)
        return
    told = dict(found["explanation"])
    nodes = told.pop("nodes")
    show.record(here, told | (found["placement"] or {}))
    show.rows(here, nodes, "node_id", "slots", "free", "largest", "reasons")
