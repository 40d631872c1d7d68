"""NetBox's REST API: verified TLS, bounded answers, writes by compare-and-set.

Written for NetBox 4.6, which has ETags, If-Match, cursors and `add_tags`. No client library is
used: pynetbox sends no If-Match, follows links to other hosts and has neither deadlines nor limits.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, TypeVar
from urllib.parse import quote

import httpx
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    IPvAnyNetwork,
    StringConstraints,
)

from reconciler.model.errors import Problem, Refusal
from reconciler.model.storable import storable_text
from reconciler.runs.service_access import LONGEST_TEXT, Conversation, ServiceAccess
from reconciler.runs.spec import LauncherAway, RunError
from reconciler.settings import Settings

API = "/api"
DEVICES = "/dcim/devices/"
MACHINES = "/virtualization/virtual-machines/"
PREFIXES = "/ipam/prefixes/"
VRFS = "/ipam/vrfs/"
INTERFACES = "/virtualization/interfaces/"
MACS = "/dcim/mac-addresses/"
ADDRESSES = "/ipam/ip-addresses/"
JOURNAL = "/extras/journal-entries/"
# Half of NetBox's largest page. A page of devices is then about 1 MB.
PAGE = 500
# Most objects that one request creates, and ids in one query.
AT_ONCE = 50
# Most bytes of the names in one query: gunicorn's limit for the request line is 4,094.
_LONGEST_QUERY = 3500
# Most objects of one list: the slices of 1,000 hosts with 16 each, and some more.
_MOST = 20_000
_REFUSALS = {
    401: ("unauthorized", "a valid token", "put a new token into the token file"),
    403: ("forbidden", "the right to do this", "give it to the token's user (docs/netbox.md)"),
    404: ("not_found", "an object that the token's user may see", "look at it in NetBox"),
}

LEAST = (4, 6)
# Fields by which objects of a kind differ.
_DISTINGUISHING = frozenset(
    {
        *("name", "virtual_machine", "mac_address", "address", "assigned_object_id"),
    }
)
_VERSION = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})")
Text = Annotated[str, StringConstraints(max_length=300), AfterValidator(storable_text)]


class Conflict(RunError):
    """The object has changed since it was read; nothing was written."""


class Unfinished(RunError):
    """The pass ran out of time. The next one compares anew and so continues."""


class _Object(BaseModel):
    model_config = ConfigDict(frozen=True)

    id: int


class Site(_Object):
    """The site of a device."""

    slug: Text


class _Tag(BaseModel):
    slug: Text


class Address(BaseModel):
    """An address, with the length of its network."""

    address: Text


class _Choice(BaseModel):
    value: Text


class Tracked(_Object):
    """An object that this service writes. etag: its version, on which a write depends.

    PEOPLES: fields that only people write. A deletion would destroy their values.
    """

    PEOPLES: ClassVar[tuple[str, ...]] = ()
    tags: list[_Tag] = Field(max_length=1000)
    custom_fields: dict[str, Any]
    last_updated: datetime | None
    etag: str = ""

    @property
    def version(self) -> str:
        """ETag. NetBox derives it from `last_updated` (documented), which lists contain too."""
        if self.etag or self.last_updated is None:
            return self.etag
        try:
            return f'W/"{self.last_updated.astimezone(UTC).isoformat()}"'
        except OverflowError:  # A time at either end of the calendar.
            return ""

    def tagged(self, slug: str) -> bool:
        return any(tag.slug == slug for tag in self.tags)


class Device(Tracked):
    """A device."""

    name: Text | None
    serial: Text
    asset_tag: Text | None
    site: Site
    cluster: _Object | None
    primary_ip4: Address | None
    oob_ip: Address | None
    local_context_data: dict[str, Any] | None


class Machine(Tracked):
    """A virtual machine."""

    model_config = ConfigDict(frozen=True, extra="allow")
    PEOPLES = (
        *("comments", "config_template", "description", "disk", "local_context_data", "memory"),
        *("owner", "platform", "primary_ip6", "role", "serial", "tenant", "vcpus"),
        *("virtual_disk_count", "virtual_machine_type"),
    )

    name: Text
    status: _Choice
    device: _Object | None
    cluster: _Object | None
    site: _Object | None
    primary_ip4: _Object | None
    interface_count: int | None = None


class Vrf(Tracked):
    """The network of a node's slices."""

    name: Text


