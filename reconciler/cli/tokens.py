"""`gpuaas token`: API tokens.

They are made directly in the database, for the first one has no other way; those that there are
are listed and revoked by the service, as whoever asks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from reconciler.cli import session, show
from reconciler.cli.session import default_token_file
from reconciler.model.errors import Problem

if TYPE_CHECKING:
    from sqlalchemy import Connection

app = typer.Typer(no_args_is_help=True, help="API tokens: make, list, revoke.")

RoleName = Literal["platform-admin", "project-member", "node"]


@app.command("create")
def create(
    *,
    role: Annotated[RoleName, typer.Option()],
    name: Annotated[str, typer.Option(help="Who holds it; audit names it.")],
    project: Annotated[str, typer.Option(help="For project-member, by id or name.")] = "",
    node: Annotated[str, typer.Option(help="For node.")] = "",
    days: Annotated[int, typer.Option(min=0, help="0: until it is revoked.")] = 0,
    save: Annotated[bool, typer.Option(help="Keep it for this machine's `gpuaas`.")] = False,
) -> None:
    """Print a new token; it is not shown again. Needs access to the database itself."""
    secret = _issue(role, name, project, node, days)
    if save:
        file = default_token_file()
        write_token(file, secret)
        show.line(f"token saved in {file}")
    else:
        typer.echo(secret)


@app.command("list")
def list_tokens(context: typer.Context) -> None:
    """All tokens, without their secrets."""
    here = session.of(context)
    columns = ("id", "name", "role", "project_id", "node_id", "expires_at", "revoked_at")
    show.rows(here, list(here.client.items("/admin/tokens")), *columns)


@app.command("revoke")
def revoke(
    context: typer.Context, token: Annotated[str, typer.Argument(help="Its id, of the list.")]
) -> None:
    """From now on it opens nothing."""
    here = session.of(context)
    show.record(here, here.client.delete(f"/admin/tokens/{token}"))


def _issue(role: RoleName, name: str, project: str, node: str, days: int) -> str:
    from reconciler.cli.database import as_it_is
    from reconciler.db.engine import transaction
    from reconciler.model.act import Act
    from reconciler.model.states import Role
    from reconciler.records import nodes, tokens

    if bool(project) is not (role == "project-member") or bool(node) is not (role == "node"):
        raise Problem(
            "token_owner_invalid",
            422,
            expected="--project with project-member, --node with node, neither with platform-admin",
            found=f"role {role}, project {project!r}, node {node!r}",
            remedy="give the option that belongs to the role",
        )
    engine = as_it_is()
    with transaction(engine) as conn:
        if project:
            project = _project_id(conn, project)
        if node:
            nodes.get(conn, node)
        _, secret = tokens.issue(
            conn,
            Act("local-operator", "gpuaas token create"),
            role=next(known for known in Role if known == role),
            name=name,
            project_id=project or None,
            node_id=node or None,
            ttl_s=days * 86_400 or None,
        )
    engine.dispose()
    return secret


def _project_id(conn: Connection, given: str) -> str:
    from reconciler.records import projects

    every = projects.every(conn)
    if given not in {row["id"] for row in every}:
        given = next((row["id"] for row in every if row["name"] == given), given)
    return str(projects.get(conn, given)["id"])


def write_token(file: Path, secret: str) -> None:
    """Keep a token where only its owner reads it."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    # Created for the owner only: changing the mode afterwards would leave a moment open.
    with os.fdopen(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as handle:
        handle.write(secret + "\n")
