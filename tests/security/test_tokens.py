"""Tokens of single sign-on that a gateway must refuse, against a gateway process and a provider that signs for real."""

from __future__ import annotations

import base64
import hmac
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import requests
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.support.identity_provider import IdentityProvider, SigningKey, new_key
from tests.support.loopback import calling_from, loopback_addresses
from tests.support.stack import Stack

RULES = [
    {"claim": "groups", "value": "llm-admins", "team": "ops", "role": "admin"},
    {"claim": "groups", "value": "llm-red", "team": "red"},
]
LEEWAY_S = 2
RED: dict[str, Any] = {"groups": ["staff", "llm-red"]}
TIMEOUT_S = 20
ADDRESSES = loopback_addresses()
"""Each call is from another one: refusals of one address are slowed, which is tried elsewhere."""


@dataclass(frozen=True, slots=True)
class Front:
    """A gateway, and the providers that it knows."""

    url: str
    key: str
    provider: IdentityProvider
    other: IdentityProvider
    """Trusted as well, for users of its own."""

    def call(self, token: str) -> requests.Response:
        """Call a model with a token."""
        body = {"model": "quick", "messages": [{"role": "user", "content": "hi"}]}
        headers = {"authorization": f"Bearer {token}"}
        with calling_from(next(ADDRESSES)) as session:
            return session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=TIMEOUT_S)

    def refusal(self, token: str) -> str:
        """Return why a token is refused; fails if it is not."""
        answer = self.call(token)
        assert answer.status_code == 401, answer.text
        error = answer.json()["error"]
        assert error["type"] == "authentication_error"
        assert token not in answer.text
        told: str = error["message"]
        return told


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with Stack() as stack, IdentityProvider() as provider, IdentityProvider() as other:
        stack.fake_worker("quick", "--step-ms", "2", "--tokens", "8")
        ours = provider.settings(rules=RULES, leeway_s=LEEWAY_S)
        theirs = other.settings(name="other", user_prefix="guest:", rules=RULES, leeway_s=LEEWAY_S)
        gateway = stack.gateway(oidc=json.dumps({"providers": [ours, theirs]}))
        running = Front(gateway.url, stack.key, provider, other)
        deadline = time.monotonic() + TIMEOUT_S
        while running.call(provider.token(**RED)).status_code != 200 and time.monotonic() < deadline:
            time.sleep(0.1)
        yield running


def rewritten(token: str, header: dict[str, Any] | None = None, **claims: object) -> str:
    """Return the token with another header or other claims, and the signature that it had."""
    parts = token.split(".")
    told = header if header is not None else read(parts[0])
    return ".".join([packed(told), packed(read(parts[1]) | claims), parts[2]])


