"""Answers that a second, smaller model drafts: they are those without it, and it follows what becomes of sequences."""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.engine.listener import GREEDY, ONE_THREAD, Bench, changed, running
from tests.support.quantised import Q4_0, write_quantised
from tests.support.small_models import write_wide_model
from tests.support.stack import DEMO_MODEL
from workers.constraint.guidance import QUICK, Grammar, schema_to_lark, tokenizer
from workers.engine.request import EngineRequest
from workers.engine.speculation.draft_model import MAX_FAILURES, DraftModel
from workers.engine.speculation.hit_rates import Source
from workers.llama.model import Model
from workers.models.generation import DraftSpec, SpeculationSettings
from workers.models.spec import LlamaSettings
from workers.protocol.events import Logprobs, Tokens
from workers.protocol.requests import Sampling, Speculation

BY_MODEL = SpeculationSettings(ngram=False, form=False, draft=DraftSpec(path="draft.gguf", n_max=8))
NO_DRAFTS = Speculation(enabled=False)
PROMPTS = ["Once upon a time", "Lily had a red ball and", "The dog", "One day, a boy named Tim"]
LONG = "Once upon a time there was a little girl who had a red ball. " * 12
SAMPLINGS = {
    "greedy": GREEDY,
    "warm": Sampling(temperature=0.8, seed=7),
    "penalised": Sampling(temperature=0.7, seed=3, repeat_penalty=1.3, presence_penalty=0.4, top_k=20, min_p=0.02),
}


