"""The contents of slots: for each slot the conversation that last ended there, to be copied out, restored and erased.

The work is done on the engine's thread in pieces between two steps, so that running streams do not wait for it.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from workers.engine.cache.cached_sequence import NOWHERE
from workers.engine.cache.prefix_cache import PrefixCache
from workers.engine.cache.prefix_tree import Block
from workers.engine.cache.prompt import BLOCK_TOKENS, Path, Scope, Tokens
from workers.engine.request import EngineRequest
from workers.llama.native import StateUnusable
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.queries import SlotInfo

T = TypeVar("T")

Post = Callable[[Callable[[], None]], None]
Work = Generator[None, None, T]


class SlotCall(Protocol):
    """A call in a slot, with the attributes that `SlotContents` needs."""

    @property
    def request(self) -> EngineRequest: ...
    @property
    def slot(self) -> int: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def num_predicted(self) -> int: ...
    @property
    def num_cells(self) -> int: ...
    @property
    def num_whole(self) -> int: ...
    @property
    def shifted(self) -> bool: ...

    def path(self) -> Path: ...


class Archive(Protocol):
    """The methods of `workers.engine.disk.link.DiskLink` that are needed here."""

    def look_up(self, path: Path, known: int, limit: int, on_blocks: Callable[[list[Block]], None]) -> bool: ...


UNBOUNDED = -1
"""`SlotInfo.n_remain` of a call without a limit, and of a slot without a call."""

READ_TOKENS = 16 * BLOCK_TOKENS
"""Maximum tokens read from disk at once for a copy; the copy's size is checked before more are read."""


@dataclass(frozen=True, slots=True)
class SavedBlock:
    """The saved state of tokens [start, end)."""

    start: int
    end: int
    state: bytes


@dataclass(frozen=True, slots=True)
class SavedConversation:
    tokens: Tokens
    blocks: tuple[SavedBlock, ...]
    """Blocks in order, without gaps, from token 0."""
    num_public: int = 0
    """Number of first tokens that belong to a prompt which the catalog lets all teams share."""
    num_bytes: int = 0
    """Bytes of the file that the conversation was read from."""


@dataclass(frozen=True, slots=True)
class SlotConversation:
    """A conversation that ended in a slot."""

    path: Path
    num_prompt: int
    num_decoded: int
    label: str


@dataclass(frozen=True, slots=True)
class CopiedSlot:
    scope: Scope
    conversation: SavedConversation
    """The conversation; it has no tokens if nothing of it is cached any more."""
    num_left: int = 0
    """Number of tokens at the end that are not cached any more and so not copied."""


