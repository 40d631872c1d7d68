"""Field types and base classes of request bodies and answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from fastapi import Path, Query
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from typing_extensions import TypeAliasType

from reconciler.db import clock
from reconciler.trust.keygen import plain_key, whole_key

Record = dict[str, Any]

# Control characters of both sets, line separators, and marks that turn the direction of a text: a
# log or a list would show other words than were written. UNPRINTED: those beyond ASCII's first 32.
UNPRINTED = r"\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
_NO_CONTROL_CHARACTERS = rf"^[^\x00-\x1f{UNPRINTED}]*$"

# Of an identifier. It excludes anything that could be read as a file path.
ID_LENGTH, ID_PATTERN = 128, r"^[A-Za-z0-9][A-Za-z0-9._:-]*$"
# An identifier in a path.
Id = Annotated[str, Path(max_length=ID_LENGTH, pattern=ID_PATTERN)]
# The same pattern in a query: an impossible identifier is an error, not an empty list.
Filter = Annotated[str | None, Query(max_length=ID_LENGTH, pattern=ID_PATTERN)]

# Types with a name are components of the OpenAPI document, so each is written there once.
Text = TypeAliasType(
    "Text", Annotated[str, StringConstraints(max_length=200, pattern=_NO_CONTROL_CHARACTERS)]
)
RequiredText = Annotated[
    str, StringConstraints(min_length=1, max_length=200, pattern=_NO_CONTROL_CHARACTERS)
]
Reason = TypeAliasType(
    "Reason",
    Annotated[
        str,
        StringConstraints(max_length=1000, pattern=_NO_CONTROL_CHARACTERS, strip_whitespace=True),
    ],
)
RequiredReason = TypeAliasType(
    "RequiredReason",
    Annotated[
        str,
        StringConstraints(
            min_length=1, max_length=1000, pattern=_NO_CONTROL_CHARACTERS, strip_whitespace=True
        ),
    ],
)
Name = TypeAliasType(
    "Name",
    Annotated[str, StringConstraints(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")],
)
Label = TypeAliasType(
    "Label",
    Annotated[str, StringConstraints(max_length=64, pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$")],
)
# Names that a DHCP server reads as a lease time or a command. The host refuses them as well
# (contracts/runs/common.schema.json and plugins/module_utils/core/_object_names.py).
RESERVED_HOSTNAMES = r"^([0-9]+[smhdw]?|infinite|ignore)$"


def _unreserved(name: str) -> str:
    if re.fullmatch(RESERVED_HOSTNAMES, name):
        raise ValueError("a number, a duration such as 12h, infinite or ignore is no host name")
    return name


Hostname = Annotated[
    str,
    StringConstraints(max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"),
    AfterValidator(_unreserved),
    Field(json_schema_extra={"not": {"pattern": RESERVED_HOSTNAMES}}),
]
Address = TypeAliasType(
    "Address",
    Annotated[str, StringConstraints(max_length=253, pattern=r"^[A-Za-z0-9:][A-Za-z0-9.:%-]*$")],
)
Username = TypeAliasType(
    "Username", Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_-]{0,31}$")]
)
# Integers of request bodies: neither `true` nor a text is a number.
Integer = Annotated[int, Field(strict=True)]
# Every JSON reader keeps integers up to this limit exact.
Bytes = Annotated[Integer, Field(ge=0, le=(1 << 53) - 1)]
StrictFlag = Annotated[bool, Field(strict=True)]


def _iso(at: float) -> str:
    return str(clock.iso(at))


# Columns hold epoch seconds of the database's clock; answers show ISO 8601.
Moment = Annotated[
    float,
    PlainSerializer(_iso, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
# A document of a host, a run or a person. It is answered as it was stored, whatever its keys are.
Document = Annotated[dict[str, Any], WithJsonSchema({"type": "object"})]


class Answer(BaseModel):
    """Base of every answer. A field that is not named here is not sent, so a new column of a table
    stays private until an answer names it.
    """

    model_config = ConfigDict(
        from_attributes=True, frozen=True, json_schema_extra={"additionalProperties": False}
    )

    @classmethod
    def of(cls, row: object, /, **added: object) -> Self:
        """The answer for a row of the database, with the fields that the route adds."""
        if not added:
            return cls.model_validate(row)
        values = row if isinstance(row, Mapping) else vars(row)
        return cls.model_validate({**values, **added})


class Devices(Answer):
    """The devices and addresses of a slot, with the generations of its uses."""

    slot_index: int
    gpu_pci_address: str
    nvme_device: str
    nvme_identity: str
    nvme_serial: str
    nvme_eui: str
    nvme_size_bytes: int
    management_mac: str
    private_ip: str
    fabric_vf_pci_address: str
    numa_node: int
    fence: int
    disk_generation: int


# Unknown fields of a body that are named one by one. Each costs time and a part of the answer, as
# each wrong item of a list does, which pydantic reads to its end: no list of a body is longer.
_NAMED_FIELDS, _ITEMS = 16, 1024


class Body(BaseModel):
    """Base of every request body. An unknown field is an error instead of a silently lost wish."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_parts(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if len(values) > len(cls.model_fields) + _NAMED_FIELDS:
            raise ValueError(
                f"{len(values)} fields, of which at most {len(cls.model_fields)} are known"
            )
        for name, value in values.items():
            if isinstance(value, list) and len(value) > _ITEMS:
                raise ValueError(f"{len(value)} items in {name[:100]}, at most {_ITEMS} are read")
        return values


class Reasoned(Body):
    """A body without required fields. The reason is recorded in the audit log."""

    reason: Reason = ""


class Switch(Reasoned):
    """On or off."""

    enabled: StrictFlag


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


def _typed_key(text: str) -> str:
    """Type, base64 and comment, in the one spelling of its bytes by which the gateway knows it."""
    # The guest's SSH server would obey options in front of a key, such as command="…".
    kind, _, rest = text.partition(" ")
    blob, _, comment = rest.partition(" ")
    if kind not in _KEY_TYPES:
        raise ValueError("a public key begins with its type, such as ssh-ed25519")
    return f"{plain_key(kind, blob)} {comment}".rstrip()


def _public_key(text: str) -> str:
    kind, blob, *comment = _typed_key(text).split(" ", 2)
    return " ".join((whole_key(f"{kind} {blob}"), *comment))


def _known_key(text: str) -> str:
    """As `_public_key`; a key that was accepted before it was checked as a whole can be named."""
    try:
        return _public_key(text)
    except ValueError:
        return _typed_key(text)


_KEY_LINE = StringConstraints(max_length=2048, pattern=r"^[ -~]*$", strip_whitespace=True)
PublicKey = Annotated[
    str,
    _KEY_LINE,
    AfterValidator(_public_key),
]
KnownKey = Annotated[
    str,
    _KEY_LINE,
    AfterValidator(_known_key),
]
