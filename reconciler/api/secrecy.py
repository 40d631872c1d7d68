"""Answers that hold a secret: given once, remembered nowhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi.encoders import jsonable_encoder
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy import Connection

from reconciler.api.context import Context
from reconciler.model.errors import Problem

Document = dict[str, Any]


def write(
    context: Context,
    work: Callable[[Connection], tuple[Document, Document]],
    *,
    body: BaseModel,
) -> JSONResponse:
    """`work` gives what may be remembered and what may not; both together are the answer.

    The memory of idempotency keys is a table: a secret in it would be readable by whoever reads
    the database. So a repetition makes nothing new and cannot show the secret again either.
    """
    secret: Document = {}

    def public(conn: Connection) -> Document:
        record, hidden = work(conn)
        secret.clear()
        secret.update(hidden)
        return record

    answer = context.answer(public, body=body, status=201)
    if answer.replayed:
        raise Problem(
            "secret_shown_once",
            409,
            expected="the first answer to have been kept",
            found="a repetition of it; the secret is not stored",
            remedy="issue another one with a new idempotency key, and revoke the first",
            detail={"issued": answer.body},
        )
    return JSONResponse(jsonable_encoder(answer.body | secret), answer.status)
