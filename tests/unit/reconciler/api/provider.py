"""An OpenID provider as a process of its own: discovery, keys, and tokens signed on request.

Tests control it: `POST /sign` takes claims, algorithm and key of a token; `POST /set` takes the
published keys, whether it answers, and the answers for a device login, whose tokens are signed
when the device asks for them. `GET /authorize` logs a person in without a question: with the claims
of `login`, for an authorization code that is exchanged once, by its PKCE verifier.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import hmac
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import httpx
import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

AUDIENCE = "gpuaas"
PUBLISHED = ["rsa", "ec", "ed", "short"]
SHARED = b"a secret that is no secret, for it is published as a key of the type oct"


class State:
    """Keys and behaviour of the provider."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {
            "rsa": rsa.generate_private_key(65537, 2048),
            "ec": ec.generate_private_key(ec.SECP256R1()),
            "ed": ed25519.Ed25519PrivateKey.generate(),
            "next": rsa.generate_private_key(65537, 2048),
            "short": rsa.generate_private_key(65537, 1024),  # noqa: S505 - to be refused
            "stranger": rsa.generate_private_key(65537, 2048),
        }
        self.published = list(PUBLISHED)
        self.down = False
        self.issuer = ""
        self.authorize = ""
        self.requests = 0
        self.device: list[dict[str, Any]] = []
        self.login: dict[str, Any] = {}
        self.codes: dict[str, dict[str, str]] = {}
        # How the endpoints of codes and tokens answer: "", "drips", "nonsense", "nested",
        # "endless", "inflates"; "ponders" drips for invented codes.
        self.manner = ""

    def jwks(self) -> dict[str, Any]:
        octets = base64.urlsafe_b64encode(SHARED).decode().rstrip("=")
        keys: list[dict[str, Any]] = [{"kty": "oct", "kid": "oct", "alg": "HS256", "k": octets}]
        keys.append({"kty": "EC", "kid": "odd", "crv": "P-1"})
        for name in self.published:
            kind = {"ec": jwt.algorithms.ECAlgorithm, "ed": jwt.algorithms.OKPAlgorithm}
            algorithm: Any = kind.get(name, jwt.algorithms.RSAAlgorithm)
            public = algorithm.to_jwk(self.keys[name].public_key(), as_dict=True)
            keys.append({**public, "kid": name, "use": "sig"})
        return {"keys": keys}

    def sign(self, order: dict[str, Any]) -> str:
        name, algorithm = order["key"], order["alg"]
        key: Any = self.keys.get(name, "")
        if algorithm == "none":
            key = None
        elif algorithm == "HS256":
            key = SHARED
            if name != "oct":
                # The public key used as a shared secret.
                form = serialization.PublicFormat.SubjectPublicKeyInfo
                key = self.keys[name].public_key().public_bytes(serialization.Encoding.PEM, form)
        return _token(order["claims"], key, algorithm, {"kid": name, **order["headers"]})


def _token(claims: dict[str, Any], key: Any, algorithm: str, headers: dict[str, Any]) -> str:
    if algorithm == "HS256":
        # By hand, because the library refuses to make such a token.
        parts = [{"alg": "HS256", "typ": "JWT", **headers}, claims]
        text = b".".join(_encoded(json.dumps(part).encode()) for part in parts)
        return (text + b"." + _encoded(hmac.digest(key, text, hashlib.sha256))).decode()
    return jwt.encode(claims, key, algorithm, headers)