def read(part: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    return found


def packed(document: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(document).encode()).rstrip(b"=").decode()


@pytest.mark.parametrize("number", [0, 1], ids=["RS256", "ES256"])
def test_a_true_token_calls_a_model(front: Front, number: int) -> None:
    assert front.call(front.provider.token(front.provider.keys[number], **RED)).status_code == 200


def test_a_forged_signature_is_refused(front: Front) -> None:
    own = new_key()
    stranger = SigningKey(front.provider.keys[0].key_id, own.algorithm, own.private)
    assert "signature" in front.refusal(front.provider.token(stranger, **RED))
    assert "signature" in front.refusal(rewritten(front.provider.token(**RED), groups=["llm-admins"]))


def test_an_expired_token_is_refused(front: Front) -> None:
    assert "expired" in front.refusal(front.provider.token(**RED, exp=int(time.time()) - LEEWAY_S - 1))


def test_a_token_is_refused_once_it_has_expired_though_it_was_verified_before(front: Front) -> None:
    token = front.provider.token(**RED, exp=int(time.time()) + 2 - LEEWAY_S)
    assert front.call(token).status_code == 200
    time.sleep(2.2)
    assert "expired" in front.refusal(token)


def test_a_token_without_an_end_is_refused(front: Front) -> None:
    assert "`exp`" in front.refusal(front.provider.token(**RED, exp=None))


def test_a_token_that_is_not_yet_valid_is_refused(front: Front) -> None:
    assert "not valid yet" in front.refusal(front.provider.token(**RED, nbf=int(time.time()) + LEEWAY_S + 5))


@pytest.mark.parametrize("audience", ["another", ["another", "third"], None])
def test_a_token_for_another_audience_is_refused(front: Front, audience: object) -> None:
    assert "aud" in front.refusal(front.provider.token(**RED, aud=audience))


@pytest.mark.parametrize("issuer", ["https://id.example.com", None])
def test_a_token_of_another_issuer_is_refused(front: Front, issuer: str | None) -> None:
    assert "issuer" in front.refusal(front.provider.token(**RED, iss=issuer))


def test_a_provider_can_not_sign_for_another_one(front: Front) -> None:
    stranger = front.other.keys[0]
    assert "key" in front.refusal(front.provider.token(stranger, **RED))
    same = SigningKey(front.provider.keys[0].key_id, stranger.algorithm, stranger.private)
    assert "signature" in front.refusal(front.provider.token(same, **RED))


def test_a_provider_can_not_name_users_of_another_one(front: Front) -> None:
    told = {**RED, "email": "guest:eve@example.com"}
    assert "another identity provider" in front.refusal(front.provider.token(**told))


@pytest.mark.parametrize("algorithm", ["none", "None", "NONE", ""])
def test_a_token_that_nobody_signed_is_refused(front: Front, algorithm: str) -> None:
    token = front.provider.token(**RED)
    header = {"alg": algorithm, "typ": "JWT", "kid": front.provider.keys[0].key_id}
    assert "algorithm" in front.refusal(rewritten(token, header))
    assert "algorithm" in front.refusal(rewritten(token, header).rpartition(".")[0] + ".")


def test_a_public_key_is_no_secret_to_sign_with(front: Front) -> None:
    key = front.provider.keys[0]
    assert isinstance(key.private, RSAPrivateKey)
    public = key.private.public_key()
    unsigned = rewritten(front.provider.token(**RED), {"alg": "HS256", "typ": "JWT", "kid": key.key_id})
    content = unsigned.rpartition(".")[0]
    for secret in (
        public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
        json.dumps(key.public_jwk()).encode(),
    ):
        signature = base64.urlsafe_b64encode(hmac.digest(secret, content.encode(), "sha256")).rstrip(b"=").decode()
        assert "algorithm" in front.refusal(f"{content}.{signature}")


def test_a_key_signs_with_its_own_algorithm_only(front: Front) -> None:
    rsa, curve = front.provider.keys
    mixed = SigningKey(rsa.key_id, curve.algorithm, curve.private)
    assert "key" in front.refusal(front.provider.token(mixed, **RED))


@pytest.mark.parametrize("kind", ["logout+jwt", "dpop+jwt", "entity-statement+jwt"])
def test_a_token_for_something_else_is_refused(front: Front, kind: str) -> None:
    assert "no ID token or access token" in front.refusal(front.provider.token(None, {"typ": kind}, **RED))


def test_a_token_that_brings_its_own_key_is_refused(front: Front) -> None:
    own = new_key()
    for header in ({"jwk": own.public_jwk()}, {"jku": f"{front.other.issuer}/keys"}, {"x5u": front.other.issuer}):
        before = len(front.other.requests)
        assert "key" in front.refusal(front.provider.token(own, header, **RED))
        assert len(front.other.requests) == before


def test_a_header_that_must_be_understood_is_refused(front: Front) -> None:
    assert "no valid" in front.refusal(front.provider.token(None, {"crit": ["exotic"], "exotic": 1}, **RED))


def test_unknown_keys_without_number_fetch_the_keys_seldom(front: Front) -> None:
    before = front.provider.count("/keys")
    begun = time.monotonic()
    for _ in range(150):
        assert "key" in front.refusal(front.provider.token(new_key("ES256"), **RED))
    most = 1 + (time.monotonic() - begun) / 10.0
    assert front.provider.count("/keys") - before <= most + 1
    assert front.call(front.provider.token(**RED)).status_code == 200


@pytest.mark.parametrize(("num_bytes", "told"), [(20_000, "16384 bytes"), (10_000, "header")])
def test_a_huge_token_is_refused(front: Front, num_bytes: int, told: str) -> None:
    header = {"alg": "RS256", "kid": front.provider.keys[0].key_id, "x": "y" * num_bytes}
    assert told in front.refusal(rewritten(front.provider.token(**RED), header))


@pytest.mark.parametrize(
    "token", ["e.e.e", "eyJ.eyJ.", "e..", "eyJhbGciOiJSUzI1NiJ9.e30.", "e30.e30.e30", "e" * 500 + ".." + "%"]
)
def test_what_is_no_token_is_refused(front: Front, token: str) -> None:
    front.refusal(token)


def test_deep_nesting_is_refused(front: Front) -> None:
    deep = base64.urlsafe_b64encode(b'{"alg":' + b"[" * 1000).rstrip(b"=").decode()
    front.refusal(f"{deep}.{deep}.")


def test_who_sends_forged_tokens_is_slowed_and_nobody_else(front: Front) -> None:
    expired = front.provider.token(**RED, exp=1)
    forged = front.provider.token(new_key("ES256"), **RED)
    body = {"model": "quick", "messages": [{"role": "user", "content": "hi"}]}
    with calling_from("127.67.0.1") as session:

        def seconds(token: str) -> float:
            begun = time.monotonic()
            headers = {"authorization": f"Bearer {token}"}
            session.post(f"{front.url}/v1/chat/completions", json=body, headers=headers, timeout=TIMEOUT_S)
            return time.monotonic() - begun

        assert max(seconds(expired) for _ in range(30)) < 1.0
        assert max(seconds(forged) for _ in range(15)) > 1.0
        assert seconds(front.provider.token(**RED)) < 1.0


def test_an_address_that_is_not_verified_names_nobody(front: Front) -> None:
    for verified in (False, None, "false", 1):
        assert "verified" in front.refusal(front.provider.token(**RED, email_verified=verified))


def test_a_user_is_no_admin(front: Front) -> None:
    for groups, status in ((["llm-red"], 403), (["llm-admins"], 200)):
        headers = {"authorization": f"Bearer {front.provider.token(groups=groups)}"}
        answer = requests.get(f"{front.url}/admin/explain?model=quick", headers=headers, timeout=TIMEOUT_S)
        assert answer.status_code == status


def test_who_has_no_team_is_refused(front: Front) -> None:
    answer = front.call(front.provider.token(groups=["others"]))
    assert answer.status_code == 403
    assert "No team" in answer.json()["error"]["message"]


def test_a_key_of_tokens_that_was_withdrawn_opens_nothing_any_more(front: Front) -> None:
    old = front.provider.keys
    token = front.provider.token(**RED)
    assert front.call(token).status_code == 200
    front.provider.keys = [new_key()]
    try:
        deadline = time.monotonic() + TIMEOUT_S  # keys are fetched anew after 10 s at the earliest
        while front.call(front.provider.token(**RED)).status_code != 200 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert "key" in front.refusal(token)
    finally:
        front.provider.keys = old


@pytest.mark.parametrize("behaviour", ["hangs", "garbage", "fails", "endless"])
def test_calls_with_keys_go_on_while_a_provider_is_in_trouble(behaviour: Any) -> None:
    with Stack() as stack, IdentityProvider(behaviour=behaviour) as provider:
        stack.fake_worker("quick", "--step-ms", "2", "--tokens", "8")
        gateway = stack.gateway(oidc=json.dumps({"providers": [provider.settings(rules=RULES)]}))
        front = Front(gateway.url, stack.key, provider, provider)
        refused = front.call(provider.token(**RED))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "provider_unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        begun = time.monotonic()
        assert front.call(stack.key).status_code == 200
        assert time.monotonic() - begun < 2.0
        if behaviour in ("fails", "endless"):
            return  # as with "garbage", only sooner
        provider.behaviour = "well"
        deadline = time.monotonic() + 2 * TIMEOUT_S
        while front.call(provider.token(**RED)).status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.5)
