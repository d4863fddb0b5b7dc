"""Files that hold one whole conversation, its tokens and their saved KV, for `/slots/{id}?action=save|restore`.

A file is sealed as the disk tier's are (`workers.engine.disk.sealed`), and bound to the team, salt and adapters that it
was saved for, so nobody else can restore it. Contents, little-endian, sizes in bytes: number of tokens 4, of public
tokens 4, of blocks 4; the tokens, 4 each; for each block start 4, end 4, length 8; the blocks' states.
"""

from __future__ import annotations

import logging
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workers.engine.cache.prompt import Scope
from workers.engine.cache.slots import SavedBlock, SavedConversation
from workers.engine.disk.folder import DISK_FULL, CacheFolder, sync_folder
from workers.engine.disk.sealed import SEALED_OVERHEAD, CacheKeys, FileRefused, Kind, Label, SealedReader, write_sealed

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
MAX_TOKENS = 1 << 24

_COUNTS = struct.Struct("<III")
_BLOCK = struct.Struct("<IIQ")

log = logging.getLogger(__name__)


class ConversationUnusable(ValueError):
    """Raised if a conversation can't be saved or restored; the message is for the caller."""


class ConversationOverBound(Exception):
    """Raised if a conversation needs more room than its team, all teams or the disk have left; the message is for the
    caller."""


class ConversationsOutOfReach(Exception):
    """Raised if the folder of saved conversations can't be read or written now, through no fault of the caller. The
    message is for the caller, and the log has the reason."""


@dataclass(frozen=True, slots=True)
class TeamSaveLimits:
    """The limits of one team's saved conversations; None: those of the folder's `SaveBounds` hold."""

    max_files: int | None = None
    max_bytes: int | None = None


NO_SAVE_LIMITS = TeamSaveLimits()


@dataclass(frozen=True, slots=True)
class SaveBounds:
    """Bounds on the number and the size of the saved conversations in one folder."""

    max_files_per_team: int
    max_bytes_per_team: int
    max_bytes: int
    """Maximum bytes of the files of all teams together."""

    def files_of(self, limits: TeamSaveLimits) -> tuple[int, str]:
        """Return the maximum number of a team's files, and its name and value for callers."""
        if limits.max_files is None:
            return self.max_files_per_team, f"slot_saves_per_team is {self.max_files_per_team}"
        return limits.max_files, f"the limit `saved_slots` of the team or its organisation is {limits.max_files}"

    def bytes_of(self, limits: TeamSaveLimits) -> tuple[int, str]:
        """Return the maximum bytes of a team's files, and its name and value for callers."""
        if limits.max_bytes is None:
            return self.max_bytes_per_team, f"slot_save_mib_per_team is {self.max_bytes_per_team >> 20:,}"
        shown = f"the limit `saved_slot_bytes` of the team or its organisation is {limits.max_bytes:,}"
        return limits.max_bytes, shown


class ConversationFiles:
    """The folder of saved conversations, with a subfolder for each team. Methods block while they read or write."""

    def __init__(self, path: Path, keys: CacheKeys, bounds: SaveBounds) -> None:
        """Open the folder `path` of saved conversations. Raises CacheFolderUnusable."""
        self._folder = CacheFolder(path)
        self._keys = keys
        self._bounds = bounds

    def close(self) -> None:
        self._folder.close()

    def check_room(
        self, name: str, tenant: str | None, num_bytes: int = 1, limits: TeamSaveLimits = NO_SAVE_LIMITS
    ) -> int:
        """Return how many bytes a new file `name` may have. An old file of that name does not count: it is replaced.

        Raises ConversationOverBound if a bound forbids a file of `num_bytes`, and ConversationsOutOfReach. Workers that
        save into one folder at the same moment can each exceed a bound by one file."""
        bounds, own = self._bounds, self._keys.tenant_folder(tenant)
        with _translated(name, "saved"):
            held = {team: self._folder.files(team) for team in {own, *self._folder.versions()}}
        held[own].pop(name, 0)
        num_files, num_own = len(held[own]), sum(held[own].values())
        remedy = "Erase some with `action=erase` and their `filename`, or save under a name that is there"
        most, limit = bounds.files_of(limits)
        if num_files >= most:
            raise ConversationOverBound(f"this team has {num_files} saved slots, and {limit}. {remedy}")
        max_own, limit = bounds.bytes_of(limits)
        if num_own + num_bytes > max_own:
            raise ConversationOverBound(
                f"{name}: with its {num_bytes:,} bytes this team's saved slots would take {num_own + num_bytes:,}, and "
                f"{limit}. {remedy}"
            )
        num_all = sum(sum(files.values()) for files in held.values())
        if num_all + num_bytes > bounds.max_bytes:
            raise ConversationOverBound(
                f"{name}: the folder of saved slots has no room for {num_bytes:,} bytes more; slot_save_mib is "
                f"{bounds.max_bytes >> 20:,}, for all teams. {remedy}, or ask the operator for more"
            )
        return min(max_own - num_own, bounds.max_bytes - num_all)

    def erase(self, name: str, tenant: str | None) -> int:
        """Remove a team's file and return its size in bytes. Raises ConversationUnusable, ConversationsOutOfReach."""
        check_name(name)
        try:
            with _translated(name, "erased"), self._folder.opened(self._keys.tenant_folder(tenant)) as folder:
                num_bytes = os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
                os.unlink(name, dir_fd=folder)
                sync_folder(folder)
        except FileNotFoundError:
            raise ConversationUnusable(f"{name}: there is no such file") from None
        return num_bytes

    def write(
        self,
        name: str,
        scope: Scope,
        fingerprint: bytes,
        saved: SavedConversation,
        limits: TeamSaveLimits = NO_SAVE_LIMITS,
    ) -> int:
        """Write or replace a file; return its size in bytes.

        Raises ConversationUnusable, ConversationOverBound, ConversationsOutOfReach."""
        check_name(name)
        counts = _COUNTS.pack(len(saved.tokens), saved.num_public, len(saved.blocks))
        table = b"".join(_BLOCK.pack(block.start, block.end, len(block.state)) for block in saved.blocks)
        tokens = np.ascontiguousarray(saved.tokens, dtype="<i4").tobytes()
        parts = [counts + tokens + table, *(block.state for block in saved.blocks)]
        label = _label(scope, fingerprint, len(saved.tokens))
        self.check_room(name, scope.tenant, sum(map(len, parts)) + SEALED_OVERHEAD, limits)
        try:
            with _translated(name, "saved"), self._folder.opened(self._team(scope), create=True) as folder:
                written = write_sealed(folder, name, self._keys.seal, label, parts)
                sync_folder(folder)
        except FileNotFoundError as error:  # the folder itself is gone
            raise _out_of_reach(name, "saved", error) from None
        return written

    def read(
        self, name: str, scope: Scope, fingerprint: bytes, *, max_bytes: int, max_tokens: int = MAX_TOKENS
    ) -> SavedConversation:
        """Return the conversation in a file.

        Raises ConversationUnusable, which names the file and the reason, and ConversationsOutOfReach."""
        check_name(name)
        try:
            with (
                _translated(name, "read"),
                self._folder.opened(self._team(scope)) as folder,
                SealedReader(folder, name, self._keys.seal, max_bytes=max_bytes) as file,
            ):
                label, length = file.label()
                saved = _contents(file, length, max_tokens)
                file.verify()
        except FileNotFoundError:
            raise ConversationUnusable(f"{name}: there is no such file; save the slot under this name first") from None
        except FileRefused as error:
            raise ConversationUnusable(f"{name}: {error}; save the slot again") from None
        if label.fingerprint != fingerprint:
            raise ConversationUnusable(
                f"{name}: it was saved with another model, llama.cpp or KV setting; save the slot again"
            )
        if label != _label(scope, fingerprint, len(saved.tokens)):
            raise ConversationUnusable(f"{name}: it was saved for another team, salt or adapter; save the slot again")
        return saved

    def _team(self, scope: Scope) -> str:
        return self._keys.tenant_folder(scope.tenant)


