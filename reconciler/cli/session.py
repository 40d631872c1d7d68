"""Session of a `gpuaas` command: service address, API token and output format."""

from __future__ import annotations

import os
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from reconciler.model.errors import Problem

if TYPE_CHECKING:
    from reconciler.client import Client

Output = Literal["table", "json"]

DEFAULT_API = "http://127.0.0.1:8080"


@dataclass(frozen=True)
class Session:
    """api "": the service of this machine. token_file None: the file of `token create --save`."""

    api: str = ""
    token_file: Path | None = None
    output: Output = "table"

    @cached_property
    def client(self) -> Client:
        """The connection, opened on first use."""
        # Importing the HTTP library takes longer than most commands.
        from reconciler.client import Client

        file = self.token_file or default_token_file()
        remedy = (
            "set GPUAAS_TOKEN_FILE to the file with your token; an operator makes one on the"
            " service's machine with `gpuaas token create --role platform-admin --name YOU --save`"
        )
        return Client(self.url, secret(file, remedy))

    @cached_property
    def url(self) -> str:
        """Address of the service, to which a token may travel; Problem `api_without_tls`."""
        if not self.api:
            # Reached without a network, whatever address it has.
            return local_api()
        _require_private(self.api)
        return self.api


def _require_private(url: str) -> None:
    """Problem `api_without_tls` for an address to which a token would travel readable."""
    from reconciler.settings import is_exposed

    try:
        # The port is read when it is asked for.
        exposed, _ = is_exposed(url), urlsplit(url).port
    except ValueError:
        raise Problem(
            "api_address_invalid",
            400,
            expected="an address such as https://gpuaas.example",
            found=url,
            remedy="correct --api or GPUAAS_API",
        ) from None
    if exposed:
        raise Problem(
            "api_without_tls",
            400,
            expected="an https:// address of the API, or one of this machine",
            found=url,
            remedy="put a proxy with TLS before the API (docs/operations.md, TLS), or tunnel with"
            " `ssh -L 8080:127.0.0.1:8080 HOST` and give --api http://127.0.0.1:8080",
        )


_current: ContextVar[Session] = ContextVar("session")


def begin(session: Session) -> None:
    """Make it the session of the commands that follow."""
    _current.set(session)


def current() -> Session:
    """The session of the running command."""
    return _current.get()


def client() -> Client:
    """The connection of the running command."""
    return current().client


def secret(file: Path, remedy: str) -> str:
    """The API token in a file; Problem `token_file_unreadable` with the given remedy."""
    try:
        words = file.read_text(encoding="ascii").split()
        content = f"{len(words)} words" if words else "an empty file"
    except OSError as error:
        words, content = [], error.strerror or type(error).__name__
    except UnicodeDecodeError:
        words, content = [], "bytes that are no token"
    # Other content does not fit into a header, and the error about that would quote it.
    if len(words) == 1 and words[0].isprintable():
        return words[0]
    raise Problem(
        "token_file_unreadable",
        401,
        expected=f"a file with an API token at {file}",
        found=content,
        remedy=remedy,
    )


def local_api() -> str:
    """Address of this machine's service, from the settings that the service itself reads."""
    from reconciler.service import listeners
    from reconciler.settings import Settings

    try:
        host, port = listeners.api_address(Settings())
    except (OSError, ValueError, Problem):
        # This user cannot read the settings, or no service could start with them.
        return DEFAULT_API
    try:
        if ip_address(host).is_unspecified:
            # A service that listens on every address also answers on loopback.
            host = "::1" if ":" in host else "127.0.0.1"
    except ValueError:
        pass
    return f"http://{listeners.host_port((host, port))}"


def default_token_file() -> Path:
    """File of the token on the reconciler's own machine."""
    folder = os.environ.get("GPUAAS_STATE_DIR")
    if folder:
        return Path(folder) / "token"
    from reconciler.settings import Settings

    return Settings().state_dir / "token"
