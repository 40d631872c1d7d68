"""Where the service listens, and who is let in there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from reconciler.doctor.finding import Finding, ok, refused, warn
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
        except Problem as refusal:
            yield refused(check, refusal)
            continue
        told = "off" if found is None else f"{addresses.host_port(found)}: {who}"
        if check == "listen" and not addresses.is_local(found):
            yield warn(
                check,
                f"{told}, in clear on the way to it",
                expected="a loopback address, and before it a proxy that ends TLS",
                remedy="GPUAAS_LISTEN=127.0.0.1:8080 and docs/operations.md, TLS; nothing, where"
                " that network is the service's alone",
            )
            continue
        yield ok(check, told)
    try:
        yield ok("public_url", f"hosts reach the API at {settings.url_for_hosts}")
    except Problem as missing:
        yield warn(
            "public_url",
            f"{missing.found}: no host can enrol",
            expected=missing.expected,
            remedy=missing.remedy,
        )
