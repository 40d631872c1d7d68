"""Bearer tokens of the site's OpenID provider: who signed them, for whom, and what they allow.

Only asymmetric signatures by a key that the provider publishes count. A token that names another
algorithm, or none, is refused before any key is looked at.
"""

from __future__ import annotations

import hashlib
import logging
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import jwt

from reconciler.model.errors import Problem

log = logging.getLogger("gpuaas.oidc")

ALGORITHMS = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA",
)  # fmt: skip
# ID tokens say JWT or nothing, access tokens at+jwt (RFC 9068). A logout token must open nothing.
_TYPES = frozenset({"", "jwt", "at+jwt", "application/at+jwt"})
# Keys are read anew after this long, so that one that was withdrawn stops counting.
FRESH_S = 600.0
# As long as the provider does not answer, keys that were read go on counting, for so long.
STALE_S = 86_400.0
# Between two looks for a key that nobody knows: a stream of forged tokens must not become a stream
# of requests to the provider.
QUIET_S = 10.0
_TIMEOUT_S = 5.0
_LONGEST_TOKEN = 16_384
_LONGEST_ANSWER = 1 << 20
_LONGEST_NAME = 128

# What a provider that is silent, a stranger or of another mind ends in.
UNREADABLE = (httpx.HTTPError, OSError, ValueError, KeyError, TypeError, AttributeError)

Claims = Mapping[str, Any]
Fetch = Callable[[str], Any]


@dataclass(frozen=True)
class Provider:
    """What is believed of whom. skew_s: how far its clock and ours may be apart.

    ca_file: PEM of the CA that alone may vouch for it; None leaves that to the public ones.
    """

    issuer: str
    audience: str
    skew_s: int = 30
    groups_claim: str = "groups"
    name_claim: str = "sub"
    admin_group: str = ""
    project_prefix: str = ""
    ca_file: Path | None = None


@dataclass(frozen=True)
class Identity:
    """The holder of a token, as this site knows it. id: the same for ever, for the same person."""

    id: str
    name: str
    admin: bool
    projects: frozenset[str]


