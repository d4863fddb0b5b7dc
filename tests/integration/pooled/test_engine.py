"""Who is served when, what is refused and why, and that nothing is left behind."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest

from tests.integration.pooled.bench import PooledBench, running, settings
from workers.engine.pooled.engine import PooledRequest
from workers.engine.pooled.input_checks import MAX_RESULT_BYTES
from workers.engine.request import IntegrityError
from workers.engine.step.shares import MIN_OVERDRAFT
from workers.llama.model import Model
from workers.llama.native import ModelError
from workers.llama.pooling import PooledInputs, Pooling, is_pooled, pooling_of
from workers.models.spec import LlamaSettings
from workers.protocol.events import CallFailed, Failure, FailureCode


def refusal(bench: PooledBench, *inputs: list[int]) -> Failure:
    with pytest.raises(CallFailed) as caught:
        bench.submit(inputs)
    return caught.value.failure


def test_a_short_call_does_not_wait_for_a_huge_one(demo: Model) -> None:
    with running(demo, settings("mean", n_ubatch=128), start=False) as bench:
        huge = bench.submit([[300] * 200] * 300)
        short = [bench.submit([[301] * 20, [302]]) for _ in range(3)]
        bench.engine.start()
        for key in short:
            bench.outcome(key)
        assert bench.ended == short
        bench.engine.check_integrity()  # while the huge one holds cells
        bench.engine.cancel(huge)
        assert len(bench.vectors([[300]])) == 1
        assert huge not in bench.ended


def test_one_team_with_many_huge_calls_leaves_another_its_turn(demo: Model) -> None:
    """All slots and more are red's: blue's call of 40 inputs takes twice the steps that it takes alone, and a few."""
    with running(demo, settings("mean", n_ubatch=128), slots=2, start=False) as bench:
        assert bench.engine.load().overdraft == MIN_OVERDRAFT, "gateways may place it beyond the slots"
        red = [bench.submit([[300] * 100] * 200, team="red") for _ in range(6)]
        blue = bench.submit([[301] * 100] * 40, team="blue")
        steps: list[int] = []
        bench.on_end = lambda key: steps.append(bench.engine.counters.num_decodes)
        bench.engine.start()
        bench.outcome(blue)
        assert bench.ended == [blue]
        alone = 40 * 100 / 128
        assert steps[0] <= 2 * alone + 6, steps
        for key in red:
            bench.engine.cancel(key)
        late = bench.submit([[302]], team="green")
        bench.outcome(late)


@pytest.mark.serial
def test_taking_millions_of_tokens_in_holds_the_loop_for_a_moment(demo: Model) -> None:
    """8 million, as lists, held a worker's event loop for half a second, once they were tokenised."""
    with running(demo, settings("mean"), n_ctx=2048, kv_tokens=2048, start=False) as bench:
        texts = [bench.inputs.of_text("word " * 900)] * 500
        lists = [list(tokens) for tokens in texts]
        began = time.process_time()
        assert min(map(min, lists)) <= max(map(max, lists))
        looked = time.process_time()
        bench.submit(texts)
        assert time.process_time() - looked < (looked - began) / 2


def test_calls_that_come_while_others_run_are_level_with_them(demo: Model) -> None:
    with running(demo, settings("mean", n_ubatch=64), start=False) as bench:
        first, second = bench.submit([[300] * 60] * 40), bench.submit([[300] * 60] * 20)
        late: list[int] = []
        bench.on_end = lambda key: late.append(bench.submit([[301]])) if key == second else None
        bench.engine.start()
        bench.outcome(first)
        bench.outcome(late[0])
        assert bench.ended == [second, late[0], first]


def test_longest_inputs_take_turns_for_the_cells(demo: Model) -> None:
    with running(demo, settings("last", n_ubatch=64), kv_tokens=512, start=False) as bench:
        keys = [bench.submit([[300 + number] * 400, [300 + number] * 300]) for number in range(3)]
        bench.engine.start()
        answers = [bench.outcome(key) for key in keys]
        for number, answer in enumerate(answers):
            assert not isinstance(answer, Failure)
            again = bench.vectors([[300 + number] * 400])
            assert abs(again[0] - answer[0]).max() < 0.01


def test_a_cancelled_call_is_told_nothing_and_holds_nothing(demo: Model) -> None:
    with running(demo, settings("mean", n_ubatch=64)) as bench:
        key = bench.submit([[300] * 500] * 100)
        bench.engine.cancel(key)
        bench.engine.cancel(999)
        bench.vectors([[300]])
        bench.engine.check_integrity()
        load = bench.engine.load()
        assert (load.slots_busy, load.waiting, load.kv_tokens_used) == (0, 0, 0)
        assert key not in bench.ended


def test_an_encoder_needs_no_cells(bert: Model) -> None:
    with running(bert, settings(), slots=2, start=False) as bench:
        for _ in range(13):
            bench.submit([[300]])
        load = bench.engine.load()
        assert (load.slots, load.slots_busy, load.waiting) == (2, 2, 11)
        assert (load.kv_tokens, load.kv_tokens_used) == (0, 0)
        bench.submit([[300]])
        failure = refusal(bench, [300])
        assert failure.code is FailureCode.BUSY
        assert "waiting room for 12" in failure.message
        bench.engine.start()
        bench.outcome(14)
        assert bench.ended == list(range(1, 15))


