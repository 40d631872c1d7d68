"""Enrolment of a host: its request, the answer with its certificate, and the userdata script.

The host sends its public key with a single-use token. Whether the token is valid is decided by the
records.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from reconciler.settings import Settings, is_exposed
from reconciler.trust.ca import OPERATOR, Trust, certify_host, user_ca
from reconciler.trust.keygen import TrustError, public_key

_SCRIPT = Path(__file__).with_name("enrol.sh")
_FETCH = Path(__file__).with_name("fetch.sh")
_MARK = "# @values@\n"

# None of these patterns admits a character that ends a quoted string of the shell.
_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TOKEN = re.compile(r"[A-Za-z0-9._~-]{16,512}")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_PEM = re.compile(r"(-----BEGIN CERTIFICATE-----\n[A-Za-z0-9+/=\n]+\n-----END CERTIFICATE-----\n)+")
_ADDRESS = re.compile(r"[0-9a-f.:]{2,45}")
_URL = re.compile(r"https?://[A-Za-z0-9.:\[\]-]+(/[A-Za-z0-9._~/-]*)?")
_FIELDS = {
    "token": _TOKEN,
    "node_id": _NODE_ID,
    "machine_id": re.compile(r"[0-9a-f]{32}"),
    "boot_id": re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
    "hostname": re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252})"),
}
_FABRIC_INTERFACE = re.compile(r"([a-z][a-z0-9]{0,14})?")


@dataclass(frozen=True)
class EnrolmentRequest:
    """Identity that a host reports. hostname is informational only.

    fabric_interface, fabric_address: interface and address on the InfiniBand fabric, if configured.
    """

    token: str = field(repr=False)
    node_id: str
    host_key: str
    machine_id: str
    boot_id: str
    hostname: str
    fabric_interface: str = ""
    fabric_address: str = ""

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> EnrolmentRequest:
        for name, pattern in _FIELDS.items():
            # An error must not repeat the token.
            _match(name, pattern, body.get(name), show=name != "token")
        fabric = {name: body.get(name, "") for name in ("fabric_interface", "fabric_address")}
        _match("fabric_interface", _FABRIC_INTERFACE, fabric["fabric_interface"])
        _check_interface_address("fabric_address", fabric["fabric_address"])
        key = body.get("host_key")
        return cls(
            **{name: body[name] for name in _FIELDS},
            **fabric,
            host_key=public_key(key if isinstance(key, str) else "", whole=True),
        )


def answer(
    trust: Trust, request: EnrolmentRequest, *, preflight: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Response body of an enrolment. Redeem the token first: the answer holds the certificate.

    preflight: the firmware check of the first boot (`preflight.document`); None runs none.
    """
    return {
        "certificate": certify_host(trust, request.host_key, request.node_id),
        "user_ca": user_ca(trust),
        "principals": [OPERATOR],
        "preflight": preflight,
    }


def read_pin(file: Path | None) -> str:
    """The certificates of a PEM file without anything else; "" when no file is set."""
    if file is None:
        return ""
    try:
        text = file.read_text(encoding="utf-8", errors="replace") + "\n"
        # The file may hold comments, and a private key, which must never reach a host.
        certificates = "".join(match.group() for match in _PEM.finditer(text))
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=certificates)
    except (OSError, ValueError) as error:
        raise TrustError(
            "enrolment_ca_unreadable",
            expected=f"PEM certificates in {file}",
            found=f"no certificate that TLS can use: {error}",
            remedy="set GPUAAS_ENROLMENT_CA_FILE to a file with the CA's certificates, or unset it",
        ) from error
    return certificates


def userdata(
    api_url: str,
    node_id: str,
    token: str,
    *,
    user: str = "root",
    ca: str = "",
    address: str = "",
    insecure: bool = False,
    ticket: bool = False,
) -> str:
    """A cloud-init script that enrols the machine it runs on as `node_id`.

    It contains the token: deliver it over a private channel and keep no copy.
    ticket: the token is a ticket, and the script fetches the script with a token by it.
    ca: PEM certificates (`read_pin`), the only CAs accepted for the API; "" accepts those that the
    machine trusts. A pinned CA requires an https URL.
    address: IP address of the API, for a machine whose DNS does not resolve the name; "" uses DNS.
    insecure: accept an http URL of another machine, which the script otherwise refuses.
    """
    url = api_url.rstrip("/")
    _match("api_url", _URL, url)
    _match("node_id", _NODE_ID, node_id)
    _match("token", _TOKEN, token, show=False)
    _match("user", _USER, user)
    if ca:
        _match("ca", _PEM, ca, show=False)
        _require_https(url)
    if address:
        _match("address", _ADDRESS, address)
    parts = urlsplit(url)
    name = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    values = {
        "node_id": node_id,
        "api_url": url,
        "api_name": name,
        "api_at": f"{name}:{port}:{address}" if address else "",
        "protocols": "=https" if is_exposed(url) and not insecure else "=http,https",
        "login_user": user,
        "token": token,
        "ca": ca,
    }
    lines = "".join(f"{key}='{value}'\n" for key, value in values.items())
    script = _FETCH if ticket else _SCRIPT
    return script.read_text(encoding="utf-8").replace(_MARK, lines, 1)


def site_userdata(
    settings: Settings, node_id: str, token: str, *, user: str, ticket: bool = False
) -> str:
    """`userdata` with the site's settings of enrolment."""
    return userdata(
        settings.url_for_hosts,
        node_id,
        token,
        user=user,
        ca=read_pin(settings.enrolment_ca_file),
        address=str(settings.public_address or ""),
        insecure=settings.enrolment_insecure,
        ticket=ticket,
    )


def _require_https(url: str) -> None:
    if not url.startswith("https://"):
        raise TrustError(
            "enrolment_pin_without_tls",
            expected="an https URL of the API, because a CA is pinned for it",
            found=url,
            remedy="set GPUAAS_PUBLIC_URL to an https URL, or unset GPUAAS_ENROLMENT_CA_FILE",
        )


def _check_interface_address(name: str, value: object) -> None:
    """Accept an empty value, or an IPv4 address with a prefix length."""
    try:
        # The comparison refuses other spellings, such as a netmask.
        if value == "" or (isinstance(value, str) and str(IPv4Interface(value)) == value):
            return
    except ValueError:
        pass
    raise TrustError(
        "enrolment_invalid",
        expected=f"{name}: an IPv4 address with a prefix length, such as 10.20.0.7/16",
        found=repr(value)[:100],
        remedy="run the enrolment script as it was generated",
    )


def _match(name: str, pattern: re.Pattern[str], value: object, *, show: bool = True) -> None:
    if isinstance(value, str) and pattern.fullmatch(value):
        return
    raise TrustError(
        "enrolment_invalid",
        expected=f"{name}: text that matches {pattern.pattern}",
        found=repr(value)[:100] if show else "another value",
        remedy="run the enrolment script as it was generated",
    )
