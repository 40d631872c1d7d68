"""Nodes: machine records, scheduling switches, enrolment and host certificates."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints
from sqlalchemy import Connection
from typing_extensions import TypeAliasType

from reconciler.api.http import IfMatch, PageOf, Paging, correlation_id, tagged
from reconciler.api.models import (
    Address,
    Answer,
    Body,
    Document,
    Id,
    Integer,
    Label,
    Moment,
    Name,
    Reason,
    Reasoned,
    Record,
    RequiredText,
    Switch,
    Text,
    Username,
)
from reconciler.api.security import Admin
from reconciler.api.tasks import Task
from reconciler.db import schema, settings
from reconciler.db.engine import reading, retrying
from reconciler.lifecycle import host
from reconciler.model import hardware
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.states import HealthState, NodeMode, NodeState
from reconciler.profiles import hardware_profile
from reconciler.records import certificates, nodes, tokens
from reconciler.settings import Settings
from reconciler.trust import ca, enrolment, preflight

router = APIRouter(prefix="/admin", tags=["nodes"])
enrolment_router = APIRouter(tags=["enrolment"])

NodeId = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
Port = Annotated[Integer, Field(ge=1, le=65535)]
# Where the tenant of the whole machine connects. Members see it, so it is never derived from
# `address`. Empty: the machine is not sold as a whole.
TenantAddress = Annotated[
    str, StringConstraints(max_length=253, pattern=r"^([A-Za-z0-9:][A-Za-z0-9.:-]*)?$")
]
TelemetryUrl = Annotated[
    str, StringConstraints(max_length=500, pattern=r"^(https?://[\x21-\x7e]+)?$")
]
# The host's interface and address on the InfiniBand fabric; they override the profile's. Empty: the
# profile's.
FabricInterface = Annotated[
    str, StringConstraints(max_length=15, pattern=r"^([a-z][a-z0-9]{0,14})?$")
]
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
FabricAddress = TypeAliasType(
    "FabricAddress",
    Annotated[
        str,
        StringConstraints(
            max_length=18, pattern=rf"^(({_OCTET}\.){{3}}{_OCTET}/([0-9]|[12][0-9]|3[0-2]))?$"
        ),
    ],
)
# The limits are those of contracts/runs/parity.schema.json.
MaasTag = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
# Sorted and unique: another order is no change, and parity counts the tags of intents.
MaasTags = TypeAliasType(
    "MaasTags",
    Annotated[list[MaasTag], Field(max_length=64), AfterValidator(lambda tags: sorted(set(tags)))],
)
# Longer than anything that a host sends; the trust layer checks the content.
HostText = TypeAliasType("HostText", Annotated[str, StringConstraints(max_length=4096)])


class NewNode(Body):
    """A machine. `address` is where SSH reaches it; `name` is for people.

    `maas_tags` are its tags in MAAS; null, the default, means that they are not known, and then
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
    # The intended form of sale.
    mode: Literal["slice", "baremetal"] = "slice"
    reason: Reason = ""


class NodeChange(Body):
    """The fields to change; others stay. Null clears `maas_tags`, and leaves other fields as they
    are.
    """

    name: RequiredText | None = None
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


class EnrolmentBody(Body):
    """What a host states about itself; the trust layer checks every field."""

    token: HostText
    node_id: HostText
    host_key: HostText
    machine_id: HostText
    boot_id: HostText
    hostname: HostText
    # Empty on most hosts: the fabric is configured by bootstrap.
    fabric_interface: HostText = ""
    fabric_address: HostText = ""


class Ticket(Body):
    """The ticket of a machine that MAAS installs."""

    ticket: HostText


class FirmwareDifference(Answer):
    """A difference of a machine's firmware, or of its settings, from before its last tenant."""

    section: str
    name: str
    change: Literal["added", "removed", "changed", "not_compared", "more"] = Field(
        description="`not_compared`: it could not be read before or after; the texts say why."
        " `more`: the number of differences that are not listed."
    )
    before: str
    after: str


