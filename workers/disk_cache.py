"""The disk tier and the folder of saved slots, as the settings of a worker say."""

from __future__ import annotations

import time

from workers import secret_file
from workers.engine.conversation_file import ConversationFiles, SaveBounds
from workers.engine.disk import DiskTier
from workers.engine.disk_folder import CacheFolder, CacheFolderUnusable
from workers.engine.disk_names import CacheKeys
from workers.engine.fingerprint import KvIdentity, ModelHashes
from workers.llama.gguf import GgufHeader
from workers.protocol.catalog import LlamaSettings
from workers.settings import WorkerSettings

HASHES_FILE = "model-hashes.json"
"""In the state folder: SHA-256 of model files, so that each is read once."""


def kv_identity(
    settings: WorkerSettings, header: GgufHeader, llama: LlamaSettings, *, n_ctx: int, loaded_at: float | None = None
) -> KvIdentity:
    """`n_ctx`: cells of the llama.cpp context. `loaded_at`: `time.time` before the model was loaded; None: now."""
    hashes = ModelHashes(settings.state_dir / HASHES_FILE)
    return KvIdentity(header, llama, hashes, n_ctx=n_ctx, loaded_at=time.time() if loaded_at is None else loaded_at)


def open_tier(settings: WorkerSettings, identity: KvIdentity) -> DiskTier | None:
    """The tier with its thread started, to be closed after the engine; None where no `cache_dir` is set.

    Raises CacheFolderUnusable.
    """
    if settings.cache_dir is None:
        return None
    try:
        folder = CacheFolder(settings.cache_dir)
    except CacheFolderUnusable as error:
        raise CacheFolderUnusable(f"cache_dir: {error}") from None
    return DiskTier(
        folder, cache_keys(settings), max_bytes=settings.cache_disk_mib << 20, identify=identity.fingerprint
    )


def open_slot_files(settings: WorkerSettings) -> ConversationFiles | None:
    """None where no `slot_save_dir` is set. Raises CacheFolderUnusable."""
    if settings.slot_save_dir is None:
        return None
    bounds = SaveBounds(
        settings.slot_saves_per_team, settings.slot_save_mib_per_team << 20, settings.slot_save_mib << 20
    )
    try:
        return ConversationFiles(settings.slot_save_dir, cache_keys(settings), bounds)
    except CacheFolderUnusable as error:
        raise CacheFolderUnusable(f"slot_save_dir: {error}") from None


def cache_keys(settings: WorkerSettings) -> CacheKeys:
    """What names and seals files: of the cache's own secret, which is made in the state folder where none is given.

    Not of the workers' one: whoever learns that could write files that are parsed in C++, and change would lose both.
    Raises CacheFolderUnusable where none can be made.
    """
    path = settings.state_dir / secret_file.CACHE_SECRET
    try:
        return CacheKeys(settings.cache_secret or secret_file.made_once(path))
    except OSError as error:
        raise CacheFolderUnusable(f"{path}: {error.strerror}; give --cache-secret, or another --state-dir") from None
