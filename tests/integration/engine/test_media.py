"""Pictures and sounds in the engine: read, shared, kept, given way to, and never another team's."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.integration.engine.listener import AS_IT_PAYS, UNDRAFTED, Bench, changed, running
from tests.integration.engine.test_disk_tier import tier
from tests.support.lone_context import lone_context
from tests.support.media_reader import ONE_THREAD, MediaReader, settings
from tests.support.projectors import PROJECTORS, Pair, picture, sound, write_pair
from workers.engine.cache.cached_sequence import CachedSequence
from workers.engine.cache.prompt import Path as Trail
from workers.engine.cache.prompt import Prompt, Scope
from workers.engine.encoder import MediaEncoder
from workers.engine.engine import EngineRequest
from workers.engine.step.scheduler import SPARE_CELLS
from workers.engine.step.sequence import Sequence
from workers.engine.step.step_plan import Chunk as Rows
from workers.engine.step.step_plan import Plan
from workers.llama.media.parts import Chunk, MediaChunk, Part, Picture, Sound, TextChunk
from workers.llama.media.projector import Embeddings, Projector
from workers.llama.model import Model
from workers.llama.native import EncodeFailed
from workers.models.spec import LlamaSettings
from workers.protocol.events import CallFailed, Failed, Failure, FailureCode, Logprobs, Started

BEFORE = "system\nYou see and hear. " + "Once upon a time there was a cat. " * 8 + "Say what"
AFTER = "was there, and what was not?"
NUM_ANSWER = 12


GAP = 0.25
"""How far log probabilities move if nothing changes but the layout of batches and cells."""


@dataclass
class Said:
    text: str
    cached: int
    tokens: list[Logprobs]

    def is_like(self, other: Said) -> bool:
        """Whether it is the same answer, or one that goes another way where two tokens were as likely."""
        for mine, theirs in zip(self.tokens, other.tokens, strict=True):
            chances = {one.token: one.logprob for one in mine.top}
            if abs(chances.get(theirs.chosen.token, -100.0) - theirs.chosen.logprob) > GAP:
                return False
            if mine.chosen.token != theirs.chosen.token:
                return abs(mine.chosen.logprob - chances[theirs.chosen.token]) < GAP
        return True


@dataclass
class SeeingBench:
    name: str
    bench: Bench
    projector: Projector
    encoder: MediaEncoder
    model: Model

    def chunks(self, *seeds: int, after: str = AFTER, before: str = BEFORE) -> list[Chunk]:
        small = PROJECTORS[self.name]
        media = [Picture(picture(seed)) if small.sees else Sound(sound(seed)) for seed in seeds]
        parts: list[Part] = [before, *media, after]
        return self.projector.read(parts)

    def request(self, *seeds: int, after: str = AFTER, max_tokens: int = NUM_ANSWER) -> EngineRequest:
        plain = changed(self.bench.request([1], max_tokens, ignore_eos=True), n_probs=5)
        return replace(plain, prompt=prompt_of(self.chunks(*seeds, after=after)))

    def large(self, after: str = AFTER) -> EngineRequest:
        """A prompt with a picture of as many cells as may be."""
        medium = Picture(picture(7, 320, 320)) if PROJECTORS[self.name].sees else Sound(sound(7))
        return replace(self.request(1), prompt=prompt_of(self.projector.read([BEFORE, medium, after])))

    def said(self, request: EngineRequest) -> Said:
        self.bench.answer(request)
        return self.heard(request.key)

    def heard(self, key: int) -> Said:
        tokens = [event for event in self.bench.heard.calls[key] if isinstance(event, Logprobs)]
        return Said(self.bench.heard.text(key), self.bench.heard.finished(key).usage.cached_tokens, tokens)

    def next_turn(self, request: EngineRequest, answer: str) -> EngineRequest:
        more = self.model.tokenize(answer + " And then?", add_special=False, parse_special=True)
        prompt = Prompt([*request.prompt.tokens, *self.answer_tokens(request), *more], request.prompt.spans)
        return replace(self.bench.again(request), prompt=prompt)

    def answer_tokens(self, request: EngineRequest) -> list[int]:
        ids = request.prompt.ids()
        held = [one.path.tokens for one in self.bench.engine._stepper.slots._held.values()]
        (mine,) = (one for one in held if len(one) >= len(ids) and (one[: len(ids)] == ids).all())
        answer: list[int] = mine[len(ids) :].tolist()
        return answer

    def push_out(self) -> None:
        """Have others compute until all idle prefixes have left the cache."""
        for _ in range(3):
            self.bench.answer(self.bench.request("Once upon a time", 40, ignore_eos=True))

    def on_thread(self, work: Callable[[], object]) -> None:
        """Have the engine's thread do something between two steps."""
        done = threading.Event()

        def run() -> None:
            work()
            done.set()

        self.bench.engine.post(run)
        assert done.wait(10)

    def answer(self, request: EngineRequest) -> tuple[str, int]:
        """The text, and how many cells of the prompt were cached."""
        text = self.bench.answer(request)
        return text, self.bench.heard.finished(request.key).usage.cached_tokens