class Hardware(Answer):
    """Vendor, product and serial number of a machine. Empty: its firmware does not say."""

    vendor: str
    product: str
    serial: str


class NetboxDevice(Answer):
    """What NetBox knows of a machine. Empty: nothing."""

    device_id: int
    asset_tag: str
    bmc_address: str


class Node(Answer):
    """The record of a machine."""

    id: str
    name: str
    address: str
    port: int
    ssh_user: str
    tenant_address: str
    tenant_port: int
    telemetry_url: str
    fabric_interface: str
    fabric_address: str
    region: str
    pool: str
    profile: str
    maas_tags: list[str] | None = Field(
        description="The machine's tags in MAAS; null when they are not known."
    )
    maas_system_id: Annotated[
        str,
        BeforeValidator(lambda maas: (maas or {}).get("system_id", "")),
        Field(
            validation_alias="maas", description="The machine in MAAS that is this node, if any."
        ),
    ]
    hardware: Hardware | None = Field(
        description="The machine as its host reports it; null before the first discovery."
    )
    netbox: NetboxDevice | None = Field(
        description="The machine's device in NetBox; null when none is known."
    )
    mode: NodeMode
    mode_reason: str
    mode_since: Moment
    mode_deadline_at: Moment | None
    state: NodeState
    state_reason: str
    state_since: Moment
    deadline_at: Moment | None
    generation: int
    slice_scheduling: bool
    fence: int
    unclean_allocation_id: str
    health_state: HealthState
    health_detail: Document
    machine_id: str
    host_key: str
    boot_id: str
    install_id: str
    boot_learned_at: Moment | None
    reboot_required: bool
    reinstall_required: Annotated[
        bool,
        BeforeValidator(bool),
        Field(
            validation_alias="tenant_machine_ids",
            description="A tenant was root on it: it needs a new installation and a new host key.",
        ),
    ]
    firmware_unverified: Annotated[
        bool,
        BeforeValidator(lambda before: before is not None),
        Field(
            validation_alias="firmware_before",
            description="Since a tenant was root on it, its firmware was not yet shown to be the"
            " same as before.",
        ),
    ]
    firmware_differences: list[FirmwareDifference]
    last_contact_at: Moment | None
    created_at: Moment


class ListedNode(Node):
    """A node with the end of its host certificate."""

    certificate_valid_until: Moment | None


class HostCertificate(Answer):
    """A certificate of the host's SSH key."""

    id: str
    node_id: str
    serial: str
    public_key: str
    certificate: str
    principals: list[str]
    valid_until: Moment | None
    revoked_at: Moment | None
    created_at: Moment


class NodeDetail(ListedNode):
    """A node with its host certificates."""

    certificates: list[HostCertificate]


class Scheduling(Answer):
    """Whether the site sells slices."""

    enabled: bool


class IssuedEnrolment(Answer):
    """An enrolment token with its secret and the userdata script that uses it."""

    id: str
    node_id: str
    created_at: Moment
    expires_at: Moment | None
    used_at: Moment | None
    used_by: Document
    token: str
    userdata: str


class Preflight(Answer):
    """A script that the host runs once, and its environment."""

    script: str
    environment: dict[str, str]


class Enrolment(Answer):
    """The host's certificate and what the host needs to trust its operators."""

    certificate: str
    user_ca: str
    principals: list[str]
    preflight: Preflight | None


@router.post("/nodes", status_code=201, response_model=Node)
def create(body: NewNode, context: Admin) -> JSONResponse:
    """Add a node. It is not trusted until it has enrolled."""
    _require_profile(context.settings, body.profile)
    values = body.model_dump(exclude={"id", "reason", "mode"})
    mode = NodeMode.of_new(body.mode)
    # Chosen outside of the transaction, which may be repeated.
    node_id = body.id or str(uuid.uuid4())
    return context.write(
        lambda conn, act: Node.of(nodes.create(conn, act, id=node_id, mode=mode, **values)),
        body=body,
        status=201,
    )


