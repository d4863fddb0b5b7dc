"""Sends requests to identity providers: bounded in time and bytes, without redirects, and by verified TLS."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp

from workers.http_addresses import ResolverOf
from workers.process.resolver import RESOLVER

TIMEOUT_S = 5.0
"""Maximum seconds of one request, from the lookup of the host to the answer's last byte."""
MAX_BYTES = 1 << 20
"""Maximum bytes of an answer."""
JSON = {"accept": "application/json"}


class ProviderAway(Exception):
    """The identity provider does not answer as it should; the message says how, without anything secret."""


class ProviderHttp:
    """An HTTP client for identity providers. Requests may be sent only inside an `async with running()` block."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Hold the connections for the length of the block."""
        connector = aiohttp.TCPConnector(resolver=ResolverOf(RESOLVER.addresses), use_dns_cache=False)
        # No cookies: a provider must not take one person's request for another's.
        jar = aiohttp.DummyCookieJar()
        async with aiohttp.ClientSession(connector=connector, timeout=self._timeout, cookie_jar=jar) as session:
            self._session = session
            try:
                yield
            finally:
                self._session = None

    async def get(self, url: str) -> bytes:
        """Return the document at a URL. Raises ProviderAway."""
        status, body = await self._ask("GET", url, JSON, None)
        if status != 200:
            raise ProviderAway(f"GET {url} was answered with status {status}")
        return body

    async def post(self, url: str, form: Mapping[str, str], headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Send a form, and return the answer's status and body. Raises ProviderAway."""
        return await self._ask("POST", url, {**JSON, **headers}, form)

    async def _ask(
        self, method: str, url: str, headers: Mapping[str, str], form: Mapping[str, str] | None
    ) -> tuple[int, bytes]:
        if self._session is None:
            raise ProviderAway(f"{method} {url} can't be sent: this process is starting or stopping")
        try:
            async with self._session.request(method, url, headers=headers, data=form, allow_redirects=False) as answer:
                return answer.status, await _read(answer)
        except TimeoutError:
            raise ProviderAway(f"{method} {url} was not answered within {self._timeout.total:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ProviderAway(f"{method} {url} failed: {error or type(error).__name__}") from None


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > MAX_BYTES:
            raise ProviderAway(f"{answer.method} {answer.url} was answered with more than {MAX_BYTES} bytes")
    return bytes(body)
