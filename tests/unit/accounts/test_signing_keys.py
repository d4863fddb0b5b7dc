"""The keys of a provider: which are used, when they are fetched, and what stays while it is away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from accounts.oidc.providers import KnownProvider, Providers
from accounts.oidc.signing_keys import read_key_set
from accounts.oidc.verification import TokenRefused
from accounts.protocol.sign_on import read_sign_on
from tests.support.identity_provider import Behaviour, IdentityProvider, new_key

REFETCH_S = 0.3
OTHER = "unknown"


def key_set(*keys: dict[str, Any]) -> bytes:
    return json.dumps({"keys": keys}).encode()


@asynccontextmanager
async def known(provider: IdentityProvider, **settings: object) -> AsyncIterator[KnownProvider]:
    """Run the providers of a process that knows this one alone."""
    text = json.dumps({"providers": [provider.settings(**settings)]})
    providers = Providers(read_sign_on(text), REFETCH_S)
    task = asyncio.create_task(providers.run())
    try:
        yield providers.all[0]
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(holds: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110 - a test may poll
            await asyncio.sleep(0.01)


def test_only_keys_to_verify_with_are_used() -> None:
    rsa, curve = new_key().public_jwk(), new_key("ES256").public_jwk()
    secret = {"kty": "oct", "kid": "secret", "k": "c2VjcmV0", "alg": "HS256"}
    found = read_key_set(
        key_set(
            rsa | {"kid": "rsa"},
            curve | {"kid": "curve"},
            secret,
            rsa | {"kid": "locks", "use": "enc"},
            rsa | {"kid": "confused", "alg": "HS256"},
            rsa | {"kid": "confused-too", "alg": "ES256"},
            new_key(bits=1024).public_jwk() | {"kid": "weak"},
            {"kty": "RSA", "kid": "broken", "n": "AQAB"},
            {"kty": 5, "kid": "odd"},
        ),
        ("RS256", "PS256", "ES256"),
    )
    assert set(found) == {("rsa", "RS256"), ("rsa", "PS256"), ("curve", "ES256")}


@pytest.mark.parametrize("document", [b"", b"[]", b'{"keys": []}', b'{"keys": 5}', b"\xff", b'{"keys": [[[[{]}'])
def test_what_is_no_key_set_is_told(document: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read_key_set(document, ("RS256",))


async def test_a_key_without_a_name_is_the_only_one() -> None:
    with IdentityProvider(keys=[new_key(), new_key("ES256"), new_key("ES256")]) as provider:
        async with known(provider) as found:
            await until(lambda: found.keys.are_known)
            assert found.keys.find("", "RS256") is not None
            assert found.keys.find("", "ES256") is None


async def test_a_new_key_is_fetched_by_whoever_needs_it_first() -> None:
    with IdentityProvider() as provider:
        async with known(provider) as found:
            await until(lambda: found.keys.are_known)
            version = found.keys.version
            await asyncio.sleep(1.5 * REFETCH_S)
            provider.rotate()
            (key,) = provider.keys
            await asyncio.gather(*(found.keys.look_for(key.key_id, "RS256") for _ in range(20)))
            assert found.keys.find(key.key_id, "RS256") is not None
            assert (found.keys.version, provider.count("/keys")) == (version + 1, 2)


async def test_unknown_keys_are_looked_for_seldom() -> None:
    with IdentityProvider() as provider:
        async with known(provider) as found:
            await until(lambda: found.keys.are_known)
            for _ in range(50):
                async with asyncio.timeout(0.1):  # nobody waits
                    await found.keys.look_for(OTHER, "RS256")
            assert provider.count("/keys") == 1


async def test_few_wait_for_a_provider_that_hangs() -> None:
    with IdentityProvider(behaviour="hangs") as provider:
        async with known(provider) as found:
            await until(lambda: provider.count("/keys") == 1)
            waiting = [asyncio.create_task(found.keys.look_for(OTHER, "RS256")) for _ in range(200)]
            await asyncio.sleep(0.1)
            assert sum(task.done() for task in waiting) == 200 - 64
            async with asyncio.timeout(4.0):
                await asyncio.gather(*waiting)


@pytest.mark.parametrize("behaviour", ["garbage", "fails", "endless"])
async def test_the_last_keys_stay_while_the_provider_is_in_trouble(
    behaviour: Behaviour, caplog: pytest.LogCaptureFixture
) -> None:
    with IdentityProvider() as provider:
        async with known(provider) as found:
            await until(lambda: found.keys.are_known)
            provider.behaviour = behaviour
            await asyncio.sleep(1.5 * REFETCH_S)
            await found.keys.look_for(OTHER, "RS256")
            await until(lambda: provider.count("/keys") >= 4)
            assert found.keys.find(provider.keys[0].key_id, "RS256") is not None
            assert sum("can't be fetched" in record.message for record in caplog.records) == 1
            provider.behaviour = "well"
            provider.rotate()
            await until(lambda: found.keys.find(provider.keys[0].key_id, "RS256") is not None)


async def test_a_document_of_another_issuer_is_none(caplog: pytest.LogCaptureFixture) -> None:
    with IdentityProvider() as provider:
        async with known(provider, issuer=provider.issuer + "/") as found:
            await until(lambda: "names the issuer" in caplog.text)
            assert not found.keys.are_known


async def test_an_algorithm_that_is_not_allowed_finds_no_key() -> None:
    with IdentityProvider() as provider:
        text = json.dumps({"providers": [provider.settings(algorithms=["RS256"])]})
        providers = Providers(read_sign_on(text), REFETCH_S)
        found, told = providers.of_token(provider.token(provider.keys[1]).encode())
        with pytest.raises(TokenRefused, match="algorithm"):
            found.key_of(told)
