"""A gateway, an accounts service and an identity provider, as processes and servers, for tests of single sign-on."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from tests.support.browser import Browser
from tests.support.identity_provider import IdentityProvider
from tests.support.loopback import calling_from, loopback_addresses
from tests.support.stack import Process, Stack

TIMEOUT_S = 20
START_S = 6.0
RULES = [
    {"claim": "groups", "value": "llm-admins", "team": "ops", "role": "admin"},
    {"claim": "groups", "value": "llm-leads", "team": "red", "role": "manager"},
    {"claim": "groups", "value": "llm-red", "team": "red"},
    {"claim": "groups", "value": "llm-blue", "team": "blue"},
]
ANN: dict[str, Any] = {"sub": "1", "email": "ann@example.com", "email_verified": True, "groups": ["llm-red"]}
BOB: dict[str, Any] = {"sub": "2", "email": "bob@example.com", "email_verified": True, "groups": ["llm-blue"]}
EVE: dict[str, Any] = {"sub": "3", "email": "eve@example.com", "email_verified": True, "groups": []}


@dataclass(slots=True)
class SignOnFront:
    """What is running."""

    url: str
    provider: IdentityProvider
    stack: Stack
    gateway: Process
    accounts: Process
    _addresses: Iterator[str] = field(default_factory=loopback_addresses)

    def browser(self) -> Browser:
        """Return a new browser, at an address of its own."""
        return Browser(next(self._addresses))

    def signed_in(self, person: dict[str, Any]) -> Browser:
        """Return a browser whose user has signed in."""
        self.provider.person = dict(person)
        browser = self.browser()
        answer = browser.open(f"{self.url}/auth/login")
        assert answer.status_code == 200, answer.text
        return browser

    def post(self, path: str, body: object, **headers: str) -> requests.Response:
        with calling_from(next(self._addresses)) as session:
            return session.post(self.url + path, json=body, headers=headers, timeout=TIMEOUT_S)

    def whoami(self, key: str) -> requests.Response:
        """Ask who the holder of a key or token is."""
        with calling_from(next(self._addresses)) as session:
            headers = {"authorization": f"Bearer {key}"}
            return session.get(f"{self.url}/admin/whoami", headers=headers, timeout=TIMEOUT_S)

    def block(self, user: str) -> None:
        """Block a user, as an admin does, and wait until every gateway knows."""
        answer = self.post(f"/admin/users/{user}/block", {}, authorization=f"Bearer {self.stack.key}")
        assert answer.status_code == 200, answer.text
        time.sleep(1.0)

    def call(self, key: str) -> requests.Response:
        """Call a model with a key or token."""
        body = {"model": "quick", "messages": [{"role": "user", "content": "hi"}]}
        return self.post("/v1/chat/completions", body, authorization=f"Bearer {key}")


@contextlib.contextmanager
def sign_on_front(
    setting: dict[str, object] | None = None,
    *,
    others: Sequence[dict[str, object]] | None = (),
    model: Path | None = None,
    **provider: object,
) -> Iterator[SignOnFront]:
    """Start all of it. `setting`: more of the setting `oidc`; `provider`: more of the provider's entry in it; `others`:
    further entries, None: no provider is named at all.

    `model`: served by a true worker; by default a fake one answers."""
    with Stack() as stack, IdentityProvider(person=dict(ANN)) as identities:
        entry = identities.settings(**{"rules": RULES, **provider})
        oidc = "" if others is None else json.dumps({"providers": [entry, *others], **(setting or {})})
        if model is None:
            stack.fake_worker("quick", "--step-ms", "2", "--tokens", "8")
        else:
            stack.worker(model, "quick", slots=2)
        accounts = stack.accounts(oidc=oidc)
        gateway = stack.gateway(oidc=oidc, accounts_url=accounts.url)
        front = SignOnFront(gateway.url, identities, stack, gateway, accounts)
        _wait(front)
        yield front


def _wait(front: SignOnFront) -> None:
    """Wait until the accounts service has made its tables; a provider that is away is not waited for."""
    deadline = time.monotonic() + START_S
    with calling_from("127.0.0.3") as session:
        while time.monotonic() < deadline:
            asked = session.post(f"{front.url}/auth/device/token", json={"device_code": "none"}, timeout=TIMEOUT_S)
            answer = session.get(f"{front.url}/auth/login", allow_redirects=False, timeout=TIMEOUT_S)
            if 503 not in (asked.status_code, answer.status_code):
                return
            time.sleep(0.05)
