"""`gpuaas token`: API tokens; `gpuaas login`: a token from the OpenID provider.

`gpuaas token create` writes directly to the database, because the first token has no other way. The
service does everything else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from reconciler.cli import output
from reconciler.cli.options import Reason
from reconciler.cli.projects import project_id
from reconciler.cli.session import client, current, default_token_file
from reconciler.model.errors import Problem

commands = typer.Typer()
app = typer.Typer(no_args_is_help=True, help="API tokens: create, list, revoke.")
commands.add_typer(app, name="token")
own_app = typer.Typer(no_args_is_help=True, help="Tokens of your own, made with the one you use.")
app.add_typer(own_app, name="own")

_COLUMNS = ("id", "name", "role", "project_id", "valid", "expires_at", "revoked_at")
RoleName = Literal["platform-admin", "project-member", "node"]

_GRANT = "urn:ietf:params:oauth:grant-type:device_code"
# RFC 8628: the interval of a provider that names none, and the step of slow_down.
_INTERVAL_S = 5.0
# Lower bound of the interval, whatever the provider answers.
_LEAST_S = 1.0


@app.command("create")
def create(
    *,
    role: Annotated[RoleName, typer.Option(help="What it may do (docs/access.md).")],
    name: Annotated[str, typer.Option(help="Name of the holder, for audit.")],
    project: Annotated[str, typer.Option(help="For project-member, by id or name.")] = "",
    node: Annotated[str, typer.Option(help="For node: the node's id.")] = "",
    days: Annotated[int, typer.Option(min=0, max=3650, help="Days until it ends; 0: no end.")] = 90,
    save: Annotated[bool, typer.Option(help="Save it for this machine's `gpuaas`.")] = False,
) -> None:
    """Print a new token; it is not shown again. Needs access to the database itself."""
    issued = _issue(role, name, project, node, days)
    if save:
        _save(issued["token"], default_token_file())
    else:
        _print(issued)


@app.command("list")
def list_tokens() -> None:
    """List all tokens, without their secrets."""
    output.rows(client().items("/admin/tokens"), *_COLUMNS, "node_id", "parent_id", "issued_by")


@app.command("revoke")
def revoke(token: Annotated[str, typer.Argument(help="The token's id.")]) -> None:
    """Revoke a token at once."""
    output.record(client().delete(f"/admin/tokens/{token}"))


@own_app.command("create")
def create_own(
    *,
    name: Annotated[str, typer.Option(help="What it is for.")],
    project: Annotated[
        str,
        typer.Option(callback=project_id, help="By id or name; left out: your only project."),
    ] = "",
    days: Annotated[int, typer.Option(min=1, max=3650, help="Days until it ends.")] = 90,
) -> None:
    """Print a new token; it is not shown again. It has at most the rights of the token that you
    use, and ends with it.
    """
    body = {"name": name, "ttl_s": days * 86_400, "project_id": project or None}
    _print(client().post("/tokens", body))


@own_app.command("list")
def list_own() -> None:
    """List the token that you use, and the tokens made with it."""
    output.rows(client().items("/tokens"), *_COLUMNS, "parent_id")


@own_app.command("revoke")
def revoke_own(token: Annotated[str, typer.Argument(help="The token's id.")]) -> None:
    """Revoke a token of this list at once, with the tokens made with it."""
    output.record(client().delete(f"/tokens/{token}"))


@app.command("sessions")
def list_sessions() -> None:
    """List who is logged in to the console."""
    columns = ("id", "actor", "address", "created_at", "expires_at")
    output.rows(client().items("/admin/console-sessions"), *columns)


@app.command("end-sessions")
def end_sessions(
    actor: Annotated[str, typer.Argument(help="The person, as `gpuaas token sessions` says.")],
    reason: Reason = "",
) -> None:
    """End all sessions of a person in the console, with their terminals."""
    body = {"actor": actor, "reason": reason}
    output.record(client().post("/admin/console-sessions/end", body))


@commands.command()
def login(
    issuer: Annotated[str, typer.Option(envvar="GPUAAS_OIDC_ISSUER", help="The provider.")],
    client_id: Annotated[
        str,
        typer.Option(
            envvar="GPUAAS_OIDC_CLIENT_ID", help="This program's client id at the provider."
        ),
    ],
    scope: Annotated[str, typer.Option(help="Scopes to request.")] = "openid profile groups",
    kind: Annotated[Literal["id", "access"], typer.Option(help="Which token to save.")] = "id",
) -> None:
    """Log in at the site's OpenID provider and save the token for this machine's `gpuaas`.

    Shows a code to confirm in a browser, on this machine or another (device code, RFC 8628).
    """
    file = current().token_file or default_token_file()
    _save_login(issuer, {"client_id": client_id, "scope": scope}, f"{kind}_token", file)


def _print(issued: dict[str, Any]) -> None:
    if not output.in_json(issued):
        typer.echo(issued["token"])


def _save(secret: str, file: Path) -> None:
    """Save a token in a file that only its owner can read."""
    from reconciler.durable import write_text

    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_text(file, secret + "\n")
    output.line(f"token saved in {file}")


def _issue(role: RoleName, name: str, project: str, node: str, days: int) -> dict[str, Any]:
    """The new token with its secret, as the API answers it."""
    from pydantic import TypeAdapter, ValidationError

    from reconciler.api.models import Name
    from reconciler.api.tokens import IssuedToken
    from reconciler.cli.service import open_unmigrated
    from reconciler.db.engine import transaction
    from reconciler.model.act import Act
    from reconciler.model.states import Role
    from reconciler.records import nodes, projects, tokens

    if bool(project) is not (role == "project-member") or bool(node) is not (role == "node"):
        raise Problem(
            "token_owner_invalid",
            422,
            expected="--project with project-member, --node with node, neither with platform-admin",
            found=f"role {role}, project {project!r}, node {node!r}",
            remedy="give the option that belongs to the role",
        )
    try:
        TypeAdapter(Name).validate_python(name)
    except ValidationError as error:
        # Audit names the holder, so a name must not look like another actor.
        raise Problem(
            "request_invalid",
            422,
            expected="a name of at most 64 letters, digits, '.', '_' and '-'",
            found=repr(name),
            remedy="choose such a name",
        ) from error
    engine = open_unmigrated()
    with transaction(engine) as conn:
        if project:
            project = projects.id_of(conn, project)
            projects.get(conn, project)
        if node:
            nodes.get(conn, node)
        record, secret = tokens.issue(
            conn,
            Act("local-operator", "gpuaas token create"),
            role=Role(role),
            name=name,
            project_id=project or None,
            node_id=node or None,
            ttl_s=days * 86_400 or None,
        )
    engine.dispose()
    return IssuedToken.of(record, token=secret).model_dump(mode="json")


def _save_login(issuer: str, client: dict[str, str], token_name: str, file: Path) -> None:
    # Importing the HTTP library takes longer than most commands.
    from reconciler.trust.oidc import UNREADABLE, converse, trusted

    if not trusted(issuer):
        raise _login_failed("an issuer over https", issuer)
    try:
        configuration = f"{issuer.rstrip('/')}/.well-known/openid-configuration"
        provider = converse(None, "GET", configuration).json()
        device, ending = (
            str(provider[f"{name}_endpoint"]) for name in ("device_authorization", "token")
        )
        for endpoint in (device, ending):
            if not trusted(endpoint):
                raise _login_failed("endpoints of the provider over https", endpoint)
        grant = converse(None, "POST", device, client).json()
        if "error" in grant:
            raise _login_failed("a code to confirm", str(grant["error"]))
        url = grant.get("verification_uri_complete") or grant["verification_uri"]
        output.line(f"open {url} and confirm the code {grant['user_code']}")
        answer = _wait_for_tokens(partial(converse, None, "POST", ending), client, grant)
        token = str(answer[token_name])
    except UNREADABLE as error:
        raise _login_failed("an answer of the provider with a token", repr(error)) from error
    _save(token, file)


def _wait_for_tokens(
    ask: Callable[[dict[str, str]], Any], client: dict[str, str], grant: dict[str, Any]
) -> Any:
    """The answer with the tokens, once the person has confirmed the code."""
    form = {**client, "grant_type": _GRANT, "device_code": str(grant["device_code"])}
    interval = max(float(grant.get("interval", _INTERVAL_S)), _LEAST_S)
    end = time.monotonic() + float(grant["expires_in"])
    while time.monotonic() < end:
        time.sleep(interval)
        answer = ask(form).json()
        error = answer.get("error", "")
        if not error:
            return answer
        if error == "slow_down":
            interval += _INTERVAL_S
        elif error != "authorization_pending":
            raise _login_failed("the login to be confirmed", str(error))
    raise _login_failed("the code to be confirmed in time", "not confirmed")


def _login_failed(expected: str, found: str) -> Problem:
    return Problem(
        "login_failed",
        401,
        expected=expected,
        found=found,
        remedy="run `gpuaas login` again; the provider must know the client and allow device codes",
    )