class Verifier:
    """Judges tokens of one provider; its keys are kept and shared by all threads."""

    def __init__(
        self,
        provider: Provider,
        *,
        fetch: Fetch | None = None,
        now: Callable[[], float] | None = None,
    ) -> None:
        self._provider = provider
        self._fetch = fetch or partial(_get, provider.ca_file)
        self._now = now or time.monotonic
        self._lock = threading.Lock()
        self._keys: dict[str, jwt.PyJWK] = {}
        self._read_at: float | None = None
        self._tried_at: float | None = None
        self._failure = ""

    def identity(self, token: str) -> Identity | None:
        """Whom the token speaks for; None when it does not count.

        Problem identity_provider_unavailable when there is no key to judge it by.
        """
        try:
            return self._identity(self._claims(token))
        except (jwt.PyJWTError, ValueError, TypeError):
            return None

    def _claims(self, token: str) -> Claims:
        if len(token) > _LONGEST_TOKEN:
            raise ValueError("too long")
        header = jwt.get_unverified_header(token)
        kind = str(header.get("typ") or "").lower()
        if header.get("alg") not in ALGORITHMS or kind not in _TYPES:
            raise ValueError("not an ID or access token with a signature that counts")
        key = self._key(str(header.get("kid") or ""))
        if key is None:
            raise ValueError("signed by nobody we know")
        provider = self._provider
        claims: Claims = jwt.decode(
            token,
            # The key says by which algorithm it signs; the token does not choose.
            key=key,
            algorithms=ALGORITHMS,
            audience=provider.audience,
            issuer=provider.issuer,
            leeway=provider.skew_s,
            options={"require": ["exp", "iat", "iss", "aud", "sub"]},
        )
        return claims

    def _identity(self, claims: Claims) -> Identity:
        provider = self._provider
        name = claims.get(provider.name_claim)
        if (
            not isinstance(name, str)
            or not name.isprintable()
            or not 0 < len(name) <= _LONGEST_NAME
        ):
            raise ValueError(f"no usable {provider.name_claim}")
        given = claims.get(provider.groups_claim)
        groups = frozenset(one for one in _listed(given) if isinstance(one, str))
        prefix = provider.project_prefix
        subject = f"{provider.issuer}\n{claims['sub']}".encode()
        return Identity(
            id=f"oidc:{hashlib.sha256(subject).hexdigest()[:32]}",
            name=name,
            admin=bool(provider.admin_group) and provider.admin_group in groups,
            projects=frozenset(
                group.removeprefix(prefix)
                for group in groups
                if prefix and group.startswith(prefix)
            ),
        )

    def _key(self, kid: str) -> jwt.PyJWK | None:
        # One thread asks the provider. The others go on with the keys there are, if there are any.
        if self._due(kid) and self._lock.acquire(blocking=self._read_at is None):
            try:
                if self._due(kid):
                    self._refresh()
            finally:
                self._lock.release()
        if self._age(self._read_at) > STALE_S:
            raise Problem(
                "identity_provider_unavailable",
                503,
                expected=f"the keys of {self._provider.issuer}",
                found=self._failure,
                remedy="try again; tokens of `gpuaas token create` work meanwhile",
            )
        return self._keys.get(kid)

    def _due(self, kid: str) -> bool:
        old = self._age(self._read_at) > FRESH_S or kid not in self._keys
        return old and self._age(self._tried_at) >= QUIET_S

    def _refresh(self) -> None:
        self._tried_at = self._now()
        try:
            self._keys = self.read()
            self._read_at = self._tried_at
        except UNREADABLE as error:
            self._failure = type(error).__name__
            log.warning("keys of %s: %s", self._provider.issuer, error)

    def _age(self, moment: float | None) -> float:
        return float("inf") if moment is None else self._now() - moment

    def read(self) -> dict[str, jwt.PyJWK]:
        """The keys that the provider publishes now, by their id; one of UNREADABLE otherwise."""
        issuer = self._provider.issuer
        found = self._fetch(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
        if found["issuer"] != issuer:
            raise ValueError("the provider calls itself by another name")
        keys = {}
        location = str(found["jwks_uri"])
        if not trusted(location):
            raise ValueError("keys over a line that anybody can write on")
        for document in self._fetch(location)["keys"]:
            # One key that this library does not know must not hide the others; a shared secret
            # in a public place proves nothing.
            if document.get("kty") == "oct" or document.get("use", "sig") != "sig":
                continue
            try:
                keys[str(document.get("kid") or "")] = jwt.PyJWK(document)
            except jwt.PyJWTError:
                continue
        return keys


def trusted(url: str) -> bool:
    """Whether what comes from there is the provider's word: TLS, or this very machine."""
    parts = urlsplit(url)
    return parts.scheme == "https" or (
        parts.scheme == "http" and parts.hostname in ("127.0.0.1", "::1", "localhost")
    )


@lru_cache(maxsize=8)
def verifier(provider: Provider) -> Verifier:
    """The one verifier of a provider: its keys are kept for as long as the process lives."""
    return Verifier(provider)


def looks_like_one(token: str) -> bool:
    """Whether this could be a token of a provider: three parts. Ours have one."""
    return token.count(".") == 2


def _listed(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    # One group, or several in one text, as scopes are written.
    return value.split() if isinstance(value, str) else []


def _get(ca_file: Path | None, url: str) -> Any:
    vouching = ssl.create_default_context(cafile=ca_file) if ca_file else True
    with (
        httpx.Client(timeout=_TIMEOUT_S, follow_redirects=False, verify=vouching) as client,
        client.stream("GET", url, headers={"Accept": "application/json"}) as answer,
    ):
        answer.raise_for_status()
        body = b""
        for part in answer.iter_bytes():
            body += part
            if len(body) > _LONGEST_ANSWER:
                raise ValueError("an answer without end")
    return httpx.Response(200, content=body).json()
