"""Memory that can't be cut, on disk: whole states outlive the engine, and never cross a trust line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.engine.listener import ONE_THREAD, Bench, changed, running
from tests.integration.engine.test_disk_tier import tier
from tests.integration.engine.test_prefix_cache import cached
from tests.integration.engine.test_slots import copy_of, of_team
from tests.support.small_models import SMALL_MODELS, WORDS
from workers.engine.disk.folder import LEFT
from workers.engine.disk.sealed import CacheKeys
from workers.engine.request import EngineRequest
from workers.llama.memory import MemoryKind
from workers.llama.model import Model
from workers.protocol.events import CallEvent

KINDS = [name for name, small in SMALL_MODELS.items() if not small.kind.by_range]
PROMPT = WORDS[:150]
LONGER = WORDS[:170]
"""What comes next in the same conversation."""


@pytest.fixture(scope="module", params=KINDS)
def uncut(request: pytest.FixtureRequest, small_models: dict[str, Path]) -> Iterator[Model]:
    with Model.load(small_models[request.param], ONE_THREAD) as model:
        yield model


def ask(bench: Bench, prompt: list[int], num_tokens: int = 8, tenant: str = "red", salt: str = "") -> EngineRequest:
    return of_team(bench.request(prompt, num_tokens, ignore_eos=True), tenant, salt)


def speak(model: Model, folder: Path, prompt: list[int] = PROMPT, **asked: str) -> str:
    """A worker reads a prompt and stops -> what it says next, when nothing is cached."""
    with tier(folder) as disk, running(model, disk=disk) as bench:
        bench.answer(ask(bench, prompt, 1, **asked))
        return bench.answer(changed(ask(bench, LONGER), cache_prompt=False))


def test_a_conversation_goes_on_after_a_restart(uncut: Model, tmp_path: Path) -> None:
    text = speak(uncut, tmp_path / "cache")
    with tier(tmp_path / "cache") as disk, running(uncut, disk=disk) as bench:
        calls = [ask(bench, LONGER, tenant=tenant, salt=salt) for tenant, salt in (("blue", ""), ("red", "x"))]
        assert [bench.answer(call) for call in calls] == [text, text]
        assert [cached(bench, call.key) for call in calls] == [0, 0]
        assert bench.engine.counters.num_fetched == 0
        mine = ask(bench, LONGER)
        assert bench.answer(mine) == text
        assert cached(bench, mine.key) == len(PROMPT)
        assert bench.engine.counters.num_fetched == len(PROMPT)
        assert bench.engine.counters.sources.disk == len(PROMPT)


@pytest.mark.parametrize("damage", ["flipped", "cut", "swapped"])
def test_a_damaged_file_is_dropped(uncut: Model, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    text = speak(uncut, tmp_path / "cache")
    if damage == "swapped":
        speak(uncut, tmp_path / "cache", tenant="blue")
    found = sorted(file for file in (tmp_path / "cache").rglob("*") if file.is_file() and file.name != LEFT)
    contents = [file.read_bytes() for file in found]
    for file, content in zip(found, contents, strict=True):
        half = len(content) // 2
        if damage == "flipped":
            file.write_bytes(content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :])
        elif damage == "cut":
            file.write_bytes(content[:half])
        else:
            file.write_bytes(contents[found.index(file) - 1])
    caplog.set_level(logging.WARNING)
    with tier(tmp_path / "cache") as disk, running(uncut, disk=disk) as bench:
        call = ask(bench, LONGER)
        assert bench.answer(call) == text
        assert cached(bench, call.key) == 0
        assert disk.stats.num_refused == 1
    assert caplog.text.count("; removed") == 1


def test_erased_with_the_team(uncut: Model, tmp_path: Path) -> None:
    text = speak(uncut, tmp_path / "cache")
    speak(uncut, tmp_path / "cache", tenant="blue")
    with tier(tmp_path / "cache") as disk:
        assert disk._folder.erase(CacheKeys("a secret").tenant_folder("red")) > 0
    with tier(tmp_path / "cache") as disk, running(uncut, disk=disk) as bench:
        red, blue = ask(bench, LONGER), ask(bench, LONGER, tenant="blue")
        assert [bench.answer(call) for call in (red, blue)] == [text, text]
        assert [cached(bench, call.key) for call in (red, blue)] == [0, len(PROMPT)]


def test_the_longest_state_that_fits_is_taken(uncut: Model, tmp_path: Path) -> None:
    for num_tokens in (63, 64, 100, 128, 129):
        text = speak(uncut, tmp_path / "cache", WORDS[:num_tokens])
    with tier(tmp_path / "cache") as disk, running(uncut, disk=disk) as bench:
        assert bench.answer(call := ask(bench, LONGER)) == text
        assert cached(bench, call.key) == 129
    for limit, expected in ((129, 128), (128, 100), (64, 63), (63, 0), (30, 0)):
        with tier(tmp_path / "cache") as disk, running(uncut, disk=disk) as bench:
            call = ask(bench, WORDS[:limit])
            bench.answer(call)
            assert cached(bench, call.key) == expected, limit


def test_what_prompts_have_in_common_is_found_after_a_restart(uncut: Model, tmp_path: Path) -> None:
    """The first goes its way; the second stops where it parts from it; who comes later finds that place."""
    prompts = [[*WORDS[:100], *WORDS[own : own + 9]] for own in (200, 220, 240)]
    with tier(tmp_path / "cache") as disk, running(uncut, disk=disk) as bench:
        for prompt in prompts[:2]:
            bench.answer(ask(bench, prompt))
        text = bench.answer(changed(ask(bench, prompts[2]), cache_prompt=False))
    for tenant, expected in (("blue", 0), ("red", 100)):
        with tier(tmp_path / "cache") as disk, running(uncut, disk=disk) as bench:
            call = ask(bench, prompts[2], tenant=tenant)
            assert bench.answer(call) == text
            assert cached(bench, call.key) == expected


def test_what_leaves_ram_comes_back_from_disk(uncut: Model, tmp_path: Path) -> None:
    prompts = [[WORDS[number], *WORDS[2 * number : 2 * number + 120]] for number in range(8)]
    with running(uncut, slots=1, n_ctx=256, kv_tokens=256) as bench:
        bench.answer(ask(bench, prompts[0], 1))
        num_bytes = max(len(block.state) for block in copy_of(bench).conversation.blocks)
    with (
        tier(tmp_path / "cache") as disk,
        running(uncut, slots=1, n_ctx=256, kv_tokens=256, ram_bytes=int(num_bytes * 3.5), disk=disk) as bench,
    ):
        for prompt in prompts:
            bench.answer(ask(bench, prompt, 1))
        texts = [bench.answer(changed(ask(bench, [*prompt, 5, 6]), cache_prompt=False)) for prompt in prompts]
        assert disk.flush(10)
        calls = [ask(bench, [*prompt, 5, 6]) for prompt in prompts]
        assert [bench.answer(call) for call in calls] == texts
        assert cached(bench, calls[0].key) == len(prompts[0])
        assert bench.engine.counters.num_fetched > 0


def test_a_shareable_prompts_state_is_everybodys(uncut: Model, tmp_path: Path) -> None:
    """Only where all of it is everybody's; what goes on from it is the team's."""
    with tier(tmp_path / "cache") as disk, running(uncut, disk=disk) as bench:
        bench.answer(changed(ask(bench, PROMPT, 1), num_public=len(PROMPT)))
    with tier(tmp_path / "cache") as disk, running(uncut, disk=disk) as bench:
        text = bench.answer(changed(ask(bench, LONGER), cache_prompt=False))
        other = changed(ask(bench, LONGER, tenant="blue"), num_public=len(PROMPT))
        assert bench.answer(other) == text
        assert cached(bench, other.key) == len(PROMPT)
    with tier(tmp_path / "cache") as disk, running(uncut, disk=disk) as bench:
        third = changed(ask(bench, WORDS[:180], tenant="green"), num_public=len(PROMPT))
        bench.answer(third)
        assert cached(bench, third.key) == len(PROMPT)


def test_a_slot_is_saved_from_disk(uncut: Model, tmp_path: Path) -> None:
    with running(uncut, slots=1, n_ctx=256, kv_tokens=256) as bench:
        bench.answer(ask(bench, PROMPT, 1))
        room = int(len(copy_of(bench).conversation.blocks[0].state) * 2.5)
    with (
        tier(tmp_path / "cache") as disk,
        running(uncut, slots=2, n_ctx=256, kv_tokens=256, ram_bytes=room, disk=disk) as bench,
    ):
        beside = ask(bench, PROMPT, 1)

        def submit_beside(step: int, events: list[CallEvent]) -> None:
            bench.heard.on_step = None
            bench.submit(beside)  # here, on the engine's thread: the other call runs for some 20 ms only

        bench.heard.on_step = submit_beside
        other = bench.submit(ask(bench, WORDS[50:60], 60))
        bench.wait(beside.key)
        early = copy_of(bench, 1)
        bench.wait(other)
        for number in range(4):  # in the slot that was freed last
            bench.answer(ask(bench, WORDS[200 + number : 350 + number], 1))
        assert disk.flush(10)
        copied = copy_of(bench, 1)
        assert copied.conversation.tokens.tolist() == PROMPT
        assert copied.conversation.blocks == early.conversation.blocks
        assert (copied.num_left, disk.stats.num_read) == (0, 1)
        for file in (tmp_path / "cache").rglob("*"):
            if file.is_file():
                file.unlink()
        lost = copy_of(bench, 1)
        assert (len(lost.conversation.tokens), lost.num_left) == (0, len(PROMPT))


def test_kinds_are_as_expected() -> None:
    assert {SMALL_MODELS[name].kind for name in KINDS} == set(MemoryKind) - {MemoryKind.ATTENTION}