@router.get("/nodes")
def list_nodes(
    context: Admin, paging: Paging, state: NodeState | None = None, mode: NodeMode | None = None
) -> PageOf[ListedNode]:
    """All nodes."""

    def items(conn: Connection, rows: Sequence[schema.Node]) -> list[ListedNode]:
        ends = certificates.ends(conn, [row.id for row in rows])
        return [ListedNode.of(row, certificate_valid_until=ends.get(row.id)) for row in rows]

    read = partial(nodes.every, state=state, mode=mode)
    return context.page_with(paging, nodes.ORDER, read, items)


@router.get("/nodes/{node_id}", response_model=NodeDetail)
def show(node_id: Id, context: Admin) -> JSONResponse:
    """One node, with its host certificates."""

    def read(conn: Connection) -> NodeDetail:
        return NodeDetail.of(
            nodes.get(conn, node_id),
            certificate_valid_until=certificates.ends(conn, [node_id]).get(node_id),
            certificates=tokens.certificates(conn, node_id),
        )

    return tagged(context.read(read))


@router.patch("/nodes/{node_id}", response_model=Node)
def change(node_id: Id, body: NodeChange, context: Admin, guard: IfMatch) -> JSONResponse:
    """Change what operators maintain of a node."""
    if body.profile is not None:
        _require_profile(context.settings, body.profile)
    values = body.model_dump(exclude={"reason"}, exclude_none=True)
    if "maas_tags" in body.model_fields_set:
        values["maas_tags"] = body.maas_tags

    def work(conn: Connection, act: Act) -> Node:
        guard.check(conn, "node", node_id)
        node = nodes.get(conn, node_id)
        changed = {name: value for name, value in values.items() if value != getattr(node, name)}
        # Without a change the generation stays, so that the If-Match of others still holds.
        return Node.of(nodes.change(conn, node_id, act, **changed) if changed else node)

    return context.write(work, body=body)


@router.put("/nodes/{node_id}/scheduling", response_model=Node)
def schedule(node_id: Id, body: Switch, context: Admin, guard: IfMatch) -> JSONResponse:
    """Switch the sale of this node's slots on or off. Existing allocations stay."""

    def work(conn: Connection, act: Act) -> Node:
        guard.check(conn, "node", node_id)
        host.set_scheduling(conn, node_id, body.enabled, act)
        return Node.of(nodes.get(conn, node_id))

    return context.write(work, body=body)


@router.get("/settings/slice-scheduling")
def site_scheduling(context: Admin) -> Scheduling:
    """Whether this site sells slices."""
    return Scheduling(enabled=context.read(settings.site_scheduling))


@router.put("/settings/slice-scheduling", response_model=Scheduling)
def schedule_site(body: Switch, context: Admin) -> JSONResponse:
    """Switch the sale of slices at this site on or off."""

    def work(conn: Connection, act: Act) -> Scheduling:
        settings.set_site_scheduling(conn, body.enabled, act)
        return Scheduling(enabled=settings.site_scheduling(conn))

    return context.write(work, body=body)


@enrolment_router.post(
    "/admin/nodes/{node_id}/enrollment-token", status_code=201, response_model=IssuedEnrolment
)
def issue(node_id: Id, context: Admin, body: Reasoned | None = None) -> JSONResponse:
    """A token for one enrolment, and the userdata script that uses it. Shown once."""

    def work(conn: Connection, act: Act) -> IssuedEnrolment:
        node = nodes.get(conn, node_id)
        nodes.require_living(node)
        record, secret = tokens.issue_enrolment(conn, node_id, act)
        script = enrolment.site_userdata(context.settings, node_id, secret, user=node.ssh_user)
        return IssuedEnrolment.of(record, token=secret, userdata=script)

    return context.write(work, body=body, status=201, secrets=frozenset({"token", "userdata"}))


@enrolment_router.post("/admin/nodes/{node_id}/certificate", status_code=202, response_model=Task)
def renew(node_id: Id, context: Admin, body: Reasoned | None = None) -> JSONResponse:
    """Sign the host's key again and install the certificate. The service also renews certificates
    by itself in time.

    Refused with `host_certificate_expired` after the certificate has expired: issue an enrolment
    token instead.
    """

    def work(conn: Connection, act: Act) -> Task:
        nodes.get(conn, node_id)
        return Task.of(host.queue_renewal(conn, context.settings, node_id, act))

    return context.write(work, body=body, status=202)


