"""Cells behind a sliding window with `swa_full`: there is room for them, and llama.cpp gives them away all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.integration.engine.listener import running
from tests.integration.engine.test_prefix_cache import cached
from tests.support.alone import Alone
from tests.support.lone_context import LoneContext, lone_context
from tests.support.small_models import write_window_model
from tests.support.tolerance import measure_tolerance
from workers.engine.cache.prompt import BLOCK_TOKENS
from workers.engine.cache.window_cells import WindowCellsCache, cache_class
from workers.llama.memory import LEAST_WINDOW, MemoryKind
from workers.llama.model import Model
from workers.models.spec import LlamaSettings

FULL = LlamaSettings(n_threads=1, n_batch=512, n_ubatch=128, swa_full=True)
WINDOW = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("window") / "window.gguf"
    write_window_model(path, WINDOW)
    with Model.load(path, FULL) as loaded:
        yield loaded


@pytest.fixture
def lone(model: Model) -> Iterator[LoneContext]:
    with lone_context(model, slots=4, kv_tokens=512, llama=FULL) as one:
        yield one


def words(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(20, 430, length)]


def test_llama_cpp_gives_cells_behind_the_window_away_while_others_are_free(lone: LoneContext) -> None:
    memory = lone.memory
    assert cache_class(memory) is WindowCellsCache
    lone.feed_long(1, words(1, 100))
    lone.feed_long(0, words(2, 200))
    memory.remove(1)
    lone.feed_long(2, words(3, 150))
    first = memory.first_position(0)
    assert 0 < first <= 200 - WINDOW + 1, "the 212 cells behind it are free"
    assert memory.can_continue(0, 200)
    assert memory.reaches_back(0, first + WINDOW - 1)
    assert not memory.reaches_back(0, first + WINDOW - 2)
    assert memory.holds_from(0, first)
    assert not memory.holds_from(0, first - 1)


def test_ranges_are_saved_whole_or_not_kept(small_models: dict[str, Path], lone: LoneContext) -> None:
    """llama.cpp saves of a range what the window holds. So with a smaller one prompts are shared by checkpoints."""
    assert BLOCK_TOKENS <= LEAST_WINDOW == WINDOW
    with lone_context(small_models["window"], kv_tokens=512, llama=FULL) as narrow:
        assert narrow.memory.kind is MemoryKind.WINDOW
    lone.feed_long(0, words(1, 200))
    lone.memory.share(0, 3, 64, 128)
    state = lone.memory.save(3)
    lone.memory.load(3, state)
    assert lone.positions(3) == (64, 127)


@pytest.mark.parametrize("ram_bytes", [0, 64 << 20], ids=["no RAM", "RAM"])
def test_answers_are_right_and_the_books_too(model: Model, ram_bytes: int) -> None:
    """Conversations through few cells: they begin alike, go on later, and are asked again for a part of them."""
    begins = [words(seed, 90) for seed in range(3)]
    first = [[*begins[number % 3], *words(100 + number, 100)] for number in range(12)]
    longer = [[*prompt, *words(200 + number, 20)] for number, prompt in enumerate(first)]
    parted = [[*prompt[:120], *words(300 + number, 40)] for number, prompt in enumerate(first)]
    prompts = [*first, *longer, *parted]
    tolerance = measure_tolerance(model, tokens=words(0, 400), llama=FULL)
    told, found = list[str](), 0
    with running(model, slots=4, n_ctx=256, kv_tokens=1024, llama=FULL, ram_bytes=ram_bytes) as bench:
        for number in range(0, len(prompts), 4):
            calls = [bench.request(prompt, 6, ignore_eos=True) for prompt in prompts[number : number + 4]]
            bench.wait(*(bench.submit(call) for call in calls))
            bench.engine.check_integrity()
            told += [bench.heard.text(call.key) for call in calls]
            found += sum(cached(bench, call.key) for call in calls)
    assert found > 0, "what is there still is shared"
    with lone_context(model, slots=4, kv_tokens=512, llama=FULL) as lone:
        assert Alone(lone, tolerance).differences(prompts, told, 6) < len(prompts) / 3
