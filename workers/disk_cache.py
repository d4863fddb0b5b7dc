"""Opens the disk tier and the folder of saved slots, as a worker's settings say."""

from __future__ import annotations

import time

from workers import secret_file
from workers.engine.disk.conversation_file import ConversationFiles, SaveBounds
from workers.engine.disk.fingerprint import KvIdentity, ModelHashes
from workers.engine.disk.folder import CacheFolder, CacheFolderUnusable
from workers.engine.disk.keys import CacheKeys
from workers.engine.disk.tier import DiskTier
from workers.llama.gguf import GgufHeader
from workers.models.spec import LlamaSettings
from workers.settings import WorkerSettings

HASHES_FILE = "model-hashes.json"
"""File in the state folder with the SHA-256 of model files, so that each is read once."""


def kv_identity(
    settings: WorkerSettings, header: GgufHeader, llama: LlamaSettings, *, n_ctx: int, loaded_at: float | None = None
) -> KvIdentity:
    """Return the KV's identity. `n_ctx`: cells of the context. `loaded_at`: `time.time` before the load; None: now."""
    hashes = ModelHashes(settings.state_dir / HASHES_FILE)
    return KvIdentity(header, llama, hashes, n_ctx=n_ctx, loaded_at=time.time() if loaded_at is None else loaded_at)


def open_tier(settings: WorkerSettings, identity: KvIdentity) -> DiskTier | None:
    """Return the tier, its thread started, to be closed after the engine; None where no `cache_dir` is set.

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
    """Return the saved slots' folder; None where no `slot_save_dir` is set. Raises CacheFolderUnusable."""
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
    """Return the keys that name and seal files, from the cache's own secret, made in the state folder if not given.

    The workers' secret is not used: whoever learns it could write files that are parsed in C++, and changing it would
    lose the files too. Raises CacheFolderUnusable where no secret can be made.
    """
    path = settings.state_dir / secret_file.CACHE_SECRET
    try:
        return CacheKeys(settings.cache_secret or secret_file.made_once(path))
    except OSError as error:
        raise CacheFolderUnusable(f"{path}: {error.strerror}; give --cache-secret, or another --state-dir") from None
