"""What request bodies are made of: nothing unknown, nothing unbounded, no control characters."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

from fastapi import Path, Query
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

_CLEAN = r"^[^\x00-\x1f\x7f]*$"

# A name in a path or a reference: ours, never a file's.
Id = Annotated[str, Path(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$")]
# The same in a query: what no record can have is an error, not an empty list.
Filter = Annotated[str | None, Query(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$")]
Text = Annotated[str, StringConstraints(max_length=200, pattern=_CLEAN)]
Reason = Annotated[str, StringConstraints(max_length=1000, pattern=_CLEAN, strip_whitespace=True)]
Name = Annotated[str, StringConstraints(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Label = Annotated[str, StringConstraints(max_length=64, pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$")]
Hostname = Annotated[
    str, StringConstraints(max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
]
Address = Annotated[
    str, StringConstraints(max_length=253, pattern=r"^[A-Za-z0-9:][A-Za-z0-9.:%-]*$")
]
Username = Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_-]{0,31}$")]
# The largest whole number that every reader of JSON keeps exact.
Bytes = Annotated[int, Field(ge=0, le=(1 << 53) - 1)]

_KEY_TYPES = frozenset(
    {
        "ssh-ed25519",
        "ssh-rsa",
        "ecdsa-sha2-nistp256",
        "ecdsa-sha2-nistp384",
        "ecdsa-sha2-nistp521",
        "sk-ssh-ed25519@openssh.com",
        "sk-ecdsa-sha2-nistp256@openssh.com",
    }
)


class Body(BaseModel):
    """A request body; a field that nobody knows is an error, not a wish that is lost."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Reasoned(Body):
    """An act that needs nothing but, maybe, a reason."""

    reason: Reason = ""


class Switch(Reasoned):
    """On or off."""

    enabled: Annotated[bool, Field(strict=True)]


def _public_key(text: str) -> str:
    # Options in front of a key (command=…) would be obeyed by the guest's SSH server.
    kind, _, rest = text.partition(" ")
    blob = rest.partition(" ")[0]
    if kind not in _KEY_TYPES:
        raise ValueError("a public key begins with its type, such as ssh-ed25519")
    try:
        data = base64.b64decode(blob, validate=True)
    except binascii.Error as error:
        raise ValueError("the key is not base64") from error
    if not data.startswith(len(kind).to_bytes(4, "big") + kind.encode()):
        raise ValueError("the key is not of the type that it says")
    return text


PublicKey = Annotated[
    str,
    StringConstraints(max_length=2048, pattern=r"^[ -~]*$", strip_whitespace=True),
    AfterValidator(_public_key),
]
