"""What a real engine counts: every gap and every prompt token once."""

from __future__ import annotations

from pathlib import Path

from tests.integration.engine.listener import Bench, running
from tests.integration.engine.test_adapters import PIRATE, shop
from tests.integration.engine.test_disk_tier import tier, whole_blocks
from tests.integration.engine.test_prefix_cache import held
from workers.engine.cache.prompt import BLOCK_TOKENS
from workers.engine.counters import PromptSources
from workers.llama.model import Model


def num_gaps(bench: Bench) -> int:
    return sum(bench.engine.counters.gap_s.counts)


def test_every_token_but_a_calls_first_is_one_gap(demo: Model) -> None:
    with running(demo, slots=4, n_ctx=256, kv_tokens=1024) as bench:
        keys = [bench.submit(bench.request(f"{number} horses", 20, ignore_eos=True)) for number in range(6)]
        bench.wait(*keys)
        bench.answer(bench.request("Hello", 1))
        bench.answer(bench.request("Hello", 0))
        counters = bench.engine.counters
        assert num_gaps(bench) == 6 * 19
        assert sum(counters.decode_s.counts) == counters.num_decodes
        assert counters.num_decodes < counters.num_busy <= 4 * counters.num_decodes
        # Gaps of calls that ran at once overlap; each call's own lie within what the engine took to decode, and more.
        assert counters.gap_s.total > counters.decode_s.total / 4


def test_a_call_that_was_thrown_out_has_one_long_gap(demo: Model) -> None:
    with running(demo, slots=4, n_ctx=200, kv_tokens=256) as bench:
        gate = held(bench)
        prompts = [[100 + number, *range(200 + 30 * number, 230 + 30 * number)] for number in range(4)]
        keys = [bench.submit(bench.request(prompt, 100, ignore_eos=True)) for prompt in prompts]
        gate.set()
        bench.wait(*keys)
        assert bench.engine.counters.num_preempted > 0
        assert num_gaps(bench) == 4 * 99
        assert bench.engine.counters.sources.computed >= sum(map(len, prompts))
        assert bench.engine.counters.num_queried == sum(map(len, prompts)) + len(bench.tokens("Zzz"))


def test_prompt_tokens_by_source(demo: Model) -> None:
    with running(demo, slots=1, n_ctx=256, kv_tokens=256) as bench:
        prompts = [[10 + number, *range(100 + number, 220 + number)] for number in range(3)]
        bench.answer(bench.request(prompts[0], 1))
        bench.answer(bench.request(prompts[0], 1))
        assert bench.engine.counters.sources.kv == 120
        assert bench.engine.counters.sources.ram == 0
        for prompt in (*prompts[1:], prompts[0]):
            bench.answer(bench.request(prompt, 1))
        sources = bench.engine.counters.sources
        assert (sources.kv, sources.ram, sources.disk) == (120, 120, 0)
        assert sources.computed == 3 * 121 + 1 + 1
        assert bench.engine.counters.num_queried == 5 * 121
        assert bench.engine.counters.ram_blocks > 0


def test_what_came_from_disk_is_not_counted_as_ram(demo: Model, tmp_path: Path) -> None:
    prompt = list(range(100, 300))
    with tier(tmp_path / "cache") as disk:
        with running(demo, disk=disk) as bench:
            bench.answer(bench.request(prompt, 1))
            assert bench.engine.counters.disk == disk.stats
        assert disk.flush(5)
        with running(demo, disk=disk) as bench:
            bench.answer(bench.request(prompt, 1))
            counters = bench.engine.counters
    num_found = whole_blocks(len(prompt) - 1)
    assert counters.sources == PromptSources(len(prompt) - num_found, 0, 0, num_found)
    assert counters.disk is not None
    assert counters.disk.num_read == num_found // BLOCK_TOKENS > 0


def test_adapters_that_calls_use(demo: Model) -> None:
    with shop(demo, slots=1) as bench:
        bench.registry.register("pirate", PIRATE)
        gate = held(bench)
        keys = [
            bench.submit(bench.with_(bench.request("Hello", None, ignore_eos=True), "pirate")),
            bench.submit(bench.with_(bench.request("Ahoy", 1), ("pirate", 0.5))),
            bench.submit(bench.request("Plain", 1)),
        ]
        gate.set()
        bench.heard.until(lambda: bench.engine.counters.adapters_running == ("pirate",))
        assert bench.engine.counters.adapters_waiting == ("pirate",)
        bench.engine.cancel(keys[0])
        bench.wait(*keys[1:])
        bench.engine.check_integrity()  # the engine has been idle once before it does this
        counters = bench.engine.counters
        assert (counters.adapters_loaded, counters.max_adapters) == (1, 8)
        assert (counters.adapters_running, counters.adapters_waiting) == ((), ())
        # Nobody's, one, the other scale, nobody's again.
        assert counters.num_switches == 3