class VmInterface(Tracked):
    """An interface of a virtual machine."""

    model_config = ConfigDict(frozen=True, extra="allow")
    PEOPLES = (
        *("bridge", "count_fhrp_groups", "description", "l2vpn_termination", "mode", "mtu"),
        *("owner", "parent", "qinq_svlan", "tagged_vlans", "untagged_vlan"),
        "vlan_translation_policy",
    )

    name: Text
    virtual_machine: _Object
    primary_mac_address: _Object | None
    vrf: _Object | None = None
    enabled: bool = True
    count_ipaddresses: int | None = None
    mac_addresses: list[_Object] | None = Field(None, max_length=1000)


class _Assigned(Tracked):
    assigned_object_type: Text | None
    assigned_object_id: int | None


class MacAddress(_Assigned):
    """A MAC address of an interface."""

    model_config = ConfigDict(frozen=True, extra="allow")
    PEOPLES = ("comments", "description", "owner")

    mac_address: Text


class IpAddress(_Assigned):
    """An address of an interface."""

    model_config = ConfigDict(frozen=True, extra="allow")
    PEOPLES = (
        *("comments", "description", "dns_name", "nat_inside", "nat_outside", "owner", "role"),
        "tenant",
    )

    address: Text
    vrf: _Object | None
    status: _Choice | None = None


class Prefix(_Object):
    """A network of a site, or of one of its locations."""

    prefix: IPvAnyNetwork


class JournalEntry(_Object):
    """A journal entry about an object."""

    assigned_object_id: int
    comments: str


T = TypeVar("T", bound=_Object)
O = TypeVar("O", bound=Tracked)  # noqa: E741
_PATHS: Mapping[type[_Object], str] = {
    **{Device: DEVICES, Machine: MACHINES, Prefix: PREFIXES},
    **{Vrf: VRFS, VmInterface: INTERFACES, MacAddress: MACS, IpAddress: ADDRESSES},
    JournalEntry: JOURNAL,
}


@dataclass(frozen=True)
class NetboxAccess(ServiceAccess):
    """Access to NetBox; the configured address does not include /api."""

    NAME = "NetBox"
    REMEDY = "write a token of NetBox there, readable by the reconciler"


def netbox_access(settings: Settings) -> NetboxAccess:
    """The NetBox of the site's settings; Problem `netbox_not_configured` without any."""
    token_file = settings.netbox_token_file
    if not settings.netbox_url or token_file is None:
        raise Problem(
            "netbox_not_configured",
            expected="GPUAAS_NETBOX_URL and GPUAAS_NETBOX_TOKEN_FILE",
            found="no NetBox in the settings",
            remedy="set both (docs/netbox.md)",
        )
    return NetboxAccess(settings.netbox_url, token_file, settings.netbox_ca_file)


