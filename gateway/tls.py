"""Finds the certificate of the settings, and what clients have to know of it to reach the gateway."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any

from gateway.settings import GatewaySettings
from gateway.telemetry.finish import PROBED
from workers.http_server.tls import Tls, TlsFiles, TlsUnusable
from workers.protocol.control import DRAIN_PATH

WITHOUT_CERTIFICATE = frozenset(path.encode() for path in (*PROBED, DRAIN_PATH) if not path.startswith("/metrics"))
"""Paths that are answered to clients without a certificate: a kubelet that probes has none, and no more has `paddock
drain`, which proves itself otherwise."""


def tls_of(settings: GatewaySettings) -> Tls | None:
    """Return the TLS of the gateway's ports; None: they have none. Raises TlsUnusable."""
    files = files_of(settings, 1 + settings.gateway_targets.count(","))
    return None if files is None else Tls(files, WITHOUT_CERTIFICATE)


def files_of(settings: GatewaySettings, num_gateways: int) -> TlsFiles | None:
    """Return the files of the settings; None: there is no TLS. `num_gateways`: several have ports beside a Unix socket.

    Raises TlsUnusable if the settings contradict each other."""
    if settings.tls_cert is None:
        for name in ("tls_key", "tls_client_ca"):
            if getattr(settings, name) is not None:
                raise TlsUnusable(f"{name} is set and tls_cert is not; give the certificate with --tls-cert")
        return None
    has_port = settings.uds is None or "," in settings.listen_fds or bool(settings.gateway_targets)
    if not has_port:
        raise TlsUnusable(
            "tls_cert is set and the gateway listens on a Unix socket, which carries no TLS; leave one out"
        )
    return TlsFiles(settings.tls_cert, settings.tls_key or settings.tls_cert, settings.tls_client_ca)


@dataclass(frozen=True, slots=True)
class Shown:
    """Tells clients what they have to know of a certificate."""

    host: str
    """A host for which it is good: the one asked about, if it is good for that."""
    is_own: bool
    """Whether it vouches for itself, so that clients have to be given it."""


def shown(files: TlsFiles, host: str) -> Shown:
    """Return what clients have to know to reach a gateway that listens at `host`. Raises TlsUnusable."""
    certificate = _certificate(files)
    names = [name for kind, name in certificate.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    plain = [name for name in names if "*" not in name]
    is_own = certificate.get("subject") == certificate.get("issuer")
    return Shown(host if host in names or not plain else plain[0], is_own)


def _certificate(files: TlsFiles) -> dict[str, Any]:
    """Return the certificate as a client sees it, by a handshake in memory; empty if the file does not vouch for it."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    trusting.load_verify_locations(files.cert)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    server = files.context().wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:  # it is out of date, say: its clients will hear of that
                return {}
    return dict(client.getpeercert() or {})


def unverified() -> ssl.SSLContext:
    """Return a context for asking a gateway of one's own, by a socket that is held open: it needs no proof."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
