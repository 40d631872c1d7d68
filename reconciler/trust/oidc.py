"""The site's OpenID provider: verification of its tokens, and exchange of a code for an ID token.

Only asymmetric signatures by a published key of the provider are accepted. A token with another
algorithm, or without a signature, is refused before a key is looked up.

The keys are cached here and not by `jwt.PyJWKClient`: that client drops its keys when the provider
is down, repeats a failed request for every token, holds a lock during the request, and reads an
answer of any size.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeGuard
from urllib.parse import urlsplit

import httpx
import jwt

from reconciler import names
from reconciler.model.errors import Problem
from reconciler.model.storable import unstorable

log = logging.getLogger("gpuaas.oidc")

ALGORITHMS = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA",
)  # fmt: skip
# The type of an ID token is JWT or absent, of an access token at+jwt (RFC 9068). A logout token is
# signed by the same key and must not be accepted.
_ID_TOKEN = frozenset({"", "jwt"})
_TYPES = _ID_TOKEN | {"at+jwt", "application/at+jwt"}
# Keys are fetched again after this time, so that a withdrawn key is refused.
FRESH_S = 600.0
# While the provider does not answer, the last keys stay valid for this time.
STALE_S = 86_400.0
# Minimum time between two requests to the provider: forged tokens with unknown key ids must not
# flood it.
QUIET_S = 10.0
_TIMEOUT_S = 5.0
# How long a request waits for the first keys, which another request fetches.
_PATIENCE_S = 2.0
# Of a whole answer. The limit above starts again with every byte.
_DEADLINE_S = 10.0
_LONGEST_TOKEN = 16_384
_LONGEST_ANSWER = 1 << 20
_LONGEST_NAME = 128
# As OpenID Connect has it.
_LONGEST_SUBJECT = 255
# Life of a token, from its issue to its end. Its groups cannot be asked for again in between.
_LONGEST_LIFE_S = 86_400
# Bits of an RSA key; shorter ones have been factored, or will be.
_LEAST_RSA = 2048

# Errors of a provider that does not answer, is not trusted, or sends an unexpected document.
UNREADABLE = (
    httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, KeyError, TypeError, AttributeError,
    # JSON that is nested too deeply.
    RecursionError,
)  # fmt: skip
# Errors of a token that is not valid.
INVALID = (jwt.PyJWTError, ValueError, TypeError)

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
    """The holder of a token. id: constant for the same person. until: when the claims end."""

    id: str
    name: str
    admin: bool
    projects: frozenset[str]
    until: float | None = None


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
        self._fetch = fetch or partial(_read, provider.ca_file)
        self._now = now
        self._lock = threading.Lock()
        self._keys: dict[str, jwt.PyJWK] = {}
        self._configuration: Claims = {}
        self._read_at: float | None = None
        self._tried_at: float | None = None
        self._failure = ""

    def identity(self, token: str, *, patient: bool = True) -> Identity | None:
        """The holder of the token; None for an invalid token. patient: whether to wait for the
        provider; else its keys are read beside this.

        Problem `identity_provider_unavailable` when there is no key to verify it with.
        """
        try:
            return identity_of(self._provider, self._claims(token, patient=patient))
        except INVALID:
            return None

    def endpoint(self, name: str) -> str:
        """The address of this name in the provider's configuration."""
        self._ensure_keys(None)
        address = str(self._configuration.get(name, ""))
        try:
            usable = trusted(str(httpx.URL(address)))
        except (httpx.InvalidURL, ValueError):
            usable = False
        if not usable:
            self._failure = f"no {name}, or one that is neither https nor local"
            raise self._unavailable()
        return address

    def exchange(self, endpoint: str, form: Mapping[str, str]) -> Future[str]:
        """Begin to exchange a code for an ID token, which holds no thread of the caller's."""
        return asyncio.run_coroutine_threadsafe(self._exchange(endpoint, dict(form)), _loop())

    async def _exchange(self, endpoint: str, form: dict[str, str]) -> str:
        try:
            answer = await _ask(self._provider.ca_file, "POST", endpoint, form)
            return str(answer.raise_for_status().json()["id_token"])
        except httpx.HTTPStatusError as refused:
            status = refused.response.status_code
            raise ValueError(f"the provider refuses the code: HTTP {status}") from refused
        except UNREADABLE as error:
            raise ValueError(f"no ID token of the provider: {type(error).__name__}") from error

    def login(self, token: str, form: Mapping[str, str], nonce: str) -> Claims:
        """The claims of the ID token for which the code of this login was exchanged.

        An exception of INVALID for every other token. The login page shows its text.
        """
        claims = self._claims(token, kinds=_ID_TOKEN)
        if not hmac.compare_digest(str(claims.get("nonce", "")).encode(), nonce.encode()):
            raise ValueError("an ID token of another login")
        several = isinstance(claims["aud"], list) and len(claims["aud"]) > 1
        if claims.get("azp", None if several else self._provider.audience) != form["client_id"]:
            raise ValueError("an ID token that was issued to another program")
        return claims

    def _claims(
        self, token: str, kinds: frozenset[str] = _TYPES, *, patient: bool = True
    ) -> Claims:
        if len(token) > _LONGEST_TOKEN:
            raise ValueError("too long")
        header = jwt.get_unverified_header(token)
        kind = str(header.get("typ") or "").lower()
        if header.get("alg") not in ALGORITHMS or kind not in kinds:
            raise ValueError("not a token of an accepted type and algorithm")
        key = self._key(str(header.get("kid") or ""), patient=patient)
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
        if claims["exp"] - claims["iat"] > _LONGEST_LIFE_S:
            raise ValueError("valid for too long")
        if "cnf" in claims:
            # Bound to a key of its sender (RFC 7800), of which a bearer shows nothing.
            raise ValueError("no bearer token")
        return claims

    def _key(self, kid: str, *, patient: bool) -> jwt.PyJWK | None:
        self._ensure_keys(kid, patient=patient)
        return self._keys.get(kid)

    def _ensure_keys(self, kid: str | None, *, patient: bool = True) -> None:
        """Read the provider's documents when they are old, or lack the key."""
        if self._due(kid):
            if patient:
                self._refresh_once(kid, blocking=self._read_at is None)
            elif not self._lock.locked():
                words = {"kid": kid, "blocking": False}
                threading.Thread(target=self._refresh_once, kwargs=words, daemon=True).start()
        if self._age(self._read_at) > STALE_S:
            raise self._unavailable()

    def _unavailable(self) -> Problem:
        return Problem(
            "identity_provider_unavailable",
            503,
            expected=f"the keys and addresses of {self._provider.issuer}",
            found=self._failure,
            remedy="try again; tokens of `gpuaas token create` work meanwhile",
        )

    def _due(self, kid: str | None) -> bool:
        old = self._age(self._read_at) > FRESH_S or (kid is not None and kid not in self._keys)
        return old and self._age(self._tried_at) >= QUIET_S

    def _refresh_once(self, kid: str | None, *, blocking: bool) -> None:
        # A single thread asks the provider. The others use the cached keys; without any they wait,
        # but not as long as a name server that hangs, or they would be all threads of the service.
        patience_s = 0.0
        if blocking:
            since = 0.0 if self._tried_at is None else self._age(self._tried_at)
            patience_s = max(0.0, _PATIENCE_S - since)
        if self._lock.acquire(timeout=patience_s):
            try:
                if self._due(kid):
                    self._refresh()
            finally:
                self._lock.release()

    def _refresh(self) -> None:
        self._tried_at = self._now()
        try:
            self._keys = self.read()
            self._read_at = self._tried_at
        except UNREADABLE as error:
            self._failure = type(error).__name__
            log.warning("keys of %s: %s", self._provider.issuer, error)
        finally:
            # Those who waited for this answer do not ask again.
            self._tried_at = self._now()

    def _age(self, moment: float | None) -> float:
        return float("inf") if moment is None else self._now() - moment

    def read(self) -> dict[str, jwt.PyJWK]:
        """Fetch the provider's keys, by their id; raises an exception of UNREADABLE."""
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
                key = jwt.PyJWK(document)
            except INVALID:
                continue
            if getattr(key.key, "key_size", _LEAST_RSA) >= _LEAST_RSA or key.key_type != "RSA":
                keys[str(document.get("kid") or "")] = key
        self._configuration = configuration
        return keys


