"""When an answer may end, and at which tokens it must: `min_tokens`, `stop_tokens`, beside everything that draws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.integration.engine.listener import GREEDY, Bench, changed, running
from workers.engine.request import EngineRequest
from workers.llama.model import Model
from workers.protocol.events import CallFailed, FailureCode, FinishReason
from workers.protocol.requests import Sampling

PROMPT = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
"""Answered with one sentence."""


@pytest.fixture
def bench(demo: Model) -> Iterator[Bench]:
    with running(demo) as one:
        yield one


def asked(bench: Bench, max_tokens: int | None = 120, sampling: Sampling = GREEDY, **more: Any) -> EngineRequest:
    return changed(bench.request(PROMPT, max_tokens, sampling=sampling), **{"tell": ("tokens",), **more})


def told(bench: Bench, request: EngineRequest) -> tuple[list[int], FinishReason, str]:
    """Return its tokens, why it ended, and its text."""
    key = bench.submit(request)
    bench.wait(key)
    tokens = [token for event in bench.heard.calls[key] for token in getattr(event, "tokens", ())]
    return tokens, bench.heard.finished(key).reason, bench.heard.text(key)


class Digits:
    """A mask of digits, after which the answer may end at any time, and must after `most` tokens."""

    def __init__(self, bench: Bench, most: int) -> None:
        vocab = bench.model.vocab
        self._ends = vocab.eog
        self._digits = {token for token in range(vocab.num_tokens) if vocab.piece(token).isdigit()}
        self._size = vocab.num_tokens
        self._left = most

    @property
    def is_done(self) -> bool:
        return False

    def forced(self) -> tuple[int, ...]:
        return ()

    def permits(self, token: int) -> bool:
        return token in self._ends or (self._left > 0 and token in self._digits)

    def allowed(self) -> Any:
        words = np.zeros((self._size + 31) // 32, dtype=np.uint32)
        for token in range(self._size):
            if self.permits(token):
                words[token // 32] |= np.uint32(1 << token % 32)
        return words

    def accept(self, token: int) -> None:
        self._left -= 1


def test_the_answer_is_as_long_as_it_must_be(bench: Bench) -> None:
    plain, reason, _ = told(bench, asked(bench))
    assert reason is FinishReason.STOP
    assert plain[-1] in bench.model.vocab.eog
    num_plain = len(plain)
    longer, reason, _ = told(bench, asked(bench, min_tokens=num_plain + 20))
    assert len(longer) > num_plain + 20 or (len(longer) == 120 and reason is FinishReason.LENGTH)
    assert not bench.model.vocab.eog & set(longer[: num_plain + 20])
    assert longer[: num_plain - 1] == plain[:-1], "until it would have ended, it says the same"


def test_one_that_is_long_enough_by_itself_is_the_same(bench: Bench) -> None:
    assert told(bench, asked(bench, min_tokens=2)) == told(bench, asked(bench))
    sampled = Sampling(seed=7, temperature=0.9)
    assert told(bench, asked(bench, 8, sampled, min_tokens=2)) == told(bench, asked(bench, 8, sampled))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=3, temperature=1.5, repeat_penalty=1.3, presence_penalty=0.5),
        Sampling(seed=3, dry_multiplier=1.0, dry_allowed_length=1),
        Sampling(seed=3, mirostat=2),
        Sampling(seed=3, temperature=2.0, top_k=0, typical_p=0.5),
    ],
    ids=["penalties", "dry", "mirostat", "typical"],
)
def test_beside_every_sampler(bench: Bench, sampling: Sampling) -> None:
    longer, _, _ = told(bench, asked(bench, 80, sampling, min_tokens=60))
    assert len(longer) >= 60
    assert not bench.model.vocab.eog & set(longer[:60])


def test_a_bias_for_the_end_waits_as_well(bench: Bench) -> None:
    eager = Sampling(temperature=0, logit_bias=((bench.model.vocab.eos, 100.0),))
    assert len(told(bench, asked(bench, sampling=eager))[0]) == 1
    tokens, reason, _ = told(bench, asked(bench, sampling=eager, min_tokens=9))
    assert (len(tokens), reason) == (10, FinishReason.STOP), "it ends with the first token that may end it"
    ruled_out = Sampling(temperature=0, logit_bias=((tokens[0], None),))
    assert told(bench, asked(bench, 9, ruled_out, min_tokens=9))[0][0] != tokens[0]


def test_with_probabilities_and_times(bench: Bench) -> None:
    wanted = told(bench, asked(bench, 60, min_tokens=60))
    for more in ({"n_probs": 3}, {"n_probs": 3, "post_sampling_probs": True}, {"tell": ("tokens", "timings")}):
        assert told(bench, asked(bench, 60, min_tokens=60, **more)) == wanted


def test_a_form_is_kept_to_and_ends_the_answer_when_it_is_complete(bench: Bench) -> None:
    end = Sampling(temperature=0, logit_bias=((bench.model.vocab.eos, 100.0),))
    tokens, reason, text = told(bench, asked(bench, sampling=end, min_tokens=12, mask=Digits(bench, 40)))
    assert (len(tokens), reason) == (13, FinishReason.STOP)
    assert text.isdigit()
    tokens, reason, text = told(bench, asked(bench, sampling=end, min_tokens=12, mask=Digits(bench, 5)))
    assert (len(tokens), reason) == (6, FinishReason.STOP), "nothing but the end may follow"
    assert text.isdigit()


def test_without_end_tokens_it_goes_on(bench: Bench) -> None:
    tokens, reason, _ = told(bench, asked(bench, 120, ignore_eos=True, min_tokens=10))
    assert (len(tokens), reason) == (120, FinishReason.LENGTH)
    assert not bench.model.vocab.eog & set(tokens)


def test_an_answer_ends_at_a_stop_token_and_does_not_say_it(bench: Bench) -> None:
    plain, _, text = told(bench, asked(bench))
    stop = plain[6]
    first = plain.index(stop)
    tokens, reason, said = told(bench, asked(bench, stop_tokens=(stop, 5)))
    assert (tokens, reason) == (plain[: first + 1], FinishReason.STOP)
    assert text.startswith(said)
    assert said == bench.model.vocab.join(plain[:first]).decode()
    assert told(bench, asked(bench, stop_tokens=(stop,), special=True))[2] == said


def test_stop_tokens_wait_for_the_fewest_tokens(bench: Bench) -> None:
    plain, _, _ = told(bench, asked(bench))
    stop = plain[3]
    tokens, _, _ = told(bench, asked(bench, stop_tokens=(stop,), min_tokens=30))
    assert stop not in tokens[:30]
    assert len(tokens) >= 30


def test_an_end_token_that_is_named_counts_though_others_do_not(bench: Bench) -> None:
    eos = bench.model.vocab.eos
    plain = told(bench, asked(bench))
    assert told(bench, asked(bench, ignore_eos=True, stop_tokens=(eos,))) == plain


def test_a_stop_token_that_is_none_is_refused(bench: Bench) -> None:
    with pytest.raises(CallFailed, match=r"`stop_token_ids.1`: there is no token 768") as caught:
        bench.submit(asked(bench, stop_tokens=(1, 768)))
    assert caught.value.failure.code is FailureCode.INVALID_REQUEST
