"""Files fetched by URL, from a real server on this machine: what is allowed, what is not, and within which bounds."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from gateway.api.media import fetcher as fetching
from gateway.api.media.fetcher import FetchBounds, Fetcher
from gateway.errors import InvalidRequest, NotSupported, PaddockError
from tests.support.sent_media import PNG
from workers.process.resolver import RESOLVER

MAX_BYTES = 100_000
HOST = "files.example.com"


@dataclass(slots=True)
class Server:
    """A server that answers each path in its own way, and notes what it is asked."""

    port: int = 0
    asked: list[web.BaseRequest] = field(default_factory=list)
    num_at_once: int = 0
    most_at_once: int = 0

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.append(request)
        match request.path:
            case "/a.png":
                return web.Response(body=PNG, content_type="image/png")
            case "/redirect":
                raise web.HTTPFound("/a.png")
            case "/cookie":
                return web.Response(body=PNG, content_type="image/png", headers={"Set-Cookie": "a=b"})
            case "/page":
                return web.Response(text="<html></html>", content_type="application/xhtml")
            case "/packed":
                return web.Response(body=PNG, content_type="image/png", headers={"Content-Encoding": "gzip"})
            case "/large":
                return web.Response(body=bytes(MAX_BYTES + 1), content_type="image/png")
            case "/slow":
                return await self._stream(request, 1, 0.05)
            case "/endless":
                return await self._stream(request, 50_000, 0.0)
            case "/wait":
                return await self._wait()
        raise web.HTTPNotFound

    async def _stream(self, request: web.BaseRequest, num_bytes: int, every_s: float) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "image/png"})
        await response.prepare(request)
        for _ in range(10_000):
            await response.write(bytes(num_bytes))
            await asyncio.sleep(every_s)
        return response

    async def _wait(self) -> web.Response:
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        await asyncio.sleep(0.1)
        self.num_at_once -= 1
        return web.Response(body=PNG, content_type="image/png")


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server()
    runner = web.ServerRunner(web.Server(server.answer))
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        server.port = runner.addresses[0][1]
        yield server
    finally:
        await runner.cleanup()


def named(*found: Sequence[str]) -> Callable[[str], object]:
    """Return a resolver that finds these addresses, one after the other; the last ones for good."""
    left = list(found)

    async def addresses(_: str) -> Sequence[str]:
        return left.pop(0) if len(left) > 1 else left[0]

    return addresses


def fetcher(
    *, hosts: tuple[str, ...] = (f"{HOST}:*",), allow_private: bool = True, timeout_s: float = 5.0, **more: object
) -> Fetcher:
    bounds = FetchBounds(hosts, allow_private, MAX_BYTES, timeout_s)
    return Fetcher(bounds, **{"addresses": named(["127.0.0.1"]), **more})  # type: ignore[arg-type]


def ignore(_: int) -> None:
    """Count nothing."""


async def refusal(fetch: Fetcher, url: str) -> PaddockError:
    with pytest.raises(PaddockError) as caught:
        await fetch.fetch(url, "messages.0.content.0", "team", ignore)
    assert caught.value.param == "messages.0.content.0"
    return caught.value


async def test_a_file_is_fetched_and_counted() -> None:
    held: list[int] = []
    async with serving() as server:
        found = await fetcher().fetch(f"http://{HOST}:{server.port}/a.png?x=1#part", "p", "team", held.append)
    assert (found.data, found.content_type, sum(held)) == (PNG, "image/png", len(PNG))
    [asked] = server.asked
    assert (asked.headers["Host"], asked.query_string) == (f"{HOST}:{server.port}", "x=1")
    assert asked.headers["Accept-Encoding"] == "identity"


async def test_nothing_is_fetched_unless_a_host_is_listed() -> None:
    async with serving() as server:
        url = f"http://{HOST}:{server.port}/a.png"
        for hosts in ((), ("example.com:*",), ("*.files.example.com:*",)):
            error = await refusal(fetcher(hosts=hosts), url)
            assert isinstance(error, NotSupported)
            assert "PADDOCK_MEDIA_ALLOWED_HOSTS" in error.message
    assert not server.asked


async def test_other_ports_of_a_host_are_listed_by_themselves() -> None:
    """What else listens on a host that has pictures may tell what is not for callers: JSON is read as a text."""
    async with serving() as server:
        url = f"http://{HOST}:{server.port}/a.png"
        for hosts in ((HOST,), (f"{HOST}:80",), (f"{HOST}:{server.port + 1}",), ("*.example.com",)):
            error = await refusal(fetcher(hosts=hosts), url)
            assert f"`{HOST}:{server.port}`" in error.message
        assert not server.asked
        for host in (f"{HOST}:{server.port}", f"*.example.com:{server.port}"):
            assert (await fetcher(hosts=(host,)).fetch(url, "p", "team", ignore)).data == PNG


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.1", "2130706433", "0x7f000001", "0"])
async def test_this_machine_is_off_limits_however_it_is_written(host: str) -> None:
    async with serving() as server:
        fetch = fetcher(hosts=(f"{host}:*",), allow_private=False, addresses=RESOLVER.addresses)
        error = await refusal(fetch, f"http://{host}:{server.port}/a.png")
    assert isinstance(error, InvalidRequest)
    assert not server.asked


async def test_a_name_with_an_address_off_limits_is_refused() -> None:
    async with serving() as server:
        for found in (["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["::ffff:169.254.169.254"]):
            fetch = fetcher(allow_private=False, addresses=named(found))
            error = await refusal(fetch, f"http://{HOST}:{server.port}/a.png")
            assert "nothing is fetched from there" in error.message
        for allow_private in (False, True):
            fetch = fetcher(allow_private=allow_private, addresses=named(["169.254.169.254"]))
            error = await refusal(fetch, f"http://{HOST}/latest/meta-data/")
            assert "nothing is fetched from there" in error.message
    assert not server.asked


async def test_a_name_that_answers_otherwise_the_second_time_changes_nothing() -> None:
    """DNS rebinding: the address that was checked is the one that is connected to."""
    lookups: Counter[str] = Counter()

    async def addresses(host: str) -> Sequence[str]:
        lookups[host] += 1
        return ["127.0.0.1"] if lookups[host] == 1 else ["169.254.169.254"]

    async with serving() as server:
        found = await fetcher(addresses=addresses).fetch(f"http://{HOST}:{server.port}/a.png", "p", "team", ignore)
    assert (found.data, lookups[HOST]) == (PNG, 1)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("redirect", "redirects are not followed"),
        ("page", "no picture, sound or text"),
        ("packed", "compressed"),
        ("large", "max_media_mib"),
        ("endless", "max_media_mib"),
        ("nothing", "404"),
    ],
)
async def test_what_is_no_file_within_the_bounds_is_refused(path: str, said: str) -> None:
    async with serving() as server:
        error = await refusal(fetcher(), f"http://{HOST}:{server.port}/{path}?secret=1")
    assert said in error.message
    assert "secret" not in error.message
    assert len(server.asked) == 1


async def test_a_file_that_trickles_in_is_given_up() -> None:
    async with serving() as server:
        error = await refusal(fetcher(timeout_s=0.3), f"http://{HOST}:{server.port}/slow")
    assert "media_timeout_s" in error.message


async def test_what_the_caller_may_not_hold_ends_the_fetch() -> None:
    def refuse(_: int) -> None:
        raise InvalidRequest("too much")

    async with serving() as server:
        with pytest.raises(InvalidRequest, match="too much"):
            await fetcher().fetch(f"http://{HOST}:{server.port}/endless", "p", "team", refuse)


async def test_nothing_is_remembered_and_no_proxy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with serving() as server:
        fetch = fetcher()
        for _ in range(2):
            await fetch.fetch(f"http://{HOST}:{server.port}/cookie", "p", "team", ignore)
    assert all("Cookie" not in one.headers for one in server.asked)
    assert all("Authorization" not in one.headers for one in server.asked)


@pytest.mark.parametrize(
    "url", ["http://", "http:///a", f"http://user:password@{HOST}/", "http://[", f"http://{HOST}:99999/"]
)
async def test_urls_that_name_no_file_are_refused(url: str) -> None:
    assert isinstance(await refusal(fetcher(), url), InvalidRequest)


@pytest.mark.parametrize("listed", ["straße.example", "xn--strae-oqa.example"])
@pytest.mark.parametrize("asked", ["straße.example", "xn--strae-oqa.example"])
async def test_a_name_beyond_ascii_is_one_name_however_it_is_written(listed: str, asked: str) -> None:
    """Python's own encoding (IDNA 2003) would look up `strasse.example`, which is another's."""
    looked_up: list[str] = []

    async def addresses(host: str) -> Sequence[str]:
        looked_up.append(host)
        return ["127.0.0.1"]

    async with serving() as server:
        fetch = fetcher(hosts=(f"{listed}:*",), addresses=addresses)
        found = await fetch.fetch(f"http://{asked}:{server.port}/a.png", "p", "team", ignore)
    assert (found.data, looked_up) == (PNG, ["xn--strae-oqa.example"])
    assert server.asked[0].headers["Host"] == f"xn--strae-oqa.example:{server.port}"


async def test_so_many_are_fetched_at_once_and_no_more() -> None:
    async with serving() as server:
        fetch, url = fetcher(), f"http://{HOST}:{server.port}/wait"
        await asyncio.gather(*(fetch.fetch(url, "p", "one", ignore) for _ in range(10)))
        assert server.most_at_once == fetching.AT_ONCE_PER_TEAM
        await asyncio.gather(*(fetch.fetch(url, "p", f"team {n}", ignore) for n in range(24)))
        assert server.most_at_once == fetching.AT_ONCE


async def test_certificates_are_checked_by_name(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    names = f"subjectAltName=DNS:{HOST}"
    made = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    made += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=test", "-addext", names]
    subprocess.run(["openssl", *made], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    trust = ssl.create_default_context(cafile=str(certificate))
    async with serving(tls) as server:
        url = f"https://{HOST}:{server.port}/a.png"
        assert (await fetcher(tls=trust).fetch(url, "p", "team", ignore)).data == PNG
        other = f"https://other.example.com:{server.port}/a.png"
        assert "connection failed" in (await refusal(fetcher(hosts=("*.example.com:*",), tls=trust), other)).message
        assert "connection failed" in (await refusal(fetcher(), url)).message
