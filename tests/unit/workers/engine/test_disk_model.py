"""KV of a real model through the disk: the same bytes after a restart, and the same from what is computed on them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import llama_cpp as c

from tests.unit.workers.engine.disk_support import TEAM, fetched, store, until
from workers.chat_worker import HASHES_FILE, cache_keys, kv_identity, open_slot_files, open_tier
from workers.engine.cache.prompt import block_names
from workers.engine.cache.slots import SavedBlock, SavedConversation
from workers.engine.disk.conversation_file import ConversationUnusable
from workers.engine.disk.fingerprint import ModelChanged
from workers.engine.disk.folder import CacheFolderUnusable
from workers.engine.disk.sealed import CacheKeys
from workers.engine.disk.tier import DiskTier
from workers.llama.context import Context
from workers.llama.model import Model
from workers.models.spec import LlamaSettings, ModelSpec
from workers.settings import WorkerSettings

DEMO = Path(__file__).resolve().parents[4] / "deploy" / "demo" / "paddock-demo.gguf"
PLAIN = LlamaSettings(n_threads=1)
TOKENS = np.arange(5, 5 + 130, dtype=np.int32)
SCRATCH = 2


@pytest.fixture
def settings(tmp_path: Path) -> WorkerSettings:
    return WorkerSettings(
        worker_secret="hush",
        state_dir=tmp_path / "state",
        cache_dir=tmp_path / "cache",
        slot_save_dir=tmp_path / "slots",
    )


def spec_of(llama: LlamaSettings) -> ModelSpec:
    return ModelSpec(name="m", path="m", llama=llama)


@contextmanager
def worker(settings: WorkerSettings, llama: LlamaSettings = PLAIN) -> Iterator[tuple[Context, DiskTier]]:
    """A model, a context and a tier that is ready."""
    with Model.load(DEMO, llama) as model, Context(model, llama, slots=3, kv_tokens=512) as context:
        tier = open_tier(settings, kv_identity(settings, model, spec_of(llama), n_ctx=context.kv_tokens))
        assert tier is not None
        until(lambda: tier.ready)
        try:
            yield context, tier
        finally:
            tier.close()


def compute(context: Context, start: int, end: int) -> None:
    """Tokens [start, end) on sequence 0."""
    batch = context.new_batch()
    batch.add_prompt(TOKENS[start:end], start, 0, num_logits=1)
    context.decode(batch)


def save(context: Context, start: int, end: int) -> bytes:
    """As the engine saves a block: share the range to a scratch sequence, save that one."""
    context.memory.share(0, SCRATCH, start, end)
    state = context.memory.save(SCRATCH)
    context.memory.remove(SCRATCH)
    return state


def load(context: Context, state: bytes, start: int, end: int) -> None:
    context.memory.load(SCRATCH, state)
    context.memory.share(SCRATCH, 0, start, end)
    context.memory.remove(SCRATCH)


@pytest.mark.parametrize("llama", [PLAIN, LlamaSettings(n_threads=1, cache_type_k="q8_0", flash_attn="off")])
def test_kv_comes_back_after_a_restart_bit_for_bit(settings: WorkerSettings, llama: LlamaSettings) -> None:
    names = block_names(TOKENS, TEAM)
    with worker(settings, llama) as (context, tier):
        compute(context, 0, 128)
        compute(context, 128, len(TOKENS))
        states = [save(context, name.start, name.end) for name in names]
        store(tier, names, states)
        whole = save(context, 0, len(TOKENS))
    with worker(settings, llama) as (context, tier):
        assert tier.num_known(names) == 2
        back = fetched(tier, names)
        assert back == states
        for name, state in zip(names, back, strict=True):
            load(context, state, name.start, name.end)
        assert context.memory.last_position(0) == 127
        compute(context, 128, len(TOKENS))
        assert save(context, 0, len(TOKENS)) == whole
        assert [save(context, name.start, name.end) for name in names] == states


def test_another_kv_type_finds_nothing(settings: WorkerSettings) -> None:
    names = block_names(TOKENS, TEAM)
    with worker(settings) as (context, tier):
        compute(context, 0, 128)
        store(tier, names, [save(context, name.start, name.end) for name in names])
    for other in (
        LlamaSettings(n_threads=1, cache_type_k="q8_0"),
        LlamaSettings(n_threads=1, flash_attn="off"),
    ):
        with worker(settings, other) as (_, tier):
            assert tier.num_known(names) == 0
            assert fetched(tier, names) == []
    with worker(settings, LlamaSettings(n_threads=1, n_batch=64, n_ubatch=64, use_mmap=False)) as (_, tier):
        assert tier.num_known(names) == 2


def test_the_model_is_hashed_once(settings: WorkerSettings) -> None:
    if time.time() - DEMO.stat().st_ctime < 3:
        time.sleep(3)
    with worker(settings):
        pass
    assert str(DEMO) in (settings.state_dir / HASHES_FILE).read_text()


def test_a_file_that_was_replaced_while_it_was_loaded_has_no_identity(settings: WorkerSettings, tmp_path: Path) -> None:
    """Else what the old weights computed would be kept as the new ones'."""
    path = tmp_path / "model.gguf"
    shutil.copy(DEMO, path)
    time.sleep(0.05)
    load_file = c.llama_model_load_from_file

    def load_slowly(*given: Any) -> Any:
        pointer = load_file(*given)
        Path(shutil.copy(DEMO, tmp_path / "new.gguf")).replace(path)
        return pointer

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(c, "llama_model_load_from_file", load_slowly)
        model = Model.load(path, PLAIN)
    with model, pytest.raises(ModelChanged, match="changed after it was loaded"):
        kv_identity(settings, model, spec_of(PLAIN), n_ctx=512).fingerprint()


