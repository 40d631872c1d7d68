"""Stand-in for NetBox 4.6 that answers like its REST API, as a separate process.

    python -m tests.standin.netbox CERTIFICATE KEY       prints its port on the first line

Requests and answers are held against NetBox's own OpenAPI description (tests/data/netbox). A query
parameter, field or body that is not in it is recorded as a violation and refused. An answer of this
stand-in with another field or type is recorded too, but given. ETags, If-Match, tags by name and
slug, cursors, all-or-nothing creation and error bodies follow the sources of NetBox 4.6.6
(`netbox/api/viewsets`, `docs/integrations/rest-api.md`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from jsonschema import Draft202012Validator

from tests.standin.bmc import ROOT
from tests.standin.service import Dripping, serve

API = json.loads((ROOT / "tests/data/netbox/openapi-4.6.json").read_text())
DEVICES, MACHINES = "/api/dcim/devices/", "/api/virtualization/virtual-machines/"
PREFIXES, JOURNAL = "/api/ipam/prefixes/", "/api/extras/journal-entries/"
VRFS, INTERFACES = "/api/ipam/vrfs/", "/api/virtualization/interfaces/"
MACS, ADDRESSES = "/api/dcim/mac-addresses/", "/api/ipam/ip-addresses/"
_NETWORK = (VRFS, INTERFACES, MACS, ADDRESSES)
# Kinds without objects here. Inventories request them.
_EMPTY = [path for path, names in API["queries"].items() if names == ["limit", "offset"]]
_STATIC = {
    "/api/status/": {"netbox-version": API["version"]},
    "/api/schema/": {
        "info": {"version": API["version"]},
        "paths": {
            path: {"get": {"parameters": [{"name": name} for name in names]}}
            for path, names in API["queries"].items()
        },
    },
}
# Values of an object that was created without them.
_DEFAULTS: dict[str, dict[str, Any]] = {
    DEVICES: {"name": None, "cluster": None, "serial": "", "asset_tag": None, "oob_ip": None}
    | {"primary_ip4": None, "local_context_data": None, "site": {"id": 1, "slug": "ams1"}}
    | {"status": {"value": "active", "label": "Active"}},
    MACHINES: {"status": "active", "device": None, "cluster": None, "primary_ip4": None}
    | {"site": None},
    INTERFACES: {"primary_mac_address": None, "vrf": None, "enabled": True},
    MACS: {"assigned_object_type": None, "assigned_object_id": None},
    ADDRESSES: {"assigned_object_type": None, "assigned_object_id": None, "vrf": None}
    | {"status": "active"},
    JOURNAL: {"kind": "info"},
}
# Fields that are written as a number and shown as an object.
_REFERENCES = (
    *("device", "cluster", "site", "virtual_machine", "vrf", "primary_mac_address", "primary_ip4"),
)
# Canary: no record or log of a test may contain it.
TOKEN = "nbt_canary91c4.e07-do-not-print"
# Gunicorn's limit for the first line of a request.
_LONGEST_LINE = 4094
_FAILED = {"error": "a plugin failed", "exception": "RuntimeError"}
_START = datetime(2026, 11, 1, tzinfo=UTC)
_ANSWERS = {
    path: Draft202012Validator({"properties": fields, "additionalProperties": False})
    for path, fields in API["answers"].items()
}
# Shown for a field without a value.
_BLANK = {"string": "", "array": [], "integer": 0, "boolean": False, "object": {}}


def _with_number(schema: dict[str, Any]) -> dict[str, Any]:
    """The body of a list of changes. The description has their fields again, with `id` required."""
    fields = {"id": {"type": "integer"}, **schema["properties"]}
    item = {**schema, "properties": fields, "required": ["id"]}
    return {"type": "array", "items": item, "minItems": 1}


_LISTS = {name.removesuffix("{id}/"): _with_number(schema)
          for name, schema in API["bodies"].items() if name.startswith("PATCH ")}  # fmt: skip
_BODIES = {
    name: Draft202012Validator(schema) for name, schema in {**API["bodies"], **_LISTS}.items()
}


@dataclass
class Faults:
    """devices, machines, prefixes: the objects at first, with only the values that matter. network:
    objects of the other kinds, by path. lost: `METHOD path` to the number of requests that are
    carried out and answered by 504, or by `lost_status`.
    status: `METHOD` to a status that is answered instead, 200 with a page. forbidden: `METHOD path`
    answered by 403.
    invalid: names of objects that no write is accepted for. edits: changes by another user, by
    name of the object, each just before the next write to it. deaf: methods without effect. page:
    the largest page. added: paths and objects of another user, created just before an object of
    this name is read. blind: the ETags for a list of changes are not compared. unchecked: nothing
    is held against the description, for measurements. broken: names of objects, or `METHOD path`,
    whose writes end in an error of NetBox itself. others: paths of objects to the number of the
    object that is answered once instead. backwards: created objects are answered in the reverse
    order. body: text of each answer to GET. drip_s: pause before each byte, in the headers as well.
    """

    token: str = TOKEN
    version: str = "4.6"
    devices: list[dict[str, Any]] = field(default_factory=list)
    machines: list[dict[str, Any]] = field(default_factory=list)
    prefixes: list[dict[str, Any]] = field(default_factory=list)
    network: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    lost_status: int = 504
    fields: list[str] = field(default_factory=list)
    status: dict[str, int] = field(default_factory=dict)
    forbidden: list[str] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    edits: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    deaf: list[str] = field(default_factory=list)
    page: int = 1000
    blind: bool = False
    unchecked: bool = False
    body: str = ""
    added: dict[str, list[list[Any]]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    others: dict[str, int] = field(default_factory=dict)
    backwards: bool = False
    drip_s: float = 0.0


class Netbox(ThreadingHTTPServer):
    """objects: by path and id."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: clients that hang up are part of the tests."""

    def begin(self, faults: Faults) -> None:
        self.faults = faults
        self.record: list[str] = []
        self.violations: list[str] = []
        self.clock = _START
        self.groups: dict[str, tuple[Any, dict[int, list[dict[str, Any]]]]] = {}
        self.objects: dict[str, dict[int, dict[str, Any]]] = {
            path: {} for path in (DEVICES, MACHINES, JOURNAL, *_NETWORK, *_EMPTY)
        }
        self.objects["/api/dcim/sites/"] = {1: {"id": 1, "slug": "ams1", "prefix_count": 0}}
        self.objects[PREFIXES] = {n: {"id": n, **row} for n, row in enumerate(faults.prefixes, 1)}
        at_first = {DEVICES: faults.devices, MACHINES: faults.machines, **faults.network}
        for path, rows in at_first.items():
            for row in rows:
                self.add(path, row)

    def add(self, path: str, row: dict[str, Any]) -> dict[str, Any]:
        number = max(self.objects[path], default=0) + 1
        new = {"id": number, "tags": [], **_DEFAULTS.get(path, {}), **row}
        if path == MACHINES and new["device"] in self.objects[DEVICES]:
            new["site"] = new["site"] or self.objects[DEVICES][new["device"]]["site"]["id"]
        if path == MACS:
            new["mac_address"] = new["mac_address"].upper()
        if path == JOURNAL:
            # As the text fields of Django REST framework do.
            new["comments"] = new["comments"].strip()
            new.setdefault("created", datetime.now(UTC).isoformat())
        values = row.get("custom_fields") or {}
        ours = {DEVICES: self.faults.fields, MACHINES: ["gpuaas_allocation_id", "gpuaas_written"]}
        names = ours.get(path, [])
        new["custom_fields"] = {name: values.get(name) for name in (*names, *values)}
        self.objects[path][new["id"]] = new
        self.touch(new)
        return new

    def delete(self, path: str, key: int) -> None:
        """Delete it with its parts: interfaces of a machine, addresses of an interface."""
        del self.objects[path][key]
        pointers = {ADDRESSES: (MACHINES, "primary_ip4"), MACS: (INTERFACES, "primary_mac_address")}
        if path in pointers:
            kind, name = pointers[path]
            for row in self.objects[kind].values():
                row[name] = None if row[name] == key else row[name]
        owner = {MACHINES: "virtual_machine", INTERFACES: "assigned_object_id"}.get(path)
        for other in {MACHINES: [INTERFACES], INTERFACES: [MACS, ADDRESSES]}.get(path, []):
            for row in [row for row in self.objects[other].values() if row[owner] == key]:
                self.delete(other, row["id"])

    def refusal(self, path: str, row: dict[str, Any]) -> dict[str, Any] | None:
        """Body of the answer to an object that contradicts others."""

        def others(*names: str) -> Iterator[dict[str, Any]]:
            for each in self.objects[path].values():
                if each["id"] != row.get("id") and all(each[n] == row[n] for n in names):
                    yield each

        if path == MACHINES:
            device = self.objects[DEVICES].get(row.get("device") or 0)
            cluster = (device["cluster"] or {}).get("id") if device else row.get("cluster")
            problems = {
                "__all__": row["name"] in self.faults.invalid or any(others("name")),
                # `VirtualMachine.clean`, whatever the request changes.
                "cluster": cluster != row.get("cluster"),
                "site": device and row["site"] not in (None, device["site"]["id"]),
            }
            return {name: ["It must be another."] for name, bad in problems.items() if bad} or None
        if path == JOURNAL and row["assigned_object_id"] not in self.objects[DEVICES]:
            number = row["assigned_object_id"]
            return {"non_field_errors": [f"Invalid assigned_object: dcim.device ID {number}"]}
        if path == INTERFACES:
            if any(others("virtual_machine", "name")):
                return {"non_field_errors": ["The fields virtual_machine, name must be unique."]}
            mac = self.objects[MACS].get(row.get("primary_mac_address") or 0)
            if mac and mac["assigned_object_id"] != row["id"]:
                return {"primary_mac_address": ["MAC address is not assigned to this interface."]}
        vrf = self.objects[VRFS].get(row.get("vrf") or 0) if path == ADDRESSES else None
        host = row.get("address", "").partition("/")[0]
        same = others("vrf") if vrf and vrf["enforce_unique"] else ()
        if host in {each["address"].partition("/")[0] for each in same}:
            return {"address": [f"Duplicate IP address found in VRF {vrf['name']}: {host}"]}
        return None

    def owned(self, path: str, key: int) -> list[dict[str, Any]]:
        """Objects of a kind by owner. Grouped anew only after a change."""
        state = (self.clock, len(self.objects[path]))
        if self.groups.get(path, ((), {}))[0] != state:
            owner = "virtual_machine" if path == INTERFACES else "assigned_object_id"
            groups: dict[int, list[dict[str, Any]]] = {}
            for row in self.objects[path].values():
                groups.setdefault(row[owner], []).append({"id": row["id"]})
            self.groups[path] = (state, groups)
        return list(self.groups[path][1].get(key, []))

    def touch(self, row: dict[str, Any]) -> None:
        self.clock += timedelta(seconds=1, microseconds=7)
        row["last_updated"] = self.clock.isoformat().replace("+00:00", "Z")


