"""Where the service listens, and who is let in there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from reconciler.doctor.finding import Finding, fail, ok, warn
from reconciler.domain.errors import Problem
from reconciler.service import addresses
from reconciler.service.addresses import Address
from reconciler.settings import Settings


def listeners(settings: Settings) -> Iterator[Finding]:
    """The API, and the operators' listener if there is one."""
    asked: tuple[tuple[str, Callable[[Settings], Address | None], str], ...] = (
        ("listen", addresses.api, "API, with tokens"),
        ("operator_listen", addresses.operators, "operators of this machine, without a token"),
    )
    for check, address, who in asked:
        try:
            found = address(settings)
        except Problem as refused:
            yield fail(check, refused.found, expected=refused.expected, remedy=refused.remedy)
            continue
        yield ok(check, "off" if found is None else f"{addresses.told(found)}: {who}")
    try:
        yield ok("public_url", f"hosts reach the API at {settings.url_for_hosts}")
    except Problem as missing:
        yield warn(
            "public_url",
            f"{missing.found}: no host can enrol",
            expected=missing.expected,
            remedy=missing.remedy,
        )
