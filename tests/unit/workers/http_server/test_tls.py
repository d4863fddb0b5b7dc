"""The looks for a new certificate: they end with the server, in whatever thread they are."""

from __future__ import annotations

import _thread
import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tls_proxy import make_certificates
from workers.http_server import tls
from workers.http_server.tls import Tls, TlsFiles

Begun = tuple[Callable[..., object], tuple[Any, ...]]


async def test_a_look_that_begins_after_the_end_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that the system ran late raised InvalidStateError as the server stopped."""
    made, begun = make_certificates(tmp_path), list[Begun]()

    def start(function: Callable[..., object], given: tuple[Any, ...]) -> int:
        begun.append((function, given))
        return 1

    monkeypatch.setattr(_thread, "start_new_thread", start)
    monkeypatch.setattr(tls, "LOOK_S", 0.0)
    watched = Tls(TlsFiles(made.server, made.server_key))
    first, watching = watched.context, asyncio.create_task(watched.watch())
    while not begun:  # noqa: ASYNC110 - it takes a turn of the loop or two
        await asyncio.sleep(0)
    made.server.write_bytes(made.server.read_bytes() + b"\n")
    watching.cancel()
    await asyncio.wait({watching})
    function, given = begun[0]
    function(*given)
    assert watched.context is first