class Client(Conversation):
    """A pass over NetBox's objects: it reads until a deadline, and writes until another. The next
    pass does what is left.
    """

    DEADLINE_S, REQUEST_S = 60.0, 15.0
    # A site of 1,000 hosts with 16 slices each has 70 MB; this takes four to five times as much
    # memory.
    LARGEST, TOTAL = 9 << 20, 96 << 20
    REFUSALS = _REFUSALS

    def __init__(self, access: NetboxAccess) -> None:
        super().__init__(access)
        self.requests = 0

    def require_time(self) -> None:
        """Raise `Unfinished` if the time left may not suffice for a request."""
        if self.left_s < self.REQUEST_S:
            raise Unfinished(
                "netbox_unfinished",
                expected=f"all writes within {self.DEADLINE_S - self.REQUEST_S:.0f} seconds",
                found=f"more to write after {self.requests} requests of this pass",
                remedy="none: the next pass goes on",
            )

    def too_large(self, request: str, found: str) -> LauncherAway:
        return LauncherAway(
            "netbox_too_large",
            expected="no more than a site of 1,000 hosts has in NetBox",
            found=f"{found} for {request}",
            remedy="shorten texts, custom fields and context data of these objects, or divide the"
            " site (docs/netbox.md, Size)",
        )

    def every(self, kind: type[T], **filters: str | Collection[str]) -> Iterator[T]:
        """All objects of a list in the order of their ids. The link to the next page is not
        followed, because it names a host.
        """
        query = {**filters, "fields": _fields(kind), "limit": str(PAGE)}
        start, count = 0, 0
        while True:
            path = _PATHS[kind]
            page, _ = self._request("GET", path, params={**query, "start": str(start)})
            results = page.get("results") if isinstance(page, dict) else None
            if not isinstance(results, list):
                raise self.silent(f"GET {path}", "an answer without results")
            for document in results:
                item = self._parse(kind, document, f"a request to {path}")
                if item.id < start:
                    raise self.silent(f"GET {path}", "a list that is not in the order of its ids")
                start, count = item.id + 1, count + 1
                yield item
            if count > _MOST:
                raise self.too_large(f"GET {path}", f"more than {_MOST} objects")
            if not results or not page.get("next"):
                return

    def read(self, item: O) -> O:
        """The object as it is now, with its ETag."""
        kind = type(item)
        path = f"{_PATHS[kind]}{item.id}/"
        document, headers = self._request("GET", path, params={"fields": _fields(kind)})
        current = self._parse(kind, document, f"a request to {_PATHS[kind]}")
        if current.id != item.id:
            # It would be written, or deleted, in place of this object.
            raise self.silent(f"GET {path}", f"the object with the number {current.id}")
        etag = headers.get("ETag", "")
        # A header that is received may contain characters that one that is sent may not.
        return current.model_copy(update={"etag": etag if etag.isascii() else ""})

    def patch(self, item: O, changes: Mapping[str, Any]) -> O:
        """Change an object that is still as it was read; `Conflict` if it is not."""
        kind = type(item)
        match = {"If-Match": self._version(item)}
        path = f"{_PATHS[kind]}{item.id}/"
        document, _ = self._request("PATCH", path, json=dict(changes), headers=match)
        return self._parse(kind, document, f"a request to {_PATHS[kind]}")

    def patch_all(self, changes: Sequence[tuple[O, Mapping[str, Any]]]) -> dict[int, O]:
        """Change objects of a kind that are all still as they were read, or none (`Conflict`).

        For each object of the list, NetBox locks its row and requires its ETag among those of the
        header (`perform_update` of 4.6.0 to 4.6.8). A change in between makes another ETag.
        """
        kind = type(changes[0][0])
        path = _PATHS[kind]
        match = {"If-Match": ", ".join(self._version(item) for item, _ in changes)}
        body = [{"id": item.id, **patch} for item, patch in changes]
        rows, _ = self._request("PATCH", path, json=body, headers=match)
        if not isinstance(rows, list):
            raise self.silent(f"PATCH {path}", "an answer that is no list")
        items = [self._parse(kind, row, f"a request to {path}") for row in rows]
        return {item.id: item for item in items}

    def compares_lists(self, item: Tracked) -> bool:
        """Whether `patch_all` is safe, which NetBox does not document: a change of nothing, with an
        ETag that no object has, must be refused.
        """
        body, match = [{"id": item.id}], {"If-Match": 'W/"none"'}
        try:
            self._request("PATCH", _PATHS[type(item)], json=body, headers=match)
        except Conflict:
            return True
        except RunError as refusal:
            if is_fatal(refusal):
                raise
        return False

    def delete(self, item: Tracked) -> None:
        """Delete an object that is still as it was read; `Conflict` if it is not."""
        match = {"If-Match": self._version(item)}
        self._request("DELETE", f"{_PATHS[type(item)]}{item.id}/", headers=match)

    def create(self, kind: type[T], documents: Sequence[Mapping[str, Any]]) -> list[T]:
        """Create all objects or none. NetBox answers in the order of the request."""
        path = _PATHS[kind]
        rows, _ = self._request("POST", path, json=list(documents))
        if not isinstance(rows, list) or len(rows) != len(documents):
            raise self.silent(f"POST {path}", "an answer without the objects that it created")
        items = [self._parse(kind, row, f"a request to {path}") for row in rows]
        if not all(map(shows, items, documents)):
            raise self.silent(f"POST {path}", "other objects than it was asked to create")
        return items

    def notes(self, kind: str, numbers: Sequence[int], *, after: str = "") -> set[tuple[int, str]]:
        """Journal entries of objects, with the objects' numbers, from a time on.

        kind: as `virtualization.virtualmachine`.
        """
        query: dict[str, str | list[str]] = {"assigned_object_type": kind}
        query |= {"assigned_object_id": [str(number) for number in numbers]}
        rows = self.every(JournalEntry, **query, **({"created_after": after} if after else {}))
        notes = {(row.assigned_object_id, row.comments) for row in rows}
        return {note for note in notes if note[0] in numbers}

    def add_journal(self, entries: Sequence[Mapping[str, Any]]) -> None:
        self._request("POST", JOURNAL, json=list(entries))

    def may_view(self, path: str) -> bool:
        """Whether the token may view these objects."""
        try:
            self._request("GET", path, params={"limit": "1", "fields": "id"})
        except RunError as refusal:
            if refusal.code != "netbox_forbidden":
                raise
            return False
        return True

    def rights(self, path: str) -> frozenset[str]:
        """`add`, `change` and `delete`, as far as the token has the right for these objects.
        NetBox answers this also without the right to view them.
        """
        document, _ = self._request("OPTIONS", path)
        actions = document.get("actions") if isinstance(document, dict) else None
        names = {"POST": "add", "PUT": "change"}
        rights = {names[method] for method in actions or () if method in names}
        try:
            # NetBox checks the right before it looks for the object, and has none with this number.
            self._request("DELETE", f"{path}0/")
        except RunError as refusal:
            if refusal.code == "netbox_not_found":
                rights.add("delete")
            elif refusal.code != "netbox_forbidden":
                raise
        return frozenset(rights)

    def _version(self, item: Tracked) -> str:
        if not item.version:
            raise Conflict(
                "netbox_without_version",
                expected="an ETag for each object (NetBox 4.6 or later)",
                found=f"none for {_PATHS[type(item)]}{item.id}/",
                remedy="upgrade NetBox",
            )
        return item.version

    def _request(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, **arguments: Any
    ) -> tuple[Any, httpx.Headers]:
        request = f"{method} {API}{path}"
        token = self._access.token()
        scheme = "Bearer" if token.startswith("nbt_") else "Token"
        sent = {"Authorization": f"{scheme} {token}", "Accept": "application/json"}
        self.requests += 1
        answer, body = self._ask(
            method, f"{API}{path}", request, headers={**sent, **(headers or {})}, **arguments
        )
        return self._answer(answer, request, body), answer.headers

    def _answer(self, answer: httpx.Response, request: str, body: bytes) -> Any:
        if answer.status_code == 412:
            raise Conflict(
                "netbox_changed",
                expected=f"the object of {request} as it was read",
                found=self._shown(answer, body)[:LONGEST_TEXT],
                remedy="none: it is read again",
            )
        if not answer.is_success:
            raise self._refusal(answer, body, request)
        if answer.status_code == 204:
            return {}
        document = self._document(body, request)
        version = _VERSION.match(answer.headers.get("API-Version", ""))
        if not version or (int(version[1]), int(version[2])) < LEAST:
            # An earlier NetBox ignores If-Match and would overwrite what others have changed.
            actual = f"version {version[0]}" if version else "no version"
            remedy = "upgrade NetBox, or correct GPUAAS_NETBOX_URL"
            raise self._access.refuse("too_old", "NetBox 4.6 or later", actual, remedy)
        return document


