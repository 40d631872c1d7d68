"""Login pages: by token, and through the OpenID provider by an authorization code with PKCE."""

from __future__ import annotations

import asyncio
import base64
import hmac
import re
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from hashlib import sha256
from urllib.parse import quote, unquote, urlsplit

import httpx
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from reconciler.api.security import cookie_name, provider
from reconciler.console import forms, guard, pages, session
from reconciler.console.visit import is_page
from reconciler.model.client_limits import client_network, oldest_of_most
from reconciler.model.errors import Problem
from reconciler.records.console_sessions import LOGIN_S
from reconciler.settings import Settings
from reconciler.trust import oidc

START = "/console/"
# Followed by the begin of its state: each tab of a browser has its own login.
_COOKIE = "gpuaas-login-"
_STATE = re.compile(r"[A-Za-z0-9_-]{43}")
# Of the page after a login. A longer address does not fit into the cookie.
_LONGEST = 2000
# Characters of all logins of a browser. Proxies refuse longer headers.
_TOGETHER = 4096
# Set after an answer by which the provider is busy or out of order, and for how long the groups
# are not asked for then, in seconds: a page would be sent back and forth for ever.
_BUSY, _BUSY_S = "gpuaas-provider-busy", 60.0
# Errors of the provider that speak of the person. Others do not end a session.
_OF_PERSON = (
    *("access_denied", "login_required", "interaction_required", "consent_required"),
    "account_selection_required",
)
# How long a login waits for a place of its network, and how often it asks for one, in seconds.
_WAIT_S, _ASK_S = 2.0, 0.05
_ERROR = re.compile(r"[a-z_]{1,64}")


class _Places:
    """Exchanges that wait for the provider, with their networks, the oldest first.

    An exchange needs no account, and its code may be invented. So a network has few of them. Beyond
    `count`, the oldest exchange of the network with most of them is dropped.
    """

    def __init__(self, count: int, of_network: int) -> None:
        self._count = count
        self._of_network = of_network
        self._lock = threading.Lock()
        self._waiting: dict[Future[str], str] = {}

    async def wait(self, network: str, begin: Callable[[], Future[str]]) -> str:
        """The answer of an exchange; Problem `login_failed` for an exchange that must go, or of a
        network without a place.
        """
        ends = time.monotonic() + _WAIT_S
        while (exchange := self._enter(network, begin)) is None:
            if time.monotonic() > ends:
                raise _crowded()
            await asyncio.sleep(_ASK_S)
        answer = asyncio.wrap_future(exchange)
        try:
            await asyncio.wait([answer])
        finally:
            with self._lock:
                self._waiting.pop(exchange, None)
            exchange.cancel()
        if answer.cancelled():
            raise _crowded()
        return answer.result()

    def _enter(self, network: str, begin: Callable[[], Future[str]]) -> Future[str] | None:
        with self._lock:
            if list(self._waiting.values()).count(network) >= self._of_network:
                return None
            if len(self._waiting) >= self._count:
                dropped = oldest_of_most(self._waiting)
                del self._waiting[dropped]
                dropped.cancel()
            exchange = begin()
            self._waiting[exchange] = network
            return exchange


_PLACES = _Places(64, of_network=8)


async def by_token(api: FastAPI, request: Request) -> Response:
    """The login page, and a login by token."""
    guard.require_same_origin(request.method, request.headers, request.url.scheme)
    after = _wish(request)
    refused = None
    if request.method == "POST":
        values = await forms.fields(request)
        token = values.get("token", [""])[-1]
        try:
            secret = await run_in_threadpool(session.start, request, api.state.engine, token)
        except Problem as problem:
            refused = problem
        else:
            answer = RedirectResponse(after, 303)
            session.set_cookie(request, answer, secret)
            return answer
    return _page(api, after, refused, unsent="unsent" in request.query_params)


