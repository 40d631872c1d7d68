"""Checks of the listen addresses and of the URL for hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from reconciler.doctor.finding import Finding, ok, refused, warn
from reconciler.model.errors import Problem
from reconciler.service import addresses
from reconciler.service.addresses import Address
from reconciler.settings import Settings


def listeners(settings: Settings) -> Iterator[Finding]:
    """The API, and the operators' listener if there is one."""
    addresses_of: tuple[tuple[str, Callable[[Settings], Address | None], str], ...] = (
        ("listen", addresses.api, "API, with tokens"),
        ("operator_listen", addresses.operators, "operators on this machine, without a token"),
    )
    for check, parse, users in addresses_of:
        try:
            address = parse(settings)
        except Problem as refusal:
            yield refused(check, refusal)
            continue
        text = "off" if address is None else f"{addresses.host_port(address)}: {users}"
        if check == "listen" and not addresses.is_local(address):
            yield warn(
                check,
                f"{text}, unencrypted on the network",
                expected="a loopback address behind a proxy that terminates TLS",
                remedy="GPUAAS_LISTEN=127.0.0.1:8080 and docs/operations.md, TLS; nothing if only"
                " the service uses that network",
            )
            continue
        yield ok(check, text)
    try:
        yield ok("public_url", f"hosts reach the API at {settings.url_for_hosts}")
    except Problem as missing:
        yield warn(
            "public_url",
            f"{missing.found}: no host can enrol",
            expected=missing.expected,
            remedy=missing.remedy,
        )
