"""`gpuaas serve` with a timing of each request by parts; BENCH_TIMES names the output file.

Each POST adds a line of JSON to it: seconds in each part, less those in parts that it called.
statements: until the database has answered. commits: the ends of transactions. launch: the rest of
the store's `allocate`. http: the rest, from the parsed head to the last byte given to the socket.
The time of other requests and of loops is not counted here, but a request may wait for it.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from fastapi import FastAPI
from sqlalchemy.engine.default import DefaultDialect

from reconciler.cli.main import main
from reconciler.lifecycle import launch

T = TypeVar("T")
WHERE: tuple[tuple[str, Any, str], ...] = (
    ("launch", launch, "allocate"),
    ("statements", DefaultDialect, "do_execute"),
    ("statements", DefaultDialect, "do_executemany"),
    ("commits", DefaultDialect, "do_commit"),
)
PARTS = ("http", "launch", "statements", "commits")


@dataclass
class Request:
    """seconds: of each part alone. inside: seconds of nested parts, for each part that is still
    open."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    inside: list[float] = field(default_factory=lambda: [0.0])


# A thread that works for a request has its context; the loops of a service have none.
_request: ContextVar[Request | None] = ContextVar("request", default=None)


def timed(part: str, work: Callable[..., T]) -> Callable[..., T]:
    """Return the function, timed as this part of the request for which it works."""

    def call(*given: Any, **named: Any) -> T:
        request = _request.get()
        if request is None:
            return work(*given, **named)
        request.inside.append(0.0)
        began = time.perf_counter()
        try:
            return work(*given, **named)
        finally:
            whole = time.perf_counter() - began
            request.seconds[part] += whole - request.inside.pop()
            request.inside[-1] += whole

    return call


def counted(output: Path, answer: Callable[..., Any]) -> Callable[..., Any]:
    """Return the application, which records the times of each POST."""

    async def call(app: FastAPI, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("method") != "POST":
            await answer(app, scope, receive, send)
            return
        request = Request()
        _request.set(request)
        began = time.perf_counter()
        await answer(app, scope, receive, send)
        request.seconds["http"] = time.perf_counter() - began - request.inside[0]
        with output.open("a") as lines:
            lines.write(json.dumps(request.seconds) + "\n")

    return call


if __name__ == "__main__":
    with ExitStack() as patches:
        for part, owner, name in WHERE:
            patches.enter_context(patch.object(owner, name, timed(part, getattr(owner, name))))
        app = counted(Path(os.environ["BENCH_TIMES"]), FastAPI.__call__)
        patches.enter_context(patch.object(FastAPI, "__call__", app))
        main()
