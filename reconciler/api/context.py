"""What a handler works with: the caller's act, and one transaction for all it records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from fastapi.encoders import jsonable_encoder
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy import Connection, Engine

from reconciler.api import correlation, guards, idempotency
from reconciler.db.engine import reading, retrying
from reconciler.db.idempotency import Answer, Call, once
from reconciler.model.act import Act
from reconciler.settings import Settings

T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """One authorised request. holder: the token's id, for idempotency keys are the token's own.

    allowed: whether its token would open it still, for answers that go on.
    """

    request: Request
    actor: str
    role: str
    holder: str
    allowed: Callable[[], bool]

    @property
    def settings(self) -> Settings:
        settings: Settings = self.request.app.state.settings
        return settings

    @property
    def engine(self) -> Engine:
        engine: Engine = self.request.app.state.engine
        return engine

    def act(self, reason: str = "") -> Act:
        """The caller's act, for history and audit."""
        return Act(self.actor, reason, correlation.of(self.request), role=self.role)

    def read(self, work: Callable[[Connection], T]) -> T:
        """Answer from one consistent picture."""
        with reading(self.engine) as conn:
            return work(conn)

    def write(
        self,
        work: Callable[[Connection], Any],
        *,
        body: BaseModel | None = None,
        status: int = 200,
        key_required: bool = False,
    ) -> JSONResponse:
        """Do the work in one transaction; with an idempotency key, once and for all."""
        answer = self.answer(work, body=body, status=status, key_required=key_required)
        headers = guards.tag(answer.body)
        if answer.replayed:
            headers["Idempotency-Replayed"] = "true"
        return JSONResponse(answer.body, answer.status, headers=headers)

    def answer(
        self,
        work: Callable[[Connection], Any],
        *,
        body: BaseModel | None = None,
        status: int = 200,
        key_required: bool = False,
    ) -> Answer:
        """As `write`, for handlers that have something to add to what is remembered."""

        def done(conn: Connection) -> Answer:
            found = work(conn)
            if isinstance(found, BaseModel):
                return Answer(status, found.model_dump(mode="json"))
            return Answer(status, jsonable_encoder(found))

        key = idempotency.key(self.request.headers)
        if not key and not key_required:
            return retrying(self.engine, done)
        scope = f"{self.request.method} {self.request.url.path} {self.holder}"
        content: Mapping[str, Any] = {} if body is None else body.model_dump(mode="json")
        return once(self.engine, Call(scope, key, dict(content)), done)