class SlotContents:
    """Holds the contents of all slots and does the queued work on them. Belongs to the engine's thread."""

    def __init__(
        self, cache: PrefixCache, running: Sequence[SlotCall], disk: Archive | None, *, num_slots: int, n_ctx: int
    ) -> None:
        self.num_slots = num_slots
        self._cache = cache
        self._running = running
        """The calls that hold a slot; the list changes when calls come and go."""
        self._disk = disk
        self._n_ctx = n_ctx
        self._held: dict[int, SlotConversation] = {}
        self._jobs: deque[Callable[[], bool]] = deque()
        self._reading = False
        """Whether the first job in `_jobs` waits for the disk; the others wait until it is done."""
        self.closed: Failure | None = None
        """Why new work is refused; None: it is accepted."""

    @property
    def has_work(self) -> bool:
        return bool(self._jobs) and not self._reading

    def ended(self, sequence: SlotCall, *, keep: bool) -> None:
        """Note the conversation that an ending call leaves in its slot. `keep`: whether its KV cells may be reused."""
        if sequence.slot == NOWHERE:
            return
        self._held.pop(sequence.slot, None)
        request = sequence.request
        if keep and request.asked.cache_prompt and not sequence.shifted and sequence.num_cells:
            path = sequence.path()
            path = replace(path, tokens=path.tokens[: sequence.num_whole])
            held = SlotConversation(path, sequence.num_prompt, sequence.num_predicted, request.label)
            self._held[sequence.slot] = held

    def infos(self) -> list[SlotInfo]:
        running = {one.slot: one for one in self._running}
        return [self._info(slot, running.get(slot)) for slot in range(self.num_slots)]

    def begin(self, result: Future[T], work: Work[T]) -> None:
        """Queue work to be done in parts, unless `result` was cancelled."""
        if not result.set_running_or_notify_cancel():
            return
        if self.closed is not None:
            result.set_exception(CallFailed(self.closed))
            return
        self._jobs.append(partial(self._go_on, result, work))

    def move(self, seconds: float) -> None:
        """Do queued work for about `seconds`. Called in every step."""
        if not self._jobs:
            return
        until = time.perf_counter() + seconds
        while self.has_work and time.perf_counter() < until:
            if self._jobs[0]():
                self._jobs.popleft()

    def close(self, failure: Failure) -> None:
        """End all work with `failure`, because the engine ends."""
        self._reading = False
        self.closed = failure
        while self._jobs:
            if self._jobs[0]():
                self._jobs.popleft()

    def copied(self, slot: int, tenant: str, salt: str, max_bytes: int = sys.maxsize) -> Work[CopiedSlot | None]:
        """Return a copy of the slot's conversation, as far as it is in cells, in RAM or on disk; None: the slot has no
        conversation of this team and salt. Raises CallFailed if a call runs in the slot, and as soon as the copy gets
        larger than `max_bytes`."""
        held = self._of(slot, tenant, salt)
        if held is None:
            return None
        path, end = held.path, len(held.path.tokens)
        if path.positions is not None:
            message = f"slot {slot} holds a picture with positions in rows and columns, which is not saved; erase it"
            raise CallFailed(Failure(FailureCode.UNSUPPORTED, message, "action"))
        if self._cache.needs_stops:
            blocks = yield from self._copied_state(path, end, max_bytes)
        else:
            blocks = yield from self._copied_blocks(path, end, max_bytes)
        position = blocks[-1].end if blocks else 0
        saved = tuple(SavedBlock(block.start, block.end, block.state) for block in blocks)
        conversation = SavedConversation(path.tokens[:position], saved, min(path.num_public, position))
        return CopiedSlot(path.scope, conversation, end - position)

    def restored(self, slot: int, scope: Scope, saved: SavedConversation) -> Work[int]:
        """Put the saved blocks into RAM, as far as there is room; return how many tokens the next call finds cached."""
        self._refuse_busy(slot)
        if not self._cache.ram.max_bytes:
            message = "conversations are restored to memory that this worker does not have; raise cache_ram_mib"
            raise CallFailed(Failure(FailureCode.UNSUPPORTED, message, "action"))
        self._held.pop(slot, None)
        end = saved.blocks[-1].end if saved.blocks else 0
        path = Path(saved.tokens[:end], scope, saved.num_public)
        for block in reversed(saved.blocks):
            self._cache.take_in(path, Block(block.start, block.end, block.state))
            yield
        known = self._num_known(path)
        if known:
            path = Path(path.tokens[:known], scope, saved.num_public)
            self._held[slot] = SlotConversation(path, known, 0, "")
        return known

    def erased(self, slot: int, tenant: str, salt: str) -> Work[int]:
        """Erase the slot's conversation; return how many tokens the slot held."""
        held = self._of(slot, tenant, salt)
        if held is None:
            return 0
        self._cache.erase(held.path)
        self._held.pop(slot)
        yield
        return len(held.path.tokens)

    def _copied_blocks(self, path: Path, end: int, max_bytes: int) -> Work[list[Block]]:
        blocks: list[Block] = []
        position = num_bytes = 0
        while True:
            for block in self._cache.copies(path, position, end):
                blocks.append(block)
                position, num_bytes = block.end, num_bytes + len(block.state)
                _check_size(num_bytes, max_bytes)
                yield
            more = (yield from self._read(path, position, min(end, position + READ_TOKENS))) if position < end else []
            if not more:
                return blocks
            for one in more:
                part = self._cache.cut_out(one, position, one.end, path.positions)
                if part is None:
                    return blocks
                blocks.append(part)
                position, num_bytes = part.end, num_bytes + len(part.state)
                _check_size(num_bytes, max_bytes)
                yield

    def _copied_state(self, path: Path, end: int, max_bytes: int) -> Work[list[Block]]:
        """Return a list with a copy of the conversation's longest saved state; empty if no state is saved."""
        _check_size(self._cache.state_size(path, end), max_bytes)
        block = next(self._cache.copies(path, 0, end), None)
        known = 0 if block is None else block.end
        longer = (yield from self._read(path, known, end)) if known < end else []
        found = longer or ([] if block is None else [block])
        _check_size(sum(len(one.state) for one in found), max_bytes)
        return found

    def _read(self, path: Path, known: int, end: int) -> Work[list[Block]]:
        """Return the conversation's blocks on disk, from token `known` to `end`. Other jobs wait until that is done."""
        blocks: list[Block] = []
        if self._disk is not None and self._disk.look_up(path, known, end, partial(self._have_read, blocks)):
            self._reading = True
            yield
        return blocks

    def _have_read(self, into: list[Block], blocks: list[Block]) -> None:
        into.extend(blocks)
        self._reading = False

    def _go_on(self, result: Future[T], work: Work[T]) -> bool:
        """Do the next part of a job; return whether the job is over."""
        try:
            if self.closed is not None:
                raise CallFailed(self.closed)
            next(work)
        except StopIteration as end:
            result.set_result(end.value)
        except CallFailed as failed:
            result.set_exception(failed)
        except MemoryError:
            message = "this worker has no memory for the conversation in the slot; ask again"
            result.set_exception(CallFailed(Failure(FailureCode.OUT_OF_MEMORY, message)))
        except StateUnusable as error:
            result.set_exception(CallFailed(Failure(FailureCode.INTERNAL, f"the slot can't be copied: {error}")))
        else:
            return False
        return True

    def _of(self, slot: int, tenant: str, salt: str) -> SlotConversation | None:
        """Return the slot's conversation of this team and salt, or None. Raises CallFailed (BUSY) if a call runs."""
        self._refuse_busy(slot)
        held = self._held.get(slot)
        mine = held is not None and (held.path.scope.tenant, held.path.scope.salt) == (tenant, salt)
        return held if mine else None

    def _refuse_busy(self, slot: int) -> None:
        if any(one.slot == slot for one in self._running):
            message = f"a call is running in slot {slot}; ask again when it has ended"
            raise CallFailed(Failure(FailureCode.BUSY, message))

    def _num_known(self, path: Path) -> int:
        index, end = self._cache.index, len(path.tokens)
        return index.match_checkpoint(path, end).end if self._cache.needs_stops else index.match(path, end).num_known

    def _info(self, slot: int, one: SlotCall | None) -> SlotInfo:
        held = self._held.get(slot)
        if one is not None:
            what = (one.num_prompt, one.num_predicted, one.request.label, one.request.tenant, _num_left(one))
        elif held is not None:
            what = (held.num_prompt, held.num_decoded, held.label, held.path.scope.tenant or "", UNBOUNDED)
        else:
            what = (0, 0, "", "", UNBOUNDED)
        return SlotInfo(
            id=slot,
            n_ctx=self._n_ctx,
            is_processing=one is not None,
            n_prompt_tokens=what[0],
            n_decoded=what[1],
            request_id=what[2],
            tenant=what[3],
            n_remain=what[4],
        )


