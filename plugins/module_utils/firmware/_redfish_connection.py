"""HTTPS exchange with a BMC: trust is verified first, and every exchange has a time limit.

A BMC's certificate is always verified: against a CA file, against the machine's own store, or by
the SHA-256 fingerprint that the caller gives.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

# An attribute registry of an iDRAC has about 2 MB; a larger answer is invalid.
_LARGEST = 32 * 1024 * 1024
_HEX_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Trust:
    """Verification of the BMC's certificate. Both empty: the machine's own CA store and the host
    name.

    ca_file: path of a PEM file with the only accepted CAs. fingerprint: SHA-256 of the BMC's own
    certificate in hexadecimal, colons allowed; the name in the certificate does not matter then.
    """

    ca_file: str = ""
    fingerprint: str = ""

    def context(self) -> ssl.SSLContext:
        """The TLS context. `create_default_context` is not used, because it writes session keys to
        a file named by the environment; that file would expose the whole exchange.

        Raises Refusal `trust_invalid`.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.fingerprint:
            self.pinned()
            # The pin replaces the chain: `_Connection.connect` compares it before any data is sent.
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        elif self.ca_file:
            try:
                context.load_verify_locations(cafile=self.ca_file)
            except (OSError, ssl.SSLError) as unusable:
                raise _trust_invalid(
                    "a readable PEM file of CA certificates", f"{self.ca_file}: {unusable}"
                ) from unusable
        else:
            context.load_default_certs()
        return context

    def pinned(self) -> str:
        """The fingerprint in lower case without colons."""
        if self.ca_file:
            raise _trust_invalid("a CA file or a fingerprint", "both")
        plain = self.fingerprint.replace(":", "").strip().lower()
        if not _HEX_SHA256.fullmatch(plain):
            raise _trust_invalid(
                "the SHA-256 fingerprint of the certificate, 64 hexadecimal digits",
                f"{len(plain)} characters",
            )
        return plain


def _trust_invalid(expected: str, found: str) -> Refusal:
    return Refusal(
        "trust_invalid",
        expected=expected,
        found=found,
        remedy="give the CA file of the BMCs, or the fingerprint as the BMC's own console shows it",
    )


@dataclass(frozen=True)
class Answer:
    """headers: names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes = field(repr=False)


@dataclass(frozen=True)
class Place:
    """host, port: address of the BMC; shown: its name in messages."""

    host: str
    port: int

    @property
    def shown(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == http.client.HTTPS_PORT else f"{host}:{self.port}"


def place(address: str) -> Place:
    """Parses `name`, `name:port`, `10.0.0.1`, `[fd00::1]:443`. Raises Refusal
    `bmc_address_invalid`.
    """
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname or "", parts.port or http.client.HTTPS_PORT
    except ValueError:
        host, port = "", 0
    named = host.isascii() and re.fullmatch(r"[\w.:%-]+", host)
    if not named or parts.netloc != address or parts.username is not None:
        raise Refusal(
            "bmc_address_invalid",
            expected="the BMC's name or address, with :port where it is not 443",
            found=ascii(address),
            remedy="give it without https:// and without a path",
        )
    return Place(host, port)


class _Connection(http.client.HTTPSConnection):
    """HTTPS with the trust above and a watchdog that closes the connection at the deadline."""

    def __init__(self, where: Place, trust: Trust, deadline: float) -> None:
        context = trust.context()
        left = max(0.1, deadline - time.monotonic())
        super().__init__(where.host, where.port, timeout=left, context=context)
        self.trust = trust
        self.trusted_context = context
        self.deadline = deadline
        self.watched: socket.socket | None = None
        self.watch: threading.Timer | None = None
        self.cut = threading.Event()

    def connect(self) -> None:
        """Connect and start the watchdog. A socket's own timeout restarts with every byte, so a BMC
        that sends a byte per second could block the caller for ever. The watchdog shuts down a
        second handle of the same connection.
        """
        raw = socket.create_connection((self.host, self.port), self.timeout)
        self.watched = raw.dup()
        self.watch = threading.Timer(
            max(0.1, self.deadline - time.monotonic()), _cut, args=(self.watched, self.cut)
        )
        self.watch.daemon = True
        self.watch.start()
        self.sock = self.trusted_context.wrap_socket(raw, server_hostname=self.host)
        if self.trust.fingerprint:
            fingerprint = hashlib.sha256(self.sock.getpeercert(binary_form=True) or b"").hexdigest()
            if not hmac.compare_digest(fingerprint, self.trust.pinned()):
                raise _untrusted(
                    self.host, "the pinned certificate", f"one with SHA-256 {fingerprint}"
                )

    def end(self) -> None:
        """Stop the watchdog. Not in `close`, because http.client calls that before the body is
        read.
        """
        self.close()
        if self.watch is not None:
            self.watch.cancel()
        if self.watched is not None:
            self.watched.close()


def _cut(watched: socket.socket, done: threading.Event) -> None:
    done.set()
    with suppress(OSError):
        watched.shutdown(socket.SHUT_RDWR)


def exchange(
    where: Place,
    trust: Trust,
    request: tuple[str, str, dict[str, str], bytes | None],
    *,
    deadline: float,
) -> Answer:
    """Send `request` (method, path, headers, body) on a connection of its own.

    deadline: on the monotonic clock. Raises Refusal `tls_untrusted`, `bmc_unreachable` (a changing
    request then has an unknown effect), `bmc_answer_malformed` or those of Trust.
    """
    method, path, headers, body = request
    connection = _Connection(where, trust, deadline)
    with _failures(where, method, path):
        try:
            connection.request(method, path, body=body, headers=headers)
            with connection.getresponse() as answer:
                content = answer.read(_LARGEST + 1)
                named = {name.lower(): value for name, value in answer.getheaders()}
                status, missing = answer.status, answer.length
        finally:
            connection.end()
        if connection.cut.is_set():
            # http.client accepts truncated headers as complete.
            raise TimeoutError("cut off when the time was over")
        if len(content) > _LARGEST:
            raise malformed(where, path, f"more than {_LARGEST} bytes")
        if missing:
            raise http.client.IncompleteRead(content, missing)
    return Answer(status, named, content)


@contextmanager
def _failures(where: Place, method: str, path: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLCertVerificationError as bad:
        raise _untrusted(
            where.shown, "a certificate that verifies", bad.verify_message or str(bad)
        ) from bad
    except (OSError, http.client.HTTPException) as failed:
        raise Refusal(
            "bmc_unreachable",
            expected=f"an answer to {method} {path} from {where.shown} in time",
            found=f"{type(failed).__name__}: {str(failed)!a}"[:300],
            remedy="check the address, the management network and that Redfish is enabled",
        ) from failed


def _untrusted(host: str, expected: str, found: str) -> Refusal:
    return Refusal(
        "tls_untrusted",
        expected=f"{expected} from {host}",
        found=found,
        remedy="nothing was sent; give the CA file of the BMCs, or the fingerprint as the BMC's "
        "own console shows it",
    )


def malformed(where: Place, path: str, found: str) -> Refusal:
    return Refusal(
        "bmc_answer_malformed",
        expected=f"a Redfish document at {path} of {where.shown}",
        found=found,
        remedy="check that the address is a BMC with Redfish, and its firmware version",
    )
