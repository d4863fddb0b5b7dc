"""The routes for a worker's LoRA adapters: load one under a name, list them, unload one.

Files come from one configured folder, so that a holder of the shared secret can't name other paths of the machine.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from workers.llama.native import AdapterError, AdapterUnreadable
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.heartbeat import Heartbeat
from workers.protocol.queries import ADAPTERS_PATH, MAX_WAIT_S, AdapterInfo, AdapterState, decode_load
from workers.service.routes.bodies import answer, decoded, read_body, refusal

MAX_BODY_BYTES = 64 << 10

LOOK_S = 0.02
"""Seconds between two checks whether an unloaded adapter is freed; the response to the unload waits for that."""

logger = logging.getLogger(__name__)


class Adapters(Protocol):
    """The part of `AdapterRegistry` that the routes need. `register`, `inspect` and `unload` may block."""

    def register(self, name: str, path: Path, *, pinned: bool = False, sha256: str = "") -> AdapterInfo: ...
    def inspect(self, name: str, path: Path, *, pinned: bool = False, sha256: str = "") -> AdapterInfo: ...
    def unload(self, name: str) -> AdapterInfo: ...
    def infos(self) -> list[AdapterInfo]: ...
    @property
    def load_ms(self) -> float: ...
    @property
    def room(self) -> int: ...


class AdapterRoutes:
    """The routes for adapters. One file is read at a time. `folder` None: nothing is loaded at run time."""

    def __init__(self, adapters: Adapters, folder: Path | None) -> None:
        self._adapters = adapters
        self._folder = folder
        self._loading = asyncio.Lock()

    def routes(self) -> list[Route]:
        return [
            Route(ADAPTERS_PATH, self.load, methods=["POST"]),
            Route(ADAPTERS_PATH, self.show, methods=["GET"]),
            Route(ADAPTERS_PATH + "/{name:path}", self.unload, methods=["DELETE"]),
        ]

    async def load(self, request: Request) -> Response:
        try:
            asked = decoded(decode_load, await read_body(request, MAX_BODY_BYTES))
            path = self._located(asked.path)
            act = self._adapters.inspect if asked.check else self._adapters.register
            async with self._loading:
                info = await _done(partial(act, asked.name, path, pinned=asked.pinned, sha256=asked.sha256))
        except CallFailed as failed:
            return refusal(failed.failure)
        if not asked.check:
            _log(info)
        return answer(self._outward(info))

    def hashes(self) -> dict[str, str]:
        """Return the adapters that calls may use: name -> SHA-256 of the file."""
        return {info.name: info.sha256 for info in self._adapters.infos() if info.state is not AdapterState.LEAVING}

    def announced(self, beat: Heartbeat) -> Heartbeat:
        """Return `beat` with the state of this worker's adapters filled in."""
        hashes = self.hashes()
        return structs.replace(
            beat,
            adapters=tuple(hashes),
            adapter_hashes=hashes,
            adapters_resident=tuple(info.name for info in self._adapters.infos() if info.state is AdapterState.LOADED),
            adapter_load_ms=self._adapters.load_ms,
            adapter_room=self._adapters.room,
        )

    async def show(self, request: Request) -> Response:
        return answer([self._outward(info) for info in self._adapters.infos()])

    async def unload(self, request: Request) -> Response:
        try:
            wait_s = _wait_s(request.query_params.get("wait_s", "0"))
            info = await _done(partial(self._adapters.unload, request.path_params["name"]))
        except CallFailed as failed:
            return refusal(failed.failure)
        _log(info)
        return answer(self._outward(await self._left(info, wait_s)))

    async def _left(self, info: AdapterInfo, wait_s: float) -> AdapterInfo:
        """Wait until an unloaded adapter is freed, but at most `wait_s` seconds; return its state then."""
        until = time.monotonic() + wait_s
        while True:
            left = [
                one for one in self._adapters.infos() if one.state is AdapterState.LEAVING and one.name == info.name
            ]
            if not left:
                return structs.replace(info, state=AdapterState.GONE, calls=0)
            if time.monotonic() >= until:
                return structs.replace(info, calls=sum(one.calls for one in left))
            await asyncio.sleep(LOOK_S)

    def _outward(self, info: AdapterInfo) -> AdapterInfo:
        """Return the info with its path as clients may see it: relative to the folder, or empty if it lies outside."""
        path = Path(info.path)
        folder = path.parent if self._folder is None else self._folder.resolve()
        inside = self._folder is not None and path.is_relative_to(folder)
        return structs.replace(info, path=str(path.relative_to(folder)) if inside else "")

    def _located(self, asked: str) -> Path:
        """Return the path of the file that `asked` names inside the folder, links followed. Raises CallFailed."""
        if self._folder is None:
            message = (
                "this worker loads no adapters at run time; give it a folder to take them from with --adapters-dir"
            )
            raise CallFailed(Failure(FailureCode.UNSUPPORTED, message, "path"))
        try:
            folder = self._folder.resolve()
            path = (folder / asked).resolve()
        except (OSError, RuntimeError, ValueError):  # too long, links in a circle, a zero byte
            raise CallFailed(_outside(asked)) from None
        if not path.is_relative_to(folder):
            raise CallFailed(_outside(asked))
        return path


async def _done(act: Callable[[], AdapterInfo]) -> AdapterInfo:
    """Run `act` off the loop, since it reads files and waits for the engine. Raises CallFailed."""
    try:
        return await asyncio.to_thread(act)
    except AdapterUnreadable as error:
        raise CallFailed(Failure(FailureCode.UNAVAILABLE, str(error), "path")) from None
    except AdapterError as error:
        raise CallFailed(Failure(FailureCode.INVALID_REQUEST, str(error), "path")) from None


def _log(info: AdapterInfo) -> None:
    logger.info("adapter %s (%s..., %d bytes) is %s", info.name, info.sha256[:12], info.size, info.state.value)


def _wait_s(text: str) -> float:
    """Return the seconds that the query's `wait_s` gives. Raises CallFailed."""
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = math.nan
    if not 0.0 <= wait_s <= MAX_WAIT_S:
        message = f"wait_s: {text[:40]!r} is no number of seconds from 0 to {MAX_WAIT_S:g}"
        raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message, "wait_s"))
    return wait_s


def _outside(asked: str) -> Failure:
    message = f"path: {asked[:200]!r} does not lie in adapters_dir; give a path inside it"
    return Failure(FailureCode.INVALID_REQUEST, message, "path")