async def to_provider(api: FastAPI, request: Request) -> Response:
    """Send the browser to the provider. A cookie ties the answer to this browser."""
    settings = _settings(api)
    after = _wish(request)
    verifier = oidc.verifier(provider(settings))
    try:
        endpoint = await run_in_threadpool(verifier.endpoint, "authorization_endpoint")
    except Problem as problem:
        return _page(api, after, problem)
    return _ask(request, settings, endpoint, after)


async def ask_again(api: FastAPI, request: Request) -> Response | None:
    """Have the provider say again who a page's person is, and in which groups; None when that is
    not due, or the provider is away.
    """
    settings: Settings = api.state.settings
    if not settings.oidc_issuer or cookie_name(request, _BUSY) in request.cookies:
        return None
    if not await run_in_threadpool(session.asks, request, api.state.engine):
        return None
    verifier = oidc.verifier(provider(settings))
    try:
        endpoint = await run_in_threadpool(verifier.endpoint, "authorization_endpoint")
    except Problem:
        return None
    query = f"?{request.url.query}" if request.url.query else ""
    return _ask(request, settings, endpoint, request.url.path + query)


def _ask(request: Request, settings: Settings, endpoint: str, after: str) -> Response:
    page = after if len(after) <= _LONGEST else START
    login = f"{time.time_ns() // 1_000_000}.{secrets.token_urlsafe(32)}.{quote(page, safe='')}"
    state = _derived(login, "state")
    challenge = _encoded(sha256(_derived(login, "verifier").encode()).digest())
    target = httpx.URL(endpoint).copy_merge_params(
        {
            "response_type": "code",
            "client_id": settings.oidc_audience,
            "redirect_uri": _callback(request),
            "scope": "openid profile",
            "state": state,
            "nonce": _derived(login, "nonce"),
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
    )
    answer = RedirectResponse(str(target), 303)
    session.keep(request, answer, _cookie(state), login, LOGIN_S)
    _drop_oldest(request, answer, _TOGETHER - len(login))
    return answer


def _cookie(state: str) -> str:
    """The name of the cookie of a login."""
    return _COOKIE + state[:12]


def _drop_oldest(request: Request, answer: Response, room: int) -> None:
    """Drop the oldest logins of the browser that have no room beside a new one."""
    plain = {name.removeprefix("__Host-"): value for name, value in request.cookies.items()}
    logins = {name: login for name, login in plain.items() if name.startswith(_COOKIE)}
    # A login begins with its time, in milliseconds: a restored browser opens several in a second.
    for name, login in sorted(logins.items(), key=lambda row: row[1], reverse=True):
        room -= len(name) + len(login)
        if room < 0:
            session.keep(request, answer, name, "", 0)


async def from_provider(api: FastAPI, request: Request) -> Response:
    """Where the provider sends the browser back: exchange the code, and start a session."""
    settings = _settings(api)
    after = START
    state = request.query_params.get("state", "")
    try:
        login, after = _begun(request, state)
        await run_in_threadpool(_require_answer, request, api, settings)
        verifier = oidc.verifier(provider(settings))
        endpoint = await run_in_threadpool(verifier.endpoint, "token_endpoint")
        form = _form(request, settings, login)
        network = client_network(request.client.host if request.client else "")
        try:
            token = await _PLACES.wait(network, partial(verifier.exchange, endpoint, form))
            work = partial(_start, request, api, login, token, form)
            secret = await run_in_threadpool(work)
        except oidc.INVALID as refused:
            expected = "an ID token of the provider for this login"
            raise _failed(expected, str(refused)[:200]) from refused
    except Problem as problem:
        answer = await _without_login(api, request, after, problem)
    else:
        answer = RedirectResponse(after, 303)
        session.set_cookie(request, answer, secret)
    if cookie_name(request, _cookie(state)) in request.cookies:
        session.keep(request, answer, _cookie(state), "", 0)
    return answer


async def _without_login(api: FastAPI, request: Request, after: str, problem: Problem) -> Response:
    """The login page with a refusal. A session whose person was only asked for again goes on while
    the provider cannot say.
    """
    renewed = partial(session.asks, request, api.state.engine)
    if problem.status != 503 or not await run_in_threadpool(renewed):
        return _page(api, after, problem)
    answer = RedirectResponse(after, 303)
    session.keep(request, answer, _BUSY, "yes", _BUSY_S)
    return answer


def _begun(request: Request, state: str) -> tuple[str, str]:
    """The login that this browser began, and the page to which it leads."""
    cookie = cookie_name(request, _cookie(state)) if _STATE.fullmatch(state) else ""
    login = request.cookies.get(cookie, "")
    begun_at, _, rest = login.partition(".")
    if not hmac.compare_digest(state.encode(), _derived(login, "state").encode()):
        raise _failed("the answer to a login that this browser began", "another state")
    begun_ms = int(begun_at) if re.fullmatch(r"[0-9]{1,15}", begun_at) else 0
    age = time.time() - begun_ms / 1000
    # Another machine of the site, whose clock differs, may have begun it.
    if not -60 <= age <= LOGIN_S:
        raise _failed(f"the answer within {LOGIN_S:.0f} seconds", "a login that began earlier")
    after = unquote(rest.partition(".")[2])
    return login, after if is_page(after) else START


def _require_answer(request: Request, api: FastAPI, settings: Settings) -> None:
    """Problem `login_failed` when the provider has not logged the person in: 503 when that says
    nothing of the person.
    """
    answer = request.query_params
    if answer.get("iss", settings.oidc_issuer) != settings.oidc_issuer:
        raise _failed(f"an answer of {settings.oidc_issuer}", "an answer of another provider")
    if error := answer.get("error"):
        shown = error if _ERROR.fullmatch(error) else "another error"
        if error not in _OF_PERSON:
            raise _failed("the provider to log you in", shown, 503)
        session.end_persons(request, api.state)
        raise _failed("the provider to log you in", shown)


def _form(request: Request, settings: Settings, login: str) -> dict[str, str]:
    """The request for an ID token."""
    return {
        "grant_type": "authorization_code",
        "code": request.query_params.get("code", ""),
        "redirect_uri": _callback(request),
        "client_id": settings.oidc_audience,
        "code_verifier": _derived(login, "verifier"),
    }


def _start(request: Request, api: FastAPI, login: str, token: str, form: dict[str, str]) -> str:
    """Start the session of the holder of an ID token."""
    verifier = oidc.verifier(provider(api.state.settings))
    claims = verifier.login(token, form, _derived(login, "nonce"))
    try:
        return session.start_by_provider(request, api.state, login, claims)
    except ValueError:
        # The person has no role here any more, so neither in the session that has asked again.
        session.end_persons(request, api.state)
        raise


def _derived(login: str, purpose: str) -> str:
    """A value of a login for one purpose, derived from a secret that only the browser's cookie has.
    So a login that is never finished leaves nothing behind.
    """
    return _encoded(hmac.digest(login.encode(), purpose.encode(), "sha256"))


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _callback(request: Request) -> str:
    return f"{request.url.scheme}://{request.url.netloc}{START}login/callback"


def _wish(request: Request) -> str:
    wish = request.query_params.get("next", "")
    return wish if is_page(wish) else START


def _settings(api: FastAPI) -> Settings:
    settings: Settings = api.state.settings
    if not settings.oidc_issuer:
        raise HTTPException(404)
    return settings


def _page(api: FastAPI, after: str, refused: Problem | None, *, unsent: bool = False) -> Response:
    return pages.render(
        "login.html",
        status=refused.status if refused else 200,
        refused=refused,
        after=after,
        unsent=unsent,
        provider=urlsplit(api.state.settings.oidc_issuer).hostname,
    )


def _crowded() -> Problem:
    return _failed("the provider to answer others first", "too many logins at once", 503)


def _failed(expected: str, found: str, status: int = 401) -> Problem:
    return Problem(
        "login_failed",
        status,
        expected=expected,
        found=found,
        remedy="begin again on the login page, or use a token",
    )
