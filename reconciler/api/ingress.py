"""Public ingress of a slice: rules by which its host forwards a public port to the guest."""

from __future__ import annotations

from functools import partial
from ipaddress import IPv4Address, IPv4Network, collapse_addresses
from typing import Annotated, Self

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, AwareDatetime, Field, StringConstraints
from sqlalchemy import Connection as DatabaseConnection

from reconciler.api.http import IfMatch, PageOf, Paging, tagged
from reconciler.api.models import Answer, Body, Id, Integer, Moment, Reason
from reconciler.api.security import Member
from reconciler.db import schema
from reconciler.lifecycle import ingress
from reconciler.model.act import Act
from reconciler.model.states import IngressProtocol, IngressState

router = APIRouter(
    prefix="/projects/{project_id}/allocations/{allocation_id}/ingress", tags=["ingress"]
)

Port = Annotated[Integer, Field(ge=1, le=65_535)]
Address = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9]{1,3}(\.[0-9]{1,3}){3}$"),
    AfterValidator(lambda text: str(IPv4Address(text))),
]
Network = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,3}(\.[0-9]{1,3}){3}(/[0-9]{1,2})?$")]


def _networks(texts: list[str]) -> list[str]:
    """The networks in their shortest form. Host bits are an error, because either the address or
    the length is wrong.
    """
    return [str(network) for network in collapse_addresses(map(IPv4Network, texts))]


Sources = Annotated[list[Network], Field(min_length=1, max_length=32), AfterValidator(_networks)]


class NewIngressRule(Body):
    """A public port for a port of the guest. Clients are named by their networks, 0.0.0.0/0 for
    all. The guest's port must answer when the rule is applied.
    """

    protocol: IngressProtocol = IngressProtocol.TCP
    public_address: Address
    public_port: Port
    guest_port: Port
    sources: Sources
    expires_at: AwareDatetime
    reason: Reason = ""


class IngressRule(Answer):
    """A rule of public ingress, and whether its host forwards."""

    id: str
    allocation_id: str
    protocol: IngressProtocol
    public_address: str
    public_port: int
    guest_port: int
    sources: list[str]
    reason: str
    expires_at: Moment
    state: IngressState
    state_since: Moment
    deadline_at: Moment | None = Field(description="When the present state is overdue.")
    generation: Annotated[int, Field(ge=0)]
    failure_code: str = Field(description="Empty unless it failed.")
    task_id: str | None
    correlation_id: str
    created_at: Moment
    ended_at: Moment | None

    @classmethod
    def of_rule(cls, rule: schema.IngressRule) -> Self:
        """The answer for a rule. Only the code of a failure: its text can name host addresses."""
        return cls.of(rule, failure_code=str(rule.failure.get("code", "")))


@router.post("", status_code=201, response_model=IngressRule)
def create(
    project_id: Id, allocation_id: Id, body: NewIngressRule, context: Member
) -> JSONResponse:
    """Request a rule. It is `applied` once the guest's port has answered, until expires_at."""
    wish = ingress.NewRule(
        protocol=body.protocol.value,
        public_address=body.public_address,
        public_port=body.public_port,
        guest_port=body.guest_port,
        sources=body.sources,
        expires_at=body.expires_at.timestamp(),
    )
    site = context.settings.ingress

    def work(conn: DatabaseConnection, act: Act) -> IngressRule:
        rule = ingress.request(conn, project_id, allocation_id, wish, act, site=site)
        return IngressRule.of_rule(rule)

    reason = "requested by its project"
    return context.write(work, body=body, reason=reason, status=201, key_required=True)


@router.get("")
def list_rules(
    project_id: Id, allocation_id: Id, context: Member, paging: Paging
) -> PageOf[IngressRule]:
    """The allocation's rules, ended ones included, the newest first."""
    read = partial(ingress.every, project_id=project_id, allocation_id=allocation_id)
    return context.page(
        paging, ingress.ORDER, lambda conn, page: read(conn, page=page), IngressRule.of_rule
    )


@router.get("/{rule_id}", response_model=IngressRule)
def show(project_id: Id, allocation_id: Id, rule_id: Id, context: Member) -> JSONResponse:
    """One rule."""
    rule = context.read(lambda conn: ingress.get(conn, project_id, allocation_id, rule_id))
    return tagged(IngressRule.of_rule(rule))


@router.delete("/{rule_id}", response_model=IngressRule)
def remove(
    project_id: Id, allocation_id: Id, rule_id: Id, context: Member, guard: IfMatch
) -> JSONResponse:
    """Remove the rule and cut its connections. Its port is free once it is `removed`."""

    def work(conn: DatabaseConnection, act: Act) -> IngressRule:
        ingress.get(conn, project_id, allocation_id, rule_id)
        guard.check(conn, "ingress_rule", rule_id)
        return IngressRule.of_rule(ingress.remove(conn, rule_id, act))

    return context.write(work, reason="removed by its project")
