"""What the service logs: one line per event, with the request and the task that it belongs to."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime

from reconciler.settings import Settings

# What is at hand where the line is written. Threads of a pool begin without either.
correlation_id: ContextVar[str] = ContextVar("correlation_id", default="")
task_id: ContextVar[str] = ContextVar("task_id", default="")

_TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s%(ids)s"
# These log whole URLs, in which a download link's query is a key, or every step of theirs.
_QUIET = ("httpx", "uvicorn.access", "alembic")


@contextmanager
def about(*, task: str = "", correlation: str = "") -> Iterator[None]:
    """Lines written meanwhile, by this thread, name the task and the request it came from."""
    tokens = ((task_id, task_id.set(task)), (correlation_id, correlation_id.set(correlation)))
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)


def configure(settings: Settings) -> None:
    """Log to standard error, as the settings say; what was configured before goes."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_with_ids)
    handler.setFormatter(Json() if settings.log_format == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def ids() -> dict[str, str]:
    """The ids that are known here."""
    known = {"correlation_id": correlation_id.get(), "task_id": task_id.get()}
    return {name: value for name, value in known.items() if value}


class Json(logging.Formatter):
    """An object per line: at, level, logger, message, error with its traceback, and the ids."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "known_ids", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        # ASCII: no line end or terminal sequence of a host's gets through.
        return json.dumps(line)


def _with_ids(record: logging.LogRecord) -> bool:
    known = ids()
    record.known_ids = known
    # A line that names an id itself does not get it a second time.
    said = record.getMessage()
    more = [f"{name}={value}" for name, value in known.items() if value not in said]
    record.ids = " ".join(["", *more])
    return True
