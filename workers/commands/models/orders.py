"""Carries out what admins order, through gateways, of this machine's models folder: downloads and removals.

One download runs at a time (`Library.alone`); others wait for it. Orders are read from Redis twice a second. While
Redis is away downloads go on, and what has become of them is told afterwards.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import redis.asyncio
from redis.exceptions import RedisError

from workers.commands.models.inventory import Item, chosen, take_inventory
from workers.commands.models.parser import Unusable
from workers.commands.models.removal import remove
from workers.models.catalog import Catalog, CatalogError
from workers.models.files import parse_reference
from workers.models.hub.watch import DownloadWatch
from workers.models.library import Library, ModelUnusable
from workers.planner.bounded_reads import BoundedReads
from workers.protocol import keys, residency
from workers.protocol.residency import (
    Download,
    FileProgress,
    LibraryAnswer,
    LibraryOrder,
    MachineLibrary,
    decode_order,
    encode,
)
from workers.redis.trouble import raise_if_cancelled

TIMEOUT_S = 2.0
"""Seconds after which Redis counts as away."""
BUSY_PATIENCE_S = 2.0
"""Seconds that a removal waits for the folder."""
TOLD_EVERY_S = residency.LIBRARY_LIFE_S / 3
MAX_FILES = 64
"""Number of files of one download whose progress is told."""
REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


@dataclass(slots=True)
class _Fetch:
    """A download, from the order on."""

    since: float
    files: dict[str, FileProgress] = field(default_factory=dict)
    watch: DownloadWatch = field(init=False)
    is_removed: bool = False
    """Whether what has come is to be removed once it has ended."""

    def __post_init__(self) -> None:
        self.watch = DownloadWatch(self._note)

    def _note(self, url: str, done: int, total: int) -> None:
        if url in self.files or len(self.files) < MAX_FILES:
            self.files[url] = FileProgress(done, total)


class LibraryOrders:
    """The orders to one machine."""

    def __init__(
        self,
        folder: Library,
        machine: str,
        state_dir: Path,
        catalog: Callable[[], Catalog],
        say: Callable[[str], None],
        client: redis.asyncio.Redis,
    ) -> None:
        """`catalog` returns the catalog as it is now; it may raise CatalogError. `say` writes a line for operators."""
        self._library = folder
        self._client = client
        self._reads = BoundedReads(client)
        self._machine = machine
        self._state_dir = state_dir
        self._catalog = catalog
        self._say = say
        self._fetches: dict[str, _Fetch] = {}
        self._ended: dict[str, tuple[float, Download]] = {}
        """Reference -> when its download ended or it was removed, and what is told of that."""
        self._answers: dict[str, LibraryAnswer] = {}
        self._told_at = float("-inf")
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Carry out orders until cancelled; then end what is being downloaded. What has come is kept."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    raise_if_cancelled()
                    self._changed.clear()
                    try:
                        async with asyncio.timeout(TIMEOUT_S):
                            await self._look(tasks)
                            await self._tell()
                    except (RedisError, OSError, TimeoutError):
                        pass  # the supervisor's other tasks tell of it
                    try:
                        async with asyncio.timeout(residency.ORDERS_EVERY_S):
                            await self._changed.wait()
                    except TimeoutError:
                        pass
        finally:
            await self._leave()

    async def _look(self, tasks: asyncio.TaskGroup) -> None:
        """Read the orders to this machine, and begin to carry them out."""
        for name, value in (await self._reads.hash(keys.LIBRARY_ORDERS)).items():
            try:
                order_id, order = name.decode(), decode_order(value)
            except ValueError:
                continue
            if order.machine != self._machine:
                continue
            # Removed first: an order is carried out once at most.
            if await self._client.hdel(keys.LIBRARY_ORDERS, name) and order_id not in self._answers:
                tasks.create_task(self._carry_out(order_id, order, tasks))

    async def _carry_out(self, order_id: str, order: LibraryOrder, tasks: asyncio.TaskGroup) -> None:
        if order.action == "fetch":
            refusal, is_missing = self._begin(order.model, tasks), False
        elif order.model in self._fetches:
            refusal, is_missing = "", False
            self._cancel(order.model)
        else:
            refusal, is_missing = await self._remove(order.model)
        self._answers[order_id] = LibraryAnswer(at=time.time(), refusal=refusal, is_missing=is_missing)
        self._changed.set()

    def _begin(self, model: str, tasks: asyncio.TaskGroup) -> str:
        """Begin a download; return why it can't begin."""
        if not REPOSITORY.fullmatch(parse_reference(model).repo):
            return f"{model!r} names no model of the hub; send OWNER/NAME[:QUANT], such as owner/name:Q4_K_M"
        if self._library.is_offline:
            return f"{self._machine} fetches nothing (`offline`, or HF_HUB_OFFLINE); start its supervisor without that"
        if model in self._fetches:
            return f"{model} is being downloaded already; DELETE it to stop that"
        if len(self._fetches) >= residency.MAX_DOWNLOADS:
            return f"{self._machine} has {len(self._fetches)} downloads to do, which is the most; send it again later"
        fetch = self._fetches[model] = _Fetch(time.time())
        self._ended.pop(model, None)
        self._say(f"paddock: {model} is downloaded: an admin has asked for it")
        tasks.create_task(self._fetch(model, fetch))
        return ""

    async def _fetch(self, model: str, fetch: _Fetch) -> None:
        reason = ""
        try:
            await asyncio.to_thread(self._library.bring, model, fetch.watch)
        except (ModelUnusable, OSError, RuntimeError, ValueError) as error:  # no thread; a line that is no JSON
            reason = str(error)
        finally:
            fetch.watch.cancel()  # if this task was cancelled, the thread goes on
            del self._fetches[model]
        if fetch.is_removed:
            self._note_end(model, fetch, "removed")
        elif reason:
            self._say(f"paddock: {reason}")
            self._note_end(model, fetch, "failed", reason)
        else:
            self._say(f"paddock: {model} has been downloaded")
            self._note_end(model, fetch, "finished")

    def _note_end(self, model: str, fetch: _Fetch, status: residency.DownloadStatus, reason: str = "") -> None:
        told = Download(since=fetch.since, status=status, files=dict(fetch.files), reason=reason)
        self._ended[model] = (time.time(), told)
        self._changed.set()

    def _cancel(self, model: str) -> None:
        fetch = self._fetches[model]
        fetch.is_removed = True
        fetch.watch.cancel()
        self._say(f"paddock: {model} is downloaded no more: an admin has stopped it; what has come is kept")

    async def _remove(self, model: str) -> tuple[str, bool]:
        """Remove a model's files; return why not, and whether there is no such model."""
        try:
            lines = await asyncio.to_thread(self._removed, model)
        except Unusable as error:
            return str(error), True
        except (ModelUnusable, CatalogError, OSError, RuntimeError) as error:
            return str(error), False
        for line in lines:
            self._say(f"paddock: {line}; an admin has asked for that")
        self._ended[model] = (time.time(), Download(since=time.time(), status="removed"))
        return "", False

    def _removed(self, model: str) -> list[str]:
        """Remove the files of a model of the hub and return what to say of it. Raises Unusable if there is none,
        ModelUnusable if it is needed, CatalogError, OSError."""
        missing = Unusable(f"{self._machine} has downloaded no {model!r}")
        if not self._library.folder.is_dir():
            raise missing
        busy = ModelUnusable(f"{self._machine} is downloading a model; remove {model} when that has ended")
        with self._library.alone(time.monotonic() + BUSY_PATIENCE_S, busy):
            items = take_inventory(self._library, self._catalog(), self._state_dir)
            if not any(item.name == model and item.is_of_hub and item.files for item in items):
                raise missing
            going = chosen(items, [model], "rm")
            for item in going:
                self._check_free(item)
            return [*remove(self._library, items, going)]

    def _check_free(self, item: Item) -> None:
        """Raise ModelUnusable if an item is needed, or is not this folder's."""
        if item.running:
            raise ModelUnusable(f"{item.name} is in use, as {', '.join(item.running)}; unload that first")
        if item.used_by:
            raise ModelUnusable(
                f"the catalog of {self._machine} names {item.name} ({', '.join(item.used_by)}); take it out there first"
            )
        if any(not file.absolute().is_relative_to(self._library.folder) for file in item.files):
            raise ModelUnusable(
                f"{item.name} is not in the models folder of {self._machine}, but in a cache that other programs may "
                "use; remove it there (`paddock models rm --force`)"
            )

    async def _tell(self) -> None:
        """Tell what has become of orders and downloads, where there is something new or it was told long ago."""
        now = time.time()
        self._answers = {name: each for name, each in self._answers.items() if now - each.at < residency.ANSWERS_KEPT_S}
        self._ended = {name: each for name, each in self._ended.items() if now - each[0] < residency.ANSWERS_KEPT_S}
        is_moving = bool(self._fetches or self._answers or self._ended)
        if not is_moving and time.monotonic() - self._told_at < TOLD_EVERY_S:
            return
        downloads = {model: told for model, (_, told) in [*self._ended.items()][-residency.MAX_DOWNLOADS :]}
        downloads |= {model: Download(since=one.since, files=dict(one.files)) for model, one in self._fetches.items()}
        told = MachineLibrary(at=now, downloads=downloads, answers=self._answers)
        await self._client.hset(keys.LIBRARY, self._machine, encode(told))
        await self._client.pexpire(keys.LIBRARY, round(2000 * residency.LIBRARY_LIFE_S))
        self._told_at = time.monotonic()

    async def _leave(self) -> None:
        """Be gone for gateways at once. Best effort."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._client.hdel(keys.LIBRARY, self._machine)
        except (RedisError, OSError, TimeoutError):
            pass
