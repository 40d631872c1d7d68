"""Enrolment: an admin hands out a token, the host comes back with it and gets its certificate."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import StringConstraints
from sqlalchemy import Connection

from reconciler.api import correlation, queueing, secrecy, views
from reconciler.api.models import Body, Id, Reasoned
from reconciler.api.security import Admin
from reconciler.db.engine import reading, retrying
from reconciler.lifecycle import host
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.profiles import hardware_profile
from reconciler.records import nodes, tokens
from reconciler.trust import ca, enrolment, preflight

router = APIRouter(tags=["enrolment"])

Word = Annotated[str, StringConstraints(max_length=4096)]


class EnrolmentBody(Body):
    """What a host says of itself; the trust layer judges every field."""

    token: Word
    node_id: Word
    host_key: Word
    machine_id: Word
    boot_id: Word
    hostname: Word
    # What it has on the InfiniBand fabric already; most have nothing before bootstrap.
    fabric_interface: Word = ""
    fabric_address: Word = ""


@router.post("/admin/nodes/{node_id}/enrollment-token", status_code=201)
def issue(node_id: Id, context: Admin, body: Reasoned | None = None) -> JSONResponse:
    """A token for one enrolment, and the userdata script that uses it. Shown once."""
    body = body or Reasoned()
    act = context.act(body.reason)

    def work(conn: Connection) -> tuple[dict[str, Any], dict[str, Any]]:
        node = nodes.get(conn, node_id)
        record, secret = tokens.issue_enrolment(conn, node_id, act)
        script = enrolment.userdata(
            context.settings.url_for_hosts,
            node_id,
            secret,
            user=node["ssh_user"],
            ca=enrolment.read_pin(context.settings.enrolment_ca_file),
            address=str(context.settings.public_address or ""),
        )
        return views.record(record), {"token": secret, "userdata": script}

    return secrecy.write(context, work, body=body)


@router.post("/admin/nodes/{node_id}/certificate", status_code=202)
def renew(node_id: Id, context: Admin, body: Reasoned | None = None) -> JSONResponse:
    """Sign the host's key anew and put the certificate there; it happens by itself in time too.

    Refused with `host_certificate_expired` when it is too late for that: hand out a token instead.
    """
    body = body or Reasoned()
    act = context.act(body.reason)

    def work(conn: Connection) -> dict[str, Any]:
        nodes.get(conn, node_id)
        task = host.queue_renewal(conn, context.settings, node_id, act)
        return queueing.told(conn, task, act)

    return context.write(work, body=body, status=202)


@router.post("/nodes/{node_id}/enrol")
def enrol(node_id: Id, body: EnrolmentBody, request: Request) -> dict[str, Any]:
    """Called by the host itself; the token in the body is its only credential."""
    asked = enrolment.EnrolmentRequest.parse(body.model_dump())
    if asked.node_id != node_id:
        raise Problem(
            "enrolment_invalid",
            422,
            expected=f"node_id {node_id}, as in the path",
            found=asked.node_id,
            remedy="run the enrolment script as it was generated",
        )
    settings = request.app.state.settings
    trust = ca.open_trust(settings.state_dir)
    act = Act(f"node:{node_id}", "node certificate enrolled", correlation.of(request), role="node")
    used_by = {"address": request.client.host if request.client else "", "host": asked.hostname}

    # One transaction: a certificate that cannot be recorded is never handed out, and a token
    # whose certificate could not be made is not used up.
    def work(conn: Connection) -> dict[str, Any]:
        tokens.redeem_enrolment(conn, node_id, asked.token, used_by=used_by)
        tokens.check_host_key(conn, node_id, asked.host_key)
        node = nodes.get(conn, node_id)
        profile = hardware_profile(settings.profiles_dir, node["profile"])
        answer = enrolment.answer(trust, asked, preflight=preflight.document(profile))
        certificate = ca.read_certificate(answer["certificate"])
        tokens.record_certificate(
            conn,
            node_id,
            act,
            serial=str(certificate.serial),
            public_key=asked.host_key,
            certificate=answer["certificate"],
            principals=certificate.principals,
            valid_until=certificate.valid_before.timestamp(),
        )
        tokens.replace_certificates(conn, node_id, asked.host_key, act)
        host.enrolled(
            conn,
            node_id,
            act,
            machine_id=asked.machine_id,
            host_key=asked.host_key,
            boot_id=asked.boot_id,
        )
        host.learn_fabric(
            conn,
            node_id,
            act,
            interface=asked.fabric_interface,
            address=asked.fabric_address,
        )
        return answer

    engine = request.app.state.engine
    answer = retrying(engine, work)
    # After the records: a key must not be shut out for an enrolment that did not happen. Should the
    # service end between the two, the next launch of a run does it.
    with reading(engine) as conn:
        revoked = tokens.revoked_host_keys(conn)
    ca.revoke_host(trust, *revoked)
    return answer
