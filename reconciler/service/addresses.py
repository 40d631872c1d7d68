"""Listen addresses of the API and of the operators' listener, from the settings."""

from __future__ import annotations

from ipaddress import ip_address

from reconciler.model.errors import Problem
from reconciler.settings import Settings

Address = tuple[str, int]


def api(settings: Settings) -> Address:
    """Host and port of the API."""
    address = _split(settings.listen)
    if address is None:
        raise Problem(
            "listen_invalid",
            400,
            expected="GPUAAS_LISTEN as host:port",
            found=settings.listen,
            remedy="for example 127.0.0.1:8080",
        )
    return address


def operators(settings: Settings) -> Address | None:
    """Loopback address and port of the operators' listener; None when it is off.

    Only an IP address is accepted: this listener asks for no token, and a name could resolve to
    another interface.
    """
    text = settings.operator_listen
    if not text:
        return None
    address = _split(text)
    try:
        if address is not None and ip_address(address[0]).is_loopback:
            return address
    except ValueError:
        pass
    raise Problem(
        "operator_listen_invalid",
        400,
        expected="GPUAAS_OPERATOR_LISTEN as a loopback address and a port, because this listener"
        " asks for no token",
        found=text,
        remedy="127.0.0.1:8008 or [::1]:8008; other machines use GPUAAS_LISTEN with a token",
    )


def is_local(address: Address | None) -> bool:
    """Whether no other machine can connect to it. The name `localhost` counts as local."""
    if address is None:
        return True
    try:
        return ip_address(address[0].strip("[]")).is_loopback
    except ValueError:
        return address[0] == "localhost"


def host_port(address: Address) -> str:
    """The address as a setting has it, with brackets around an IPv6 address."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split(text: str) -> Address | None:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        return None
    return host.strip("[]"), int(port)
