"""MAAS's REST API 2.0: OAuth keys, verified TLS, bounded answers.

No client library is used: python-libmaas has had no code since 2024. Names of operations and of
parameters are those of canonical/maas at 9e51f33 (src/maasserver/api).

MAAS continues a request after the proxy in front of it has answered 504. A request without an
answer therefore has an unknown effect, and the machine is read before the next request.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    IPvAnyNetwork,
    StringConstraints,
)

from reconciler.model.errors import Problem
from reconciler.model.hardware import serial_number
from reconciler.model.storable import storable_text
from reconciler.runs.service_access import Conversation, ServiceAccess
from reconciler.runs.spec import LauncherAway, RunError
from reconciler.settings import Settings

API = "/MAAS/api/2.0"
# Beginnings of paths whose answers are lists.
LISTS = (_TAGGED := "/machines/?tags=", _SUBNETS := "/subnets/")
# Code of a request that MAAS has refused for lack of rights, without effect.
FORBIDDEN = "maas_forbidden"
# Code of an answer about another machine, which says nothing about the effect of the request.
WRONG_MACHINE = "maas_wrong_machine"
# Types of the events of a lock and of its end (src/maascommon/events.py).
_LOCKING, _UNLOCKING = "User locking node", "User unlocking node"
# Oldest supported version; it has release scripts and workload annotations.
LEAST = (3, 5)
_REFUSALS = {
    401: (
        "unauthorized",
        "a valid API key, and clocks that differ by less than five minutes,",
        "put a new key into the file, or correct the clock of this machine or of MAAS",
    ),
    403: (
        "forbidden",
        "the right to do this, which nobody has on a locked machine,",
        "use the key of an administrator, and unlock the machine in MAAS if that is meant",
    ),
    404: ("not_found", "an object that MAAS has", "look at it in MAAS"),
    409: ("conflict", "a state in which MAAS does this", "look at the machine in MAAS"),
}

Text = Annotated[
    str,
    BeforeValidator(lambda value: "" if value is None else value),
    Field(max_length=300),
    AfterValidator(storable_text),
]
# Text for display, cut to 300 characters: the status message of a failed machine is long.
Shown = Annotated[
    Text, BeforeValidator(lambda value: value[:300] if isinstance(value, str) else value)
]
_SYSTEM_ID = r"^[a-z0-9]{1,41}$"
SystemId = Annotated[str, StringConstraints(pattern=_SYSTEM_ID)]


class Status(IntEnum):
    """Statuses of a machine (src/maascommon/enums/node.py)."""

    READY = 4
    DEPLOYED = 6
    DEPLOYING = 9
    ALLOCATED = 10
    FAILED_DEPLOYMENT = 11
    RELEASING = 12
    FAILED_RELEASING = 13
    DISK_ERASING = 14
    FAILED_DISK_ERASING = 15


class _Hardware(BaseModel):
    system_serial: Shown = ""


class _Interface(BaseModel):
    mac_address: Text = ""


class Machine(BaseModel):
    """A machine. owner: user who has it, "" for none. Only the owner's machines are touched."""

    model_config = ConfigDict(frozen=True)

    system_id: SystemId
    hostname: Text
    status: int
    status_name: Shown
    status_message: Shown = ""
    owner: Text = ""
    locked: bool
    tag_names: list[Text] = Field(max_length=1000)
    ip_addresses: list[Text] = Field(max_length=1000)
    hardware_uuid: Text = ""
    hardware_info: _Hardware
    interface_set: list[_Interface] = Field(max_length=1000)
    workload_annotations: dict[str, Shown] = Field(default_factory=dict)
    distro_series: Text = ""

    def tagged(self, name: str) -> bool:
        return name in self.tag_names

    @property
    def serial(self) -> str:
        """Serial number; "" for MAAS's own "Unknown", too."""
        return serial_number(self.hardware_info.system_serial)

    @property
    def identity(self) -> dict[str, Any]:
        """Properties of the hardware that survive an installation."""
        macs = {row.mac_address.lower() for row in self.interface_set} - {""}
        uuid = self.hardware_uuid.lower()
        return {"serial": self.serial, "hardware_uuid": uuid, "macs": sorted(macs)}


class Subnet(BaseModel):
    """A network of the site."""

    cidr: IPvAnyNetwork


class User(BaseModel):
    """The user of the key."""

    username: Text
    is_superuser: bool


class _Version(BaseModel):
    version: Text


T = TypeVar("T", bound=BaseModel)