@pytest.fixture(autouse=True)
def drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every draft made and computed, whatever it costs: these tests are about what comes of drafts."""

    def choose(
        _: object, chances: Ordered[Ordered[float]], num_calls: int, *, max_rows: int, **__: object
    ) -> list[int]:
        left = min(max_rows - num_calls, 32)
        return [min(len(one), left // len(chances)) for one in chances]

    costs = "workers.engine.speculation.step_costs.StepCosts"
    monkeypatch.setattr("workers.engine.step.speculator.LOOK_S", 0.0)
    monkeypatch.setattr(f"{costs}.choose", choose)
    monkeypatch.setattr(f"{costs}.note_drafted", lambda *_: None)
    monkeypatch.setattr(f"{costs}.saved_s", lambda *_: 1.0)
    monkeypatch.setattr(f"{costs}.least_chance", lambda *_: 0.0)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """The demo model with coarse weights: it is mistaken now and then."""
    path = write_quantised(DEMO_MODEL, tmp_path_factory.mktemp("draft") / "draft.gguf", Q4_0)
    with Model.load(path, ONE_THREAD) as model:
        yield model


@pytest.fixture
def bench(demo: Model, small: Model) -> Iterator[Bench]:
    with drafting(demo, small) as bench:
        yield bench


def drafting(model: Model, draft: Model, **settings: Any) -> AbstractContextManager[Bench]:
    return running(model, draft=draft, speculation=BY_MODEL, **settings)


def draft_model(bench: Bench) -> DraftModel:
    drafts = bench.engine._stepper.speculator._model
    assert drafts is not None
    return drafts.model


def tokens_of(bench: Bench, key: int) -> list[int]:
    return [event.tokens[0] for event in bench.heard.calls[key] if isinstance(event, Tokens)]


def telling(bench: Bench, prompt: str | list[int], num_tokens: int | None = 60, **changes: Any) -> EngineRequest:
    return changed(bench.request(prompt, num_tokens, ignore_eos=True), tell=("tokens",), **changes)


def said(bench: Bench, *requests: EngineRequest) -> list[list[int]]:
    """Have answers made, all at once, and return their tokens."""
    keys = [bench.submit(request) for request in requests]
    bench.wait(*keys)
    return [tokens_of(bench, key) for key in keys]


def undrafted(bench: Bench, *requests: EngineRequest) -> list[list[int]]:
    return said(bench, *(changed(bench.again(one), speculation=NO_DRAFTS) for one in requests))


def num_accepted(bench: Bench) -> int:
    return bench.engine.counters.num_accepted[Source.MODEL]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("num_callers", [1, 4])
def test_an_answer_is_the_one_without_drafts(bench: Bench, sampling: Sampling, num_callers: int) -> None:
    requests = [telling(bench, text, sampling=sampling, cache_prompt=False) for text in PROMPTS[:num_callers]]
    plain = undrafted(bench, *requests)
    before = bench.engine.counters.num_decodes
    assert said(bench, *requests) == plain
    assert num_accepted(bench) > 20 * num_callers
    assert bench.engine.counters.num_decodes - before < 40


def test_most_of_what_a_copy_with_coarser_weights_guesses_is_drawn(bench: Bench) -> None:
    key = bench.submit(telling(bench, PROMPTS[0], 300, speculation=Speculation(n_max=3)))
    bench.wait(key)
    timings = bench.heard.finished(key).timings
    assert timings.draft_n_accepted > 0.9 * timings.draft_n
    assert timings.draft_n_accepted > 0.65 * 300
    counters = bench.engine.counters
    assert counters.num_drafted[Source.MODEL] == timings.draft_n
    assert counters.num_accepted[Source.MODEL] == timings.draft_n_accepted


def test_every_token_has_its_probability(bench: Bench) -> None:
    request = telling(bench, PROMPTS[0], cache_prompt=False, n_probs=3)
    told = []
    for speculation in (NO_DRAFTS, Speculation()):
        key = bench.submit(changed(bench.again(request), speculation=speculation))
        bench.wait(key)
        events = [event for event in bench.heard.calls[key] if isinstance(event, Logprobs)]
        told.append([(event.chosen.token, [other.token for other in event.top]) for event in events])
    assert len(told[1]) == 60
    assert told[0] == told[1]
    assert num_accepted(bench) > 0


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["Lily", "Tim"]}, "toys": {"type": "array", "items": {"enum": ["ball", "car"]}}},
    "required": ["name", "toys"],
    "additionalProperties": False,
}


def test_a_form_is_kept(bench: Bench) -> None:
    grammar = Grammar(tokenizer(bench.model.vocab), schema_to_lark(SCHEMA), QUICK)
    request = changed(bench.request("Who?", 60), tell=("tokens",), cache_prompt=False)
    plain, drafted = (
        said(bench, changed(bench.again(request), mask=grammar.mask(), speculation=speculation))[0]
        for speculation in (NO_DRAFTS, Speculation())
    )
    assert plain == drafted
    text = bench.heard.text(max(bench.heard.calls))
    assert json.loads(text).keys() == SCHEMA["properties"].keys()
    assert bench.engine.counters.num_drafted[Source.MODEL] > 0


def test_a_preempted_call_goes_on_as_it_would(demo: Model, small: Model) -> None:
    with drafting(demo, small, slots=4, n_ctx=256, kv_tokens=320) as bench:
        requests = [telling(bench, text, 150, cache_prompt=False) for text in PROMPTS]
        drafted = said(bench, *requests)
        assert bench.engine.counters.num_preempted > 0
        assert num_accepted(bench) > 100
        assert drafted == [undrafted(bench, one)[0] for one in requests]


def test_an_answer_goes_on_past_the_context(demo: Model, small: Model) -> None:
    with drafting(demo, small, slots=2, n_ctx=64, kv_tokens=256) as bench:
        request = telling(bench, PROMPTS[0], 200, context_shift=True, n_keep=4)
        (plain,), (drafted,) = undrafted(bench, request), said(bench, request)
        assert drafted == plain
        assert num_accepted(bench) > 60


def test_nothing_is_left_of_calls_that_are_cancelled(bench: Bench) -> None:
    keys = [bench.submit(telling(bench, text, None, cache_prompt=False)) for text in PROMPTS]
    bench.heard.until(lambda: all(len(bench.heard.calls[key]) > 30 for key in keys))
    for key in keys:
        bench.engine.cancel(key)
    bench.heard.until(lambda: not bench.engine.load().slots_busy)
    bench.engine.check_integrity()
    assert draft_model(bench).num_cells == 0


def test_the_cells_of_a_prefix_are_shared(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call with the same system prompt, and one of another team, which must not find what it is."""
    read: list[int] = []
    model = draft_model(bench)
    num_missing = model.num_missing

    def noted(sequence: int, known: Any) -> int:
        read.append(num_missing(sequence, known))
        return read[-1]

    monkeypatch.setattr(model, "num_missing", noted)
    num_tokens = len(bench.tokens(LONG))
    said(bench, telling(bench, LONG + "She", tenant="team"))
    assert read[0] > num_tokens
    read.clear()
    said(bench, telling(bench, LONG + "He", tenant="team"))
    assert read[0] < 20
    read.clear()
    said(bench, telling(bench, LONG + "He", tenant="other"))
    assert read[0] > num_tokens
    bench.engine.check_integrity()


