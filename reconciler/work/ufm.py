"""Partition keys through UFM, the manager of an InfiniBand fabric: verified TLS, bounded answers.

The interface is that of the NVIDIA UFM Enterprise REST API Guide, chapter "PKey GUIDs Rest API"
(docs.nvidia.com/networking/display/ufmenterpriserestapiv6221/pkey+guids+rest+api), with token
authentication (`/ufmRestV3`, `Authorization: Basic TOKEN`):

    GET    /resources/pkeys?guids_data=true          members of every partition
    POST   /resources/pkeys                          add GUIDs; makes the partition if needed
    DELETE /resources/pkeys/PKEY/guids/GUID,GUID     remove GUIDs; an empty partition disappears

UFM answers before its subnet manager has acted, so every change is read back. Not run on hardware;
`tests/standin/ufm.py` answers like this description.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from reconciler.runs.service_access import Conversation, ServiceAccess
from reconciler.runs.spec import RunError
from reconciler.settings import Settings

API = "/ufmRestV3"
# The partition of all ports, in which the subnet manager itself is.
DEFAULT = 0x7FFF
FULL, LIMITED = "full", "limited"
_MEMBERSHIPS = (FULL, LIMITED)
_REMEDY = "put a token of a UFM user that may manage partitions into the token file"
_REFUSALS = dict.fromkeys((401, 403), ("forbidden", "the right", _REMEDY))
_GUID = re.compile(r"(0x)?([0-9a-f]{16})")


@dataclass(frozen=True)
class Partition:
    """A partition. members: membership by GUID with colons. default: that of ports that are not
    listed; "" if UFM does not say.
    """

    members: Mapping[str, str]
    default: str = ""


@dataclass(frozen=True)
class UfmAccess(ServiceAccess):
    """Access to UFM."""

    NAME = "UFM"
    REMEDY = "write a token of UFM there, readable by the reconciler"


def ufm_access(settings: Settings) -> UfmAccess:
    """The UFM of the site's settings; RunError `ufm_missing` without any."""
    if not settings.ufm_url or settings.ufm_token_file is None:
        raise RunError(
            "ufm_missing",
            expected="GPUAAS_UFM_URL and GPUAAS_UFM_TOKEN_FILE, for a fabric with partitions",
            found="no UFM in the settings",
            remedy="set both; where one tenant owns the fabric, set fabric.isolation single_tenant"
            " in the hardware profile",
        )
    return UfmAccess(settings.ufm_url, settings.ufm_token_file, settings.ufm_ca_file)


class Client(Conversation):
    """A look at the fabric's partitions, and changes of them."""

    # A worker's lease of its task is longer.
    DEADLINE_S, REQUEST_S = 20.0, 5.0
    # A fabric of 10,000 ports in ten partitions each answers with about 10 MB, which is read again
    # until a change shows.
    LARGEST, TOTAL = 32 << 20, 1 << 30
    REFUSALS = _REFUSALS

    def partitions(self) -> dict[int, Partition]:
        """Every partition of the fabric, by key."""
        answer = self._request("GET", "/resources/pkeys?guids_data=true")
        if not isinstance(answer, dict):
            raise self.silent("GET /resources/pkeys", "an answer that is no document")
        partitions = {}
        for name, document in answer.items():
            try:
                number = int(name, 16) & DEFAULT
                if number in partitions:
                    # The second would hide members of the first.
                    raise ValueError("twice")
                partitions[number] = _partition(document)
            except (ValueError, TypeError, AttributeError, KeyError) as broken:
                text = f"partition {name!r:.40}: {type(broken).__name__} {str(broken)!r:.100}"
                raise self.silent("GET /resources/pkeys", text) from broken
        if DEFAULT not in partitions:
            # Every fabric has it. Without it, this is no list of a fabric's partitions.
            raise self.silent("GET /resources/pkeys", "no default partition")
        return partitions

    def add(self, key: int, guids: Collection[str]) -> None:
        """Make GUIDs full members of a partition."""
        document = {
            **{"pkey": f"0x{key:x}", "membership": FULL, "index0": True, "ip_over_ib": True},
            "guids": [_bare(guid) for guid in sorted(guids)],
        }
        self._request("POST", "/resources/pkeys", json=document)

    def remove(self, key: int, guids: Collection[str]) -> None:
        """Remove GUIDs from a partition."""
        names = ",".join(_bare(guid) for guid in sorted(guids))
        self._request("DELETE", f"/resources/pkeys/0x{key:x}/guids/{names}", gone=True)

    def _request(self, method: str, path: str, *, gone: bool = False, **arguments: Any) -> Any:
        request = f"{method} {API}{path}"[:120]
        headers = {"Authorization": f"Basic {self._access.token()}"}
        answer, body = self._ask(method, f"{API}{path}", request, headers=headers, **arguments)
        if gone and answer.status_code == 404:
            return {}
        if not answer.is_success:
            raise self._refusal(answer, body, request)
        if not body.strip() or method != "GET":
            return {}
        return self._document(body, request)


def _partition(document: Mapping[str, Any]) -> Partition:
    members: dict[str, str] = {}
    rows = document["guids"]
    if not isinstance(rows, list):
        # A partition without a list of members must not pass for an empty one.
        raise TypeError(type(rows))
    for row in rows:
        membership = str(row["membership"]).lower()
        if membership not in _MEMBERSHIPS:
            raise ValueError(membership)
        guid = _colons(str(row["guid"]))
        if members.setdefault(guid, membership) != membership:
            raise ValueError(f"{guid} is a {FULL} and a {LIMITED} member")
    return Partition(members, str(document.get("membership") or "").lower())


def _colons(text: str) -> str:
    """A GUID as the kernel writes it; a text that is no GUID stays as it is."""
    digits = _GUID.fullmatch(text.lower().replace(":", ""))
    return ":".join(re.findall("..", digits[2])) if digits else text[:40]


def _bare(guid: str) -> str:
    return guid.replace(":", "")
