"""An identity provider on loopback: a real HTTP server that signs real tokens, rotates its keys, and can misbehave.

It has a discovery document, keys, the authorization code flow with PKCE, and the device flow. Whoever comes to sign in
is `person`. Every request is remembered in `requests` as "METHOD path".
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

CLIENT_ID, CLIENT_SECRET = "paddock", "secret of the test: with / and +"
TOKEN_LIFE_S = 300
Behaviour = Literal["well", "hangs", "garbage", "fails", "endless"]
Claims = dict[str, Any]
DEVICE_GRANT = "urn:ietf:params:oauth:grant-type:device_code"


@dataclass(slots=True)
class SigningKey:
    """A key pair of the provider."""

    key_id: str
    algorithm: str
    private: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey

    def public_jwk(self) -> dict[str, Any]:
        if isinstance(self.private, rsa.RSAPrivateKey):
            described = json.loads(RSAAlgorithm.to_jwk(self.private.public_key()))
        else:
            described = json.loads(ECAlgorithm.to_jwk(self.private.public_key()))
        return {**described, "kid": self.key_id, "use": "sig"}


def new_key(algorithm: str = "RS256", bits: int = 2048) -> SigningKey:
    private: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey
    private = ec.generate_private_key(ec.SECP256R1()) if algorithm == "ES256" else rsa.generate_private_key(65537, bits)
    return SigningKey(secrets.token_hex(4), algorithm, private)


@dataclass(slots=True)
class ProviderCode:
    """An authorization code that was given out."""

    query: dict[str, str]
    claims: Claims


@dataclass(slots=True)
class _Device:
    """A device flow that was begun."""

    user_code: str
    approved: bool | None = None
    asked_at: float = 0.0


@dataclass(slots=True)
class IdentityProvider:
    """Use as a context manager. `settings` is its entry in the setting `oidc`."""

    person: Claims = field(default_factory=lambda: {"sub": "1", "email": "ann@example.com", "email_verified": True})
    """Claims of whoever signs in."""
    keys: list[SigningKey] = field(default_factory=lambda: [new_key("RS256"), new_key("ES256")])
    behaviour: Behaviour = "well"
    """Of the document of its keys."""
    secret: str = CLIENT_SECRET
    """Empty: its clients are public."""
    forged: Claims = field(default_factory=dict)
    """Claims that its ID tokens have in place of the true ones, such as another nonce."""
    interval_s: int = 1
    """Least seconds between two questions in a device flow."""
    refuses: bool = False
    """Whether whoever signs in refuses to."""
    has_device_flow: bool = True
    names_itself: bool = True
    """Whether it sends its issuer along with codes (RFC 9207)."""
    requests: list[str] = field(default_factory=list)
    forms: list[dict[str, str]] = field(default_factory=list)
    """Forms that were sent to its token endpoint."""
    codes: dict[str, ProviderCode] = field(default_factory=dict)
    devices: dict[str, _Device] = field(default_factory=dict)
    closed: threading.Event = field(default_factory=threading.Event)
    server: ThreadingHTTPServer | None = None

    @property
    def issuer(self) -> str:
        assert self.server is not None
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def settings(self, **more: object) -> dict[str, object]:
        """Its entry in the setting `oidc`."""
        client = {"issuer": self.issuer, "client_id": CLIENT_ID, "client_secret": self.secret}
        return client | {"name": "test", **more}

    def token(
        self, key: SigningKey | None = None, headers: Mapping[str, object] | None = None, **claims: object
    ) -> str:
        """A token that it signs for whoever `person` is; a claim that is None is left out."""
        key = key or self.keys[0]
        now = int(time.time())
        told: Claims = {"iss": self.issuer, "aud": CLIENT_ID, "iat": now, "exp": now + TOKEN_LIFE_S}
        told |= self.person | claims
        told = {name: value for name, value in told.items() if value is not None}
        return jwt.encode(told, key.private, key.algorithm, {"kid": key.key_id, **(headers or {})})

    def rotate(self, algorithm: str = "RS256") -> None:
        """Sign with a new key from now on, and list no other."""
        self.keys = [new_key(algorithm)]

    def count(self, path: str) -> int:
        """Return how often a path was asked for."""
        return sum(request.split()[1] == path for request in self.requests)

    def approve(self, user_code: str, approved: bool = True) -> None:
        """Let a person answer a device flow."""
        next(device for device in self.devices.values() if device.user_code == user_code).approved = approved

    def __enter__(self) -> IdentityProvider:
        provider = self

        class Handler(_Handler):
            pass

        Handler.provider = provider
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.server is not None
        self.closed.set()
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    provider: IdentityProvider

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path, query = self._begin()
        provider = self.provider
        match path:
            case "/.well-known/openid-configuration":
                self._json(200, _discovery(provider))
            case "/keys":
                self._keys()
            case "/authorize":
                self._authorize(query)
            case _:
                self._json(404, {"error": "not_found"})

    def do_POST(self) -> None:
        path, _ = self._begin()
        length = int(self.headers.get("content-length") or 0)
        form = {name: values[0] for name, values in parse_qs(self.rfile.read(length).decode()).items()}
        if path not in ("/token", "/device"):
            self._json(404, {"error": "not_found"})
        elif not self._is_client(form):
            self._json(401, {"error": "invalid_client"})
        elif path == "/device":
            self._begin_device()
        else:
            self.provider.forms.append(form)
            by_device = form.get("grant_type") == DEVICE_GRANT
            self._json(*(self._poll_device(form) if by_device else self._redeem(form)))

    def _begin(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        self.provider.requests.append(f"{self.command} {parts.path}")
        return parts.path, {name: values[0] for name, values in parse_qs(parts.query).items()}

    def _keys(self) -> None:
        provider = self.provider
        match provider.behaviour:
            case "hangs":
                provider.closed.wait(60)
            case "garbage":
                self._send(200, b'{"keys": "\xff none of your' + b"[" * 100_000)
            case "fails":
                self._json(500, {"error": "server_error"})
            case "endless":
                self._send(200, b" " * (2 << 20))
            case "well":
                self._json(200, {"keys": [key.public_jwk() for key in provider.keys]})

    def _authorize(self, query: dict[str, str]) -> None:
        provider = self.provider
        if query.get("code_challenge_method") != "S256" or not query.get("code_challenge"):
            self._json(400, {"error": "invalid_request", "error_description": "code challenge required"})
            return
        answer = {"state": query["state"]}
        if provider.refuses:
            answer |= {"error": "access_denied", "error_description": "<b>no</b>"}
        else:
            code = secrets.token_urlsafe(16)
            provider.codes[code] = ProviderCode(query, dict(provider.person))
            answer["code"] = code
        if provider.names_itself:
            answer["iss"] = provider.issuer
        self.send_response(302)
        self.send_header("location", f"{query['redirect_uri']}?{urlencode(answer)}")
        self.send_header("content-length", "0")
        self.end_headers()

    def _redeem(self, form: dict[str, str]) -> tuple[int, object]:
        provider = self.provider
        code = provider.codes.pop(form.get("code", ""), None)
        if code is None or form.get("redirect_uri") != code.query["redirect_uri"]:
            return 400, {"error": "invalid_grant"}
        hashed = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        if base64.urlsafe_b64encode(hashed).rstrip(b"=").decode() != code.query["code_challenge"]:
            return 400, {"error": "invalid_grant", "error_description": "wrong code verifier"}
        return 200, self._tokens({**code.claims, "nonce": code.query.get("nonce")})

    def _begin_device(self) -> None:
        code, device = secrets.token_urlsafe(16), _Device(secrets.token_hex(3).upper())
        self.provider.devices[code] = device
        there = f"{self.provider.issuer}/activate"
        told = {"device_code": code, "user_code": device.user_code, "verification_uri": there, "expires_in": 120}
        self._json(
            200,
            told
            | {
                "verification_uri_complete": f"{there}?user_code={device.user_code}",
                "interval": self.provider.interval_s,
            },
        )

    def _poll_device(self, form: dict[str, str]) -> tuple[int, object]:
        device = self.provider.devices.get(form.get("device_code", ""))
        if device is None:
            return 400, {"error": "expired_token"}
        is_early, device.asked_at = time.monotonic() - device.asked_at < self.provider.interval_s, time.monotonic()
        if device.approved is None:
            return 400, {"error": "slow_down" if is_early else "authorization_pending"}
        if not device.approved:
            return 400, {"error": "access_denied"}
        del self.provider.devices[form["device_code"]]
        return 200, self._tokens(dict(self.provider.person))

    def _tokens(self, claims: Claims) -> dict[str, object]:
        id_token = self.provider.token(**(claims | self.provider.forged))
        return {"access_token": "opaque", "token_type": "Bearer", "expires_in": TOKEN_LIFE_S, "id_token": id_token}

    def _is_client(self, form: Mapping[str, str]) -> bool:
        if not self.provider.secret:
            return form.get("client_id") == CLIENT_ID
        scheme, _, given = self.headers.get("authorization", "").partition(" ")
        if scheme != "Basic":
            return False
        name, _, secret = base64.b64decode(given).decode().partition(":")
        return (unquote(name), unquote(secret.replace("+", " "))) == (CLIENT_ID, self.provider.secret)

    def _json(self, status: int, document: object) -> None:
        self._send(status, json.dumps(document).encode())

    def _send(self, status: int, body: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            pass  # whoever asked has gone


def _discovery(provider: IdentityProvider) -> dict[str, object]:
    at = provider.issuer
    found: dict[str, object] = {
        "issuer": at,
        "jwks_uri": f"{at}/keys",
        "authorization_endpoint": f"{at}/authorize",
        "token_endpoint": f"{at}/token",
        "authorization_response_iss_parameter_supported": provider.names_itself,
    }
    return found | ({"device_authorization_endpoint": f"{at}/device"} if provider.has_device_flow else {})
