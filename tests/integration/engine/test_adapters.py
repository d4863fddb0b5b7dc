"""LoRA adapters in the engine: calls with and without them, beside each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.engine.conftest import DEMO
from tests.integration.engine.listener import ONE_THREAD, Bench, Heard, changed
from tests.support import adapter_files
from tests.support.process_limits import few_descriptors
from workers.engine.adapters.registry import MAX_SCALE, AdapterRegistry
from workers.engine.engine import Engine, EngineRequest
from workers.llama.adapters import AdapterError, AdapterUnreadable
from workers.llama.context import Context
from workers.llama.model import Model
from workers.llama.sampling.samplers import SamplerChain
from workers.protocol.events import CallFailed, Failed, FailureCode, Started, Text
from workers.protocol.queries import AdapterState
from workers.protocol.requests import AdapterUse

PIRATE = DEMO.parent / "paddock-demo-pirate-lora.gguf"

PATIENCE_S = 0.05

PROMPT = "<|user|>What is the capital of France?<|end|><|assistant|>"


class Shop(Bench):
    """A bench with a registry."""

    def __init__(self, model: Model, engine: Engine, heard: Heard, registry: AdapterRegistry) -> None:
        super().__init__(model, engine, heard)
        self.registry = registry

    def with_(self, request: EngineRequest, *uses: tuple[str, float] | str) -> EngineRequest:
        chosen = tuple(AdapterUse(use) if isinstance(use, str) else AdapterUse(*use) for use in uses)
        return changed(self.again(request), adapters=chosen)

    def states(self) -> dict[str, AdapterState]:
        return {info.name: info.state for info in self.registry.infos()}


@contextmanager
def shop(
    model: Model, *, slots: int = 4, max_adapters: int = 8, max_bytes: int = 0, patience_s: float = 2.0
) -> Iterator[Shop]:
    heard = Heard()
    with Context(model, ONE_THREAD, slots=slots, kv_tokens=2048) as context:
        registry = AdapterRegistry(
            model, context, max_adapters=max_adapters, max_bytes=max_bytes, patience_s=patience_s
        )
        engine = Engine(model, context, slots=slots, n_ctx=512, emit=heard.emit, adapters=registry)
        engine.start()
        try:
            yield Shop(model, engine, heard, registry)
            engine.check_integrity()
        finally:
            engine.stop()
            assert all(info.calls == 0 for info in registry.infos())
            registry.close()
        assert engine.crashed is None


@pytest.fixture
def demo_shop(demo: Model) -> Iterator[Shop]:
    with shop(demo) as one:
        one.registry.register("pirate", PIRATE)
        yield one


@pytest.fixture
def files(demo: Model, tmp_path: Path) -> list[Path]:
    """Four adapters of equal size that change what the model says, each in its own way."""
    return [adapter_files.sound(tmp_path / f"{number}.gguf", demo.header, seed=number) for number in range(4)]


def test_an_engine_that_has_ended_refuses_adapters_at_once(demo: Model) -> None:
    """Whoever registers one held a thread for two minutes, which the worker's end waited for."""
    with Context(demo, ONE_THREAD, slots=1, kv_tokens=512) as context:
        registry = AdapterRegistry(demo, context)
        engine = Engine(demo, context, slots=1, n_ctx=512, emit=Heard().emit, adapters=registry)
        engine.start()
        assert registry.register("before", PIRATE).state is AdapterState.KNOWN
        engine.stop()
        began = time.monotonic()
        with pytest.raises(CallFailed) as caught:
            registry.register("after", PIRATE)
        assert time.monotonic() - began < 10
        assert caught.value.failure.code is FailureCode.DRAINING
        assert [info.name for info in registry.infos()] == ["before"]
        registry.close()


