"""Where the service listens: the settings' text, and nothing that it must not be."""

from __future__ import annotations

from ipaddress import ip_address

from reconciler.model.errors import Problem
from reconciler.settings import Settings

Address = tuple[str, int]


def api(settings: Settings) -> Address:
    """Host and port of the API."""
    found = _split(settings.listen)
    if found is None:
        raise Problem(
            "listen_invalid",
            400,
            expected="GPUAAS_LISTEN as host:port",
            found=settings.listen,
            remedy="for example 127.0.0.1:8080",
        )
    return found


def operators(settings: Settings) -> Address | None:
    """Loopback address and port of the operators' listener; None when there is none.

    By its number: what a name means is decided elsewhere, and whoever connects needs no token.
    """
    text = settings.operator_listen
    if not text:
        return None
    found = _split(text)
    try:
        if found is not None and ip_address(found[0]).is_loopback:
            return found
    except ValueError:
        pass
    raise Problem(
        "operator_listen_invalid",
        400,
        expected="GPUAAS_OPERATOR_LISTEN as a loopback address and a port: whoever can connect"
        " needs no token there",
        found=text,
        remedy="127.0.0.1:8008 or [::1]:8008; from elsewhere use GPUAAS_LISTEN with a token",
    )


def local(address: Address | None) -> bool:
    """Whether nobody on another machine reaches it. A name counts as what it mostly means."""
    if address is None:
        return True
    try:
        return ip_address(address[0].strip("[]")).is_loopback
    except ValueError:
        return address[0] == "localhost"


def told(address: Address) -> str:
    """As it stands in a setting."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split(text: str) -> Address | None:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        return None
    return host.strip("[]"), int(port)
