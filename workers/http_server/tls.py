"""Reads the certificate with which a server listens with TLS, and reads it anew when its files change."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import logging
import ssl
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

LOOK_S = 5.0
"""Seconds between two looks whether the files have changed."""
PROTOCOL = "http/1.1"

log = logging.getLogger(__name__)


class TlsUnusable(Exception):
    """Raised if the files can't be used. The message names the file and the remedy."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the certificate with those that vouch for it, its key, and the authorities of clients' ones."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    @property
    def all(self) -> tuple[Path, ...]:
        return (self.cert, self.key) if self.client_ca is None else (self.cert, self.key, self.client_ca)

    def context(self) -> ssl.SSLContext:
        """Return a new context for a server. Raises TlsUnusable.

        With `client_ca` a certificate is asked for, and one that is sent must be good. Whether there must be one is
        decided by the request: probes have none."""
        for path in self.all:
            _check_readable(path)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION  # each costs as much as a handshake; before OpenSSL 3 clients may
        context.set_alpn_protocols([PROTOCOL])
        try:
            # Without a function for the password, OpenSSL would ask the terminal for it.
            context.load_cert_chain(self.cert, self.key, password=lambda: "")
        except ssl.SSLError as error:
            raise TlsUnusable(self._trouble(error)) from None
        except OSError as error:  # it went since it was looked at
            raise TlsUnusable(f"{self.cert} or {self.key} can't be read: {error.strerror}; give both files") from None
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except OSError:  # as ssl.SSLError is
                line = f"{self.client_ca} holds no certificates in PEM form; give those of the authorities"
                raise TlsUnusable(line) from None
            context.verify_mode = ssl.CERT_OPTIONAL
        return context

    def _trouble(self, error: ssl.SSLError) -> str:
        if error.reason == "KEY_VALUES_MISMATCH":
            return f"the key in {self.key} does not belong to the certificate in {self.cert}; give the pair"
        try:
            has_certificate = "-----BEGIN CERTIFICATE-----" in self.cert.read_text(errors="replace")
        except OSError:
            has_certificate = False
        if not has_certificate:
            return f"{self.cert} holds no certificate in PEM form; convert it, or give another file"
        return (
            f"the certificate in {self.cert} and the key in {self.key} can't be used ({error.reason or error}); give "
            "both in PEM form, the key without a password"
        )


def _check_readable(path: Path) -> None:
    try:
        with path.open("rb"):
            return
    except OSError as error:
        raise TlsUnusable(f"{path} can't be read: {error.strerror}; give a file that this process may read") from None


class Tls:
    """Keeps the context for new connections up to date. Connections that are open keep theirs."""

    def __init__(self, files: TlsFiles, without_certificate: frozenset[bytes] = frozenset()) -> None:
        """`without_certificate`: paths that are answered to clients without a certificate although one is asked for.

        Raises TlsUnusable."""
        self._files = files
        self._seen = self._stamps()
        self._failed: tuple[object, ...] | None = None
        self.context = files.context()
        """The context for the next connection."""
        self.without_certificate = without_certificate

    def refresh(self) -> None:
        """Read the files anew if they have changed. What can't be used leaves everything as it was, and is logged."""
        stamps = self._stamps()
        if stamps == self._seen:
            return
        try:
            self.context = self._files.context()
        except TlsUnusable as error:  # perhaps only one of the files is there yet: they are tried again at each look
            if stamps != self._failed:
                log.warning("the new certificate is not used: %s", error)
            self._failed = stamps
        else:
            self._seen, self._failed = stamps, None
            log.info("the certificate was read anew")

    async def watch(self) -> None:
        """Call `refresh` every few seconds, until cancelled.

        It runs in a thread that nobody waits for when the process ends: a file system that hangs holds up new
        certificates and nothing else."""
        while True:
            await asyncio.sleep(LOOK_S)
            looked: Future[None] = Future()
            with contextlib.suppress(RuntimeError):  # no thread can be had now
                # `threading.Thread.start` would wait for the thread: for ever, if memory is short just then.
                _thread.start_new_thread(self._look, (looked,))
                await asyncio.wrap_future(looked)

    def _look(self, looked: Future[None]) -> None:
        if not looked.set_running_or_notify_cancel():
            return  # nobody waits any more
        try:
            self.refresh()
        finally:
            looked.set_result(None)

    def _stamps(self) -> tuple[object, ...]:
        stamps: list[object] = []
        for path in self._files.all:
            try:
                found = path.stat()
                stamps.append((found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino))
            except OSError as error:
                stamps.append(error.errno)
        return tuple(stamps)