def _fields(kind: type[_Object]) -> str:
    others = kind.PEOPLES if issubclass(kind, Tracked) else ()
    return ",".join((*(name for name in kind.model_fields if name != "etag"), *others))


def shows(item: _Object, document: Mapping[str, Any]) -> bool:
    """Whether an object has the values of this document that distinguish it from others."""
    for name in _DISTINGUISHING & document.keys():
        value = getattr(item, name, None)
        value = value.id if isinstance(value, _Object) else value
        if str(value).lower() != str(document[name]).lower():
            return False
    return True


def by_query(names: Iterable[str]) -> Iterator[list[str]]:
    """The names in parts that fit in a query, where a character has up to 12 bytes."""
    part: list[str] = []
    length = 0
    for name in names:
        size = len(f"&name={quote(name, safe='')}")
        if part and length + size > _LONGEST_QUERY:
            yield part
            part, length = [], 0
        part.append(name)
        length += size
    if part:
        yield part


def chunks(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """The items in parts of the size of one request."""
    return (items[begin : begin + AT_ONCE] for begin in range(0, len(items), AT_ONCE))


def is_own_error(silence: LauncherAway) -> bool:
    """Whether NetBox itself answered with an error, and not a proxy before it: the request has
    ended, with or without effect.
    """
    return silence.found == "HTTP 500"


def is_fatal(refusal: Refusal) -> bool:
    """Whether the next request would fail too: no time, no answer, or a token without rights."""
    return isinstance(refusal, LauncherAway | Unfinished) or refusal.code in (
        "netbox_unauthorized",
        "netbox_forbidden",
        "netbox_token_unreadable",
        "netbox_too_old",
        "netbox_untrusted",
        "netbox_redirected",
        "netbox_ca_unreadable",
    )
