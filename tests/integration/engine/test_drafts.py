"""Drafts: tokens that a step computes beside the newest one, and keeps as far as they are drawn; ends by the caller."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from pathlib import Path
from typing import Any

import pytest

from tests.integration.engine.listener import GREEDY, ONE_THREAD, Bench, changed, running
from tests.support.small_models import WORDS
from workers.constraint.guidance import QUICK, Grammar, schema_to_lark, tokenizer
from workers.engine.speculation.hit_rates import Source
from workers.engine.step.sequence import Sequence
from workers.engine.step.step_plan import Decode, Plan
from workers.llama.model import Model
from workers.models.generation import SpeculationSettings
from workers.protocol.events import Failed, FinishReason, Logprobs, Tokens
from workers.protocol.requests import Sampling, Speculation

PROMPTS = ["Once upon a time", "Lily had a red ball and", "The dog"]
WARM = Sampling(temperature=0.8, seed=7)
PENALISED = Sampling(temperature=0.7, seed=3, repeat_penalty=1.3, presence_penalty=0.4, top_k=20, min_p=0.02)
NO_DRAFTS = Speculation(enabled=False)

SONG = "The wheels on the bus go round and round, round and round, round and round."


@pytest.fixture(autouse=True)
def drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every draft computed, whatever it costs: these tests are about what comes of drafts."""

    def choose(
        _: object, chances: Ordered[Ordered[float]], num_calls: int, *, max_rows: int, **__: object
    ) -> list[int]:
        left = min(max_rows - num_calls, 32)
        return [min(len(one), left // len(chances)) for one in chances]

    monkeypatch.setattr("workers.engine.step.speculator.LOOK_S", 0.0)
    costs = "workers.engine.speculation.step_costs.StepCosts"
    monkeypatch.setattr(f"{costs}.choose", choose)
    monkeypatch.setattr(f"{costs}.note_drafted", lambda *_: None)


def tokens_of(bench: Bench, key: int) -> list[int]:
    return [event.tokens[0] for event in bench.heard.calls[key] if isinstance(event, Tokens)]


def answers(bench: Bench, sampling: Sampling, **asked: object) -> list[list[int]]:
    """Return the tokens of each prompt's answer, all computed together."""
    requests = [bench.request(prompt, 40, sampling=sampling, ignore_eos=True) for prompt in PROMPTS]
    keys = [bench.submit(changed(request, tell=("tokens",), cache_prompt=False, **asked)) for request in requests]
    bench.wait(*keys)
    assert [bench.heard.finished(key).usage.completion_tokens for key in keys] == [40] * len(keys)
    return [tokens_of(bench, key) for key in keys]


def draft_from(bench: Bench, known: dict[tuple[int, ...], list[int]], num_tokens: int) -> None:
    """Have each answer drafted from what is known of it; every third draft goes wrong."""

    def extend(plan: Plan[Sequence], has_room: Callable[[int], bool]) -> Plan[Sequence] | None:
        parts = []
        for one in plan.decoding:
            at = one.num_predicted
            tokens = known[tuple(one.prompt.tokens)][at : at + num_tokens]
            wrong = [tokens[0], 5, *tokens[2:]] if at % 3 == 0 and tokens else tokens
            parts.append(Decode(one, tuple(wrong[: max(0, one.limit - at - 1)])))
        drafted = Plan(parts, [])
        return drafted if drafted.has_drafts and has_room(drafted.num_tokens) else None

    bench.engine._stepper.speculator.extend = extend  # type: ignore[method-assign]


@pytest.mark.parametrize("sampling", [GREEDY, WARM, PENALISED], ids=["greedy", "warm", "penalised"])
def test_a_drafted_answer_is_the_one_without_a_draft(demo: Model, sampling: Sampling) -> None:
    with running(demo) as bench:
        plain = answers(bench, sampling, speculation=NO_DRAFTS)
        num_plain = bench.engine.counters.num_decodes
        draft_from(bench, {tuple(bench.tokens(text)): tokens for text, tokens in zip(PROMPTS, plain, strict=True)}, 4)
        assert answers(bench, sampling) == plain
        num_drafted = bench.engine.counters.num_decodes - num_plain
        assert num_drafted < num_plain * 2 / 3


@pytest.fixture
def bench(demo: Model) -> Iterator[Bench]:
    with running(demo) as bench:
        yield bench


def said(bench: Bench, prompt: str, **changes: object) -> int:
    """Have an answer made alone, and return its key."""
    request = changed(bench.request(prompt, 60, ignore_eos=True), tell=("tokens",), **changes)
    key = bench.submit(request)
    bench.wait(key)
    return key


def test_a_conversation_that_repeats_itself_is_drafted_from_itself(bench: Bench) -> None:
    plain = said(bench, SONG * 3, speculation=NO_DRAFTS, cache_prompt=False)
    before = bench.engine.counters
    drafted = said(bench, SONG * 3, cache_prompt=False)
    after = bench.engine.counters
    assert tokens_of(bench, drafted) == tokens_of(bench, plain)
    timings = bench.heard.finished(drafted).timings
    assert timings.draft_n >= timings.draft_n_accepted > 0
    assert after.num_accepted[Source.HISTORY] - before.num_accepted[Source.HISTORY] == timings.draft_n_accepted
    assert after.num_decodes - before.num_decodes == 60 - timings.draft_n_accepted
    assert bench.heard.finished(plain).timings.draft_n == 0


def test_an_answer_that_was_given_before_is_drafted_from_it(bench: Bench) -> None:
    first = said(bench, PROMPTS[0])
    again = said(bench, PROMPTS[0])
    assert tokens_of(bench, again) == tokens_of(bench, first)
    assert bench.engine.counters.num_accepted[Source.POOL] >= 40


def test_another_team_drafts_nothing_from_it(bench: Bench) -> None:
    """The attacker: it asks what the team was answered, and learns nothing from how many tokens were drafted."""
    theirs = said(bench, PROMPTS[0], tenant="team")
    before = bench.engine.counters
    for changes in ({"tenant": "attacker"}, {"tenant": "team", "cache_salt": "other"}):
        key = said(bench, PROMPTS[0], **changes)
        assert tokens_of(bench, key) == tokens_of(bench, theirs)
        after = bench.engine.counters
        assert after.num_drafted[Source.POOL] == before.num_drafted[Source.POOL]
    unkept = said(bench, PROMPTS[0], tenant="team", cache_prompt=False)
    assert bench.engine.counters.num_drafted[Source.POOL] == before.num_drafted[Source.POOL]
    said(bench, PROMPTS[0], tenant="team")
    assert bench.engine.counters.num_accepted[Source.POOL] > 0
    assert tokens_of(bench, unkept) == tokens_of(bench, theirs)


def test_what_an_answer_without_the_cache_said_is_not_kept(bench: Bench) -> None:
    said(bench, PROMPTS[0], cache_prompt=False)
    said(bench, PROMPTS[0])
    assert bench.engine.counters.num_drafted[Source.POOL] == 0


def test_a_prediction_that_is_right_spares_steps(bench: Bench) -> None:
    plain = tokens_of(bench, said(bench, PROMPTS[1], cache_prompt=False, speculation=NO_DRAFTS))
    before = bench.engine.counters.num_decodes
    drafted = said(bench, PROMPTS[1], cache_prompt=False, prediction=tuple(plain[:30] + plain[34:]))
    assert tokens_of(bench, drafted) == plain
    assert bench.engine.counters.num_accepted[Source.PREDICTION] > 40
    assert bench.engine.counters.num_decodes - before < 12
    counters = bench.engine.counters
    usage = bench.heard.finished(max(bench.heard.calls)).usage
    assert usage.accepted_prediction_tokens == counters.num_accepted[Source.PREDICTION]
    num_drafted = counters.num_drafted[Source.PREDICTION]
    assert usage.rejected_prediction_tokens == num_drafted - usage.accepted_prediction_tokens


def test_seconds_per_token_count_drafted_tokens_too(bench: Bench) -> None:
    """By what heartbeats tell of them (`decode_ms`), gateways find quicker the worker that drafts well."""
    told = []
    for speculation in (NO_DRAFTS, Speculation()):
        before = bench.engine.counters.gap_s
        key = said(bench, SONG * 3, cache_prompt=False, speculation=speculation)
        after = bench.engine.counters.gap_s
        num_gaps, total_s = sum(after.counts) - sum(before.counts), after.total - before.total
        assert num_gaps == 59
        assert total_s * 1e3 == pytest.approx(bench.heard.finished(key).timings.predicted_ms, rel=0.2)
        told.append(num_gaps)
    assert bench.heard.finished(key).timings.draft_n_accepted > 10
    assert told[0] == told[1]


def test_every_token_has_its_probability(bench: Bench) -> None:
    plain = said(bench, SONG * 3, cache_prompt=False, n_probs=3, speculation=NO_DRAFTS)
    drafted = said(bench, SONG * 3, cache_prompt=False, n_probs=3)
    told = [
        [
            (event.chosen.token, [other.token for other in event.top])
            for event in bench.heard.calls[key]
            if isinstance(event, Logprobs)
        ]
        for key in (plain, drafted)
    ]
    assert len(told[1]) == 60
    assert told[0] == told[1]
    assert bench.heard.finished(drafted).timings.draft_n_accepted > 0


def test_drafts_keep_to_what_the_caller_allows(bench: Bench) -> None:
    none = said(bench, SONG * 3, cache_prompt=False, speculation=Speculation(n_min=33))
    assert bench.heard.finished(none).timings.draft_n == 0
    before = bench.engine.counters
    few = said(bench, SONG * 3, cache_prompt=False, speculation=Speculation(n_max=2))
    after = bench.engine.counters
    num_drafts = after.num_drafts - before.num_drafts
    assert 0 < bench.heard.finished(few).timings.draft_n <= 2 * num_drafts
    none = said(bench, SONG * 3, cache_prompt=False, speculation=Speculation(n_max=0))
    assert bench.heard.finished(none).timings.draft_n == 0
    unlikely = said(bench, SONG * 3, cache_prompt=False, speculation=Speculation(p_min=1.0))
    assert bench.heard.finished(unlikely).timings.draft_n == 0


def test_an_answer_ends_in_the_middle_of_a_draft(bench: Bench) -> None:
    plain = tokens_of(bench, said(bench, SONG * 3, cache_prompt=False, speculation=NO_DRAFTS))
    request = bench.request(SONG * 3, 60, ignore_eos=True)
    key = bench.submit(changed(request, tell=("tokens",), cache_prompt=False, max_tokens=17))
    bench.wait(key)
    assert tokens_of(bench, key) == plain[:17]
    key = bench.submit(changed(bench.again(request), tell=("tokens",), cache_prompt=False, stop_tokens=(plain[20],)))
    bench.wait(key)
    assert tokens_of(bench, key) == plain[: plain.index(plain[20]) + 1]
    bench.engine.check_integrity()


def test_the_end_of_the_context_is_not_drafted_beyond(demo: Model) -> None:
    with running(demo, n_ctx=128, kv_tokens=256) as bench:
        key = bench.submit(bench.request(bench.tokens(SONG * 3)[:100], None, ignore_eos=True))
        bench.wait(key)
        assert bench.heard.finished(key).usage.completion_tokens == 28
        bench.engine.check_integrity()


def test_memory_that_cannot_be_cut_is_not_drafted(small_models: dict[str, Path]) -> None:
    with Model.load(small_models["recurrent"], ONE_THREAD) as model, running(model) as bench:
        key = bench.submit(bench.request([5, 6, 7] * 10, 40, ignore_eos=True))
        bench.wait(key)
        assert not isinstance(bench.heard.calls[key][-1], Failed)
        assert bench.heard.finished(key).timings.draft_n == 0


@pytest.fixture
def convolving(small_models: dict[str, Path]) -> Iterator[Bench]:
    """A model with a recurrent layer that llama.cpp can take back."""
    with (
        Model.load(small_models["hybrid-convolution"], ONE_THREAD) as model,
        running(model, speculation=SpeculationSettings(rollback=8)) as bench,
    ):
        yield bench


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_a_recurrent_layer_is_taken_back(convolving: Bench, sampling: Sampling) -> None:
    """Over and over: a state that kept a wrong token would say something else. Of several callers, those are drafted
    that are alone in a step, here once the others have ended."""
    bench = convolving
    prompts = [WORDS[start : start + 24] for start in (0, 40, 80)]
    lengths = (90, 20, 30)
    told: list[list[list[int]]] = []
    for speculation in (NO_DRAFTS, Speculation()):
        keys = []
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            wrong = [7 if at % 10 == 9 else token for at, token in enumerate(told[0][number] if told else [])]
            request = bench.request(prompt, length, sampling=sampling, ignore_eos=True)
            request = changed(request, speculation=speculation, prediction=wrong, cache_prompt=False)
            keys.append(bench.submit(changed(request, tell=("tokens",))))
        bench.wait(*keys)
        told.append([tokens_of(bench, key) for key in keys])
    assert told[1] == told[0]
    counters = bench.engine.counters
    assert counters.num_accepted[Source.PREDICTION] > 25
    assert counters.num_drafted[Source.PREDICTION] > counters.num_accepted[Source.PREDICTION] + 3


def test_a_conversation_goes_on_where_a_draft_was_taken_back(convolving: Bench) -> None:
    """Its state is saved while llama.cpp has yet to use the older one."""
    bench = convolving
    first = bench.request(WORDS[:40], 30, ignore_eos=True)
    plain = changed(first, tell=("tokens",), speculation=NO_DRAFTS, cache_prompt=False)
    key = bench.submit(plain)
    bench.wait(key)
    answer = tokens_of(bench, key)
    turn = [*WORDS[:40], *answer[:21], *WORDS[100:110]]
    key = bench.submit(
        changed(bench.request(turn, 30, ignore_eos=True), tell=("tokens",), speculation=NO_DRAFTS, cache_prompt=False)
    )
    bench.wait(key)
    expected = tokens_of(bench, key)
    for num_right in range(4):
        wrong = [*answer[: 20 + num_right], *[9] * 8]
        salt = f"{num_right}"
        key = bench.submit(changed(bench.again(first), prediction=wrong, max_tokens=21, cache_salt=salt))
        bench.wait(key)
        key = bench.submit(
            changed(bench.request(turn, 30, ignore_eos=True), tell=("tokens",), cache_salt=salt, speculation=NO_DRAFTS)
        )
        bench.wait(key)
        assert tokens_of(bench, key) == expected
        assert bench.heard.started(key).num_cached_tokens > 50
        bench.engine.check_integrity()


def test_an_answer_that_its_caller_ends_is_not_taken_back(convolving: Bench) -> None:
    """llama.cpp would do so, to a state that it does not have."""
    bench = convolving
    request = changed(bench.request(WORDS[:40], None, ignore_eos=True), tell=("tokens",), speculation=NO_DRAFTS)
    key = bench.submit(request)
    bench.heard.until(lambda: len(bench.heard.calls[key]) > 20)
    num_wanted = len(tokens_of(bench, key)) - 3
    bench.engine.end(key, num_wanted)
    bench.wait(key)
    answer = tokens_of(bench, key)[:num_wanted]
    turn = changed(bench.request([*WORDS[:40], *answer, 20, 21], 30, ignore_eos=True), tell=("tokens",))
    told = []
    for cache_prompt in (True, False):
        key = bench.submit(changed(bench.again(turn), cache_prompt=cache_prompt, speculation=NO_DRAFTS))
        bench.wait(key)
        told.append(tokens_of(bench, key))
    assert told[0] == told[1]


def test_an_answer_ends_after_the_tokens_that_were_wanted(demo: Model) -> None:
    with running(demo) as bench:
        request = changed(bench.request(PROMPTS[0], None, ignore_eos=True), tell=("tokens",))
        key = bench.submit(request)
        bench.heard.until(lambda: len(bench.heard.text(key)) > 60)
        bench.engine.end(key, 5)
        bench.engine.end(key + 100, 5)
        bench.wait(key)
        finished = bench.heard.finished(key)
        assert (finished.reason, finished.usage.completion_tokens) == (FinishReason.STOP, 5)
        assert finished.timings.predicted_n == 5
        bench.engine.check_integrity()
        assert bench.engine._stepper.num_cells_idle == len(request.prompt) + 5, "the cells of the others are free"


def test_no_more_tokens_are_told_as_foretold_than_the_answer_has(bench: Bench) -> None:
    """Its caller has ended it before tokens that were drafted and drawn."""
    plain = tokens_of(bench, said(bench, PROMPTS[1], cache_prompt=False, speculation=NO_DRAFTS))
    request = changed(bench.request(PROMPTS[1], None, ignore_eos=True), prediction=tuple(plain), cache_prompt=False)
    key = bench.submit(changed(request, tell=("tokens",)))
    bench.heard.until(lambda: len(bench.heard.calls[key]) > 50)
    bench.engine.end(key, 5)
    bench.wait(key)
    finished = bench.heard.finished(key)
    assert finished.usage.accepted_prediction_tokens == finished.usage.completion_tokens == 5
    assert finished.usage.rejected_prediction_tokens > 20
    assert finished.timings.draft_n > finished.timings.draft_n_accepted == 5


def test_an_answer_ends_where_the_memory_cannot_be_truncated(small_models: dict[str, Path]) -> None:
    with Model.load(small_models["recurrent"], ONE_THREAD) as model, running(model) as bench:
        key = bench.submit(changed(bench.request([5, 6, 7], None, ignore_eos=True), tell=("tokens",)))
        bench.heard.until(lambda: len(bench.heard.calls[key]) > 20)
        bench.engine.end(key, 5)
        bench.wait(key)
        assert bench.heard.finished(key).usage.completion_tokens == 5


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "weather_station": {"enum": ["north", "south"]},
        "street_name": {"enum": ["High Street", "Park Lane"]},
    },
    "required": ["weather_station", "street_name"],
    "additionalProperties": False,
}