def test_what_comes_back_from_ram_is_read_again(demo: Model, small: Model) -> None:
    with drafting(demo, small, slots=1, kv_tokens=512) as bench:
        first = said(bench, telling(bench, LONG, 20))
        said(bench, telling(bench, " ".join(PROMPTS) * 12, 20))
        assert said(bench, telling(bench, LONG, 20)) == first
        assert bench.engine.counters.num_restored > 0
        assert num_accepted(bench) > 30


def test_a_model_without_room_starts_over(demo: Model, small: Model, caplog: pytest.LogCaptureFixture) -> None:
    with drafting(demo, small, draft_cells=300) as bench:
        requests = [telling(bench, f"{text}. {LONG}"[:300], 60, cache_prompt=False) for text in PROMPTS]
        plain = undrafted(bench, *requests)
        assert said(bench, *requests) == plain
        assert "the draft model forgets all conversations: llama_decode" in caplog.text
        assert draft_model(bench).is_able
        assert num_accepted(bench) > 0


def test_a_model_that_computes_no_numbers_is_given_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(draft_model(bench)._context, "surest", lambda *_: (0, 0.0))
    said(bench, telling(bench, PROMPTS[0], 30))
    assert not draft_model(bench).is_able
    assert caplog.text.count("it computed something that is not a number") == MAX_FAILURES


def test_what_is_left_of_a_draft_is_used(bench: Bench) -> None:
    """A guess beyond what a step computes is not made a second time."""
    guesses: list[int] = []
    model = draft_model(bench)
    guess = model.guess

    def counted(asked: Any, costs: Any) -> None:
        guess(asked, costs)
        guesses.extend(len(one.tokens) for one in asked)

    model.guess = counted  # type: ignore[method-assign]
    (drafted,) = said(bench, telling(bench, PROMPTS[0], 100))
    assert len(drafted) == 100
    assert sum(guesses) <= 120


@pytest.mark.parametrize("rows", [32, 512])
def test_short_prompts_of_many_calls_are_read_in_parts(demo: Model, small: Model, rows: int) -> None:
    """As many as fit the batch, and as take as long as other answers may wait: a token a second, if it were true."""
    sizes: list[int] = []
    with drafting(demo, small, llama=LlamaSettings(n_threads=1, n_batch=rows, n_ubatch=rows)) as bench:
        model = draft_model(bench)
        decode, model.row_s = model._decode, 1.0

        def noted() -> bool:
            sizes.append(model._batch.num_tokens)
            return decode()

        model._decode = noted  # type: ignore[method-assign]
        text = bench.tokens(LONG)
        requests = [telling(bench, text[: 24 + number], cache_prompt=False) for number in range(4)]
        drafted = said(bench, *requests)
        assert num_accepted(bench) > 60
        assert max(sizes) <= 32
        assert drafted == [undrafted(bench, one)[0] for one in requests]


def test_tokens_that_the_model_lacks_are_left_alone(
    demo: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Some models are padded with tokens that smaller ones of their family lack. Other calls are drafted on."""
    write_wide_model(tmp_path / "wide.gguf", 100)
    with Model.load(tmp_path / "wide.gguf", ONE_THREAD) as wide, drafting(wide, demo) as bench:
        assert not demo.vocab.difference(wide.vocab)
        beyond = demo.vocab.num_tokens + 30
        for _ in range(MAX_FAILURES):
            said(bench, telling(bench, [beyond, *bench.tokens(PROMPTS[0])], 10))
        assert draft_model(bench).is_able
        assert "forgets" not in caplog.text
        said(bench, telling(bench, PROMPTS[1], 20))
        assert bench.engine.counters.num_drafted[Source.MODEL] > 0


def test_vocabularies_must_be_alike(demo: Model, stories: Model) -> None:
    assert demo.vocab.difference(demo.vocab) == ""
    assert "kind" in demo.vocab.difference(stories.vocab)


def test_a_memory_that_cannot_be_cut_drafts_nothing(small_models: dict[str, Path]) -> None:
    with (
        Model.load(small_models["recurrent"], ONE_THREAD) as model,
        pytest.raises(ValueError, match="attention in all layers"),
        drafting(model, model),
    ):
        pass
