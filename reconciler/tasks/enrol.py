"""node.enrol: the host's SSH key certified anew before the old certificate ends.

The key is the one that the records have, and the way to the host is the one which the old
certificate still vouches for: nobody is trusted who was not before. A host whose certificate has
ended comes back by a new enrolment (reconciler/trust/enrolment.py).
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from sqlalchemy import Connection, Engine

from reconciler.domain.act import Act
from reconciler.domain.states import TaskKind
from reconciler.settings import Settings
from reconciler.store import certificates, tasks, tokens
from reconciler.store.engine import reading, retrying
from reconciler.store.leader import Deposed
from reconciler.tasks.handler import Handler, Record, Work
from reconciler.trust import ca

log = logging.getLogger("gpuaas.certificates")

RENEW_S = ca.HOST_DAYS * 86_400 / 3


def queue(conn: Connection, settings: Settings, node_id: str, act: Act) -> Record:
    """A renewal of the node's certificate, or the one that waits already.

    The certificate is signed here and goes with the task: a run that is attached to again must get
    the same one. It counts once the host has it.
    """
    known = certificates.current(conn, node_id)
    for task in tasks.every(conn, node_id=node_id, kind=TaskKind.NODE_ENROL, limit=1):
        if task["finished_at"] is None:
            return task
    signed = ca.certify_host(ca.open_trust(settings.state_dir), known["public_key"], node_id)
    item = tasks.Enqueue(
        kind=TaskKind.NODE_ENROL,
        node_id=node_id,
        subject_kind="node",
        subject_id=node_id,
        parameters={"certificate": signed.text, "public_key": known["public_key"]},
    )
    return tasks.add(conn, item, act)


def renew_ending(engine: Engine, settings: Settings) -> None:
    """The loop: whoever has a third of the time left, or less, gets a renewal."""
    with reading(engine) as conn:
        found = certificates.ending(conn, RENEW_S)
    for node_id in found:
        act = Act("reconciler", "a third of the certificate's time is left")
        try:
            retrying(engine, partial(queue, settings=settings, node_id=node_id, act=act))
        except Deposed:
            raise
        except Exception:
            # One node that cannot be certified must not keep all others waiting.
            log.exception("certificate of node %s is not renewed; it is tried again", node_id)


def variables(work: Work) -> dict[str, Any]:
    return {"slice_certificate": work.parameters["certificate"]}


def succeed(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    """The host shows the new certificate from now on."""
    text, key = work.parameters["certificate"], work.parameters["public_key"]
    # The host may have enrolled with another key meanwhile: that one counts then.
    tokens.check_host_key(work.conn, work.task["node_id"], key)
    certificate = ca.read_certificate(text)
    tokens.record_certificate(
        work.conn,
        work.task["node_id"],
        work.act.because("certificate renewed", evidence),
        serial=str(certificate.serial),
        public_key=key,
        certificate=text,
        principals=certificate.principals,
        valid_until=certificate.valid_before.timestamp(),
    )
    return evidence


HANDLER = Handler("renew_certificate", variables, succeed)