def check_name(name: str) -> None:
    """Raise ConversationUnusable for a file name that is not allowed."""
    if not NAME.fullmatch(name):
        raise ConversationUnusable(
            "filename: use at most 128 letters, digits and . _ -, not beginning with a dot; folders can't be given"
        )


@contextmanager
def _translated(name: str, done: str) -> Iterator[None]:
    """Translate OSErrors within this block to errors for the caller; only FileNotFoundError passes.

    `done`: what can't be done with the file `name`, a participle. Raises ConversationOverBound if the disk is full,
    ConversationsOutOfReach for all else."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise _out_of_reach(name, done, error) from None
        log.error("slots: %s can't be %s: %s", name, done, error.strerror)
        raise ConversationOverBound(
            f"{name}: the disk with the saved slots is full. Erase some with `action=erase` and their `filename`, or "
            "ask the operator for more room"
        ) from None


def _out_of_reach(name: str, done: str, error: OSError) -> ConversationsOutOfReach:
    """Return the error for the caller, and log the reason, which is for the operator only."""
    log.error("slots: %s can't be %s: %s", name, done, error.strerror)
    return ConversationsOutOfReach(
        f"{name}: can't be {done} now, through no fault of the request; the worker's log says why. Try again later"
    )


def _label(scope: Scope, fingerprint: bytes, num_tokens: int) -> Label:
    return Label(Kind.CONVERSATION, fingerprint, scope.seed, 0, num_tokens)


def _contents(file: SealedReader, length: int, max_tokens: int) -> SavedConversation:
    """Return the conversation in a file. Each length that the file states is checked against the file's real size."""
    num_tokens, num_public, num_blocks = _COUNTS.unpack(_bounded(file, _COUNTS.size, length))
    left = length - _COUNTS.size
    if num_tokens > max_tokens:
        raise FileRefused(f"its {num_tokens:,} tokens are more than the {max_tokens:,} of a conversation here")
    tokens = np.frombuffer(_bounded(file, num_tokens * 4, left), dtype="<i4").astype(np.int32)
    left -= num_tokens * 4
    table = [*_BLOCK.iter_unpack(_bounded(file, num_blocks * _BLOCK.size, left))]
    left -= num_blocks * _BLOCK.size
    if sum(size for _, _, size in table) != left:
        raise FileRefused("it is damaged: its blocks do not add up to its length")
    at = 0
    blocks = []
    for start, end, size in table:
        if start != at or not start < end <= num_tokens:
            raise FileRefused(f"it is damaged: a block of tokens {start} to {end} follows token {at}")
        blocks.append(SavedBlock(start, end, file.take(size)))
        at = end
    return SavedConversation(tokens, tuple(blocks), num_public, file.size)


def _bounded(file: SealedReader, size: int, left: int) -> bytes:
    if size > left:
        raise FileRefused("it is damaged: it ends inside its table")
    return file.take(size)
