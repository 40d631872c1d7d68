"""`gpuaas token`: API tokens, made directly in the database. This is how the first one is made."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from reconciler.cli import show
from reconciler.cli.session import default_token_file
from reconciler.domain.errors import Problem

app = typer.Typer(no_args_is_help=True, help="API tokens; needs access to the database itself.")

RoleName = Literal["platform-admin", "project-member", "node"]


@app.callback()
def _group() -> None:
    """Keeps `create` a word of its own."""


@app.command("create")
def create(
    *,
    role: Annotated[RoleName, typer.Option()],
    name: Annotated[str, typer.Option(help="Who holds it; audit names it.")],
    project: Annotated[str, typer.Option(help="For project-member.")] = "",
    node: Annotated[str, typer.Option(help="For node.")] = "",
    days: Annotated[int, typer.Option(min=0, help="0: until it is revoked.")] = 0,
    save: Annotated[bool, typer.Option(help="Keep it for this machine's `gpuaas`.")] = False,
) -> None:
    """Print a new token; it is not shown again."""
    secret = _issue(role, name, project, node, days)
    if save:
        file = default_token_file()
        write_token(file, secret)
        show.line(f"token saved in {file}")
    else:
        typer.echo(secret)


def _issue(role: RoleName, name: str, project: str, node: str, days: int) -> str:
    from reconciler.cli.database import opened
    from reconciler.domain.act import Act
    from reconciler.domain.states import Role
    from reconciler.store import nodes, projects, tokens
    from reconciler.store.engine import transaction

    if bool(project) is not (role == "project-member") or bool(node) is not (role == "node"):
        raise Problem(
            "token_owner_invalid",
            422,
            expected="--project with project-member, --node with node, neither with platform-admin",
            found=f"role {role}, project {project!r}, node {node!r}",
            remedy="give the option that belongs to the role",
        )
    engine, _ = opened()
    with transaction(engine) as conn:
        if project:
            projects.get(conn, project)
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


def write_token(file: Path, secret: str) -> None:
    """Keep a token where only its owner reads it."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    # Created for the owner only: changing the mode afterwards would leave a moment open.
    with os.fdopen(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as handle:
        handle.write(secret + "\n")
