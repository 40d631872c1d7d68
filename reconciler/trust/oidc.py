"""Verification of bearer tokens from the site's OpenID provider.

Only asymmetric signatures by a published key of the provider are accepted. A token with another
algorithm, or without a signature, is refused before a key is looked up.

The keys are cached here and not by `jwt.PyJWKClient`: that client drops its keys when the provider
is down, repeats a failed request for every token, holds a lock during the request, and reads an
answer of any size.
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
# The type of an ID token is JWT or absent, of an access token at+jwt (RFC 9068). A logout token is
# signed by the same key and must not be accepted.
_TYPES = frozenset({"", "jwt", "at+jwt", "application/at+jwt"})
# Keys are fetched again after this time, so that a withdrawn key is refused.
FRESH_S = 600.0
# While the provider does not answer, the last keys stay valid for this time.
STALE_S = 86_400.0
# Minimum time between two requests to the provider: forged tokens with unknown key ids must not
# flood it.
QUIET_S = 10.0
_TIMEOUT_S = 5.0
_LONGEST_TOKEN = 16_384
_LONGEST_ANSWER = 1 << 20
_LONGEST_NAME = 128

# Errors of a provider that does not answer, is not trusted, or sends an unexpected document.
UNREADABLE = (httpx.HTTPError, OSError, ValueError, KeyError, TypeError, AttributeError)

Claims = Mapping[str, Any]
Fetch = Callable[[str], Any]


@dataclass(frozen=True)
class Provider:
    """A provider and how its claims are read. skew_s: allowed difference between the clocks.

    ca_file: PEM of the only CA accepted for its TLS certificate; None accepts the public CAs.
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
    """The holder of a token. id: constant for the same person."""

    id: str
    name: str
    admin: bool
    projects: frozenset[str]


class Verifier:
    """Verifies tokens of a provider; its cached keys are shared by all threads."""

    def __init__(
        self,
        provider: Provider,
        *,
        fetch: Fetch | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._provider = provider
        self._fetch = fetch or partial(_get, provider.ca_file)
        self._now = now
        self._lock = threading.Lock()
        self._keys: dict[str, jwt.PyJWK] = {}
        self._read_at: float | None = None
        self._tried_at: float | None = None
        self._failure = ""

    def identity(self, token: str) -> Identity | None:
        """The holder of the token; None for an invalid token.

        Problem `identity_provider_unavailable` when there is no key to verify it with.
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
            raise ValueError("not an ID or access token with an accepted algorithm")
        key = self._key(str(header.get("kid") or ""))
        if key is None:
            raise ValueError("signed by an unknown key")
        provider = self._provider
        claims: Claims = jwt.decode(
            token,
            # The key determines the algorithm, not the token.
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
        listed = _listed(claims.get(provider.groups_claim))
        groups = frozenset(group for group in listed if isinstance(group, str))
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
        # A single thread asks the provider. The others use the cached keys, if there are any.
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
        """Fetch the provider's keys, by their id; raises one of UNREADABLE."""
        issuer = self._provider.issuer
        configuration = self._fetch(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
        if configuration["issuer"] != issuer:
            raise ValueError("the provider names another issuer in its configuration")
        keys = {}
        location = str(configuration["jwks_uri"])
        if not trusted(location):
            raise ValueError("the address of the keys is neither https nor local")
        for document in self._fetch(location)["keys"]:
            # Skip unknown types of keys, which must not hide the others, and shared secrets: a
            # published secret proves nothing.
            if document.get("kty") == "oct" or document.get("use", "sig") != "sig":
                continue
            try:
                keys[str(document.get("kid") or "")] = jwt.PyJWK(document)
            except jwt.PyJWTError:
                continue
        return keys


def trusted(url: str) -> bool:
    """Whether the provider's documents may be read from this URL: https, or this machine."""
    parts = urlsplit(url)
    return parts.scheme == "https" or (
        parts.scheme == "http" and parts.hostname in ("127.0.0.1", "::1", "localhost")
    )


@lru_cache(maxsize=8)
def verifier(provider: Provider) -> Verifier:
    """The verifier of a provider, shared within the process so that its keys stay cached."""
    return Verifier(provider)


def looks_like_jwt(token: str) -> bool:
    """Whether this could be a token of a provider: three parts, while our tokens have no dots."""
    return token.count(".") == 2


def _listed(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    # A single group, or several separated by spaces, like scopes.
    return value.split() if isinstance(value, str) else []


def _get(ca_file: Path | None, url: str) -> Any:
    verify = ssl.create_default_context(cafile=ca_file) if ca_file else True
    with (
        httpx.Client(timeout=_TIMEOUT_S, follow_redirects=False, verify=verify) as client,
        client.stream("GET", url, headers={"Accept": "application/json"}) as answer,
    ):
        answer.raise_for_status()
        body = b""
        for part in answer.iter_bytes():
            body += part
            if len(body) > _LONGEST_ANSWER:
                raise ValueError(f"an answer of more than {_LONGEST_ANSWER} bytes")
    return httpx.Response(200, content=body).json()
