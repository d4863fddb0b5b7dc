"""The routes for a worker's slots: list them, save a conversation under a name, restore or erase it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from workers.engine.adapters.turns import AdapterSet
from workers.engine.cache.prompt import Scope
from workers.engine.cache.slots import SlotProxy
from workers.engine.disk.conversation_file import (
    ConversationFiles,
    ConversationOverBound,
    ConversationsOutOfReach,
    ConversationUnusable,
    TeamSaveLimits,
    check_name,
)
from workers.engine.disk.fingerprint import ModelChanged
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.queries import (
    SLOTS_PATH,
    RestoreTimings,
    SaveTimings,
    SlotAction,
    SlotErased,
    SlotInfo,
    SlotRestored,
    SlotSaved,
    decode_action,
)
from workers.protocol.requests import AdapterUse
from workers.service.routes.bodies import answer, decoded, read_body, refusal, refusing

MAX_BODY_BYTES = 64 << 10

ENGINE_S = 60.0
"""Maximum seconds to wait for the engine, which works on slots between its steps; then the request fails as BUSY."""

FILE_OVERHEAD = 16 << 20
"""Maximum bytes that the file of a saved conversation has beside the KV states: its tokens and names."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Adapters(Protocol):
    """The part of `workers.engine.adapters.registry.AdapterRegistry` that is needed here."""

    def resolve(self, uses: tuple[AdapterUse, ...]) -> AdapterSet: ...
    def release(self, adapters: AdapterSet) -> None: ...


class SlotKeeper:
    """Moves conversations between an engine's slots and a folder of files. `act` blocks, and can raise CallFailed."""

    def __init__(
        self,
        contents: SlotProxy,
        files: ConversationFiles | None,
        adapters: Adapters,
        fingerprint: Callable[[], bytes | None],
        *,
        n_ctx: int,
        max_bytes: int,
    ) -> None:
        """`files`: None if nothing is saved or restored. `fingerprint` returns the KV's fingerprint; None: unknown.

        `max_bytes`: maximum bytes of the KV states of a conversation that is restored."""
        self._contents = contents
        self._files = files
        self._adapters = adapters
        self._fingerprint = fingerprint
        self._n_ctx = n_ctx
        self._max_bytes = max_bytes

    def infos(self) -> Future[list[SlotInfo]]:
        """Return a future of the list of slots, without blocking."""
        return self._contents.infos()

    def act(self, slot: int, asked: SlotAction) -> SlotSaved | SlotRestored | SlotErased:
        if asked.action == "erase" and not asked.filename:
            return SlotErased(id_slot=slot, n_erased=_wait_for(self._contents.erase(slot, asked.tenant, asked.salt)))
        if self._files is None:
            message = "this worker saves no slots; give it a folder for them with --slot-save-dir"
            raise CallFailed(Failure(FailureCode.UNSUPPORTED, message, "action"))
        try:
            check_name(asked.filename)
            match asked.action:
                case "save":
                    return self._save(self._files, slot, asked)
                case "restore":
                    return self._restore(self._files, slot, asked)
            self._contents.check(slot)
            num_freed = self._files.erase(asked.filename, asked.tenant)
            return SlotErased(id_slot=slot, n_erased=0, n_freed=num_freed)
        except ConversationUnusable as error:
            raise CallFailed(Failure(FailureCode.INVALID_REQUEST, str(error), "filename")) from None
        except ConversationOverBound as error:
            raise CallFailed(Failure(FailureCode.STORAGE_FULL, str(error), "filename")) from None
        except ConversationsOutOfReach as error:
            raise CallFailed(Failure(FailureCode.UNAVAILABLE, str(error))) from None

    def _save(self, files: ConversationFiles, slot: int, asked: SlotAction) -> SlotSaved:
        started = time.perf_counter()
        # No more is copied than the folder has room for; the file's overhead is checked when the file is written.
        limits = TeamSaveLimits(asked.max_files, asked.max_bytes)
        max_bytes = files.check_room(asked.filename, asked.tenant, limits=limits)
        identity = self._identity()
        copied = _wait_for(self._contents.copy(slot, asked.tenant, asked.salt, max_bytes))
        num_saved = num_written = num_left = 0
        if copied is not None:
            num_saved, num_left = len(copied.conversation.tokens), copied.num_left
        if copied is not None and num_saved:
            num_written = files.write(asked.filename, copied.scope, identity, copied.conversation, limits)
        return SlotSaved(
            id_slot=slot,
            filename=asked.filename,
            n_saved=num_saved,
            n_written=num_written,
            n_left=num_left,
            timings=SaveTimings(_ms_since(started)),
        )

    def _restore(self, files: ConversationFiles, slot: int, asked: SlotAction) -> SlotRestored:
        started = time.perf_counter()
        self._contents.check(slot)
        saved = files.read(
            asked.filename,
            self._scope(asked),
            self._identity(),
            max_bytes=self._max_bytes + FILE_OVERHEAD,
            max_tokens=self._n_ctx,
        )
        num_restored = _wait_for(self._contents.restore(slot, self._scope(asked), saved))
        return SlotRestored(
            id_slot=slot,
            filename=asked.filename,
            n_restored=num_restored,
            n_read=saved.num_bytes,
            timings=RestoreTimings(_ms_since(started)),
        )

    def _scope(self, asked: SlotAction) -> Scope:
        adapters = self._adapters.resolve(asked.adapters)
        self._adapters.release(adapters)
        return Scope(asked.tenant, asked.salt, adapters.key)

    def _identity(self) -> bytes:
        try:
            found = self._fingerprint()
        except (ModelChanged, OSError) as error:
            logger.error("slots can't be saved or restored: %s", error)
            found = None
        if found is None:
            message = (
                "the model's file can't be told from others any more; the worker's log says why. Restart the worker"
            )
            raise CallFailed(Failure(FailureCode.INTERNAL, message))
        return found