def test_a_conversation_is_restored_from_its_file(settings: WorkerSettings) -> None:
    files = open_slot_files(settings)
    assert files is not None
    with Model.load(DEMO, PLAIN) as model:
        identity = kv_identity(settings, model, spec_of(PLAIN), n_ctx=512)
        fingerprint = identity.fingerprint()
        assert fingerprint is not None
        assert fingerprint == identity.fingerprint()
        with Context(model, PLAIN, slots=3, kv_tokens=512) as context:
            compute(context, 0, len(TOKENS))
            ranges = [(0, 64), (64, 128), (128, 130)]
            blocks = tuple(SavedBlock(start, end, save(context, start, end)) for start, end in ranges)
            whole = save(context, 0, 130)
            files.write("chat.bin", TEAM, fingerprint, SavedConversation(TOKENS, blocks))
        with Context(model, PLAIN, slots=3, kv_tokens=512) as context:
            saved = files.read("chat.bin", TEAM, fingerprint, max_bytes=1 << 24)
            assert saved.tokens.tolist() == TOKENS.tolist()
            for block in saved.blocks:
                load(context, block.state, block.start, block.end)
            assert save(context, 0, 130) == whole
    with pytest.raises(ConversationUnusable, match="another model"):
        files.read("chat.bin", TEAM, b"o" * 32, max_bytes=1 << 24)
    files.close()


def test_what_is_not_configured_is_not_opened(tmp_path: Path) -> None:
    settings = WorkerSettings(worker_secret="hush", state_dir=tmp_path)
    with Model.load(DEMO, PLAIN) as model:
        assert open_tier(settings, kv_identity(settings, model, spec_of(PLAIN), n_ctx=512)) is None
        assert open_slot_files(settings) is None
        open_to_all = tmp_path / "open"
        open_to_all.mkdir()
        open_to_all.chmod(0o777)
        own = {"cache_dir": open_to_all, "slot_save_dir": open_to_all, "cache_secret": "sealed"}
        wrong = WorkerSettings(worker_secret="hush", **own)  # type: ignore[arg-type]
        with pytest.raises(CacheFolderUnusable, match=r"^cache_dir: .*open: other users"):
            open_tier(wrong, kv_identity(wrong, model, spec_of(PLAIN), n_ctx=512))
        with pytest.raises(CacheFolderUnusable, match=r"^slot_save_dir: .*open: other users"):
            open_slot_files(wrong)
    assert list(tmp_path.iterdir()) == [open_to_all]


def test_the_secret_of_files_is_one_of_its_own(tmp_path: Path) -> None:
    """Whoever learns what gateways and workers share can't write files that llama.cpp would parse."""

    def team_of(**values: object) -> str:
        settings = WorkerSettings(**{"worker_secret": "hush", "state_dir": tmp_path / "state", **values})  # type: ignore[arg-type]
        return cache_keys(settings).tenant_folder("blue")

    made = team_of()
    secret = tmp_path / "state" / "cache-secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert team_of(worker_secret="another") == made, "workers of one state folder agree, and secrets change one by one"
    assert team_of(state_dir=tmp_path / "elsewhere") != made
    assert team_of(cache_secret=secret.read_text().strip(), state_dir=tmp_path / "third") == made
    assert made not in (CacheKeys("hush").tenant_folder("blue"), CacheKeys("another").tenant_folder("blue"))
    (tmp_path / "shut").touch()
    with pytest.raises(CacheFolderUnusable, match="give --cache-secret"):
        team_of(state_dir=tmp_path / "shut")