class Handler(BaseHTTPRequestHandler):
    """A request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes; the second would wait 40 ms
    server: Netbox

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because the record is the log."""

    def do_GET(self) -> None:
        netbox, faults = self.server, self.server.faults
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(raw) if raw else None
        if self.path.startswith("/standin/"):
            if self.command == "POST":
                netbox.begin(Faults(**(body or {})))
            self._send(200, {"requests": netbox.record, "violations": netbox.violations,
                             "objects": netbox.objects})  # fmt: skip
            return
        netbox.record.append(f"{self.command} {self.path}")
        parts = urlsplit(self.path)
        path, _, key = re.fullmatch(r"(.*?/)(([0-9]+)/)?", parts.path).groups()  # type: ignore[union-attr]
        scheme = "Bearer" if faults.token.startswith("nbt_") else "Token"
        if self.headers.get("Authorization") != f"{scheme} {faults.token}":
            self._send(403, {"detail": "Invalid token"})
        elif self.command in faults.status:
            busy = faults.status[self.command]
            self._send(busy, {"detail": "busy"} if busy != 200 else "<html>Log in</html>")
        elif (label := f"{self.command} {path}") in (*faults.forbidden, *faults.broken):
            denied = {"detail": "You do not have permission to perform this action."}
            self._send(*((500, _FAILED) if label in faults.broken else (403, denied)))
        elif self.command == "OPTIONS":
            pairs = (("POST", "POST"), ("PATCH", "PUT"))
            actions = {n: {} for m, n in pairs if f"{m} {path}" not in faults.forbidden}
            self._send(200, {"name": "list", "actions": actions})
        elif path in _STATIC:
            self._send(200, _STATIC[path])
        elif path not in netbox.objects or (key and int(key) not in netbox.objects[path]):
            self._send(404, {"detail": "Not found."})
        elif wrong := self._violation(path, key, parse_qs(parts.query), body):
            netbox.violations.append(f"{self.command} {self.path}: {wrong}")
            self._send(400, {"detail": wrong})
        elif self.command == "GET":
            self._get(path, key, parse_qs(parts.query))
        elif self.command in faults.deaf:
            self._one(200, path, netbox.objects[path][int(key)], {}) if key else self._send(201, [])
        else:
            self._write(path, key, body)

    do_POST = do_PATCH = do_DELETE = do_OPTIONS = do_GET

    def _get(self, path: str, key: str | None, query: dict[str, list[str]]) -> None:
        if key:
            other = self.server.faults.others.pop(f"{path}{key}/", int(key))
            row = self.server.objects[path][other]
            for other, new in self.server.faults.added.pop(str(row.get("name")), []):
                self.server.add(other, new)
            self._one(200, path, row, query)
        else:
            self._send(200, self._page(path, query))

    def _violation(self, path: str, key: str | None, query: Any, body: Any) -> str:
        if len(self.requestline) > _LONGEST_LINE:
            return "Request Line is too large"
        if self.server.faults.unchecked:
            return ""
        where = f"{path}{{id}}/" if key else path
        if self.command == "GET":
            unknown = sorted(query.keys() - set(API["queries"].get(where, ())))
            names = query.get("fields", [""])[0].split(",")
            unknown += sorted(set(filter(None, names)) - set(API["answers"].get(path, ())))
            return f"unknown: {', '.join(unknown)}" if unknown else ""
        if self.command == "DELETE":
            return ""
        schema = _BODIES.get(f"{self.command} {where}")
        if schema is None:
            return "no such operation"
        return next((error.message for error in schema.iter_errors(body)), "")

    def _page(self, path: str, query: dict[str, list[str]]) -> Any:
        """A page by cursor, or the first. Several values of `tag` must all match, those of others
        once.
        """
        rows = sorted(self.server.objects[path].values(), key=lambda row: int(row["id"]))
        for name, values in query.items():
            if name == "tag":
                rows = [r for r in rows if set(values) <= {tag["slug"] for tag in r["tags"]}]
            elif name == "name":
                rows = [r for r in rows if r["name"] in values]
            elif name in ("assigned_object_id", "assigned_object_type"):
                rows = [r for r in rows if str(r[name]) in values]
            elif name == "created_after":
                since = datetime.fromisoformat(values[0])
                rows = [r for r in rows if datetime.fromisoformat(r["created"]) >= since]
            elif name == "site_id":
                # `_site`: that of a network whose scope is a location.
                rows = [r for r in rows if str(r.get("_site", r["scope_id"])) in values]
        start, most = int(query.get("start", ["0"])[0]), self.server.faults.page
        # No limit, and 0, mean the largest page.
        limit = min(int(query.get("limit", ["0"])[0]) or most, most)
        rows = [row for row in rows if row["id"] >= start]
        more = f"https://elsewhere.invalid{path}" if len(rows) > limit else None
        shown = [self._shown(path, row, query) for row in rows[:limit]]
        return {"count": None, "next": more, "previous": None, "results": shown}

    def _shown(self, path: str, row: dict[str, Any], query: dict[str, list[str]]) -> dict[str, Any]:
        row = dict(row)
        if path == MACHINES:
            row["status"] = {"value": row["status"], "label": row["status"].title()}
        for name in _REFERENCES:
            if isinstance(row.get(name), int):
                row[name] = {"id": row[name]}
        if path == MACHINES and row["primary_ip4"]:
            address = self.server.objects[ADDRESSES].get(row["primary_ip4"]["id"], {})
            row["primary_ip4"]["address"] = address.get("address", "")
        if path == MACHINES:
            row["interface_count"] = len(self.server.owned(INTERFACES, row["id"]))
        if path == INTERFACES:
            row["mac_addresses"] = self.server.owned(MACS, row["id"])
            row["count_ipaddresses"] = len(self.server.owned(ADDRESSES, row["id"]))
        if path == JOURNAL:
            row["kind"] = {"value": row["kind"], "label": row["kind"].title()}
        if path == ADDRESSES:
            row["status"] = {"value": row["status"], "label": row["status"].title()}
        if path in (DEVICES, MACHINES):
            row["primary_ip"] = row["primary_ip4"]
        names = query.get("fields", [""])[0].split(",")
        if names != [""]:
            fields = API["answers"].get(path, {})
            row = {name: row.get(name, _blank(fields.get(name, {}))) for name in names}
        if path in _ANSWERS and not self.server.faults.unchecked:
            wrong = (f"{e.json_path}: {e.message}" for e in _ANSWERS[path].iter_errors(row))
            self.server.violations += [f"answer of {path}: {text}" for text in wrong]
        return row

    def _one(self, status: int, path: str, row: dict[str, Any], query: Any) -> None:
        self._send(status, self._shown(path, row, query), etag=_etag(row))

    def _write(self, path: str, key: str | None, body: Any) -> None:
        netbox = self.server
        if key is None:
            (self._write_list if self.command == "PATCH" else self._create)(path, body)
            return
        row = netbox.objects[path][int(key)]
        if edits := netbox.faults.edits.get(row.get("name", "")):
            _change(row, edits.pop(0))
            netbox.touch(row)
        if self.headers.get("If-Match") not in (None, "*", _etag(row)):
            self._send(412, {"detail": "Precondition failed."}, etag=_etag(row))
        elif row.get("name") in netbox.faults.broken:
            self._send(500, _FAILED)
        elif row.get("name") in netbox.faults.invalid:
            self._send(400, {"gpuaas_slots": ["Value must be valid for the schema."]})
        elif self.command == "DELETE":
            netbox.delete(path, int(key))
            self._send(204, None)
        elif unknown := body.get("custom_fields", {}).keys() - row["custom_fields"].keys():
            self._send(400, {"custom_fields": [f"Unknown field name: {min(unknown)}"]})
        elif refusal := self.command == "PATCH" and netbox.refusal(path, {**row, **body}):
            self._send(400, refusal)
        else:
            _change(row, body)
            netbox.touch(row)
            self._one(200, path, row, {})

    def _create(self, path: str, body: list[dict[str, Any]]) -> None:
        netbox = self.server
        if any(row.get("name") in netbox.faults.broken for row in body):
            self._send(500, _FAILED)
            return
        refusals = [netbox.refusal(path, {**_DEFAULTS.get(path, {}), **row}) for row in body]
        if any(refusals):
            self._send(400, [refusal or {} for refusal in refusals])
            return
        made = [netbox.add(path, row) for row in body]
        if netbox.faults.backwards:
            made.reverse()
        self._send(201, [self._shown(path, row, {}) for row in made])

    def _write_list(self, path: str, body: list[dict[str, Any]]) -> None:
        """Changes of several objects, all or none. Each must have one of the ETags of the header
        (`bulk_update` and `perform_update` in netbox/api/viewsets).
        """
        netbox = self.server
        pairs = [(netbox.objects[path][row["id"]], row) for row in body]
        etags = [text.strip() for text in self.headers.get("If-Match", "*").split(",")]
        for row, _ in pairs:
            if edits := netbox.faults.edits.get(row.get("name", "")):
                _change(row, edits.pop(0))
                netbox.touch(row)
        for row, change in pairs:
            refusal = netbox.refusal(path, {**row, **change})
            if row.get("name") in netbox.faults.invalid:
                refusal = {"gpuaas_slots": ["Value must be valid for the schema."]}
            if not netbox.faults.blind and "*" not in etags and _etag(row) not in etags:
                self._send(412, {"detail": "Precondition failed."}, etag=_etag(row))
                return
            if row.get("name") in netbox.faults.broken:
                self._send(500, _FAILED)
                return
            if refusal:
                self._send(400, refusal)
                return
        for row, change in pairs:
            _change(row, {name: value for name, value in change.items() if name != "id"})
            netbox.touch(row)
        self._send(200, [self._shown(path, row, {}) for row, _ in pairs])

    def _send(self, status: int, answer: Any, etag: str = "") -> None:
        faults, inside = self.server.faults, self.path.startswith("/standin/")
        content = b"" if status == 204 else json.dumps(answer).encode()
        if faults.body and self.command == "GET" and not inside:
            content = faults.body.encode()
        if isinstance(answer, str):
            content = answer.encode()
        path = re.sub(r"[0-9]+/$", "", urlsplit(self.path).path)
        if status < 300 and not inside and faults.lost.get(f"{self.command} {path}", 0) > 0:
            faults.lost[f"{self.command} {path}"] -= 1
            status, content = faults.lost_status, b"<html>504 Gateway Time-out</html>"
        whole = self.wfile
        if faults.drip_s and not inside:
            self.wfile = Dripping(whole, faults.drip_s)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("API-Version", faults.version)
        if etag:
            self.send_header("ETag", etag)
        if status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        self.wfile = whole


def _blank(field: dict[str, Any]) -> Any:
    kind = field.get("type")
    return deepcopy(_BLANK.get(kind)) if isinstance(kind, str) else None


def _etag(row: dict[str, Any]) -> str:
    return f'W/"{datetime.fromisoformat(row["last_updated"]).isoformat()}"'


def _change(row: dict[str, Any], body: dict[str, Any]) -> None:
    for name, value in body.items():
        if name == "custom_fields":
            row[name] = {**row[name], **value}
        elif name == "add_tags":
            row["tags"] = [*row["tags"], *value]
        elif name == "remove_tags":
            gone = {tag["slug"] for tag in value}
            row["tags"] = [tag for tag in row["tags"] if tag["slug"] not in gone]
        else:
            row[name] = value


def main() -> None:
    server = Netbox(("127.0.0.1", 0), Handler)
    server.begin(Faults())
    serve(server)


if __name__ == "__main__":
    main()