def _check_size(num_bytes: int, max_bytes: int) -> None:
    """Raise CallFailed if the conversation has more than `max_bytes`."""
    if num_bytes > max_bytes:
        message = (
            f"the slot's conversation takes more than the {max_bytes:,} bytes that are left of slot_save_mib_per_team "
            "or the team's own limit `saved_slot_bytes`, or of slot_save_mib for all teams. Erase some with "
            "`action=erase` and their `filename`, or save under a name that is there"
        )
        raise CallFailed(Failure(FailureCode.STORAGE_FULL, message, "filename"))


def _num_left(one: SlotCall) -> int:
    most = one.request.asked.max_tokens
    return UNBOUNDED if most is None else max(0, most - one.num_predicted)


class SlotProxy:
    """Lets any thread use the slots' contents: the engine's thread does the work and fulfils the futures.

    A future ends with CallFailed: BUSY while a call runs in the slot, UNSUPPORTED (no RAM tier to restore to),
    OUT_OF_MEMORY, INTERNAL, or the failure that the engine ends with. Methods raise CallFailed: INVALID_REQUEST for an
    unknown slot, or the failure that the engine has ended with."""

    def __init__(self, book: SlotContents, post: Post) -> None:
        self._book = book
        self._post = post

    def infos(self) -> Future[list[SlotInfo]]:
        return self._begin(self._list())

    def copy(self, slot: int, tenant: str, salt: str, max_bytes: int = sys.maxsize) -> Future[CopiedSlot | None]:
        """Copy the slot's conversation; the result is None if the slot is empty for this team and salt.

        The future ends with STORAGE_FULL if the copy takes more than `max_bytes`."""
        self.check(slot)
        return self._begin(self._book.copied(slot, tenant, salt, max_bytes))

    def restore(self, slot: int, scope: Scope, saved: SavedConversation) -> Future[int]:
        """Restore a conversation; the result is how many tokens the next call with this prefix need not compute."""
        self.check(slot)
        return self._begin(self._book.restored(slot, scope, saved))

    def erase(self, slot: int, tenant: str, salt: str) -> Future[int]:
        """Erase the slot's conversation; the result is how many tokens the slot held."""
        self.check(slot)
        return self._begin(self._book.erased(slot, tenant, salt))

    def _begin(self, work: Work[T]) -> Future[T]:
        if self._book.closed is not None:
            raise CallFailed(self._book.closed)
        result: Future[T] = Future()
        self._post(partial(self._book.begin, result, work))
        return result

    def _list(self) -> Work[list[SlotInfo]]:
        yield
        return self._book.infos()

    def check(self, slot: int) -> None:
        """Raise CallFailed for a slot that does not exist."""
        if not 0 <= slot < self._book.num_slots:
            message = f"there is no slot {slot}; this worker's are 0 to {self._book.num_slots - 1}"
            raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message, "id"))