@dataclass(frozen=True)
class MaasAccess(ServiceAccess):
    """Access to MAAS; the configured address does not include /MAAS."""

    NAME = "MAAS"
    REMEDY = "write an API key of MAAS there, readable by the reconciler"


def maas_access(settings: Settings) -> MaasAccess:
    """The MAAS of the site's settings; Problem `maas_not_configured` without any."""
    if not settings.maas_url or settings.maas_token_file is None:
        raise Problem(
            "maas_not_configured",
            expected="GPUAAS_MAAS_URL and GPUAAS_MAAS_TOKEN_FILE",
            found="no MAAS in the settings",
            remedy="set both (docs/maas.md)",
        )
    return MaasAccess(settings.maas_url, settings.maas_token_file, settings.maas_ca_file)


class Client(Conversation):
    """Requests of a pass over the machines, or of a step of a task."""

    # Shorter than a worker's lease of its task.
    DEADLINE_S, REQUEST_S = 25.0, 20.0
    # A machine with eight GPUs and its disks is about 100 KB.
    LARGEST = 64 << 20
    REFUSALS = _REFUSALS

    def user(self) -> User:
        return self._parsed(User, self._get("/users/?op=whoami"))

    def version(self) -> tuple[int, ...]:
        """Version as numbers; () if MAAS shows none."""
        text = self._parsed(_Version, self._get("/version/")).version
        numbers = text.partition("-")[0].partition("~")[0].split(".")[:2]
        numeric = all(re.fullmatch(r"[0-9]{1,6}", number) for number in numbers)
        return tuple(int(number) for number in numbers) if numeric else ()

    def machines(self, tag: str) -> tuple[list[Machine], dict[str, RunError]]:
        """All machines with a tag, and why others are in no form that can be read, by system id."""
        machines, unread = list[Machine](), dict[str, RunError]()
        for document in self._list(f"{_TAGGED}{quote(tag, safe='')}"):
            try:
                machines.append(self._parsed(Machine, document))
            except LauncherAway as refusal:
                unread[_system_id(document) or f"with the tag {tag}"] = refusal
        return machines, unread

    def subnets(self) -> list[Subnet]:
        return [self._parsed(Subnet, document) for document in self._list(_SUBNETS)]

    def machine(self, system_id: str) -> Machine:
        """A machine; RunError `maas_not_found` if MAAS has none with this id."""
        path = f"/machines/{system_id}/"
        return self._same(system_id, f"GET {path}", self._get(path))

    def deploy(self, system_id: str, *, userdata: str, series: str, comment: str) -> Machine:
        """Install the machine. MAAS first gives a machine in `Ready` to the key's user."""
        fields = {"user_data": base64.b64encode(userdata.encode()).decode(), "comment": comment}
        if series:
            fields["distro_series"] = series
        return self._operate(system_id, "deploy", fields)

    def release(
        self, system_id: str, *, comment: str, script: str = "", erase: bool = False
    ) -> Machine:
        """Return the machine to MAAS.

        script: a release script that MAAS has; it refuses another. erase: all disks, by the drive's
        own erasure or by zeros. The quick erasure of MAAS leaves nearly everything readable.
        """
        fields = {"erase": "false", "comment": comment, **({"scripts": script} if script else {})}
        if erase:
            fields |= {"erase": "true", "secure_erase": "true", "quick_erase": "false"}
        return self._operate(system_id, "release", fields)

    def lock(self, system_id: str, *, comment: str) -> Machine:
        """Make MAAS refuse to release the machine, for every user. Only for a deployed machine."""
        return self._operate(system_id, "lock", {"comment": comment})

    def unlock(self, system_id: str, *, comment: str) -> Machine:
        return self._operate(system_id, "unlock", {"comment": comment})

    def has_lock(self, system_id: str, *, comment: str) -> bool | None:
        """Whether the machine's last request to lock or unlock it was `lock` with this comment;
        None if its newest events have no such request.

        MAAS records a request in the transaction that carries it out.
        """
        path = f"/events/?op=query&id={system_id}&level=DEBUG&limit=1000"
        try:
            document = self._get(path)
        except RunError as refusal:
            if isinstance(refusal, LauncherAway):
                raise
            return False
        rows = document.get("events") if isinstance(document, dict) else None
        if not isinstance(rows, list):
            return False
        for row in rows:
            # The newest comes first.
            if isinstance(row, dict) and row.get("type") in (_LOCKING, _UNLOCKING):
                text = str(row.get("description"))
                return row["type"] == _LOCKING and text.endswith(f" - {comment}")
        return None

    def annotate(self, system_id: str, values: Mapping[str, str]) -> None:
        """Set workload annotations. MAAS refuses them for a locked machine."""
        self._post(f"/machines/{system_id}/?op=set_workload_annotations", values)

    def tag(self, name: str, system_id: str, *, on: bool) -> None:
        """Give the tag to the machine, or take it away."""
        verb = "add" if on else "remove"
        self._post(f"/tags/{quote(name, safe='')}/?op=update_nodes", {verb: system_id})

    def script_digest(self, name: str) -> str:
        """SHA-256 of a script; "" if MAAS has none of this name."""
        content, status = self._request("GET", f"/scripts/{name}?op=download", missing=True)
        return "" if status == 404 else hashlib.sha256(content).hexdigest()

    def upload(self, name: str, kind: str, content: bytes, *, new: bool) -> None:
        """Create or replace a script. kind: `commissioning` or `release`."""
        fields = {"name": name, "type": kind} if new else {"comment": "by gpuaas.slice"}
        verb, path = ("POST", "/scripts/") if new else ("PUT", f"/scripts/{name}")
        self._request(verb, path, files={**_form(fields), "script": (name, content)})

    def _operate(self, system_id: str, verb: str, fields: Mapping[str, str]) -> Machine:
        path = f"/machines/{system_id}/?op={verb}"
        return self._same(system_id, f"POST {path}", self._post(path, fields))

    def _same(self, system_id: str, request: str, document: Any) -> Machine:
        machine = self._parsed(Machine, document)
        if machine.system_id != system_id:
            raise self._access.refuse(
                "wrong_machine",
                f"an answer about machine {system_id} to {request}",
                f"one about {machine.system_id}",
                "look at both in MAAS, and at the proxy before it; nothing more was asked",
            )
        return machine

    def _list(self, path: str) -> list[Any]:
        documents = self._get(path)
        if not isinstance(documents, list):
            raise self.silent(f"GET {path}", "an answer that is no list")
        return documents

    def _parsed(self, kind: type[T], document: Any) -> T:
        return self._parse(kind, document, f"a request for {kind.__name__}")

    def _get(self, path: str) -> Any:
        content, _ = self._request("GET", path)
        return self._document(content, f"GET {path}")

    def _post(self, path: str, fields: Mapping[str, str]) -> Any:
        content, status = self._request("POST", path, files=_form(fields))
        return {} if status == 204 else self._document(content, f"POST {path}")

    def _request(
        self, method: str, path: str, *, missing: bool = False, **arguments: Any
    ) -> tuple[bytes, int]:
        """Body and status. missing: 404 is an answer."""
        request = f"{method} {path}"
        headers = {"Authorization": self._authorization(), "Accept": "application/json"}
        answer, body = self._ask(method, f"{API}{path}", request, headers=headers, **arguments)
        if not answer.is_success and not (missing and answer.status_code == 404):
            raise self._refusal(answer, body, request)
        return body, answer.status_code

    def _authorization(self) -> str:
        """OAuth 1.0 header with the signature method PLAINTEXT: the secret itself is the proof."""
        parts = self._access.token().split(":")
        if len(parts) != 3 or not all(parts):
            raise self._access.refuse(
                "token_unreadable",
                f"an API key of three parts with colons in {self._access.token_file}",
                f"{len(parts)} parts",
                MaasAccess.REMEDY,
            )
        consumer, token, secret = parts
        values = {
            "oauth_version": "1.0",
            "oauth_signature_method": "PLAINTEXT",
            "oauth_consumer_key": consumer,
            "oauth_token": token,
            "oauth_signature": f"&{secret}",
            "oauth_nonce": secrets.token_hex(16),
            "oauth_timestamp": str(int(time.time())),
        }
        return "OAuth " + ", ".join(f'{name}="{quote(v, safe="")}"' for name, v in values.items())


def had_no_effect(refusal: RunError) -> bool:
    """Whether MAAS certainly did not carry out the request that ended so."""
    return not isinstance(refusal, LauncherAway) and refusal.code != WRONG_MACHINE


def _system_id(document: Any) -> str:
    """System id of a machine in another form, "" without a valid one."""
    value = document.get("system_id") if isinstance(document, dict) else None
    return value if isinstance(value, str) and re.fullmatch(_SYSTEM_ID, value) else ""


def _form(fields: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a multipart form. An empty form has no body."""
    return {name: (None, value) for name, value in fields.items()}
