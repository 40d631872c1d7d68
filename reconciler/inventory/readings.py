"""Comparisons with a service of the site: people request them, the leader makes and keeps them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from reconciler.db import clock, journal
from reconciler.db import settings as site
from reconciler.db.engine import reading, retrying
from reconciler.db.leader import Deposed
from reconciler.db.schema import outbox
from reconciler.inventory.compare import Finding
from reconciler.model.act import Act
from reconciler.model.errors import Problem, Refusal
from reconciler.model.storable import shown

# Seconds between two comparisons without an event, and after a failed one.
EVERY_S, RETRY_S = 900.0, 60.0
# Findings that a reading keeps; all are counted.
_MOST_FINDINGS = 500
# Changes that other inventories show. Reports about hosts are frequent and change no state.
_SUBJECTS = ("node", "node_mode", "slot", "allocation")
_REPORTS = ("node.drift", "node.discovered", "node.parity", "allocation.absence")


@dataclass
class Reading:
    """A comparison. event_id: the newest event before it. request_number: of the newest request;
    it serves all earlier ones too. error: the four parts of the refusal that ended it. counts: all
    findings, by code. done: what was written, by kind.
    """

    at: float
    event_id: int = 0
    request_number: int = 0
    applied: bool = False
    complete: bool = False
    error: Mapping[str, Any] | None = None
    nodes: int = 0
    machines: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


@dataclass(frozen=True)
class Due:
    """Reasons for a comparison now. last: the last comparison, empty before the first. requested,
    apply: a person has requested one since then, or one that writes. changed: state has changed
    since then. over: the last comparison is too old.
    """

    at: float
    event_id: int
    request_number: int
    last: Mapping[str, Any]
    requested: bool
    apply: bool

    @property
    def changed(self) -> bool:
        return self.event_id != self.last.get("event_id")

    @property
    def failed(self) -> bool:
        return bool(self.last.get("error"))

    @property
    def over(self) -> bool:
        age = self.at - float(self.last.get("at", 0.0))
        # A clock that was set back must not end the comparisons until it catches up.
        return not 0 <= age < (RETRY_S if self.failed else EVERY_S)


@dataclass(frozen=True)
class Readings:
    """Requests for comparisons with a service, and the last comparison. name: of the service in
    addresses and the audit log. title: its name for people. key: of the setting that holds the last
    comparison.
    """

    name: str
    title: str
    key: str

    def ask(self, conn: Connection, act: Act, *, apply: bool) -> int:
        """Record a request for a comparison; returns its number.

        Requests are only counted, so that one comparison serves all that wait. It writes if one of
        them asks for that.
        """
        last = site.read(conn, self._request, {}, lock=True)
        number = int(last.get("number", 0)) + 1
        apply_number = number if apply else last.get("apply_number", 0)
        site.store(conn, self._request, {"number": number, "apply_number": apply_number})
        action = f"admin.{self.name}.{'sync' if apply else 'diff'}"
        journal.audit(conn, act, action, "site", self.name, detail={"request_number": number})
        return number

    def latest(self, conn: Connection) -> dict[str, Any] | None:
        """The last comparison."""
        document: dict[str, Any] | None = site.read(conn, self.key)
        return document

    def get(self, conn: Connection) -> dict[str, Any]:
        """The last comparison; Problem `<key>_not_found` before the first."""
        document = self.latest(conn)
        if document is None:
            raise Problem(
                f"{self.key}_not_found",
                404,
                expected=f"a comparison with {self.title}",
                found="none yet",
                remedy=f"ask for one (`gpuaas {self.name} diff`)",
            )
        return document

    def due(self, engine: Engine) -> Due:
        """Reasons for a comparison now."""
        with reading(engine) as conn:
            last = self.latest(conn) or {}
            request = site.read(conn, self._request, {})
            event_id = _newest_event(conn, int(last.get("event_id", 0)))
            now = clock.read(conn)
        number, served = int(request.get("number", 0)), int(last.get("request_number", 0))
        apply = int(request.get("apply_number", 0)) > served
        return Due(now, event_id, number, last, number > served, apply)

    @contextmanager
    def failing(self, document: Reading, log: logging.Logger) -> Iterator[None]:
        """Record an exception as the error of the comparison, so that the next one waits.

        An unexpected answer may raise any exception. Without a record the loop would begin anew at
        once, for ever, and people would see an old comparison. A lost term and an unavailable
        database end the pass instead.
        """
        try:
            yield
        except (Deposed, InterfaceError, OperationalError):
            raise
        except Refusal as refusal:
            log.warning("%s: %s", self.title, refusal)
            document.error = {part: shown(text) for part, text in refusal.to_dict().items()}
        except Exception as failure:
            log.exception("the comparison with %s failed", self.title)
            # The text of SQLAlchemy quotes the statement with its values.
            cause = failure.orig if isinstance(failure, DBAPIError) else failure
            document.error = {
                "code": f"{self.name}_comparison_failed",
                "expected": f"a comparison with {self.title} without an error of this service",
                "found": shown(f"{type(cause).__name__}: {cause}"),
                "remedy": f"look in {self.title} at what changed last, and in the log of the"
                f" service at {log.name}",
            }

    def keep(
        self, engine: Engine, document: Reading, findings: Sequence[Finding], log: logging.Logger
    ) -> None:
        """Complete a comparison by its findings and store it as the last."""
        document.counts = dict(Counter(finding.code for finding in findings))
        document.findings = list(findings[:_MOST_FINDINGS])
        retrying(engine, partial(site.store, name=self.key, value=asdict(document)))
        if document.done:
            done = ", ".join(f"{count} {kind}" for kind, count in document.done.items())
            log.info("%s: %s", self.title, done)

    @property
    def _request(self) -> str:
        return f"{self.name}_request"


def _newest_event(conn: Connection, last: int) -> int:
    """The newest change that other inventories show."""
    query = sa.select(outbox.c.id).where(
        outbox.c.id > last, outbox.c.subject_kind.in_(_SUBJECTS), outbox.c.topic.not_in(_REPORTS)
    )
    return conn.execute(query.order_by(outbox.c.id.desc()).limit(1)).scalar() or last