def identity_of(provider: Provider, claims: Claims) -> Identity:
    """The holder of verified claims; ValueError without a usable name."""
    subject, name = claims.get("sub"), claims.get(provider.name_claim)
    if not _storable(subject) or not 0 < len(subject) <= _LONGEST_SUBJECT:
        raise ValueError("no usable sub")
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _LONGEST_NAME:
        raise ValueError(f"no usable {provider.name_claim}")
    groups = groups_of(provider, claims)
    prefix = provider.project_prefix
    named = f"{provider.issuer}\n{subject}".encode()
    return Identity(
        id=f"oidc:{hashlib.sha256(named).hexdigest()[:32]}",
        name=name,
        admin=bool(provider.admin_group) and provider.admin_group in groups,
        projects=frozenset(
            group.removeprefix(prefix) for group in groups if prefix and group.startswith(prefix)
        ),
        until=claims.get("exp"),
    )


def groups_of(provider: Provider, claims: Claims) -> list[str]:
    """The groups in claims, without those that no database stores."""
    value = claims.get(provider.groups_claim)
    # A single group, or several separated by spaces, like scopes.
    listed = value.split() if isinstance(value, str) else value if isinstance(value, list) else []
    return list(filter(_storable, listed))


def _storable(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and unstorable(value) is None


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


@lru_cache(maxsize=1)
def _loop() -> asyncio.AbstractEventLoop:
    """The loop of exchanges, in a thread of its own, like the threads in which it looks up names: a
    name server that hangs holds up nothing else.
    """
    loop = names.Loop()
    threading.Thread(target=loop.run_forever, name="gpuaas-oidc", daemon=True).start()
    return loop


def _read(ca_file: Path | None, url: str) -> Any:
    return converse(ca_file, "GET", url).raise_for_status().json()


def converse(
    ca_file: Path | None, method: str, url: str, form: dict[str, str] | None = None
) -> httpx.Response:
    """An answer of the provider, within a time and a size; an exception of UNREADABLE for others.
    Called in a thread; the loop is there for the deadline.
    """
    with asyncio.Runner(loop_factory=names.Loop) as runner:
        return runner.run(_ask(ca_file, method, url, form))


@lru_cache(maxsize=8)
def _tls(ca_file: Path | None, _changed: int) -> ssl.SSLContext:
    """Reading the public CAs takes 50 ms, which anybody can cause by an invented code."""
    return ssl.create_default_context(cafile=ca_file) if ca_file else httpx.create_ssl_context()


async def _ask(
    ca_file: Path | None, method: str, url: str, form: dict[str, str] | None
) -> httpx.Response:
    verify = _tls(ca_file, ca_file.stat().st_mtime_ns if ca_file else 0)
    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
    async with (
        asyncio.timeout(_DEADLINE_S),
        httpx.AsyncClient(timeout=_TIMEOUT_S, follow_redirects=False, verify=verify) as client,
        client.stream(method, url, headers=headers, data=form) as answer,
    ):
        # httpx decodes a piece before its size can be looked at, and stacked encodings make
        # gigabytes of a few hundred bytes.
        encoding = answer.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise ValueError(f"an answer in the encoding {encoding[:100]}")
        body = b""
        async for part in answer.aiter_raw():
            body += part
            if len(body) > _LONGEST_ANSWER:
                raise ValueError(f"an answer of more than {_LONGEST_ANSWER} bytes")
    return httpx.Response(answer.status_code, content=body, request=answer.request)
