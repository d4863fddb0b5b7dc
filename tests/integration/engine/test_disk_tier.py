"""Prefixes on disk: they outlive the engine, serve another one, and never cross a trust line."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.integration.engine.listener import ONE_THREAD, Bench, Heard, changed, running
from tests.integration.engine.test_prefix_cache import ENDS, STORY, cached
from tests.integration.engine.test_slots import copy_of
from tests.support.small_models import WORDS
from workers.engine.cache.prefix_index import PrefixIndex
from workers.engine.cache.prefix_tree import Block
from workers.engine.cache.prompt import BLOCK_TOKENS, BlockName, Scope, block_names
from workers.engine.cache.prompt import Path as PrefixPath
from workers.engine.disk.folder import LEFT, CacheFolder
from workers.engine.disk.link import DiskLink
from workers.engine.disk.sealed import CacheKeys
from workers.engine.disk.tier import DiskTier, Stop
from workers.engine.engine import Engine, EngineRequest
from workers.engine.pace import MovePace, PrefillPace
from workers.llama.context import Context
from workers.llama.model import Model


@contextmanager
def tier(folder: Path, *, model: bytes = b"m" * 32, max_bytes: int = 64 << 20) -> Iterator[DiskTier]:
    one = DiskTier(CacheFolder(folder), CacheKeys("a secret"), max_bytes=max_bytes, identify=lambda stop: model)
    try:
        until = time.monotonic() + 10
        while not one.ready:  # until then nothing is found, and a call would not wait
            assert time.monotonic() < until
            time.sleep(0.001)
        yield one
    finally:
        one.close()


def names_of(call: EngineRequest) -> list[BlockName]:
    """Of its prompt's whole blocks."""
    return block_names(call.prompt.ids(), Scope(call.tenant, call.asked.cache_salt), 0)


def whole_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_conversation_goes_on_after_a_restart(any_model: Model, tmp_path: Path) -> None:
    with tier(tmp_path / "cache") as disk, running(any_model, disk=disk) as bench:
        first = changed(bench.request(STORY + ENDS[0], 20), tenant="red")
        text = bench.answer(first)
    with tier(tmp_path / "cache") as disk:
        assert disk.flush(5) or disk.stats.num_files
        with running(any_model, disk=disk) as bench:
            calls = [changed(bench.again(first), tenant=tenant) for tenant in ("red", "blue")]
            assert [bench.answer(call) for call in calls] == [text, text]
            num_prompt = len(first.prompt.tokens)
            assert [cached(bench, call.key) for call in calls] == [whole_blocks(num_prompt - 1), 0]
            assert bench.engine.counters.num_fetched == whole_blocks(num_prompt - 1)


def test_what_belongs_to_one_call_never_goes_to_disk(tmp_path: Path) -> None:
    tokens = np.arange(BLOCK_TOKENS, dtype=np.int32)
    with tier(tmp_path / "cache") as disk:
        link = DiskLink(disk, MovePace(PrefillPace(32, 512)), by_range=True, post=lambda act: act())
        for scope, num_files in ((Scope("red", own="one"), 0), (Scope("red"), 1)):
            block = Block(0, BLOCK_TOKENS, b"state")
            PrefixIndex().put(PrefixPath(tokens, scope), block)
            link.evicted(block)
            assert disk.flush(5)
            assert disk.stats.num_files == num_files


def test_what_leaves_ram_is_found_on_disk(stories: Model, tmp_path: Path) -> None:
    with (
        tier(tmp_path / "cache") as disk,
        running(stories, slots=2, n_ctx=256, kv_tokens=512, ram_bytes=200 << 10, disk=disk) as bench,
    ):
        prompts = [[*bench.tokens(ENDS[number % 8]), *bench.tokens(STORY)[1 + number : 200]] for number in range(12)]
        texts = [bench.answer(bench.request(prompt, 5)) for prompt in prompts]
        again = [bench.request(prompt, 5) for prompt in prompts]
        assert [bench.answer(call) for call in again] == texts
        # The first is fetched whatever it costs; with what that took the engine judges whether the others are worth it.
        assert cached(bench, again[0].key) >= whole_blocks(len(again[0].prompt.tokens) - 1)
        assert bench.engine.counters.num_fetched > 0