@enrolment_router.post("/nodes/{node_id}/userdata", response_class=PlainTextResponse)
def fetch(node_id: Id, body: Ticket, request: Request) -> PlainTextResponse:
    """Called by a machine that MAAS has installed. The ticket in the body is its only credential,
    and is accepted once, from the machine's address. The answer is the script that enrols it.
    """
    configuration: Settings = request.app.state.settings
    address = request.client.host if request.client else ""
    act = Act(f"node:{node_id}", "ticket redeemed", correlation_id(request), role="node")

    def work(conn: Connection) -> str:
        tokens.redeem_ticket(conn, node_id, body.ticket, address=address)
        node = nodes.get(conn, node_id)
        nodes.require_living(node)
        _, secret = tokens.issue_enrolment(conn, node_id, act)
        return enrolment.site_userdata(configuration, node_id, secret, user=node.ssh_user)

    # Before anything is written, as in `enrol`.
    with reading(request.app.state.engine) as conn:
        tokens.require_ticket(conn, node_id, body.ticket, address=address)
    script = retrying(request.app.state.engine, work)
    return PlainTextResponse(script, headers={"Cache-Control": "no-store"})


@enrolment_router.post("/nodes/{node_id}/enrol")
def enrol(node_id: Id, body: EnrolmentBody, request: Request) -> Enrolment:
    """Called by the host itself. The token in the body is its only credential."""
    parsed = enrolment.EnrolmentRequest.parse(body.model_dump())
    if parsed.node_id != node_id:
        raise Problem(
            "enrolment_invalid",
            422,
            expected=f"node_id {node_id}, as in the path",
            found=parsed.node_id,
            remedy="run the enrolment script as it was generated",
        )
    configuration: Settings = request.app.state.settings
    engine = request.app.state.engine
    # Before anything is written: callers without a token must not keep the database or the disk
    # busy.
    with reading(engine) as conn:
        tokens.require_enrolment(conn, node_id, parsed.token)
    trust = ca.open_trust(configuration.state_dir)
    act = Act(f"node:{node_id}", "node certificate enrolled", correlation_id(request), role="node")
    used_by = {"address": request.client.host if request.client else "", "host": parsed.hostname}

    # One transaction: a certificate that cannot be recorded is never handed out, and a token
    # whose certificate could not be made is not used up.
    def work(conn: Connection) -> Record:
        tokens.redeem_enrolment(conn, node_id, parsed.token, used_by=used_by)
        tokens.check_host_key(conn, node_id, parsed.host_key)
        node = nodes.get(conn, node_id)
        profile = hardware_profile(configuration.profiles_dir, node.profile)
        answer = enrolment.answer(trust, parsed, preflight=preflight.document(profile))
        key, certificate = parsed.host_key, answer["certificate"]
        identity = {"machine_id": parsed.machine_id, "boot_id": parsed.boot_id}
        host.enrolled(conn, node_id, act, host_key=key, **identity)
        host.record_certificate(conn, node_id, act, certificate=certificate, public_key=key)
        replaced = act.because("the host enrolled with another key")
        tokens.replace_certificates(conn, node_id, key, replaced)
        fabric = {"interface": parsed.fabric_interface, "address": parsed.fabric_address}
        host.learn_fabric(conn, node_id, act, **fabric)
        return answer

    answer = retrying(engine, work)
    # After the transaction: an enrolment that failed must not revoke a key. If the service ends
    # between the two, the next run revokes it.
    with reading(engine) as conn:
        revoked = tokens.revoked_host_keys(conn)
    ca.revoke_host(trust, *revoked)
    return Enrolment.of(answer)


def _require_profile(configuration: Settings, name: str) -> None:
    hardware.check_new(hardware_profile(configuration.profiles_dir, name), name)
