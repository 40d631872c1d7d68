"""`gpuaas login`: a token of the site's OpenID provider, through a browser on any other machine.

RFC 8628: this program shows a code, a person confirms it, the provider gives the token.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from reconciler.cli import session, show
from reconciler.cli.session import default_token_file
from reconciler.cli.tokens import write_token
from reconciler.model.errors import Problem

_GRANT = "urn:ietf:params:oauth:grant-type:device_code"
_TIMEOUT_S = 10.0
# RFC 8628: what a provider means that names no interval, and by how much slow_down slows.
_INTERVAL_S = 5.0
# Whatever the provider says: no more often than that.
_LEAST_S = 1.0


def mount(app: typer.Typer) -> None:
    """Add the command."""
    app.command("login")(login)


def login(
    context: typer.Context,
    issuer: Annotated[str, typer.Option(envvar="GPUAAS_OIDC_ISSUER", help="The provider.")],
    client_id: Annotated[
        str,
        typer.Option(envvar="GPUAAS_OIDC_CLIENT_ID", help="As the provider knows this program."),
    ],
    scope: Annotated[str, typer.Option(help="What to ask for.")] = "openid profile groups",
    kind: Annotated[Literal["id", "access"], typer.Option(help="Which token to keep.")] = "id",
) -> None:
    """Log in at the OpenID provider and keep the token for this machine's `gpuaas`."""
    file = session.of(context).token_file or default_token_file()
    _keep(issuer, {"client_id": client_id, "scope": scope}, f"{kind}_token", file)


def _keep(issuer: str, client: dict[str, str], wanted: str, file: Path) -> None:
    # Importing the HTTP library takes longer than most commands.
    import httpx

    from reconciler.trust.oidc import trusted

    if not trusted(issuer):
        raise _refused("an issuer over https", issuer)
    try:
        with httpx.Client(timeout=_TIMEOUT_S) as http:
            found = http.get(f"{issuer.rstrip('/')}/.well-known/openid-configuration").json()
            asked = http.post(str(found["device_authorization_endpoint"]), data=client).json()
            if "error" in asked:
                raise _refused("a code to confirm", str(asked["error"]))
            place = asked.get("verification_uri_complete") or asked["verification_uri"]
            show.line(f"open {place} and confirm the code {asked['user_code']}")
            write_token(file, str(_wait(http, str(found["token_endpoint"]), client, asked)[wanted]))
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refused("an answer of the provider with a token", repr(error)) from error
    show.line(f"token saved in {file}")


def _wait(http: Any, endpoint: str, client: dict[str, str], asked: dict[str, Any]) -> Any:
    """The answer that holds the tokens, once the person has confirmed."""
    form = {**client, "grant_type": _GRANT, "device_code": str(asked["device_code"])}
    interval = max(float(asked.get("interval", _INTERVAL_S)), _LEAST_S)
    end = time.monotonic() + float(asked["expires_in"])
    while time.monotonic() < end:
        time.sleep(interval)
        answer = http.post(endpoint, data=form).json()
        error = answer.get("error", "")
        if not error:
            return answer
        if error == "slow_down":
            interval += _INTERVAL_S
        elif error != "authorization_pending":
            raise _refused("the login to be confirmed", str(error))
    raise _refused("the code to be confirmed in time", "nobody did")


def _refused(expected: str, found: str) -> Problem:
    return Problem(
        "login_failed",
        401,
        expected=expected,
        found=found,
        remedy="run `gpuaas login` again; the provider must know the client and allow device codes",
    )