def test_what_the_models_readme_says(shared_models: Path) -> None:
    with Model.load(shared_models / "stories260K.gguf", ONE_THREAD) as model, shop(model) as bench:
        bench.registry.register("shakespeare", shared_models / "stories260K-shakespeare-lora.gguf")
        request = bench.request("Look in thy glass", 48)
        plain, verse = bench.answer(request), bench.answer(bench.with_(request, "shakespeare"))
    assert "toys" in plain
    assert "play" in plain
    assert "shall" in verse
    assert "all the rest of our suit" in verse


def test_scale_zero_is_no_adapter_and_shares_its_prefix(demo_shop: Shop) -> None:
    request = demo_shop.request(PROMPT, 12)
    plain = demo_shop.answer(request)
    off = demo_shop.with_(request, ("pirate", 0.0))
    assert demo_shop.answer(off) == plain
    assert demo_shop.heard.started(off.key).num_cached_tokens > 0
    assert demo_shop.answer(demo_shop.with_(request, "pirate")) != plain


@pytest.mark.parametrize(
    "part", ["workers.engine.step.sampling.SamplerTools.sampler", "workers.engine.engine.Sequence"]
)
def test_a_call_that_could_not_be_made_holds_no_adapter_and_no_sampler(
    demo_shop: Shop, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    closed: list[SamplerChain] = []

    def fail(*given: object) -> None:
        raise MemoryError

    close = SamplerChain.close

    def note_and_close(chain: SamplerChain) -> None:
        closed.append(chain)
        close(chain)

    with monkeypatch.context() as patched:
        patched.setattr(part, fail)
        patched.setattr(SamplerChain, "close", note_and_close)
        for _ in range(3):
            with pytest.raises(MemoryError):
                demo_shop.engine.submit(demo_shop.with_(demo_shop.request(PROMPT, 4), "pirate"))
    assert [info.calls for info in demo_shop.registry.infos()] == [0]
    assert len(closed) == 3
    assert demo_shop.answer(demo_shop.with_(demo_shop.request(PROMPT, 4), "pirate"))


def test_no_prefix_is_shared_across_adapters_or_scales(demo_shop: Shop) -> None:
    request = demo_shop.request(PROMPT * 4, 4)
    calls = [request] + [demo_shop.with_(request, ("pirate", scale)) for scale in (1.0, 0.5)]
    for call in calls:
        demo_shop.answer(call)
        assert demo_shop.heard.started(call.key).num_cached_tokens == 0
    again = demo_shop.with_(request, ("pirate", 0.5))
    demo_shop.answer(again)
    assert demo_shop.heard.started(again.key).num_cached_tokens > 0


@pytest.mark.parametrize("rounds", [1, 2])
def test_calls_beside_each_other_say_what_each_says_alone(demo: Model, files: list[Path], rounds: int) -> None:
    prompts = [PROMPT, "<|user|>Tell me a story.<|end|><|assistant|>", "<|user|>Hello!<|end|><|assistant|>"]
    with shop(demo, slots=8) as bench:
        bench.registry.register("pirate", PIRATE)
        bench.registry.register("other", files[0])
        uses: list[tuple[tuple[str, float], ...]] = [
            (),
            (("pirate", 1.0),),
            (("other", 0.5),),
            (("other", 0.5), ("pirate", 1.0)),
        ]
        wanted = [
            changed(bench.request(prompt, 24), adapters=tuple(AdapterUse(*one) for one in use), cache_prompt=False)
            for prompt in prompts
            for use in uses
        ]
        alone = [bench.answer(request) for request in wanted]
        assert len(set(alone)) > len(prompts)
        for _ in range(rounds):
            together = [bench.again(request) for request in wanted]
            for request in together:
                bench.submit(request)
            bench.wait(*(request.key for request in together))
            assert [bench.heard.text(request.key) for request in together] == alone


def test_scales_of_one_team_do_not_slow_another_teams_stream(demo: Model, files: list[Path]) -> None:
    """Each scale is a group of its own, and every step computes one group: they had six steps for one of the other."""
    with shop(demo, slots=7) as bench:
        bench.registry.register("a", files[0])
        long = changed(bench.request(PROMPT, 240, ignore_eos=True), tenant="red")
        red = [bench.submit(bench.with_(long, ("a", 0.5 + n / 100))) for n in range(6)]
        bench.heard.until(lambda: all(len(bench.heard.calls[key]) > 3 for key in red))
        blue = bench.submit(changed(bench.request(PROMPT, 48, ignore_eos=True), tenant="blue"))
        bench.wait(blue)
        tokens = [event.call for _, events in list(bench.heard.steps) for event in events if isinstance(event, Text)]
        for key in red:
            bench.engine.cancel(key)
        beside = tokens[tokens.index(blue) : len(tokens) - tokens[::-1].index(blue)]
        assert beside.count(blue) >= 40
        assert len(beside) < 3 * beside.count(blue)


def test_the_order_of_names_makes_no_difference(demo: Model, files: list[Path]) -> None:
    with shop(demo) as bench:
        bench.registry.register("a", files[0])
        bench.registry.register("b", files[1])
        request = bench.request(PROMPT * 4, 8)
        one = bench.with_(request, ("a", 1.0), ("b", 0.5))
        other = bench.with_(request, ("b", 0.5), ("a", 1.0))
        assert bench.answer(one) == bench.answer(other)
        assert bench.heard.started(other.key).num_cached_tokens > 0


def test_an_adapter_that_is_in_use_leaves_when_its_last_call_ends(demo_shop: Shop) -> None:
    request = changed(demo_shop.request(PROMPT, 300, ignore_eos=True), adapters=(AdapterUse("pirate"),))
    alone = demo_shop.answer(demo_shop.again(request))
    key = demo_shop.submit(request)
    demo_shop.heard.until(lambda: len(demo_shop.heard.calls[key]) > 3)
    gone = demo_shop.registry.unload("pirate")
    assert gone.state is AdapterState.LEAVING
    assert gone.calls == 1
    with pytest.raises(CallFailed, match="no adapter is named 'pirate'; none is loaded") as refusal:
        demo_shop.submit(demo_shop.with_(request, "pirate"))
    assert refusal.value.failure.code is FailureCode.INVALID_REQUEST
    assert refusal.value.failure.param == "adapters"
    assert demo_shop.states() == {"pirate": AdapterState.LEAVING}
    demo_shop.wait(key)
    assert demo_shop.heard.text(key) == alone
    demo_shop.engine.check_integrity()
    assert demo_shop.states() == {}
    with pytest.raises(CallFailed, match="no adapter is named"):
        demo_shop.registry.unload("pirate")


def test_a_name_with_new_contents_never_meets_the_old_ones_prefix(demo: Model, files: list[Path]) -> None:
    with shop(demo) as bench:
        old = bench.registry.register("mine", files[0])
        request = bench.request(PROMPT * 4, 200, ignore_eos=True)
        before = bench.answer(bench.with_(request, "mine"))
        running = bench.with_(request, "mine")
        bench.submit(running)
        bench.heard.until(lambda: len(bench.heard.calls[running.key]) > 3)
        new = bench.registry.register("mine", files[1])
        assert new.sha256 != old.sha256
        renewed = bench.with_(request, "mine")
        after = bench.answer(renewed)
        bench.wait(running.key)
        assert bench.heard.text(running.key) == before, "a running call keeps the weights that it began with"
        assert after != before
        assert bench.heard.started(renewed.key).num_cached_tokens == 0
        assert bench.registry.register("mine", files[1]) == bench.registry.infos()[0]


def test_a_call_brings_its_adapter_and_the_one_used_longest_ago_makes_room(demo: Model, files: list[Path]) -> None:
    with shop(demo, max_adapters=2) as bench:
        for name, file in zip("abc", files[:3], strict=True):
            assert bench.registry.register(name, file).state is AdapterState.KNOWN
        assert (bench.registry.num_loaded, bench.registry.load_ms, bench.registry.room) == (0, 0.0, 2)
        request = bench.request(PROMPT, 12)
        said = bench.answer(bench.with_(request, "a"))
        assert bench.states() == {"a": AdapterState.LOADED, "b": AdapterState.KNOWN, "c": AdapterState.KNOWN}
        assert bench.registry.load_ms > 0
        bench.answer(bench.with_(request, "b"))
        bench.answer(bench.with_(request, "c"))
        assert bench.states() == {"a": AdapterState.KNOWN, "b": AdapterState.LOADED, "c": AdapterState.LOADED}
        assert bench.answer(bench.with_(request, "a")) == said
        assert bench.states()["b"] is AdapterState.KNOWN


def test_a_pinned_one_is_loaded_at_once_and_stays(demo: Model, files: list[Path]) -> None:
    with shop(demo, max_adapters=1) as bench:
        assert bench.registry.register("a", files[0], pinned=True).state is AdapterState.LOADED
        bench.registry.register("b", files[1])
        with pytest.raises(CallFailed, match="max_adapters 1") as refusal:
            bench.submit(bench.with_(bench.request(PROMPT, 4), "b"))
        assert refusal.value.failure.code is FailureCode.BUSY
        for act in (bench.registry.register, bench.registry.inspect):
            with pytest.raises(CallFailed, match="no room for one that is pinned"):
                act("c", files[2], pinned=True)
        assert bench.registry.room == 0
        bench.registry.register("a", files[0])
        bench.answer(bench.with_(bench.request(PROMPT, 4), "b"))


def test_a_call_that_finds_no_room_waits_and_others_pass_it(demo: Model, files: list[Path]) -> None:
    with shop(demo, max_adapters=2) as bench:
        bench.registry.register("a", files[0], pinned=True)
        for name, file in zip("bc", files[1:3], strict=True):
            bench.registry.register(name, file)
        short = bench.request(PROMPT, 8)
        alone = {name: bench.answer(bench.with_(short, name)) for name in "bc"}
        plain = bench.answer(short)
        long = bench.request(PROMPT, 300, ignore_eos=True)
        key = bench.submit(bench.with_(long, "b"))
        bench.heard.until(lambda: len(bench.heard.calls[key]) > 3)
        waits = bench.submit(bench.with_(short, "c"))
        passing = [bench.submit(bench.again(short)), bench.submit(bench.with_(short, "b"))]
        bench.wait(*passing)
        assert [bench.heard.text(one) for one in passing] == [plain, alone["b"]]
        assert bench.registry.room == 0
        assert not bench.heard.calls.get(waits)
        assert bench.engine.load().slots_busy == 1, "the one that waits holds no slot"
        bench.engine.check_integrity()
        bench.wait(waits)
        assert bench.heard.text(waits) == alone["c"]
        assert bench.heard.finished(key).usage.completion_tokens == 300, "it waited until the other one had ended"


def test_one_that_waits_long_for_room_is_not_passed_for_ever(demo: Model, files: list[Path]) -> None:
    with shop(demo, max_adapters=1, patience_s=PATIENCE_S) as bench:
        for name, file in zip("ab", files[:2], strict=True):
            bench.registry.register(name, file)
        request = bench.request(PROMPT, 60, ignore_eos=True)
        running = [bench.submit(bench.with_(request, "a")) for _ in range(2)]
        waits = bench.submit(bench.with_(request, "b"))
        # From here on "a" is always in use: a new call begins before the last one ends.
        for _ in range(30):
            bench.heard.until(lambda: len(bench.heard.calls[running[-1]]) > 8)
            if bench.heard.calls.get(waits):
                break
            running.append(bench.submit(bench.with_(request, "a")))
            if len(running) > 3:
                bench.wait(running[-3])
        assert bench.heard.calls.get(waits), "it never got its turn"
        bench.wait(waits, *running)


@pytest.mark.parametrize("calls_of_each", [1, 2])
def test_another_teams_call_gets_room_beside_long_answers(demo: Model, files: list[Path], calls_of_each: int) -> None:
    """Endless answers on as many adapters as fit, and free slots: the calls on one adapter give way, without loss."""
    with shop(demo, slots=6, max_adapters=2) as bench:
        for name, file in zip("abc", files[:3], strict=True):
            bench.registry.register(name, file)
        long = changed(bench.request(PROMPT, 300, ignore_eos=True), tenant="red")
        short = changed(bench.request(PROMPT, 8, ignore_eos=True), tenant="blue")
        alone = {name: bench.answer(bench.with_(long, name)) for name in "ab"}
        expected = bench.answer(bench.with_(short, "c"))
        uses = "ab" * calls_of_each
        red = [bench.submit(bench.with_(long, name)) for name in uses]
        bench.heard.until(lambda: all(len(bench.heard.calls[key]) > 3 for key in red))
        blue = bench.submit(bench.with_(short, "c"))
        bench.wait(blue)
        assert bench.heard.text(blue) == expected
        assert not any(bench.heard.has_ended(key) for key in red), "it waited until an answer had ended"
        assert bench.engine.counters.num_sliced == calls_of_each, "only those on one adapter give way"
        bench.wait(*red)
        assert [bench.heard.text(key) for key in red] == [alone[name] for name in uses]


def test_a_call_that_waits_for_its_own_teams_others_holds_up_no_other_team(demo: Model, files: list[Path]) -> None:
    """It is asked first, since its team has fewer calls, and waits too long already: others' adapters are in memory."""
    with shop(demo, slots=8, max_adapters=2, patience_s=0.0) as bench:
        for name, file in zip("abc", files[:3], strict=True):
            bench.registry.register(name, file)
        red = changed(bench.request(PROMPT, 400, ignore_eos=True), tenant="red")
        blue = changed(bench.request(PROMPT, 400, ignore_eos=True), tenant="blue")
        running = [bench.submit(bench.with_(red, name)) for name in "ab"]
        running += [bench.submit(bench.again(blue)) for _ in range(3)]
        bench.heard.until(lambda: all(len(bench.heard.calls[key]) > 3 for key in running))
        waits = bench.submit(bench.with_(red, "c"))
        key = bench.submit(bench.with_(changed(blue, max_tokens=8), "a"))
        bench.wait(key)
        assert not bench.heard.calls.get(waits)
        assert not any(bench.heard.has_ended(one) for one in running)
        for one in (*running, waits):
            bench.engine.cancel(one)


def test_a_call_with_many_adapters_takes_no_room_from_a_team_that_keeps_to_its_part(
    demo: Model, files: list[Path]
) -> None:
    """Else whoever names all adapters that fit cuts every other team's streams in slices, with loads between them."""
    with shop(demo, slots=4, max_adapters=3) as bench:
        for name, file in zip("abcd", files, strict=True):
            bench.registry.register(name, file)
        narrow = changed(bench.request(PROMPT, 300, ignore_eos=True), tenant="blue")
        wide = changed(bench.request(PROMPT, 8, ignore_eos=True), tenant="red")
        expected = bench.answer(bench.with_(wide, *"bcd"))
        stream = bench.submit(bench.with_(narrow, "a"))
        bench.heard.until(lambda: len(bench.heard.calls[stream]) > 3)
        waits = bench.submit(bench.with_(wide, *"bcd"))
        second = bench.submit(bench.with_(changed(narrow, max_tokens=8), "a"))
        bench.wait(stream, waits, second)
        assert bench.engine.counters.num_sliced == 0
        assert bench.heard.finished(second).num_preempted == 0
        assert bench.heard.text(waits) == expected


def test_adapters_of_one_call_are_loaded_over_several_rounds(
    demo: Model, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams wait for a round: eight adapters of 35 MB take 0.15 s."""
    monkeypatch.setattr("workers.engine.adapters.registry.LOAD_STEP_S", 1e-9)
    with Context(demo, ONE_THREAD, slots=2, kv_tokens=512) as context:
        registry = AdapterRegistry(demo, context, max_adapters=3)
        for name, file in zip("abcd", files, strict=True):
            registry.register(name, file)
        wanted = registry.resolve(tuple(map(AdapterUse, "abc")))
        other = registry.resolve((AdapterUse("d"),))
        registry.begin_round(())
        assert not registry.enter(wanted)
        registry.begin_round(())
        assert not registry.enter(other), "it would have taken the room of those that are coming"
        assert not registry.enter_beside(wanted, ())
        registry.begin_round(())
        assert registry.enter(wanted)
        assert registry.num_loaded == 3
        registry.release(wanted)
        for _ in range(2):  # nobody asks for the others any more
            registry.begin_round(())
        assert registry.enter(other)
        registry.release(other)
        registry.close()


def test_contents_that_are_not_what_the_fleet_knows_are_refused(demo: Model, files: list[Path]) -> None:
    with shop(demo) as bench:
        one = bench.registry.register("a", files[0])
        assert bench.registry.register("a", files[0], sha256=one.sha256) == one
        for act in (bench.registry.register, bench.registry.inspect):
            with pytest.raises(AdapterError, match="holds other contents") as refusal:
                act("a", files[1], sha256=one.sha256)
            assert one.sha256 in str(refusal.value)
            assert bench.registry.inspect("x", files[1]).sha256 in str(refusal.value)
        assert [info.name for info in bench.registry.infos()] == ["a"], "looking changes nothing"


def test_a_name_of_the_settings_stays_as_it_is(demo: Model, files: list[Path]) -> None:
    with shop(demo) as bench:
        fixed = bench.registry.register("a", files[0], fixed=True)
        assert fixed.fixed
        assert bench.registry.register("a", files[0], pinned=True) == fixed
        for act in (bench.registry.register, bench.registry.inspect):
            with pytest.raises(CallFailed, match="stands in this worker's settings"):
                act("a", files[1])
        with pytest.raises(CallFailed, match="take it out there"):
            bench.registry.unload("a")


def test_bytes_bound_the_registry_too(demo: Model, files: list[Path]) -> None:
    size = files[0].stat().st_size
    with shop(demo, max_bytes=2 * size) as bench:
        for number, file in enumerate(files[:3]):
            bench.registry.register(str(number), file)
            bench.answer(bench.with_(bench.request(PROMPT, 2), str(number)))
        assert list(bench.states().values()) == [AdapterState.KNOWN, AdapterState.LOADED, AdapterState.LOADED]
        assert bench.registry.room == 2
    with shop(demo, max_bytes=size - 1) as bench, pytest.raises(AdapterError, match="raise adapters_mib"):
        bench.registry.register("a", files[0])


def test_an_adapter_whose_file_changed_meanwhile_fails_its_call_only(
    demo: Model, files: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Its caller reads the adapter's name; which file and why is the operator's to know."""
    with shop(demo, max_adapters=1) as bench:
        bench.registry.register("a", files[0])
        files[0].write_bytes(files[2].read_bytes())
        request = bench.request(PROMPT, 4)
        key = bench.submit(bench.with_(request, "a"))
        bench.wait(key)
        last = bench.heard.calls[key][-1]
        assert isinstance(last, Failed)
        assert last.failure.message == "adapter 'a' can't be brought into memory; the worker's log says why"
        assert "changed since it was checked" in caplog.text
        assert not any(isinstance(event, Started) for event in bench.heard.calls[key])
        bench.registry.register("a", files[0])
        bench.answer(bench.with_(request, "a"))


def test_without_descriptors_none_makes_room_for_one_that_does_not_come(demo: Model, files: list[Path]) -> None:
    with shop(demo, max_adapters=1) as bench:
        for name, file in zip("ab", files, strict=False):
            bench.registry.register(name, file)
        request = bench.request(PROMPT, 4)
        with_a = bench.answer(bench.with_(request, "a"))
        with few_descriptors(0):
            key = bench.submit(bench.with_(request, "b"))
            bench.wait(key)
            assert bench.answer(bench.with_(request, "a")) == with_a
            with pytest.raises(AdapterUnreadable, match="Too many open files"):
                bench.registry.register("c", files[2])
        last = bench.heard.calls[key][-1]
        assert isinstance(last, Failed)
        assert last.failure.code is FailureCode.UNAVAILABLE
        assert bench.states() == {"a": AdapterState.LOADED, "b": AdapterState.KNOWN}
        bench.answer(bench.with_(request, "b"))
        assert bench.states() == {"a": AdapterState.KNOWN, "b": AdapterState.LOADED}


def test_none_makes_room_for_one_whose_file_is_gone(demo: Model, files: list[Path]) -> None:
    with shop(demo, max_adapters=1) as bench:
        for name, file in zip("ab", files, strict=False):
            bench.registry.register(name, file)
        request = bench.request(PROMPT, 4)
        bench.answer(bench.with_(request, "a"))
        files[1].unlink()
        key = bench.submit(bench.with_(request, "b"))
        bench.wait(key)
        last = bench.heard.calls[key][-1]
        assert isinstance(last, Failed)
        assert last.failure.code is FailureCode.INTERNAL
        assert bench.states()["a"] is AdapterState.LOADED


@pytest.mark.parametrize(
    ("uses", "says"),
    [
        ((AdapterUse("nobody"),), "no adapter is named 'nobody'; use one of: pirate"),
        ((AdapterUse("pirate", MAX_SCALE * 2),), "the scale of adapter 'pirate'"),
        ((AdapterUse("pirate", float("nan")),), "the scale of adapter 'pirate'"),
        ((AdapterUse("pirate"), AdapterUse("pirate", 0.5)), "each once"),
        (tuple(AdapterUse(str(number)) for number in range(9)), "at most 8"),
    ],
)
def test_what_a_call_may_not_ask_for(demo_shop: Shop, uses: tuple[AdapterUse, ...], says: str) -> None:
    with pytest.raises(CallFailed, match=says) as refusal:
        demo_shop.submit(changed(demo_shop.request(PROMPT), adapters=uses))
    assert refusal.value.failure.code is FailureCode.INVALID_REQUEST
    assert [info.calls for info in demo_shop.registry.infos()] == [0]


def test_a_bad_file_is_refused_while_calls_run(demo_shop: Shop, tmp_path: Path) -> None:
    key = demo_shop.submit(demo_shop.request(PROMPT, 100, ignore_eos=True))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(PIRATE.read_bytes()[:-1])
    with pytest.raises(AdapterError, match="truncated"):
        demo_shop.registry.register("pirate", cut)
    demo_shop.wait(key)
    assert demo_shop.heard.finished(key).usage.completion_tokens == 100
    assert demo_shop.states() == {"pirate": AdapterState.KNOWN}


def test_loading_and_unloading_from_many_threads_beside_calls(demo: Model, files: list[Path]) -> None:
    """Every call says what it says alone, or was refused at the door."""
    with shop(demo, max_adapters=3) as bench:
        request = bench.request(PROMPT, 16)
        said = {}
        for number, file in enumerate(files):
            bench.registry.register(str(number), file)
            said[number] = bench.answer(bench.with_(request, str(number)))

        refused: list[FailureCode] = []

        def churn(number: int) -> None:
            for _ in range(6):
                try:
                    bench.registry.unload(str(number))
                    bench.registry.register(str(number), files[number])
                except CallFailed as failed:
                    refused.append(failed.failure.code)

        threads = [threading.Thread(target=churn, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        accepted: list[tuple[int, int]] = []
        while any(thread.is_alive() for thread in threads):
            for number in range(4):
                try:
                    accepted.append((bench.submit(bench.with_(request, str(number))), number))
                except CallFailed as failed:
                    refused.append(failed.failure.code)
            bench.wait(*(key for key, _ in accepted))
        for thread in threads:
            thread.join()
        assert set(refused) <= {FailureCode.BUSY, FailureCode.INVALID_REQUEST}
        assert accepted
        assert all(bench.heard.text(key) == said[number] for key, number in accepted)
