"""Nodes: the records of machines, and the switch that lets them be sold."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, Field, StringConstraints
from sqlalchemy import Connection

from reconciler.api import guards, views
from reconciler.api.guards import IfMatch
from reconciler.api.models import Address, Body, Id, Label, Name, Reason, Switch, Text, Username
from reconciler.api.paging import Paging
from reconciler.api.security import Admin
from reconciler.db import settings
from reconciler.lifecycle import host
from reconciler.model import hardware
from reconciler.model.states import NodeMode, NodeState
from reconciler.profiles import hardware_profile
from reconciler.records import certificates, nodes, tokens
from reconciler.settings import Settings

router = APIRouter(prefix="/admin", tags=["nodes"])

NodeId = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
Port = Annotated[int, Field(ge=1, le=65535)]
# Where the tenant of the whole machine reaches it: shown to members, so it is never derived from
# `address`. Empty: the machine is not given away as a whole.
TenantAddress = Annotated[
    str, StringConstraints(max_length=253, pattern=r"^([A-Za-z0-9:][A-Za-z0-9.:-]*)?$")
]
TelemetryUrl = Annotated[
    str, StringConstraints(max_length=500, pattern=r"^(https?://[\x21-\x7e]+)?$")
]
# Its own place on the InfiniBand fabric, which goes before the profile's. Empty: the profile's.
FabricInterface = Annotated[
    str, StringConstraints(max_length=15, pattern=r"^([a-z][a-z0-9]{0,14})?$")
]
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
FabricAddress = Annotated[
    str,
    StringConstraints(
        max_length=18, pattern=rf"^(({_OCTET}\.){{3}}{_OCTET}/([0-9]|[12][0-9]|3[0-2]))?$"
    ),
]
# No more and no longer than contracts/runs/parity.schema.json lets through to the host.
MaasTag = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
# Sorted, each once: in another order they are no change, and parity counts the tags of intents.
MaasTags = Annotated[
    list[MaasTag], Field(max_length=64), AfterValidator(lambda tags: sorted(set(tags)))
]


class NewNode(Body):
    """A machine. `address` is where SSH reaches it; `name` is for people.

    `maas_tags` are its tags in MAAS; null, as without it, says that they are not known, and then
    parity only warns.
    """

    id: NodeId | None = None
    name: Text = ""
    address: Address
    port: Port = 22
    ssh_user: Username = "root"
    tenant_address: TenantAddress = ""
    tenant_port: Port = 22
    telemetry_url: TelemetryUrl = ""
    fabric_interface: FabricInterface = ""
    fabric_address: FabricAddress = ""
    region: Label = ""
    pool: Name = "default"
    profile: Name
    maas_tags: MaasTags | None = None
    # What it will be sold as.
    mode: Literal["slice", "baremetal"] = "slice"
    reason: Reason = ""


class NodeChange(Body):
    """What may be changed; fields left out stay. Null is for `maas_tags`: not known any more."""

    name: Annotated[Text, Field(min_length=1)] | None = None
    address: Address | None = None
    port: Port | None = None
    ssh_user: Username | None = None
    tenant_address: TenantAddress | None = None
    tenant_port: Port | None = None
    telemetry_url: TelemetryUrl | None = None
    fabric_interface: FabricInterface | None = None
    fabric_address: FabricAddress | None = None
    region: Label | None = None
    pool: Name | None = None
    profile: Name | None = None
    maas_tags: MaasTags | None = None
    reason: Reason = ""


@router.post("/nodes", status_code=201)
def create(body: NewNode, context: Admin) -> JSONResponse:
    """Add a node; it is not trusted before it has enrolled."""
    _known_profile(context.settings, body.profile)
    values = body.model_dump(exclude={"id", "reason", "mode"})
    mode = NodeMode.BAREMETAL if body.mode == "baremetal" else NodeMode.CONVERTING_TO_SLICE
    act = context.act(body.reason)
    # One id for every repetition of the transaction.
    node_id = body.id or str(uuid.uuid4())
    return context.write(
        lambda conn: views.record(nodes.create(conn, act, id=node_id, mode=mode, **values)),
        body=body,
        status=201,
    )


@router.get("/nodes")
def list_nodes(
    context: Admin,
    part: Paging,
    state: NodeState | None = None,
    mode: NodeMode | None = None,
) -> dict[str, Any]:
    """All nodes."""
    page = part.page(nodes.ORDER)

    def read(conn: Connection) -> list[dict[str, Any]]:
        rows = nodes.every(conn, state=state, mode=mode, page=page)
        until = certificates.ends(conn, [row["id"] for row in rows])
        return [row | {"certificate_valid_until": until.get(row["id"])} for row in rows]

    return part.told(nodes.ORDER, context.read(read))


@router.get("/nodes/{node_id}")
def show(node_id: Id, context: Admin) -> JSONResponse:
    """One node, with its host certificates."""

    def read(conn: Connection) -> dict[str, Any]:
        until = certificates.ends(conn, [node_id]).get(node_id)
        node = views.record(nodes.get(conn, node_id) | {"certificate_valid_until": until})
        return node | {"certificates": views.items(tokens.certificates(conn, node_id))["items"]}

    return guards.tagged(context.read(read))


@router.patch("/nodes/{node_id}")
def change(node_id: Id, body: NodeChange, context: Admin, guard: IfMatch) -> JSONResponse:
    """Change what an operator knows better than the host."""
    if body.profile is not None:
        _known_profile(context.settings, body.profile)
    values = body.model_dump(exclude={"reason"}, exclude_none=True)
    if "maas_tags" in body.model_fields_set:
        values["maas_tags"] = body.maas_tags
    act = context.act(body.reason)

    def work(conn: Connection) -> dict[str, Any]:
        guard.check(conn, "node", node_id)
        node = nodes.get(conn, node_id)
        other = {name: value for name, value in values.items() if value != node[name]}
        # A generation that rises although nothing changed would refuse others' If-Match.
        return views.record(nodes.change(conn, node_id, act, **other) if other else node)

    return context.write(work, body=body)


@router.put("/nodes/{node_id}/scheduling")
def schedule(node_id: Id, body: Switch, context: Admin, guard: IfMatch) -> JSONResponse:
    """Sell this node's slots, or sell none of them anew."""
    act = context.act(body.reason)

    def work(conn: Connection) -> dict[str, Any]:
        guard.check(conn, "node", node_id)
        host.set_scheduling(conn, node_id, body.enabled, act)
        return views.record(nodes.get(conn, node_id))

    return context.write(work, body=body)


@router.get("/settings/slice-scheduling")
def site_scheduling(context: Admin) -> dict[str, bool]:
    """Whether this site sells slices at all."""
    return {"enabled": context.read(settings.site_scheduling)}


@router.put("/settings/slice-scheduling")
def schedule_site(body: Switch, context: Admin) -> JSONResponse:
    """Sell slices at this site, or none."""
    act = context.act(body.reason)

    def work(conn: Connection) -> dict[str, bool]:
        settings.set_site_scheduling(conn, body.enabled, act)
        return {"enabled": settings.site_scheduling(conn)}

    return context.write(work, body=body)


def _known_profile(configuration: Settings, name: str) -> None:
    hardware.check_link(hardware_profile(configuration.profiles_dir, name), name)
