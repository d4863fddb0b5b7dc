"""A gateway that speaks TLS, or listens on a Unix socket: real certificates, real clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import pytest
from openai import AsyncOpenAI
from websockets.asyncio.client import connect

from tests.support.stack import Process, Stack
from tests.support.tls_proxy import Certificates, make_certificates
from tests.support.waiting import until
from workers.http_server.tls_transport import HANDSHAKE_S
from workers.protocol.exits import Exit

BODY: dict[str, Any] = {"model": "quick", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
EIGHT = "t0 t1 t2 t3 t4 t5 t6 t7 "
MANY = 24


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        running.fake_worker("quick", "--step-ms", "2", "--tokens", "8", worker_id="quick-a", slots=8)
        running.fake_worker("slow", "--step-ms", "20", "--tokens", "500", worker_id="slow-a", slots=4)
        yield running


def trusting(certificates: Certificates, *, client: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(certificates.ca))
    if client:
        context.load_cert_chain(certificates.client, certificates.client_key)
    return context


def address_of(gateway: Process) -> tuple[str, int]:
    host, _, port = gateway.url.rpartition("/")[2].rpartition(":")
    return host, int(port)


async def encrypted(stack: Stack, certificates: Certificates, **settings: object) -> Process:
    """Start a gateway with TLS, and wait until it is ready."""
    files = {"tls_cert": certificates.server, "tls_key": certificates.server_key}
    gateway = stack.gateway(wait=False, **{**files, **settings})
    gateway.url = gateway.url.replace("http://", "https://")
    context = trusting(certificates)
    async with aiohttp.ClientSession() as session:

        async def is_ready() -> bool:
            assert gateway.popen.poll() is None, gateway.text()
            with contextlib.suppress(aiohttp.ClientConnectorError):
                async with session.get(f"{gateway.url}/ready", ssl=context) as answer:
                    return answer.status == 200
            return False

        await until_true(is_ready)
    return gateway


async def until_true(asked: Any, timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await asked():  # noqa: ASYNC110 - a server of another process
            await asyncio.sleep(0.02)


@pytest.fixture
async def gateway(stack: Stack, certificates: Certificates) -> AsyncIterator[Process]:
    running = await encrypted(stack, certificates)
    yield running
    running.stop()


@contextlib.asynccontextmanager
async def openai(stack: Stack, gateway: Process, context: ssl.SSLContext) -> AsyncIterator[AsyncOpenAI]:
    async with (
        httpx2.AsyncClient(verify=context) as transport,
        AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=stack.key, max_retries=0, http_client=transport) as client,
    ):
        yield client


async def test_a_chat_is_streamed_over_tls(stack: Stack, gateway: Process, certificates: Certificates) -> None:
    async with openai(stack, gateway, trusting(certificates)) as client:
        said = [chunk.choices[0].delta.content or "" async for chunk in await client.chat.completions.create(**BODY)]
        assert "".join(said) == EIGHT
        assert len(said) > 4
        models = await client.models.list()
    assert "quick" in {model.id for model in models.data}
    headers = {"Authorization": f"Bearer {stack.key}"}
    url = gateway.url.replace("https", "wss") + "/v1/responses"
    async with connect(url, ssl=trusting(certificates), additional_headers=headers) as connection:
        await connection.send(json.dumps({"type": "response.create", "model": "quick", "input": "hi", "store": False}))
        kinds = []
        while "response.completed" not in kinds:
            kinds.append(json.loads(await connection.recv())["type"])


async def test_who_speaks_no_tls_or_does_not_trust_it_gets_nothing(
    gateway: Process, certificates: Certificates
) -> None:
    host, port = address_of(gateway)
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        assert b" 200 " not in await asyncio.wait_for(reader.read(), 5)
    writer.close()
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await session.get(f"{gateway.url}/health")
    assert gateway.popen.poll() is None
    assert "Traceback" not in gateway.text()


async def test_refusals_arrive_over_tls(gateway: Process, certificates: Certificates) -> None:
    host, port = address_of(gateway)
    for sent, status in ((b"nonsense\r\n\r\n", b" 400 "), (b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000, b" 431 ")):
        reader, writer = await asyncio.open_connection(host, port, ssl=trusting(certificates))
        writer.write(sent)
        assert status in await asyncio.wait_for(reader.readline(), 5)
        writer.close()


async def test_handshakes_that_never_end_leave_others_alone(stack: Stack, certificates: Certificates) -> None:
    """They count for their address from their first packet, and end when their time is over."""
    gateway = await encrypted(stack, certificates, max_connections=2 * MANY, address_share=0.5)
    host, port = address_of(gateway)
    context = trusting(certificates)
    async with openai(stack, gateway, context) as client:
        stream = await client.chat.completions.create(**{**BODY, "model": "slow"}, max_tokens=150)
        chunks = aiter(stream)
        await anext(chunks)
        idle = []
        for number in range(3 * MANY):
            peer = socket.create_connection((host, port), source_address=("127.0.0.2", 0))
            if number % 2:
                peer.send(b"\x16\x03\x01")  # the beginning of a handshake
            idle.append(peer)
        began, longest, last, num = time.monotonic(), 0.0, time.monotonic(), 0
        async for _ in chunks:
            now = time.monotonic()
            longest, last, num = max(longest, now - last), now, num + 1
        assert num >= 149, "the stream went on to its end"
        assert longest < 1.0
        models = await client.models.list()
        assert models.data
    closed = 0
    for peer in idle:
        peer.settimeout(max(0.1, began + HANDSHAKE_S + 5 - time.monotonic()))
        with contextlib.suppress(ConnectionError):
            assert peer.recv(1) == b"", "nobody is told anything before a handshake"
        closed += 1
        peer.close()
    assert closed == len(idle), "all of them were closed"
    with socket.create_connection((host, port)):
        await asyncio.sleep(0.2)
        began = time.monotonic()
        assert gateway.stop() == Exit.OK
        assert time.monotonic() - began < HANDSHAKE_S / 2, "a handshake keeps no gateway from its end"


async def test_a_new_certificate_is_used_without_a_restart(stack: Stack, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, second = make_certificates(tmp_path / "a"), make_certificates(tmp_path / "b")
    files = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}

    def put(given: Certificates) -> None:
        files["tls_cert"].write_bytes(given.server.read_bytes())
        files["tls_key"].write_bytes(given.server_key.read_bytes())

    put(first)
    gateway = await encrypted(stack, first, **files)
    async with openai(stack, gateway, trusting(first)) as client:
        stream = aiter(await client.chat.completions.create(**{**BODY, "model": "slow"}, max_tokens=400))
        await anext(stream)
        put(second)

        async def is_new() -> bool:
            async with aiohttp.ClientSession() as session:
                with contextlib.suppress(aiohttp.ClientConnectorCertificateError):
                    async with session.get(f"{gateway.url}/health", ssl=trusting(second)) as answer:
                        return answer.status == 200
            return False

        await until_true(is_new, 15)
        await anext(stream)  # the connection that was open goes on
        files["tls_key"].write_text("nothing")
        await until(lambda: "the new certificate is not used" in gateway.text(), 15, "told")
        assert await is_new()
    gateway.stop()


async def test_a_file_system_that_hangs_holds_up_new_certificates_only(
    stack: Stack, certificates: Certificates, tmp_path: Path
) -> None:
    """The files were looked at on the event loop: every stream stood still for as long as that took."""
    files = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    files["tls_cert"].write_bytes(certificates.server.read_bytes())
    files["tls_key"].write_bytes(certificates.server_key.read_bytes())
    gateway = await encrypted(stack, certificates, **files)
    hangs = tmp_path / "hangs"
    os.mkfifo(hangs)  # opening it takes until somebody writes to it
    os.rename(hangs, files["tls_cert"])
    async with openai(stack, gateway, trusting(certificates)) as client, asyncio.timeout(60):
        last, longest = time.monotonic(), 0.0
        async for _ in await client.chat.completions.create(**{**BODY, "model": "slow"}, max_tokens=400):
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        assert longest < 1.0
        assert (await client.models.list()).data, "new connections get the old certificate"
    began = time.monotonic()
    assert gateway.stop() == Exit.OK
    assert time.monotonic() - began < 5.0


async def test_clients_must_show_a_certificate_but_for_probes(stack: Stack, certificates: Certificates) -> None:
    gateway = await encrypted(stack, certificates, tls_client_ca=certificates.ca)
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {stack.key}"}) as session:
        async with session.get(f"{gateway.url}/v1/models", ssl=trusting(certificates)) as answer:
            assert answer.status == 403
            assert "client certificate" in (await answer.json())["error"]["message"]
        async with session.get(f"{gateway.url}/metrics", ssl=trusting(certificates)) as answer:
            assert answer.status == 403
        async with session.get(f"{gateway.url}/v1/models", ssl=trusting(certificates, client=True)) as answer:
            assert answer.status == 200
    gateway.stop()


def refused(stack: Stack, **settings: object) -> tuple[int, str]:
    """Return the exit code and last line of a gateway that can't start."""
    gateway = stack.gateway(wait=False, **settings)
    code = gateway.popen.wait(30)
    return code, gateway.text().strip().splitlines()[-1]


