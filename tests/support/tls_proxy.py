"""TLS in front of a server on a Unix socket, with a certificate authority of its own: for servers built without TLS."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files. The server's is for 127.0.0.1, the client's for nobody in particular."""

    ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


def make_certificates(folder: Path) -> Certificates:
    """Runs openssl a few times; elliptic curves, so that it takes milliseconds."""
    ca, ca_key = folder / "ca.pem", folder / "ca.key"
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _openssl("req", "-x509", *key, "-keyout", ca_key, "-out", ca, "-subj", "/CN=test authority", "-days", "2")
    made = []
    for name, names in (("server", "IP:127.0.0.1"), ("client", "DNS:client")):
        certificate, own_key, request = folder / f"{name}.pem", folder / f"{name}.key", folder / f"{name}.csr"
        extra = folder / f"{name}.ext"
        extra.write_text(f"subjectAltName={names}\n")
        _openssl("req", *key, "-keyout", own_key, "-out", request, "-subj", f"/CN={name}")
        signer = ("-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2", "-extfile", extra)
        _openssl("x509", "-req", "-in", request, "-out", certificate, *signer)
        made += [certificate, own_key]
    return Certificates(ca, *made)


@asynccontextmanager
async def tls_in_front_of(socket: Path, certificates: Certificates) -> AsyncIterator[int]:
    """A port on loopback whose clients must show a certificate of the same authority."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates.ca))
    context.load_cert_chain(certificates.server, certificates.server_key)
    context.verify_mode = ssl.CERT_REQUIRED

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(str(socket))
        with suppress(OSError):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_pour(reader, inner_writer))
                tasks.create_task(_pour(inner_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)