def test_two_workers_share_a_folder(stories: Model, tmp_path: Path) -> None:
    with tier(tmp_path / "cache") as disk, running(stories, disk=disk) as bench:
        call = bench.request(STORY, 5)
        bench.answer(call)
    with (
        tier(tmp_path / "cache") as one,
        tier(tmp_path / "cache") as other,
        running(stories, disk=one) as bench,
        running(stories, disk=other) as second,
    ):
        for each in (bench, second):
            again = each.again(call)
            each.answer(again)
            assert cached(each, again.key) == whole_blocks(len(call.prompt.tokens) - 1)


def test_who_retires_hands_on_what_is_idle_while_its_last_call_runs(stories: Model, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with tier(folder) as disk, tier(folder) as others, running(stories, disk=disk) as bench:
        ended = bench.request(STORY, 5)
        bench.answer(ended)
        # What ends meanwhile is handed on as well.
        endless = bench.request("Once upon a time", 8000, ignore_eos=True)
        long = changed(endless, tenant="red", context_shift=True)
        short = changed(bench.request(ENDS[0] + STORY, 30, ignore_eos=True), tenant="blue")
        bench.submit(long)
        bench.submit(short)
        bench.heard.until(lambda: bench.heard.calls[short.key])
        bench.engine.retire()
        bench.heard.until(lambda: others.num_known(names_of(ended)) and others.num_known(names_of(short)))
        assert not bench.heard.has_ended(long.key)
        bench.engine.cancel(long.key)


def test_who_stays_after_all_hands_nothing_on(stories: Model, tmp_path: Path) -> None:
    with tier(tmp_path / "cache") as disk, running(stories, disk=disk) as bench:
        endless = bench.request("Once upon a time", 8000, ignore_eos=True)
        long = changed(endless, tenant="red", context_shift=True)
        bench.submit(long)
        bench.heard.until(lambda: bench.heard.calls[long.key])
        bench.engine.retire()
        bench.engine.stay()
        ended = bench.request(STORY, 5)
        bench.answer(ended)
        time.sleep(0.5)  # several looks for what is idle
        assert disk.num_known(names_of(ended)) == 0
        bench.engine.retire()
        bench.heard.until(lambda: disk.num_known(names_of(ended)) > 0)
        bench.engine.cancel(long.key)


def test_who_retires_hands_on_the_beginning_first(
    stories: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are saved one after the other; the last one, without those before it, is of use to nobody."""
    offered: list[int] = []
    offer = DiskLink.offer

    def noted(link: DiskLink, block: Block) -> bool:
        offered.append(block.start)
        return offer(link, block)

    monkeypatch.setattr(DiskLink, "offer", noted)
    with tier(tmp_path / "cache") as disk, running(stories, disk=disk) as bench:
        ended = bench.request(STORY * 3, 5)
        bench.answer(ended)
        long = changed(bench.request("Once upon a time", 8000, ignore_eos=True), context_shift=True)
        bench.submit(long)
        bench.heard.until(lambda: bench.heard.calls[long.key])
        bench.engine.retire()
        bench.heard.until(lambda: disk.num_known(names_of(ended)) == len(names_of(ended)) > 2)
        bench.engine.cancel(long.key)
    assert offered == sorted(offered)


def test_another_models_files_are_not_taken(stories: Model, tmp_path: Path) -> None:
    with tier(tmp_path / "cache") as disk, running(stories, disk=disk) as bench:
        call = bench.request(STORY, 5)
        bench.answer(call)
    with tier(tmp_path / "cache", model=b"n" * 32) as disk, running(stories, disk=disk) as bench:
        again = bench.again(call)
        bench.answer(again)
        assert cached(bench, again.key) == 0


def test_a_damaged_file_costs_only_the_time_to_compute_it(stories: Model, tmp_path: Path) -> None:
    with tier(tmp_path / "cache") as disk, running(stories, disk=disk) as bench:
        call = bench.request(STORY, 20)
        text = bench.answer(call)
    for file in (tmp_path / "cache").rglob("*"):
        if file.is_file() and file.name != LEFT:
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
    with tier(tmp_path / "cache") as disk, running(stories, disk=disk) as bench:
        again = bench.again(call)
        assert bench.answer(again) == text
        assert cached(bench, again.key) == 0
        assert disk.stats.num_refused > 0


@pytest.mark.serial
@pytest.mark.parametrize("kind", ["attention", "window", "recurrent", "hybrid"])
def test_stopping_ends_in_time(small_models: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """The disk takes nothing; more lies in the cache than RAM has room for."""
    go = threading.Event()

    def identify(stop: Stop) -> bytes | None:
        return None if go.wait(20) else b"m" * 32

    disk = DiskTier(CacheFolder(tmp_path), CacheKeys("a secret"), max_bytes=1 << 30, identify=identify, queue_bytes=1)
    try:
        with (
            Model.load(small_models[kind], ONE_THREAD) as model,
            Context(model, ONE_THREAD, slots=4, kv_tokens=2048) as context,
        ):
            heard = Heard()
            engine = Engine(
                model,
                context,
                slots=4,
                n_ctx=512,
                emit=heard.emit,
                ram_bytes=80_000,
                disk=disk,
                write_out_s=0.3,
            )
            engine.start()
            bench = Bench(model, engine, heard)
            bench.wait(*(bench.submit(bench.request(WORDS[n : n + 200], 2, ignore_eos=True)) for n in range(4)))
            num_dropped = disk.stats.num_dropped
            started = time.monotonic()
            engine.stop()
            assert 0.25 < time.monotonic() - started < 1
            assert disk.stats.num_dropped - num_dropped <= 2, "what there is no time for is not even saved"
    finally:
        go.set()
        disk.close()


def test_a_slot_is_saved_from_disk(stories: Model, tmp_path: Path) -> None:
    """From blocks in the cache, in RAM and on disk, and what is nowhere is told."""
    with (
        tier(tmp_path / "cache") as disk,
        running(stories, slots=2, n_ctx=512, kv_tokens=512, ram_bytes=200 << 10, disk=disk) as bench,
    ):
        other = bench.submit(bench.request("Tim said", 250, ignore_eos=True))
        bench.heard.until(lambda: bench.heard.calls[other])
        first = changed(bench.request(STORY, 20, ignore_eos=True), tenant="red")
        text = bench.answer(first)
        whole = copy_of(bench, 1).conversation
        bench.wait(other)
        for end in ENDS:
            bench.answer(bench.request([*bench.tokens(end), *bench.tokens(STORY)[:300]], 5))
        assert disk.flush(10)
        copied = copy_of(bench, 1)
        num_whole = whole_blocks(len(whole.tokens))
        assert copied.conversation.tokens.tolist() == whole.tokens[:num_whole].tolist()
        assert copied.num_left == len(whole.tokens) - num_whole
        assert disk.stats.num_read > 0
    with running(stories, slots=2, n_ctx=512) as bench:
        assert bench.engine.slot_contents.restore(0, copied.scope, copied.conversation).result(20) == num_whole
        again = changed(bench.again(first), tenant="red")
        assert bench.answer(again) == text
        assert cached(bench, again.key) == min(num_whole, len(first.prompt.tokens) - 1)


def test_nothing_is_written_without_a_folder(stories: Model) -> None:
    with running(stories) as bench:
        bench.answer(bench.request(STORY, 5))
        assert bench.engine.counters.num_fetched == 0
