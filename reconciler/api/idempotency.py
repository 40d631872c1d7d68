"""The key under which a caller repeats an act without doing it twice."""

from __future__ import annotations

import re
from collections.abc import Mapping

from reconciler.model.errors import Problem

HEADERS = ("Idempotency-Key", "X-Idempotency-Key")
_KEY = re.compile(r"[!-~]{1,255}")


def key(headers: Mapping[str, str]) -> str:
    """The request's key, under either of its two names; "" without one."""
    given = {headers[name] for name in HEADERS if name in headers}
    if not given:
        return ""
    if len(given) > 1:
        raise _invalid("one key, in one of its two headers", "two different keys")
    (found,) = given
    if not _KEY.fullmatch(found):
        raise _invalid("1 to 255 visible ASCII characters", f"{len(found)} characters of others")
    return found


def _invalid(expected: str, found: str) -> Problem:
    return Problem(
        "idempotency_key_invalid",
        400,
        expected=expected,
        found=found,
        remedy="make a new key (a UUID) for each act, and repeat it only to repeat that act",
    )