def test_files_that_can_not_be_used_are_told_at_the_start(
    stack: Stack, certificates: Certificates, tmp_path: Path
) -> None:
    empty, cert, key = tmp_path / "empty.pem", certificates.server, certificates.server_key
    empty.write_text("nothing")
    sealed = tmp_path / "sealed.key"
    made = ("openssl", "ec", "-in", key, "-aes256", "-passout", "pass:secret", "-out", sealed)
    subprocess.run(made, check=True, capture_output=True)
    for settings, told in (
        ({"tls_cert": tmp_path / "none.pem", "tls_key": key}, "none.pem can't be read: No such file"),
        ({"tls_cert": empty, "tls_key": key}, "holds no certificate in PEM form"),
        ({"tls_cert": cert, "tls_key": certificates.client_key}, "does not belong to the certificate"),
        ({"tls_cert": cert}, "can't be used"),
        ({"tls_cert": cert, "tls_key": sealed}, "without a password"),
        ({"tls_cert": cert, "tls_key": key, "tls_client_ca": empty}, "holds no certificates in PEM form"),
        ({"tls_key": key}, "tls_cert is not"),
        ({"tls_cert": cert, "tls_key": key, "uds": tmp_path / "s"}, "carries no TLS"),
    ):
        code, line = refused(stack, **settings)
        assert code == Exit.USAGE, line
        assert told in line