def _encoded(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


class Handler(BaseHTTPRequestHandler):
    """HTTP handler; state: of the provider in this process."""

    state: State

    def do_GET(self) -> None:
        state = self.state
        here = f"http://{self.headers['Host']}"
        state.requests += self.path != "/requests"
        if self.path == "/requests":
            self._answer(200, {"requests": state.requests})
        elif state.down:
            self._answer(503, {})
        elif self.path == "/.well-known/openid-configuration":
            places = {
                "jwks_uri": f"{here}/jwks",
                "device_authorization_endpoint": f"{here}/device",
                "authorization_endpoint": state.authorize or f"{here}/authorize?tenant=1",
                "token_endpoint": f"{here}/token",
            }
            self._answer(200, {"issuer": state.issuer or here, **places})
        elif self.path.startswith("/authorize?"):
            wish = dict(parse_qsl(urlsplit(self.path).query))
            code = f"code-{len(state.codes)}"
            state.codes[code] = wish
            answer = {"code": code, "state": wish["state"], "iss": here}
            self.send_response(302)
            self.send_header("Location", f"{wish['redirect_uri']}?{urlencode(answer)}")
            self.end_headers()
        elif self.path == "/jwks":
            self._answer(200, state.jwks())
        else:
            self._answer(404, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.path in ("/device", "/token"):
            self._device(dict(parse_qsl(body)))
            return
        order = json.loads(body)
        if self.path == "/sign":
            self._answer(200, {"token": self.state.sign(order)})
        else:
            vars(self.state).update(order)
            self._answer(200, {})

    def _device(self, form: dict[str, str]) -> None:
        """RFC 8628, with the answers that the test set for `/token`."""
        codes = {"device_code": "d-1", "user_code": "ABCD-EFGH", "interval": 0, "expires_in": 2}
        if form["client_id"] != AUDIENCE:
            self._answer(400, {"error": "invalid_client"})
        elif self.state.manner not in ("", "ponders"):
            self._misbehave(self.state.manner)
        elif form.get("grant_type") == "authorization_code":
            self._exchange(form)
        elif self.path == "/device":
            place = {"verification_uri": "https://id.example/device"}
            self._answer(200, codes | place if "openid" in form["scope"] else {})
        elif form["device_code"] == "d-1" and form["grant_type"].endswith(":device_code"):
            answers = self.state.device
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
            if "error" in answer:
                self._answer(400, answer)
            else:
                self._answer(200, {name: self.state.sign(order) for name, order in answer.items()})

    def _exchange(self, form: dict[str, str]) -> None:
        """RFC 6749 section 4.1.3 with RFC 7636."""
        state = self.state
        wish = state.codes.pop(form["code"], {})
        challenge = _encoded(hashlib.sha256(form["code_verifier"].encode()).digest()).decode()
        expected = {
            "code_challenge": challenge,
            "code_challenge_method": "S256",
            **{name: form[name] for name in ("client_id", "redirect_uri")},
        }
        if not wish and state.manner == "ponders":
            self._misbehave("drips")
        elif not wish or expected != {name: wish.get(name) for name in expected}:
            self._answer(400, {"error": "invalid_grant"})
        else:
            order = json.loads(json.dumps(state.login))
            order["claims"].setdefault("nonce", wish["nonce"])
            self._answer(200, {"token_type": "Bearer", "id_token": state.sign(order)})

    def _misbehave(self, manner: str) -> None:
        self.send_response(200)
        if manner == "inflates":
            self.send_header("Content-Encoding", "gzip, gzip")
        self.end_headers()
        try:
            if manner == "inflates":
                self.wfile.write(gzip.compress(gzip.compress(bytes(64 << 20))))
            if manner == "nonsense":
                self.wfile.write(b'["no", "token"]')
            if manner == "nested":
                self.wfile.write(b"[" * 100_000)
            while manner in ("drips", "endless"):
                self.wfile.write(b" " * (1 if manner == "drips" else 1 << 16))
                time.sleep(0.02 if manner == "drips" else 0)
        except OSError:
            pass  # The client has left.

    def log_message(self, *_arguments: object) -> None:
        """Quiet."""

    def _answer(self, status: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@dataclass(frozen=True)
class Provider:
    """Client with which tests control the provider."""

    url: str

    def token(self, **wishes: Any) -> str:
        """A valid token, changed by the given values; a claim that is None is left out."""
        # httpx itself writes neither an infinity nor half a surrogate pair.
        order = json.dumps(self.order(**wishes))
        return str(httpx.post(f"{self.url}/sign", content=order, timeout=60).json()["token"])

    def order(
        self, *, key: str = "rsa", alg: str = "RS256", headers: Any = None, **claims: Any
    ) -> dict[str, Any]:
        """The body of a request to sign such a token."""
        now = int(time.time())
        usual = {"iss": self.url, "aud": AUDIENCE, "sub": "u-1", "iat": now, "exp": now + 300}
        signed = {name: value for name, value in (usual | claims).items() if value is not None}
        return {"key": key, "alg": alg, "headers": headers or {}, "claims": signed}

    def set(self, **values: Any) -> None:
        """Change published keys, availability or issuer."""
        httpx.post(f"{self.url}/set", content=json.dumps(values), timeout=60)

    def requests(self) -> int:
        """Number of requests for public documents."""
        return int(httpx.get(f"{self.url}/requests", timeout=60).json()["requests"])


@contextmanager
def running() -> Iterator[Provider]:
    """The process, from its start to its end."""
    with subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Provider(process.stdout.readline().strip())
        finally:
            process.terminate()


if __name__ == "__main__":
    Handler.state = State()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