def test_what_a_schema_leaves_as_the_only_text_is_drafted(bench: Bench) -> None:
    grammar = Grammar(tokenizer(bench.model.vocab), schema_to_lark(SCHEMA), QUICK)
    request = changed(bench.request("Where?", 60), tell=("tokens",), cache_prompt=False)
    told = []
    for speculation in (NO_DRAFTS, Speculation()):
        key = bench.submit(changed(bench.again(request), mask=grammar.mask(), speculation=speculation))
        bench.wait(key)
        told.append(tokens_of(bench, key))
        assert json.loads(bench.heard.text(key)).keys() == SCHEMA["properties"].keys()
    assert told[0] == told[1]
    assert bench.engine.counters.num_accepted[Source.FORM] > 0


def test_a_long_text_that_a_schema_leaves_does_not_end_its_mask(bench: Bench) -> None:
    """Asked for 20,000 characters, a matcher has used up what it may do, and refuses the next token."""
    long = "".join(f"{number} " for number in range(4_000))
    words = tokenizer(bench.model.vocab)
    for text in (long, long[:12_000]):
        mask = Grammar(words, schema_to_lark({"const": text}), QUICK).mask()
        for token in words.greedy_tokenize(json.dumps(text))[:300]:
            assert len(mask.forced()) <= 256
            mask.accept(token)
        assert not mask.is_beyond_limits


def test_a_drafted_token_that_ends_the_answer_counts(bench: Bench) -> None:
    plain = tokens_of(bench, said(bench, PROMPTS[1], cache_prompt=False, speculation=NO_DRAFTS))
    last = plain.index(plain[20])
    request = changed(bench.request(PROMPTS[1], 60, ignore_eos=True), prediction=tuple(plain), cache_prompt=False)
    key = bench.submit(changed(request, stop_tokens=(plain[20],)))
    bench.wait(key)
    timings = bench.heard.finished(key).timings
    assert timings.predicted_n == last + 1
    assert timings.draft_n > timings.draft_n_accepted == last
    usage = bench.heard.finished(key).usage
    assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (last, timings.draft_n - last)
    bench.engine.check_integrity()