MAX_ACTIONS_PER_TEAM = 2
"""Maximum number of a team's running and waiting actions; more are refused as BUSY. Files are long, and those of
one team must not keep all other teams waiting."""


class SlotRoutes:
    """The routes for slots. One action runs at a time."""

    def __init__(self, keeper: SlotKeeper) -> None:
        self._keeper = keeper
        self._acting = asyncio.Lock()
        self._teams: Counter[str] = Counter()
        """Team -> its running and waiting actions."""
        self._looking: asyncio.Future[list[SlotInfo]] | None = None
        """The latest request to the engine for its list of slots. Callers that come before the reply share it."""

    def routes(self) -> list[Route]:
        return [
            Route(SLOTS_PATH, self.show, methods=["GET"]),
            Route(SLOTS_PATH + "/{id:int}", self.act, methods=["POST"]),
        ]

    async def show(self, request: Request) -> Response:
        try:
            return answer(await self._infos())
        except CallFailed as failed:
            return refusal(failed.failure)

    async def _infos(self) -> list[SlotInfo]:
        """Return the slots. Raises CallFailed."""
        looking = self._looking
        if looking is None or looking.done():
            looking = self._looking = asyncio.wrap_future(self._keeper.infos())
            looking.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            async with asyncio.timeout(ENGINE_S):
                return await asyncio.shield(looking)
        except TimeoutError:
            raise CallFailed(_late()) from None

    async def act(self, request: Request) -> Response:
        try:
            asked = decoded(decode_action, await read_body(request, MAX_BODY_BYTES))
            with self._counted(asked.tenant):
                async with self._acting:
                    return answer(await asyncio.to_thread(self._keeper.act, request.path_params["id"], asked))
        except CallFailed as failed:
            return refusal(failed.failure)

    @contextmanager
    def _counted(self, tenant: str) -> Iterator[None]:
        """Count an action of the team within this block. Raises CallFailed beyond `MAX_ACTIONS_PER_TEAM`."""
        if self._teams[tenant] >= MAX_ACTIONS_PER_TEAM:
            message = (
                f"{MAX_ACTIONS_PER_TEAM} actions on this worker's slots are under way for this team; send this one "
                "when one of them has ended"
            )
            raise CallFailed(Failure(FailureCode.BUSY, message))
        self._teams[tenant] += 1
        try:
            yield
        finally:
            self._teams[tenant] -= 1
            if not self._teams[tenant]:
                del self._teams[tenant]


def no_slots() -> list[Route]:
    """Return the routes for slots of a worker that keeps no conversations in them: they refuse every request."""
    message = "this worker keeps no conversations in its slots; ask one that generates text"
    failure = Failure(FailureCode.UNSUPPORTED, message)
    return [refusing(SLOTS_PATH, failure, "GET"), refusing(SLOTS_PATH + "/{id:int}", failure, "POST")]


def _wait_for(future: Future[T]) -> T:
    """Wait for the engine's result. Raises CallFailed."""
    try:
        return future.result(ENGINE_S)
    except TimeoutError:
        future.cancel()
        raise CallFailed(_late()) from None


def _late() -> Failure:
    return Failure(FailureCode.BUSY, f"the engine did not get to it within {ENGINE_S:g} s; ask again when less runs")


def _ms_since(started: float) -> float:
    return round((time.perf_counter() - started) * 1e3, 3)