def prompt_of(chunks: list[Chunk]) -> Prompt:
    return Prompt.of(one.tokens.tolist() if isinstance(one, TextChunk) else one for one in chunks)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("projectors")
    return {name: write_pair(folder, name) for name in PROJECTORS}


@contextmanager
def seeing(name: str, pair: Pair, *, llama: LlamaSettings = ONE_THREAD, **how: object) -> Iterator[SeeingBench]:
    with (
        Model.load(pair.model, llama) as model,
        Projector.load(model, settings(pair), n_ubatch=llama.n_ubatch) as projector,
    ):
        encoder = MediaEncoder(projector)
        encoder.start()
        how = {"n_ctx": 2048, "kv_tokens": 8192, "speculation": UNDRAFTED, **how}
        try:
            with running(model, encoder=encoder, llama=llama, **how) as bench:  # type: ignore[arg-type]
                yield SeeingBench(name, bench, projector, encoder, model)
        finally:
            encoder.stop()


@pytest.fixture(params=list(PROJECTORS))
def eyes(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Iterator[SeeingBench]:
    with seeing(request.param, pairs[request.param]) as one:
        yield one


def expected(eyes: SeeingBench, chunks: list[Chunk], num_tokens: int = NUM_ANSWER) -> str:
    """What a context that is driven by hand says to a prompt."""
    vocab = eyes.model.vocab
    with lone_context(eyes.model, kv_tokens=4096, llama=ONE_THREAD) as lone:
        reader = MediaReader(eyes.name, eyes.projector, lone)
        logits = reader.feed(0, chunks)
        position = sum(len(one.tokens) if isinstance(one, TextChunk) else one.num_positions for one in chunks)
        tokens: list[int] = []
        for _ in range(num_tokens):
            logits[list(vocab.suppressed)] = -np.inf
            logits[list(vocab.eog)] = -np.inf
            tokens.append(int(logits.argmax()))
            logits = lone.feed(0, tokens[-1:], position)
            position += 1
    return b"".join(vocab.piece(token) for token in tokens).decode("utf-8", "replace")


def test_an_answer_is_that_of_a_context_driven_by_hand(eyes: SeeingBench) -> None:
    for seeds in (1,), (2, 1):
        assert eyes.answer(eyes.request(*seeds))[0] == expected(eyes, eyes.chunks(*seeds))


def test_usage_tells_the_cells_of_pictures_and_sounds(eyes: SeeingBench) -> None:
    request = eyes.request(1, 2)
    num_media = sum(chunk.num_cells for chunk in eyes.chunks(1, 2) if not isinstance(chunk, TextChunk))
    eyes.said(request)
    (started,) = [event for event in eyes.bench.heard.calls[request.key] if isinstance(event, Started)]
    usage = eyes.bench.heard.finished(request.key).usage
    assert started.num_media_tokens == usage.media_tokens == num_media > 0
    assert usage.prompt_tokens > num_media


def test_a_second_turn_computes_only_what_is_new(eyes: SeeingBench) -> None:
    first = eyes.request(1)
    said = eyes.said(first)
    assert said.cached == 0
    num_encoded = eyes.encoder.num_encoded
    turn = eyes.next_turn(first, said.text)
    second = eyes.said(turn)
    assert second.cached >= len(first.prompt), "the picture is cached, whole, and the answer's tokens are"
    assert eyes.encoder.num_encoded == num_encoded, "nor is it encoded again"
    fresh = eyes.said(replace(eyes.bench.again(turn), tenant="fresh"))
    assert fresh.cached == 0
    assert fresh.is_like(second)
    other = eyes.request(2)
    said = eyes.said(other)
    assert said.cached <= other.prompt.spans[0].start
    assert said.text == expected(eyes, eyes.chunks(2))
    assert not said.is_like(eyes.said(replace(eyes.bench.again(first), tenant="fresh too")))


def test_what_left_the_cache_is_restored_from_memory(eyes: SeeingBench) -> None:
    first = eyes.request(1)
    turn = eyes.next_turn(first, eyes.said(first).text)
    fresh = eyes.said(replace(eyes.bench.again(turn), tenant="fresh"))
    eyes.push_out()
    num_encoded = eyes.encoder.num_encoded
    said = eyes.said(turn)
    assert said.is_like(fresh)
    assert said.cached >= first.prompt.spans[-1].end
    assert eyes.encoder.num_encoded == num_encoded


def test_a_picture_of_many_blocks_is_shared_whole_or_not_at_all(pairs: dict[str, Pair]) -> None:
    """With M-RoPE all its 400 cells have one position; blocks that are kept have 64."""
    with seeing("qwen2vl", pairs["qwen2vl"]) as eyes:
        first = eyes.large()
        large = first.prompt
        assert [(one.num_cells, one.cells.num_positions) for one in large.spans] == [(400, 20)]
        turn = eyes.next_turn(first, eyes.said(first).text)
        eyes.push_out()
        said = eyes.said(turn)
        assert said.cached >= len(large)
        fresh = eyes.said(replace(eyes.bench.again(turn), tenant="fresh"))
        assert fresh.is_like(said)
        eyes.push_out()
        cache, path = eyes.bench.engine._stepper._cache, Trail(large.ids(), Scope(""), 0, large.positions())
        some = sorted((one for one in cache.ram.blocks if one.start > large.spans[0].start), key=lambda one: one.start)
        eyes.on_thread(lambda: cache.ram.discard(some[4]))
        eyes.on_thread(lambda: cache.ram.discard(some[5]))
        assert large.spans[0].start < cache.index.match(path, len(large)).num_known < large.spans[0].end
        again = eyes.said(eyes.bench.again(turn))
        assert again.is_like(said)
        assert again.cached == large.spans[0].start, "a part of it is of no use"


def test_a_block_with_all_of_a_picture_does_not_make_tokens_seem_large(pairs: dict[str, Pair]) -> None:
    """Prefixes would not be saved at rest although there is room, and be packed in needlessly small parts."""
    with seeing("qwen2vl", pairs["qwen2vl"]) as eyes:
        large = eyes.large()
        eyes.said(large)
        eyes.push_out()
        cache = eyes.bench.engine._stepper._cache
        sizes = {one.start: len(one.state) for one in cache.ram.blocks}
        assert sizes[large.prompt.spans[0].start // 64 * 64] > 4 * sizes[0]
        assert cache._token_bytes < 2 * sizes[0] / 64


@pytest.mark.parametrize("has_room", [True, False])
def test_a_picture_of_many_blocks_is_restored_at_once(
    has_room: bool, pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first block fills all its cells, of which the books must know, and which must not be computed again."""
    with seeing("qwen2vl", pairs["qwen2vl"]) as eyes:
        first = eyes.large()
        turn = eyes.next_turn(first, eyes.said(first).text)
        fresh = eyes.said(replace(eyes.bench.again(turn), tenant="fresh"))
        eyes.push_out()
        cache, span, ends = eyes.bench.engine._stepper._cache, first.prompt.spans[0], list[int]()
        restore, make_room = cache.restore, cache.make_room

        def watched(sequence: CachedSequence) -> None:
            restore(sequence)
            ends.append(sequence.num_cells)

        def scarce(num_cells: int) -> bool:
            is_within = any(span.start < one.num_cells < span.end and one.restores for one in cache._live.values())
            return (has_room or not is_within) and make_room(num_cells)

        monkeypatch.setattr(cache, "restore", watched)
        monkeypatch.setattr(cache, "make_room", scarce)
        said = eyes.said(turn)
        assert ends
        assert not any(span.start < end < span.end for end in ends)
        assert (said.cached >= span.end) is has_room
        assert said.is_like(fresh)


def test_a_picture_that_is_being_restored_is_not_encoded(eyes: SeeingBench, monkeypatch: pytest.MonkeyPatch) -> None:
    first = eyes.request(1)
    turn = eyes.next_turn(first, eyes.said(first).text)
    eyes.push_out()
    monkeypatch.setattr("workers.engine.step.scheduler.MOVE_S", 0.0)  # a block in each step
    monkeypatch.setattr(eyes.encoder, "_max_bytes", 0)
    eyes.encoder._kept.clear()
    eyes.encoder._num_bytes = 0
    num_encoded = eyes.encoder.num_encoded
    assert eyes.said(turn).cached >= first.prompt.spans[-1].end
    assert eyes.encoder.num_encoded == num_encoded


def test_a_call_that_waits_for_its_picture_in_a_slot_begins_after_that(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was saved can't be restored after all, so that the picture is encoded again."""
    with seeing("phi4", pairs["phi4"]) as eyes:
        first = eyes.request(1)
        turn = eyes.next_turn(first, eyes.said(first).text)
        fresh = eyes.said(replace(eyes.bench.again(turn), tenant="fresh"))
        eyes.push_out()
        monkeypatch.setattr(eyes.encoder, "_max_bytes", 0)
        eyes.encoder._kept.clear()
        eyes.encoder._num_bytes = 0
        monkeypatch.setattr(eyes.bench.engine._stepper._cache, "restore", lambda sequence: sequence.restores.clear())
        slow = SlowProjector(eyes.projector)
        monkeypatch.setattr(eyes.encoder, "_projector", slow)
        eyes.bench.submit(turn)
        assert slow.begun.wait(5)
        eyes.on_thread(lambda: None)
        assert not eyes.bench.heard.calls[turn.key]
        slow.may_go_on.set()
        eyes.bench.wait(turn.key)
        said = eyes.heard(turn.key)
        assert eyes.bench.heard.started(turn.key).num_cached_tokens == said.cached <= first.prompt.spans[0].start
        assert said.is_like(fresh)


def test_a_picture_one_cell_wide_is_at_one_position_too(pairs: dict[str, Pair]) -> None:
    """It takes as many positions as cells. A prefix that ends with it is what a call leaves that is cancelled there."""
    with seeing("qwen2vl", pairs["qwen2vl"]) as eyes:
        chunks = eyes.projector.read([BEFORE, Picture(picture(7, 16, 1600)), AFTER])
        (thin,) = (one for one in chunks if isinstance(one, MediaChunk))
        assert (thin.num_cells, thin.num_positions) == (100, 100)
        last = chunks.index(thin)
        eyes.bench.answer(replace(eyes.request(1, max_tokens=1), prompt=prompt_of(chunks[: last + 1])))
        eyes.bench.engine.check_integrity()
        whole = replace(eyes.request(1), prompt=prompt_of(chunks))
        said = eyes.said(whole)
        assert said.cached >= whole.prompt.spans[0].end
        eyes.push_out()
        restored = eyes.said(eyes.bench.again(whole))
        assert restored.cached >= whole.prompt.spans[0].end
        fresh = eyes.said(replace(eyes.bench.again(whole), tenant="fresh"))
        assert said.is_like(fresh)
        assert restored.is_like(fresh)


def test_a_picture_is_read_beside_running_answers_and_others_pictures(eyes: SeeingBench) -> None:
    alone = {seed: eyes.said(eyes.request(seed)) for seed in (1, 2, 3)}
    stream = eyes.bench.request("Once upon a time", 200, ignore_eos=True)
    calls = [replace(eyes.request(seed), tenant=f"team-{seed}") for seed in (1, 2, 3)]
    keys = [eyes.bench.submit(one) for one in (stream, *calls)]
    eyes.bench.wait(*keys)
    for seed, key in zip((1, 2, 3), keys[1:], strict=True):
        assert alone[seed].is_like(eyes.heard(key))


def test_who_comes_later_does_not_read_first(pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a team that sends small pictures, one after the other, would keep others from reading theirs at all."""
    with seeing("phi4", pairs["phi4"], llama=msgspec.structs.replace(ONE_THREAD, n_ubatch=16)) as eyes:
        large = eyes.large()
        late = replace(eyes.request(2), tenant="late", prompt=prompt_of(eyes.chunks(2, before="See ")))
        is_encoded, order = threading.Event(), list[int]()
        encoding = eyes.encoder.want("late", "", late.prompt.spans[0].cells, is_encoded.set)
        assert is_encoded.wait(10)
        media = eyes.bench.engine._stepper._media
        compute = media.compute

        def watched(chunk: Rows[Sequence]) -> None:
            if not order:
                eyes.bench.submit(late)
            order.append(chunk.sequence.key)
            compute(chunk)

        monkeypatch.setattr(media, "compute", watched)
        eyes.bench.submit(large)
        eyes.bench.wait(large.key, late.key)
        assert encoding.rows is not None
        assert order[:3] == [large.key, large.key, late.key]


def test_callers_who_send_one_picture_have_it_encoded_once(eyes: SeeingBench) -> None:
    requests = [eyes.request(5) for _ in range(4)]
    keys = [eyes.bench.submit(one) for one in requests]
    eyes.bench.wait(*keys)
    assert all(eyes.heard(keys[0]).is_like(eyes.heard(key)) for key in keys)
    assert eyes.encoder.num_encoded == len({one.cells.digest for one in requests[0].prompt.spans})


def test_another_team_has_it_encoded_and_computed_anew(eyes: SeeingBench) -> None:
    first = eyes.request(6)
    text, _ = eyes.answer(first)
    num_spans = eyes.encoder.num_encoded
    theirs = replace(eyes.bench.again(first), tenant="them")
    assert eyes.answer(theirs) == (text, 0)
    assert eyes.encoder.num_encoded == 2 * num_spans
    salted = changed(eyes.bench.again(first), cache_salt="other")
    assert eyes.answer(salted) == (text, 0)
    assert eyes.encoder.num_encoded == 3 * num_spans


def test_prepared_pixels_are_given_back_with_their_call(eyes: SeeingBench) -> None:
    """Embeddings stay for those who show the picture again; what they were made of would be as much memory again."""
    request = eyes.request(6)
    prepared = [weakref.ref(span.cells.native) for span in request.prompt.spans]  # type: ignore[attr-defined]
    eyes.bench.answer(request)
    assert eyes.encoder._kept
    del request
    eyes.push_out()  # the engine remembers the last step's calls until the next step
    gc.collect()
    assert not any(one() for one in prepared)


class SlowProjector:
    """Encodes when it is told to."""

    def __init__(self, projector: Projector) -> None:
        self.projector = projector
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.num = 0

    def encode(self, chunk: MediaChunk) -> Embeddings:
        self.num += 1
        self.begun.set()
        assert self.may_go_on.wait(20)
        if self.error is not None:
            raise self.error
        return self.projector.encode(chunk)


@pytest.fixture
def slow(pairs: dict[str, Pair]) -> Iterator[tuple[SeeingBench, SlowProjector]]:
    with seeing("qwen2vl", pairs["qwen2vl"], slots=1) as eyes:
        slow = SlowProjector(eyes.projector)
        eyes.encoder._projector = slow
        yield eyes, slow
        slow.may_go_on.set()


def test_a_call_waits_for_its_picture_without_a_slot(slow: tuple[SeeingBench, SlowProjector]) -> None:
    eyes, projector = slow
    seeing = eyes.bench.submit(eyes.request(1))
    assert projector.begun.wait(5)
    assert eyes.bench.answer(eyes.bench.request("Once upon a time", 20, ignore_eos=True)), "with the only slot"
    assert not eyes.bench.heard.calls[seeing]
    busy = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - busy < 0.15, "nobody spins meanwhile"
    projector.may_go_on.set()
    eyes.bench.wait(seeing)
    assert eyes.bench.heard.text(seeing) == expected(eyes, eyes.chunks(1))


def test_a_call_that_is_cancelled_is_not_encoded_any_more(slow: tuple[SeeingBench, SlowProjector]) -> None:
    eyes, projector = slow
    first, second = (eyes.bench.submit(eyes.request(seed)) for seed in (1, 2))
    assert projector.begun.wait(5)
    eyes.bench.engine.cancel(second)
    eyes.on_thread(lambda: None)
    projector.may_go_on.set()
    eyes.bench.wait(first)
    assert eyes.bench.answer(eyes.request(3))
    assert projector.num == 2, "the second was never begun"


def test_a_picture_that_can_not_be_encoded_ends_its_call_alone(slow: tuple[SeeingBench, SlowProjector]) -> None:
    eyes, projector = slow
    projector.error = EncodeFailed("no number")
    failing = eyes.bench.submit(eyes.request(1))
    assert projector.begun.wait(5)
    stream = eyes.bench.submit(eyes.bench.request("Once upon a time", 40, ignore_eos=True))
    projector.may_go_on.set()
    eyes.bench.wait(failing, stream)
    (failed,) = eyes.bench.heard.calls[failing]
    assert isinstance(failed, Failed)
    assert failed.failure.code is FailureCode.INVALID_REQUEST
    projector.error = None
    assert eyes.bench.answer(eyes.request(1)) == expected(eyes, eyes.chunks(1)), "it is tried again"


def test_a_call_that_can_not_begin_for_two_reasons_ends_once(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its picture fails just as it was to enter, and so do its adapters."""
    with seeing("phi4", pairs["phi4"]) as eyes:
        eyes.encoder.stop()

        def refuse(*_: object) -> bool:
            raise CallFailed(Failure(FailureCode.INTERNAL, "no adapter"))

        monkeypatch.setattr(eyes.bench.engine._stepper._media, "may_enter", lambda *_: True)
        monkeypatch.setattr(eyes.bench.engine._adapters, "enter", refuse)
        key = eyes.bench.submit(eyes.request(1))
        eyes.bench.wait(key)
        eyes.on_thread(lambda: None)
        assert len(eyes.bench.heard.calls[key]) == 1


@pytest.mark.parametrize("name", ["qwen2vl", "phi4", "ultravox"])
def test_a_call_preempted_within_a_picture_reads_it_again(
    name: str, pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    with seeing(name, pairs[name], llama=msgspec.structs.replace(ONE_THREAD, n_ubatch=32)) as eyes:
        request = eyes.large()
        alone = eyes.said(request)
        stepper, cut = eyes.bench.engine._stepper, list[int]()
        step, scheduler = stepper.step, stepper._scheduler

        def give_way() -> None:
            step()
            for one in list(scheduler.running):
                if not cut and one.reads_media and one.num_cells > one.prompt.spans[one.span].start:
                    cut.append(one.num_cells)
                    scheduler._put_off(one)

        monkeypatch.setattr(stepper, "step", give_way)
        key = eyes.bench.submit(replace(eyes.bench.again(request), tenant="them"))
        eyes.bench.wait(key)
        assert cut
        assert eyes.bench.heard.finished(key).num_preempted == 1
        assert alone.is_like(eyes.heard(key))


def test_a_picture_on_disk_serves_another_engine(eyes: SeeingBench, pairs: dict[str, Pair], tmp_path: Path) -> None:
    pair = pairs[eyes.name]
    with tier(tmp_path / "cache") as disk, seeing(eyes.name, pair, disk=disk) as one:
        first = one.request(1, after=AFTER + " And the cat was happy." * 12)
        if eyes.name == "qwen2vl":
            first = replace(first, prompt=one.large(after=AFTER + " And the cat was happy." * 12).prompt)
        turn = one.next_turn(first, one.said(first).text)
        fresh = one.said(replace(one.bench.again(turn), tenant="fresh"))
    with tier(tmp_path / "cache") as disk:
        assert disk.flush(5) or disk.stats.num_files
        with seeing(eyes.name, pair, disk=disk) as other:
            said = other.said(replace(turn, key=1))
            assert said.is_like(fresh)
            assert said.cached >= first.prompt.spans[-1].end
            assert other.encoder.num_encoded == 0
            theirs = other.said(replace(turn, key=2, tenant="them"))
            assert theirs.cached == 0
            assert theirs.is_like(fresh)


@pytest.mark.parametrize("name", ["phi4", "ultravox", "qwen2vl"])
def test_a_slot_with_a_picture_is_saved_where_positions_are_cells(name: str, pairs: dict[str, Pair]) -> None:
    with seeing(name, pairs[name]) as eyes:
        first = eyes.request(1)
        text = eyes.said(first).text
        turn = eyes.next_turn(first, text)
        slots = eyes.bench.engine.slot_contents
        slot = next(info.id for info in slots.infos().result(10) if info.tenant == "" and info.n_decoded)
        copying = slots.copy(slot, "", "")
        if name == "qwen2vl":
            with pytest.raises(CallFailed, match="rows and columns"):
                copying.result(10)
            return
        copied = copying.result(10)
        assert copied is not None
        fresh = eyes.said(replace(eyes.bench.again(turn), tenant="fresh"))
    with seeing(name, pairs[name]) as other:
        other.bench.engine.slot_contents.restore(0, copied.scope, copied.conversation).result(10)
        said = other.said(replace(turn, key=1))
        assert said.is_like(fresh)
        assert said.cached >= first.prompt.spans[-1].end


def test_answers_about_pictures_are_drafted_from_the_text_around_them(pairs: dict[str, Pair]) -> None:
    """What the caller foretells is verified as without a picture, and no cell of a picture is taken for a token."""
    with seeing("qwen2vl", pairs["qwen2vl"]) as eyes:
        plain = eyes.request(1, max_tokens=60)
        alone = eyes.said(plain)
        answer = eyes.answer_tokens(plain)
    with seeing("qwen2vl", pairs["qwen2vl"], speculation=AS_IT_PAYS) as eyes:
        foretold = replace(eyes.request(1, max_tokens=60), prediction=answer)
        said = eyes.said(foretold)
        assert said.is_like(alone)
        assert eyes.bench.heard.finished(foretold.key).timings.draft_n_accepted > 0


def test_drafts_leave_the_cells_to_a_picture_that_were_planned_for_it(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them llama.cpp finds none for the picture, and the engine ends."""
    llama = msgspec.structs.replace(ONE_THREAD, n_ubatch=32)
    with seeing("qwen2vl", pairs["qwen2vl"], llama=llama, speculation=AS_IT_PAYS) as eyes:
        plain = eyes.bench.request("Once upon a time", 300, ignore_eos=True)
        eyes.bench.answer(plain)
        stepper, large = eyes.bench.engine._stepper, eyes.large()
        cache, lacking, tight = stepper._cache, list[int](), list[int]()
        size, extend, compute = cache.kv_tokens, stepper.speculator.extend, stepper._media.compute

        def extend_in_a_full_cache(plan: Plan[Sequence], has_room: Callable[[int], bool]) -> Plan[Sequence] | None:
            if plan.media is not None:
                cache.make_room(size)
                cache.kv_tokens = cache.num_used + plan.num_tokens + plan.media.num_tokens + SPARE_CELLS
                tight.append(cache.num_free)
            return extend(plan, has_room)

        def compute_what_fits(chunk: Rows[Sequence]) -> None:
            lacking.append(max(0, chunk.num_tokens - cache.num_free))
            cache.kv_tokens = size
            compute(chunk)

        def eight_of_each(chances: list[list[float]], _: int, **how: object) -> list[int]:
            return [min(len(one), 8) for one in chances]

        monkeypatch.setattr("workers.engine.step.speculator.LOOK_S", 0.0)
        monkeypatch.setattr(stepper.speculator._costs, "choose", eight_of_each)
        monkeypatch.setattr(stepper.speculator._costs, "note_drafted", lambda *_: None)
        monkeypatch.setattr(stepper.speculator, "extend", extend_in_a_full_cache)
        monkeypatch.setattr(stepper._media, "compute", compute_what_fits)
        foretold = replace(eyes.bench.again(plain), prediction=eyes.answer_tokens(plain))
        is_encoded = threading.Event()
        encoding = eyes.encoder.want("", "", large.prompt.spans[0].cells, is_encoded.set)
        assert is_encoded.wait(10)
        assert encoding.rows is not None

        def submit_both() -> None:
            for one in (foretold, large):
                eyes.bench.submit(one)

        eyes.on_thread(submit_both)
        eyes.bench.wait(foretold.key, large.key)
        assert stepper.speculator.num_drafts
        assert tight, "answers and the picture shared steps"
        assert not any(lacking)


def test_what_can_not_be_done_with_pictures_is_refused(eyes: SeeingBench) -> None:
    request = eyes.request(1)
    for wrong in (changed(request, context_shift=True), changed(request, prompt_probs=100, n_probs=1)):
        with pytest.raises(CallFailed) as refused:
            eyes.bench.submit(wrong)
        assert refused.value.failure.code in (FailureCode.UNSUPPORTED, FailureCode.INVALID_REQUEST)
    with running(eyes.model, n_ctx=2048) as blind, pytest.raises(CallFailed, match="text only"):
        blind.submit(replace(request, key=1))
