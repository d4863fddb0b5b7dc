"""Drawing from candidates of our own: the same as llama.cpp's where all may come, and never a token that may not."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from llama_cpp import llama_cpp as c

from tests.integration.engine.listener import changed
from tests.support.lone_context import LoneContext, lone_context
from workers.engine.cache.prompt import Prompt
from workers.engine.request import EngineRequest
from workers.engine.step.sampling import SamplerTools
from workers.engine.step.sequence import Sequence
from workers.llama.model import Model
from workers.llama.native import gil_calls
from workers.llama.sampling.candidates import MAX_SPARSE_WORDS, MOST, Candidates, Logits, Words, all_tokens
from workers.llama.sampling.samplers import MAX_KEPT, DryStages, SamplerChain
from workers.llama.sampling.stages import ORDER
from workers.llama.sampling.top_k import BLOCK, MOST_K, TopK
from workers.protocol.events import CallEvent, CallFailed, FailureCode, Logprobs, Text, decode_step, encode_step
from workers.protocol.requests import GenerateRequest, SamplerName, Sampling

PROMPT = "Tell me a story about"
N_CTX = 256

EVERY_KIND = {
    "greedy": Sampling(temperature=0),
    "defaults": Sampling(seed=7),
    "wide open": Sampling(seed=7, temperature=3.0, top_k=0, top_p=1.0, min_p=0.0),
    "penalties": Sampling(seed=7, temperature=1.5, repeat_penalty=1.3, dry_multiplier=1.0, dry_allowed_length=1),
    "typical": Sampling(seed=7, temperature=2.0, top_k=0, typical_p=0.5),
    "sigma and xtc": Sampling(seed=7, temperature=2.0, top_n_sigma=2.0, xtc_probability=0.9, xtc_threshold=0.01),
    "mirostat 1": Sampling(seed=7, mirostat=1),
    "mirostat 2": Sampling(seed=7, mirostat=2, temperature=2.0),
    "adaptive": Sampling(seed=7, samplers=("min_p", "adaptive_p"), adaptive_target=0.2),
    "infill": Sampling(seed=7, samplers=("top_k", "infill")),
}


NO_PROBABILITIES = {
    "nothing left": Sampling(seed=7, logit_bias=tuple((token, None) for token in range(768))),
    "sigma": Sampling(seed=7, temperature=1e-10, top_n_sigma=1e-40, samplers=("temperature", "top_p", "top_n_sigma")),
}
"""Settings after which llama.cpp divides by a number so small, or by none, that what it calls a probability is none."""


class Row:
    """A model that has read the prompt: row `number` has logits."""

    def __init__(self, alone: LoneContext) -> None:
        self.alone = alone
        self.context = alone.context
        self.vocab = alone.model.vocab
        self.prompt = alone.model.tokenize(PROMPT, add_special=True, parse_special=False)
        self.logits = alone.feed(0, self.prompt)
        self.number = len(self.prompt) - 1
        self.tools = SamplerTools(self.vocab)

    def chain(self, sampling: Sampling, *, masked: bool = False, banned: tuple[int, ...] = ()) -> SamplerChain:
        return SamplerChain(self.vocab, sampling, n_ctx=N_CTX, masked=masked, banned=banned)

    def request(self, sampling: Sampling, mask: Allowing | None = None, n_probs: int = 0) -> EngineRequest:
        return EngineRequest(1, GenerateRequest(n_probs=n_probs), Prompt(self.prompt), sampling, mask=mask)


class Allowing:
    """A mask that always allows the same tokens."""

    is_done = False

    def __init__(self, allowed: Words | None) -> None:
        self.bits = allowed
        self.accepted: list[int] = []

    def forced(self) -> tuple[int, ...]:
        return ()

    def permits(self, token: int) -> bool:
        return self.bits is None or is_in(self.bits, token)

    def allowed(self) -> Words | None:
        return self.bits

    def accept(self, token: int) -> None:
        self.accepted.append(token)


def is_in(words: Words, token: int) -> bool:
    return bool(words[token // 32] >> np.uint32(token % 32) & 1)


def words_of(tokens: list[int], num_tokens: int) -> Words:
    words = np.zeros_like(all_tokens(num_tokens))
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


@pytest.fixture(scope="module")
def row(demo: Model) -> Iterator[Row]:
    with lone_context(demo, slots=1, kv_tokens=N_CTX) as alone:
        yield Row(alone)


@pytest.mark.parametrize("name", EVERY_KIND)
def test_all_candidates_give_what_llama_cpp_gives(row: Row, name: str) -> None:
    ours, theirs = row.chain(EVERY_KIND[name]), row.chain(EVERY_KIND[name])
    for chain in (ours, theirs):
        chain.accept_prompt(row.prompt)
    for _ in range(20):
        candidates = row.tools.candidates
        candidates.fill(candidates.logits(row.context.pointer, row.number))
        token = candidates.choose(ours.pointer)
        candidates.accept(ours.pointer, token)
        assert token == row.context.sample(theirs.pointer, row.number)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("temperature", [0.8, 3.0])
@pytest.mark.parametrize("k", [1, 5, 40])
def test_the_likeliest_tokens_give_what_the_whole_vocabulary_gives(
    row: Row, k: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int | None] = []
    draw = TopK.draw

    def noted(top: TopK, chain: int, logits: Logits, k: int) -> int | None:
        drawn.append(draw(top, chain, logits, k))
        return drawn[-1]

    monkeypatch.setattr(TopK, "draw", noted)
    for seed in range(20):
        sampling = Sampling(seed=seed, temperature=temperature, top_k=k, xtc_probability=0.5, xtc_threshold=0.05)
        ours, theirs = row.chain(sampling), row.chain(sampling)
        assert ours.top_k == k
        for _ in range(20):
            token = row.context.sample_top(ours.pointer, row.number, k)
            assert token == row.context.sample(theirs.pointer, row.number)
        ours.close()
        theirs.close()
    is_large = row.vocab.num_tokens // BLOCK > k + 1
    assert all((token is not None) == is_large for token in drawn)


def test_tied_or_impossible_logits_are_left_to_llama_cpp(row: Row) -> None:
    chain = row.chain(Sampling(seed=1, top_k=3))
    top = TopK(20_010)
    logits = np.random.default_rng(1).permutation(20_010).astype(np.float32)
    assert top.draw(chain.pointer, logits, 3) in set(np.argsort(-logits)[:3].tolist())
    for value, place in ((20_007.0, 3), (20_008.0, 0), (math.nan, 5)):
        spoiled = logits.copy()
        spoiled[np.argsort(-logits)[place]] = value
        assert top.draw(chain.pointer, spoiled, 3) is None
    chain.close()


@pytest.mark.parametrize(
    ("sampling", "top_k"),
    [
        (Sampling(), 40),
        (Sampling(top_k=MOST_K), MOST_K),
        (Sampling(top_k=MOST_K + 1), 0),
        (Sampling(top_k=0), 0),
        (Sampling(temperature=0), 0),
        (Sampling(repeat_penalty=1.1), 0),
        (Sampling(top_n_sigma=1.0), 0),
        (Sampling(mirostat=2), 0),
        (Sampling(logit_bias=((5, 1.0),)), 0),
        (Sampling(samplers=("min_p", "top_k")), 0),
    ],
)
def test_top_k_counts_only_where_it_comes_first(row: Row, sampling: Sampling, top_k: int) -> None:
    chain = row.chain(sampling)
    assert chain.top_k == top_k
    chain.close()


@pytest.mark.parametrize("num_tokens", [40, 768, 20_000, 151_936])
@pytest.mark.parametrize("left_out", ["none", "few", "some", "most", "all but one", "the last word", "the first half"])
def test_exactly_the_allowed_tokens_are_filled_in(num_tokens: int, left_out: str) -> None:
    numbers = random.Random(num_tokens)
    tokens = list(range(num_tokens))
    closed = {
        "none": [],
        "few": numbers.sample(tokens, 7),
        "some": numbers.sample(tokens, num_tokens // 3),
        "most": numbers.sample(tokens, num_tokens - num_tokens // 30 - 1),
        "all but one": tokens[:3] + tokens[4:],
        "the last word": tokens[num_tokens // 32 * 32 - 8 :],
        "the first half": tokens[: num_tokens // 2],
    }[left_out]
    allowed = all_tokens(num_tokens) & ~words_of(closed, num_tokens)
    logits = np.random.default_rng(1).normal(size=num_tokens).astype(np.float32)
    candidates = Candidates(num_tokens)
    candidates.fill(logits[::-1].copy())  # what a row before left there
    size = candidates.fill(logits, allowed)
    filled = candidates._data[:size]
    assert sorted(filled["id"].tolist()) == sorted(set(tokens) - set(closed))
    assert np.array_equal(filled["logit"], logits[filled["id"]])


def test_the_ways_to_fill_in_are_all_tested() -> None:
    """Word by word, all bits at once, and all but a few."""
    assert 768 // 32 < MAX_SPARSE_WORDS < 20_000 // 32
    assert 1 - 1 / 3 < MOST < 1 - 7 / 20_000


def test_a_set_of_another_length_is_of_the_tokens_that_are_there() -> None:
    candidates = Candidates(100)
    logits = np.zeros(100, np.float32)
    assert candidates.fill(logits, np.full(8, 0xFFFFFFFF, np.uint32)) == 100
    assert candidates.fill(logits, np.full(2, 0xFFFFFFFF, np.uint32)) == 64
    assert candidates.fill(logits, np.zeros(4, np.uint32)) == 0


@pytest.mark.parametrize("name", [name for name in EVERY_KIND if name != "infill"])
@pytest.mark.parametrize("num_allowed", [1, 3, 200, 700])
def test_nothing_but_what_the_mask_allows_is_drawn(row: Row, name: str, num_allowed: int) -> None:
    tokens = random.Random(num_allowed).sample(range(row.vocab.num_tokens), num_allowed)
    mask = Allowing(words_of(tokens, row.vocab.num_tokens))
    sampling = EVERY_KIND[name]
    chain = row.chain(sampling, masked=True)
    chain.accept_prompt(row.prompt)
    sampler = row.tools.sampler(row.request(sampling, mask), chain)
    assert sampler is not None
    drawn = [sampler.pick(row.context, row.number, []) for _ in range(30)]
    assert set(drawn) <= set(tokens)
    assert mask.accepted == drawn
    chain.close()


def test_random_settings_never_bring_anything_down(row: Row) -> None:
    """Every stage in any order, on any number of candidates."""
    dice = random.Random(11)
    names: list[SamplerName] = [*ORDER, "adaptive_p"]
    num_drawn = 0
    for seed in range(150):
        sampling = Sampling(
            seed=seed,
            temperature=dice.choice([0.0, 1e-30, 0.5, 2.0]),
            dynatemp_range=dice.choice([0.0, 1.0, 2.0]),
            top_k=dice.choice([-1, 0, 1, 200, 2**31 - 1]),
            top_p=dice.choice([0.0, 0.5, 1.0]),
            min_p=dice.choice([0.0, 0.5, 1.0]),
            typical_p=dice.choice([0.0, 0.5, 1.0]),
            top_n_sigma=dice.choice([-1.0, 0.01, 100.0]),
            xtc_probability=dice.choice([0.0, 1.0]),
            xtc_threshold=dice.choice([0.0, 0.1, 0.5]),
            repeat_penalty=dice.choice([0.01, 1.0, 10.0]),
            frequency_penalty=dice.choice([-2.0, 0.0, 2.0]),
            repeat_last_n=dice.choice([-1, 0, 1, 2**31 - 1]),
            dry_multiplier=dice.choice([0.0, 100.0]),
            dry_base=dice.choice([0.0, 10.0]),
            dry_allowed_length=dice.choice([0, 2, 2**31 - 1]),
            dry_penalty_last_n=dice.choice([-1, 1, 2**31 - 1]),
            mirostat=dice.choice([0, 0, 0, 1, 2]),
            mirostat_tau=dice.choice([0.0, 5.0, 100.0]),
            mirostat_eta=dice.choice([0.0, 1.0]),
            adaptive_target=dice.choice([-1.0, 0.0, 1.0]),
            min_keep=dice.choice([0, 3, 2**31 - 1]),
            samplers=tuple(dice.choices(names, k=dice.randrange(12))),
            logit_bias=tuple((dice.randrange(768), dice.choice([None, -100.0, 100.0])) for _ in range(5)),
        )
        tokens = dice.sample(range(row.vocab.num_tokens), dice.choice([5, 10, 300, 768]))
        mask = Allowing(words_of(tokens, row.vocab.num_tokens)) if dice.random() < 0.7 else None
        chain = row.chain(sampling, masked=mask is not None)
        chain.accept_prompt(row.prompt)
        sampler = row.tools.sampler(row.request(sampling, mask, n_probs=3), chain)
        assert sampler is not None
        drawn: list[int] = []
        with suppress(CallFailed):  # where the bias rules out all that the mask leaves
            drawn = [sampler.pick(row.context, row.number, []) for _ in range(3)]
        chain.close()
        num_drawn += len(drawn)
        assert all(mask is None or mask.permits(token) for token in drawn)
    assert num_drawn > 300


def test_a_token_that_is_ruled_out_is_not_drawn_because_a_mask_allows_it(row: Row) -> None:
    best = int(row.logits.argmax())
    other = 5 if best != 5 else 6
    mask = Allowing(words_of([best, other], row.vocab.num_tokens))
    for sampling, banned in (
        (Sampling(temperature=0, logit_bias=((best, None),)), ()),
        (Sampling(temperature=0), (best,)),
        (Sampling(temperature=0, logit_bias=((best, -100.0),)), ()),
    ):
        chain = row.chain(sampling, masked=True, banned=banned)
        sampler = row.tools.sampler(row.request(sampling, mask), chain)
        assert sampler is not None
        assert sampler.pick(row.context, row.number, []) == other
        chain.close()


def test_nothing_left_is_the_callers_error(row: Row) -> None:
    mask = Allowing(words_of([5], row.vocab.num_tokens))
    sampling = Sampling(logit_bias=((5, None),))
    chain = row.chain(sampling, masked=True)
    sampler = row.tools.sampler(row.request(sampling, mask), chain)
    assert sampler is not None
    with pytest.raises(CallFailed, match="allows only tokens that `logit_bias`") as caught:
        sampler.pick(row.context, row.number, [])
    assert caught.value.failure.code is FailureCode.INVALID_REQUEST
    assert mask.accepted == []
    chain.close()


def test_plain_calls_need_no_sampler_of_their_own(row: Row) -> None:
    chain = row.chain(Sampling())
    assert row.tools.sampler(row.request(Sampling()), chain) is None
    chain.close()


def test_slow_samplers_are_drawn_apart_and_say_the_same(row: Row) -> None:
    sampling = EVERY_KIND["typical"]
    chain = row.chain(sampling)
    sampler = row.tools.sampler(row.request(sampling), chain)
    assert chain.slow
    assert sampler is not None
    alone = row.chain(sampling)
    drawn = [sampler.pick(row.context, row.number, []) for _ in range(10)]
    assert drawn == [row.context.sample(alone.pointer, row.number) for _ in range(10)]
    chain.close()
    alone.close()


@pytest.mark.parametrize("sampling", [Sampling(seed=3), Sampling(temperature=0), Sampling(seed=3, mirostat=2)])
def test_asking_for_probabilities_or_a_mask_that_allows_all_changes_no_token(row: Row, sampling: Sampling) -> None:
    answers = set()
    for n_probs, mask in itertools.product((0, 3), (None, Allowing(None))):
        chain = row.chain(sampling, masked=mask is not None)
        sampler = row.tools.sampler(row.request(sampling, mask, n_probs), chain)
        events: list[CallEvent] = []
        draw = sampler.pick if sampler else lambda context, number, _: context.sample(chain.pointer, number)  # noqa: B023
        answers.add(tuple(draw(row.context, row.number, events) for _ in range(10)))
        assert len(events) == (10 if n_probs else 0)
        chain.close()
    assert len(answers) == 1


def test_probabilities_name_control_tokens(row: Row) -> None:
    sampling = Sampling(temperature=0, logit_bias=((row.vocab.eos, 100.0),))
    chain = row.chain(sampling)
    sampler = row.tools.sampler(row.request(sampling, n_probs=-1), chain)
    assert sampler is not None
    events: list[CallEvent] = []
    assert sampler.pick(row.context, row.number, events) == row.vocab.eos
    [event] = events
    assert isinstance(event, Logprobs)
    assert event.chosen.piece == row.vocab.text(row.vocab.eos).encode() != b""
    assert event.top == ()
    assert event.chosen.logprob < 0
    chain.close()


@pytest.mark.parametrize("token", [-1, 768, 2**31 - 1])
def test_a_bias_for_no_token_is_refused(row: Row, token: int) -> None:
    with pytest.raises(CallFailed, match=f"there is no token {token}; this model's are 0 to 767"):
        row.chain(Sampling(logit_bias=((token, 1.0),)))


def test_infill_needs_a_bound(row: Row) -> None:
    for sampling in (
        Sampling(samplers=("infill",)),
        Sampling(samplers=("infill", "top_k")),
        Sampling(samplers=("top_k", "infill"), top_k=0),
        Sampling(samplers=("top_k", "infill"), top_k=257),
    ):
        with pytest.raises(CallFailed, match="`infill` needs `top_k` before it, at most 256"):
            row.chain(sampling)


def test_only_as_much_of_the_prompt_is_accepted_as_is_remembered(row: Row) -> None:
    """Token 9 was said long ago: penalties that look back far enough keep it from coming, others do not."""
    far_away = [9] + [10] * 60
    for last_n, comes in ((60, True), (61, False), (-1, False), (2**31 - 1, False)):
        sampling = Sampling(
            temperature=0, presence_penalty=2.0, repeat_penalty=10.0, repeat_last_n=last_n, logit_bias=((9, 60.0),)
        )
        chain = row.chain(sampling)
        chain.accept_prompt(np.array(far_away, dtype=np.int32))
        assert (row.context.sample(chain.pointer, row.number) == 9) is comes, last_n
        chain.close()


def test_kept_dry_stages_are_like_new_ones_and_few(row: Row) -> None:
    kept = DryStages(row.vocab)
    sampling = Sampling(temperature=0, dry_multiplier=5.0, dry_allowed_length=1)
    repeated = [5, 6, 7, 8] * 4 + [5, 6, 7]
    answers = []
    for dry in (None, kept, kept):
        chain = SamplerChain(row.vocab, sampling, n_ctx=N_CTX, dry=dry)
        chain.accept_prompt(repeated)
        answers.append([row.context.sample(chain.pointer, row.number) for _ in range(12)])
        chain.close()
    assert answers[0] == answers[1] == answers[2]
    for number in range(MAX_KEPT + 5):
        SamplerChain(row.vocab, Sampling(dry_multiplier=1.0 + number), n_ctx=N_CTX, dry=kept).close()
    assert len(kept._kept) == MAX_KEPT
    kept.close()
    assert not kept._kept


def test_breakers_that_stand_in_most_tokens_are_refused(row: Row) -> None:
    """llama.cpp keeps each token for each of them: sixteen letters took 19 MiB a call of a vocabulary of 150,000."""
    kept = DryStages(row.vocab)
    letters = Sampling(dry_multiplier=1.0, dry_sequence_breakers=tuple("etaoinshrdlucmfw"))
    with pytest.raises(CallFailed, match="leave out single letters and spaces"):
        SamplerChain(row.vocab, letters, n_ctx=N_CTX, dry=kept)
    for breakers in (("\n", ":", '"', "*"), ("\n\n", "User:", "<|im_start|>", " "), ()):
        sampling = Sampling(dry_multiplier=1.0, dry_sequence_breakers=breakers)
        SamplerChain(row.vocab, sampling, n_ctx=N_CTX, dry=kept).close()
    kept.close()


def test_a_chain_whose_last_stage_is_refused_is_freed(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its penalties hold 4 bytes for each token of the context: 500 kB a refused call at 131,072 tokens."""
    chains: list[int] = []
    freed: list[int] = []
    make, functions = c.llama_sampler_chain_init, gil_calls()

    def making(params: Any) -> int:
        chains.append(make(params))
        return chains[-1]

    def freeing(pointer: int) -> None:
        freed.append(pointer)
        functions.sampler_free(pointer)

    monkeypatch.setattr(c, "llama_sampler_chain_init", making)
    monkeypatch.setattr("workers.llama.sampling.samplers.gil_calls", lambda: replace(functions, sampler_free=freeing))
    kept = DryStages(row.vocab)
    refused = Sampling(
        repeat_penalty=1.1,
        repeat_last_n=-1,
        dry_multiplier=1.0,
        dry_sequence_breakers=tuple("etaoinshrdlucmfw"),
        samplers=("penalties", "dry"),
        logit_bias=((9, 1.0),),
    )
    for _ in range(8):
        with pytest.raises(CallFailed, match="leave out single letters"):
            SamplerChain(row.vocab, refused, n_ctx=N_CTX, dry=kept)
    assert len(chains) == 8
    assert freed == chains
    kept.close()


