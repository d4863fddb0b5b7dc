"""Fetches the files that callers name by URL, within bounds, from hosts that the operator allows.

A host is looked up once, all its addresses are checked, and the connection goes to one of those: a name that answers
otherwise the next time changes nothing. Redirects are not followed, since each could lead elsewhere.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO

import aiohttp
from yarl import URL

from gateway.api.media.attachments import DEFAULT_MAX_BYTES, MIB, UNTOLD
from gateway.api.media.kinds import bare_type, is_text, kind_of_type
from gateway.dispatch.team_turns import TeamTurns
from gateway.errors import InvalidRequest, NotSupported, PaddockError
from workers.http_addresses import Addresses, ResolverOf
from workers.process.addresses import USUAL_PORTS, is_listed, why_refused
from workers.process.resolver import RESOLVER

AT_ONCE, AT_ONCE_PER_TEAM = 16, 4
"""Maximum fetches at once in all, and of one team; others wait."""
PIECE_BYTES = 64 << 10
PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class FetchBounds:
    """The hosts from which files may be fetched, and the limits of a fetch."""

    hosts: tuple[str, ...] = ()
    """Names of the hosts, or `*.example.com`, each perhaps with a port (`is_listed`); empty: nothing is fetched."""
    allow_private: bool = False
    """Whether these hosts may have addresses of private networks or of this machine."""
    max_bytes: int = DEFAULT_MAX_BYTES
    timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Fetched:
    """A file that was fetched."""

    data: bytes
    content_type: str
    """Its content type as the server told it, without parameters; empty: the server told none."""


class Fetcher:
    """Fetches files for all requests of a gateway process."""

    def __init__(
        self, bounds: FetchBounds, addresses: Addresses = RESOLVER.addresses, tls: ssl.SSLContext | bool = True
    ) -> None:
        """`tls`: checks servers' certificates; True: as aiohttp does by default."""
        self._bounds = bounds
        self._addresses = addresses
        self._tls = tls
        self._turns = TeamTurns(AT_ONCE, AT_ONCE_PER_TEAM)

    async def fetch(self, url: str, param: str, team: str, hold: Callable[[int], None]) -> Fetched:
        """Return the file at a URL. `param`: the caller's parameter that the URL comes from. `hold` is called with
        the number of bytes of each piece; what it raises ends the fetch.

        Raises NotSupported, InvalidRequest."""
        parsed = self._allowed(url, param)
        await self._turns.take(team)
        try:
            async with asyncio.timeout(self._bounds.timeout_s):
                # Encoded: a name with letters that ASCII lacks has to be the same for the lookup and for the server.
                addresses = await self._checked(parsed.raw_host or "", param)
                return await self._get(parsed, addresses, param, hold)
        except TimeoutError:
            reason = f"it took longer than {self._bounds.timeout_s:g} s (media_timeout_s)"
            raise _failed(parsed, reason, param) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _failed(parsed, f"the connection failed ({type(error).__name__})", param) from None
        finally:
            self._turns.give_back(team)

    def _allowed(self, url: str, param: str) -> URL:
        """Return the URL. Raises InvalidRequest, or NotSupported if nothing may be fetched from its host."""
        try:
            parsed = URL(url)
            host, encoded, port = parsed.host, parsed.raw_host, parsed.port
        except ValueError:
            raise InvalidRequest(f"`{param}` has a URL that can't be read. Send a whole one.", param=param) from None
        if parsed.scheme not in PORTS or not host or not encoded or port is None:
            raise InvalidRequest(f"`{param}` has a URL without a host. Send one of http or https.", param=param)
        if parsed.user is not None or parsed.password is not None:
            raise InvalidRequest(f"`{param}` has a URL with a password in it. Send one without.", param=param)
        if not any(is_listed(one, self._bounds.hosts, port) for one in (host, encoded)):
            place = host[:100] if port in USUAL_PORTS else f"{host[:100]}:{port}"
            raise NotSupported(
                f"`{param}` is to be fetched from `{place}`, and this gateway fetches nothing from there. Send "
                "the file itself, as a `data:` URL, or have the operator add the host to PADDOCK_MEDIA_ALLOWED_HOSTS.",
                param=param,
            )
        return parsed

    async def _checked(self, host: str, param: str) -> Sequence[str]:
        """Return the host's addresses. Raises InvalidRequest if one of them is of a network that is off limits."""
        addresses = await self._addresses(host)
        for address in addresses:
            why = why_refused(address, allow_private=self._bounds.allow_private)
            if why:
                raise InvalidRequest(
                    f"`{param}` names `{host[:100]}`, whose address is {why}: nothing is fetched from there. Send the "
                    "file itself, as a `data:` URL.",
                    param=param,
                )
        return addresses

    async def _get(self, url: URL, addresses: Sequence[str], param: str, hold: Callable[[int], None]) -> Fetched:
        async def checked(_: str) -> Sequence[str]:
            return addresses

        connector = aiohttp.TCPConnector(
            resolver=ResolverOf(checked), use_dns_cache=False, force_close=True, limit=1, ssl=self._tls
        )
        async with (
            aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=self._bounds.timeout_s),
                headers={"Accept": "image/*, audio/*, text/*, application/json", "Accept-Encoding": "identity"},
                skip_auto_headers=("User-Agent",),
            ) as session,
            session.get(url.with_fragment(None), allow_redirects=False) as response,
        ):
            self._check_head(response, url, param)
            whole = BytesIO()
            async for piece in response.content.iter_chunked(PIECE_BYTES):
                if whole.tell() + len(piece) > self._bounds.max_bytes:
                    raise self._too_large(url, param)
                hold(len(piece))
                whole.write(piece)
            return Fetched(whole.getvalue(), bare_type(response.headers.get("Content-Type", "")))

    def _check_head(self, response: aiohttp.ClientResponse, url: URL, param: str) -> None:
        """Raise InvalidRequest for an answer that is no file, or none of a kind that is read."""
        if response.status in range(300, 400):
            raise _failed(url, f"it answered {response.status}, and redirects are not followed", param)
        if response.status != 200:
            raise _failed(url, f"it answered {response.status}", param)
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise _failed(url, "it answered with a compressed body, which nobody asked for", param)
        content_type = bare_type(response.headers.get("Content-Type", ""))
        if content_type not in UNTOLD and kind_of_type(content_type) is None and not is_text(content_type):
            raise _failed(url, f"it is of type {content_type[:100]!r}: no picture, sound or text", param)
        if (response.content_length or 0) > self._bounds.max_bytes:
            raise self._too_large(url, param)

    def _too_large(self, url: URL, param: str) -> PaddockError:
        return _failed(url, f"it has more than {self._bounds.max_bytes / MIB:g} MiB (max_media_mib)", param)


def _failed(url: URL, reason: str, param: str) -> InvalidRequest:
    """Return the error for a URL from which no file came. It has no query: that may be a secret."""
    where = str(url.with_query(None).with_fragment(None))[:200]
    message = f"`{param}`: `{where}` can't be fetched: {reason}. Send the file itself, as a `data:` URL."
    return InvalidRequest(message, param=param)