async def local(stack: Stack, path: Path, **settings: object) -> Process:
    gateway = stack.gateway(wait=False, uds=path, **settings)

    async def is_ready() -> bool:
        assert gateway.popen.poll() is None, gateway.text()
        with contextlib.suppress(aiohttp.ClientConnectorError):
            connector = aiohttp.UnixConnector(str(path))
            async with aiohttp.ClientSession(connector=connector) as session, session.get("http://x/ready") as answer:
                return answer.status == 200
        return False

    await until_true(is_ready)
    return gateway


async def test_a_chat_is_streamed_over_a_unix_socket(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "p.sock"
    with socket.socket(socket.AF_UNIX) as left:  # what a server that was killed leaves
        left.bind(str(path))
    gateway = await local(stack, path, address_share=0.01, max_connections=64)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    transport = httpx2.AsyncHTTPTransport(uds=str(path))
    async with (
        httpx2.AsyncClient(transport=transport) as http,
        AsyncOpenAI(base_url="http://localhost/v1", api_key=stack.key, max_retries=0, http_client=http) as client,
    ):

        async def said() -> str:
            chunks = await client.chat.completions.create(**BODY)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        assert await asyncio.gather(*(said() for _ in range(6))) == [EIGHT] * 6, "no address has a share of it"
    code, line = refused(stack, uds=path)
    assert (code, "is in use" in line) == (Exit.PORT_TAKEN, True), line
    assert path.exists()
    assert gateway.stop() == Exit.OK
    assert not path.exists()
    plain = tmp_path / "file"
    plain.write_text("mine")
    code, line = refused(stack, uds=plain)
    assert (code, "is no socket" in line, plain.read_text()) == (Exit.USAGE, True, "mine")
    code, line = refused(stack, uds=tmp_path / ("x" * 120))
    assert (code, "short path" in line) == (Exit.USAGE, True), line


async def test_a_killed_gateways_socket_is_taken_over_with_its_permissions(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "p.sock"
    first = await local(stack, path)
    first.kill()
    assert path.exists()
    second = await local(stack, path, uds_mode="0600")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert re.search(r'"uds": ?"[^"]*p.sock"|uds=\S*p.sock', second.text())
    third = os.fspath(path)
    path.unlink()
    taken = socket.socket(socket.AF_UNIX)
    taken.bind(third)
    taken.listen()
    second.stop()
    assert path.exists(), "another server's socket stays"
    taken.close()


def drain(stack: Stack, **settings: object) -> subprocess.CompletedProcess[str]:
    named = {"gateway_secret": stack.gateway_secret, "state_dir": stack.folder, **settings}
    environment = {f"PADDOCK_{name.upper()}": str(value) for name, value in named.items()}
    command = (sys.executable, "-m", "gateway.cli", "drain", "gateway", "--timeout-s", "5", "--settle-s", "0.1")
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60)


async def test_paddock_drain_finds_both(stack: Stack, certificates: Certificates, tmp_path: Path) -> None:
    files = {"tls_cert": certificates.server, "tls_key": certificates.server_key, "tls_client_ca": certificates.ca}
    gateway = await encrypted(stack, certificates, **files)
    asked = drain(stack, port=address_of(gateway)[1], **files)
    assert asked.returncode == 0, asked.stderr
    gateway.stop()
    gateway = await local(stack, tmp_path / "p.sock")
    asked = drain(stack, uds=tmp_path / "p.sock")
    assert asked.returncode == 0, asked.stderr
    gateway.stop()


async def test_a_slow_reader_gets_all_of_an_answer_that_ends_its_connection(
    stack: Stack, gateway: Process, certificates: Certificates
) -> None:
    """The connection is closed by the gateway as soon as it has written the answer, most of which is not read yet."""
    body = json.dumps({"model": "quick", "content": "abcd" * 500_000}).encode()
    head = f"POST /tokenize HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {stack.key}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"

    def ask() -> bytes:
        with socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            peer.connect(address_of(gateway))
            with trusting(certificates).wrap_socket(peer, server_hostname="127.0.0.1") as talking:
                talking.settimeout(30)
                talking.sendall(head.encode() + body)
                answer = talking.recv(1 << 14)
                time.sleep(3)
                while more := talking.recv(1 << 16):
                    answer += more
        return answer

    answer = await asyncio.to_thread(ask)
    told, _, text = answer.partition(b"\r\n\r\n")
    assert told.startswith(b"HTTP/1.1 200"), told
    assert b"chunked" in told or len(text) == int(re.search(rb"content-length: (\d+)", told)[1])  # type: ignore[index]
    assert text.rstrip().endswith((b"}", b"0"))
    assert len(text) > 4 << 20