def test_special_pieces_are_what_a_template_writes(demo: Model) -> None:
    vocab = demo.vocab
    for token in range(vocab.num_tokens):
        assert vocab.special_piece(token).decode("utf-8", "replace") == vocab.text(token)
    assert vocab.piece(vocab.eos) == b""


def test_control_tokens_are_written_where_the_call_says_so(row: Row) -> None:
    silent = [
        token for token in range(row.vocab.num_tokens) if not row.vocab.piece(token) and token not in row.vocab.eog
    ]
    request = changed(row.request(Sampling()), written={silent[0]: b"[MARK]"})
    sequence = Sequence(request, row.chain(Sampling()), row.vocab, N_CTX)
    events: list[CallEvent] = []
    for token in silent[:2]:
        sequence.accept(token, events)
    assert [event.text for event in events if isinstance(event, Text)] == ["[MARK]"]


@pytest.mark.parametrize("name", NO_PROBABILITIES)
def test_what_is_no_probability_ends_its_call_only(row: Row, name: str) -> None:
    """JSON says null in its place: a gateway could not read the step, and ended the calls of all teams there."""
    request = row.request(NO_PROBABILITIES[name], n_probs=2)
    for post in (True, False):
        chain = row.chain(NO_PROBABILITIES[name])
        sampler = row.tools.sampler(changed(request, post_sampling_probs=post), chain)
        assert sampler is not None
        events: list[CallEvent] = []
        if post:
            with pytest.raises(CallFailed, match="post_sampling_probs") as caught:
                sampler.pick(row.context, row.number, events)
            assert caught.value.failure.code is FailureCode.INVALID_REQUEST
        else:
            sampler.pick(row.context, row.number, events)
            assert decode_step(encode_step(events)) == events
        chain.close()