def test_what_is_refused_says_why(demo: Model) -> None:
    n_vocab = demo.vocab.num_tokens
    with running(demo, settings("none"), n_ctx=400) as bench:
        nothing, empty = refusal(bench), refusal(bench, [300], [])
        strange, negative = refusal(bench, [n_vocab]), refusal(bench, [-1])
        long = refusal(bench, [300], [300] * 401)
        for failure in (nothing, empty, strange, negative):
            assert failure.code is FailureCode.INVALID_REQUEST
        assert "at least one" in nothing.message
        assert "input 1 has no tokens" in empty.message
        assert f"0 to {n_vocab - 1}" in strange.message
        assert "token -1" in negative.message
        assert long.code is FailureCode.CONTEXT_OVERFLOW
        assert "input 1 has 401 tokens" in long.message
        assert "400" in long.message
        assert "--ctx" in long.message
        big = refusal(bench, *[[300] * 400] * (MAX_RESULT_BYTES // (400 * 4 * bench.context.width) + 1))
        assert "fewer inputs" in big.message
        assert f"{MAX_RESULT_BYTES:,}" in big.message


def test_an_encoder_tells_how_to_read_more_at_once(bert: Model) -> None:
    with running(bert, settings(n_ubatch=64)) as bench:
        assert len(bench.vectors([[300] * 64])) == 1
        failure = refusal(bench, [300] * 65)
    assert failure.code is FailureCode.CONTEXT_OVERFLOW
    for part in ("65", "64", "n_ubatch"):
        assert part in failure.message


def test_stopping_ends_what_is_in(bert: Model) -> None:
    with running(bert, settings(), start=False) as bench:
        key = bench.submit([[300]])
        bench.engine.drain()
        assert refusal(bench, [300]).code is FailureCode.DRAINING
        bench.engine.stop()
        outcome = bench.outcome(key)
        assert isinstance(outcome, Failure)
        assert outcome.code is FailureCode.DRAINING


def test_draining_lets_what_is_in_finish(bert: Model) -> None:
    with running(bert, settings()) as bench:
        key = bench.submit([[300] * 512] * 10)
        bench.engine.drain()
        assert not isinstance(bench.outcome(key), Failure)


def test_a_call_is_taken_once(bert: Model) -> None:
    with running(bert, settings(), start=False) as bench:
        bench.engine.submit(PooledRequest(7, [[300]]))
        with pytest.raises(ValueError, match="already"):
            bench.engine.submit(PooledRequest(7, [[300]]))


def test_a_lost_sequence_is_noticed(demo: Model) -> None:
    with running(demo, settings("last"), start=False) as bench:
        batch = bench.context.new_batch()
        batch.add_input(PooledBench.tokens([300, 301]), 0, 3)
        bench.context.compute(batch)
        with pytest.raises(IntegrityError, match="sequence 3"):
            bench.engine.check_integrity()
        assert bench.context.memory is not None
        bench.context.memory.remove(3)


def test_calls_from_many_threads(bert: Model) -> None:
    with running(bert, settings(), slots=64) as bench:
        expected = [bench.vectors([[300 + number]])[0].tobytes() for number in range(16)]
        found: dict[int, bytes] = {}

        def ask(number: int) -> None:
            found[number] = bench.vectors([[300 + number]])[0].tobytes()

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == len(set(expected)) == 16


def test_what_a_model_is_served_for(demo: Model, bert: Model, reranker: Model) -> None:
    auto = LlamaSettings()
    assert [is_pooled(model, auto) for model in (demo, bert, reranker)] == [False, True, True]
    assert is_pooled(demo, LlamaSettings(embeddings=True))
    assert is_pooled(demo, LlamaSettings(pooling="mean"))
    assert not is_pooled(demo, LlamaSettings(embeddings=False))
    with pytest.raises(ModelError, match="embeddings: false"):
        is_pooled(bert, LlamaSettings(embeddings=False))


def test_settings_that_contradict_each_other_are_refused() -> None:
    for text, told in ((b'{"pooling":"average"}', "pooling"), (b'{"pooling":"mean","embeddings":false}', "remove one")):
        with pytest.raises(msgspec.ValidationError, match=told):
            msgspec.json.decode(text, type=LlamaSettings)


def test_which_pooling_a_model_gets(demo: Model, bert: Model, reranker: Model) -> None:
    auto = LlamaSettings()
    pooling = [pooling_of(model, auto) for model in (demo, bert, reranker)]
    assert pooling == [Pooling.LAST, Pooling.CLS, Pooling.RANK]
    assert pooling_of(bert, LlamaSettings(pooling="mean")) is Pooling.MEAN
    assert pooling_of(reranker, LlamaSettings(pooling="none")) is Pooling.NONE
    with pytest.raises(ModelError, match="ranking head"):
        pooling_of(bert, LlamaSettings(pooling="rank"))
    with pytest.raises(ModelError, match="can't rank"):
        PooledInputs(demo, Pooling.RANK, demo)


def test_a_pair_is_put_together_as_the_vocabulary_says(reranker: Model) -> None:
    inputs = PooledInputs(reranker, Pooling.RANK, reranker)
    hello, cat = (reranker.tokenize(text, add_special=False, parse_special=False) for text in ("hello", "a cat [SEP]"))
    assert list(inputs.of_pair("hello", "a cat [SEP]")) == [101, *hello, 102, *cat]
    assert 102 not in cat
