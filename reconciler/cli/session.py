"""One call of `gpuaas`: which service it talks to, as whom, and how it answers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from reconciler.domain.errors import Problem

if TYPE_CHECKING:
    from reconciler.client import Client

Output = Literal["table", "json"]

DEFAULT_API = "http://127.0.0.1:8080"


@dataclass(frozen=True)
class Session:
    """token_file None: the one that `gpuaas token create --save` writes."""

    api: str = DEFAULT_API
    token_file: Path | None = None
    output: Output = "table"

    @cached_property
    def client(self) -> Client:
        """The connection; made when a command first needs it."""
        # Importing the HTTP library takes longer than most commands.
        from reconciler.client import Client

        return Client(self.api, self._secret())

    def _secret(self) -> str:
        return secret(
            self.token_file or default_token_file(),
            "`gpuaas token create --role platform-admin --name YOU --save`, "
            "or set GPUAAS_TOKEN_FILE",
        )


def secret(file: Path, remedy: str) -> str:
    """The API token in a file; Problem `token_file_unreadable` with that remedy."""
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(
            "token_file_unreadable",
            401,
            expected=f"a file with an API token at {file}",
            found=type(error).__name__,
            remedy=remedy,
        ) from error


def default_token_file() -> Path:
    """Where a token is kept on the machine of the reconciler itself."""
    folder = os.environ.get("GPUAAS_STATE_DIR")
    if folder:
        return Path(folder) / "token"
    from reconciler.settings import Settings

    return Settings().state_dir / "token"


def of(context: typer.Context) -> Session:
    """The session of a command's context."""
    session = context.obj
    if not isinstance(session, Session):
        raise TypeError("a command was called without its session")
    return session
