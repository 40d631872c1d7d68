"""Logging of the service: a line per event, with the ids of its request and its task."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from reconciler.settings import Settings

# The ids in force where a line is written. Threads of a pool start without them.
_ids: ContextVar[dict[str, str]] = ContextVar("ids", default={})  # noqa: B039 - never changed

_TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s%(ids)s"
# The longest line. A path has up to 64 KiB, a host's answer more.
_LONGEST = 16_000
# The longest traceback, whose last words may be a host's. One of our own has some kilobytes.
_LONGEST_ERROR = 64_000
# Some log whole URLs, and the query of a download link is a key. One logs the commands of tenants.
# Others log every step, and steps of starting after this program's own words.
_QUIET = ("httpx", "asyncssh", "uvicorn.access", "uvicorn.error", "alembic")


@contextmanager
def about(*, task: str = "", correlation: str = "") -> Iterator[None]:
    """Add the ids of a task and of its request to the lines of this thread."""
    values = {"correlation_id": correlation, "task_id": task}
    token = _ids.set({name: value for name, value in values.items() if value})
    try:
        yield
    finally:
        _ids.reset(token)


def configure(settings: Settings) -> None:
    """Log to standard error as the settings say, in place of any earlier configuration."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_with_ids)
    handler.setFormatter(Json() if settings.log_format == "json" else Text(_TEXT))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def ids() -> dict[str, str]:
    """The ids in force, without empty values."""
    return _ids.get()


class Text(logging.Formatter):
    """A line per event, which no path, name or output of a host can end or colour.

    Lines of a traceback are indented, so that none of them looks like an event.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        # Not splitlines(), which also splits at characters that a terminal does not.
        lines = _shortened(super().formatException(ei), _LONGEST_ERROR).split("\n")
        return "\n".join(f"  {_printable(line)}" for line in lines)


class Json(logging.Formatter):
    """A JSON object per line: at, level, logger, message, error with its traceback, and the ids."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _shortened(record.getMessage()),
            **getattr(record, "context_ids", {}),
        }
        if record.exc_info:
            line["error"] = _shortened(self.formatException(record.exc_info), _LONGEST_ERROR)
        # ASCII, so that a line end or a terminal sequence from a host is escaped.
        return json.dumps(line)


def _printable(text: str) -> str:
    """The text with every control, separator and direction character escaped, and cut if long."""
    text = _shortened(text)
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def _shortened(text: str, longest: int = _LONGEST) -> str:
    more = len(text) - longest
    return f"{text[:longest]} [{more} more characters]" if more > 0 else text


def _with_ids(record: logging.LogRecord) -> bool:
    context = ids()
    record.context_ids = context
    # An id that the message contains is not repeated.
    message = record.getMessage()
    more = [f"{name}={value}" for name, value in context.items() if value not in message]
    record.ids = " ".join(["", *more])
    return True
