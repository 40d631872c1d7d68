"""The loop of the recovery policy: off by default, one move per allocation and look."""

from __future__ import annotations

import logging
from functools import partial

from sqlalchemy import Engine

from reconciler.domain.recovery import Move
from reconciler.settings import Settings
from reconciler.store import policy
from reconciler.store.engine import reading, retrying

log = logging.getLogger("gpuaas.recovery")


def recover_blocked(engine: Engine, _settings: Settings) -> None:
    """Do the next move about every allocation with blocked slots, if the site wants that."""
    with reading(engine) as conn:
        found = policy.cases(conn) if policy.read(conn).enabled else []
    for case in found:
        if case.move == Move.WAIT:
            continue
        try:
            done = retrying(engine, partial(policy.step, allocation_id=case.allocation_id))
        except Exception:
            # One that cannot be handled must not keep all others waiting.
            log.exception("recovery of allocation %s is left as it is", case.allocation_id)
            continue
        if done is not None:
            log.info("recovery of %s: %s, %s", done.allocation_id, done.move, done.why)
