"""What is asked and when: conversations, traces, arrivals."""

from __future__ import annotations

from itertools import islice, pairwise
from math import sqrt
from pathlib import Path
from random import Random
from statistics import mean, median, pstdev

import pytest

from gateway.bench.workload import PRESETS, Conversations, Length, Replay, TraceUnusable, Words, arrivals, read

MOST = 1 << 20


def words() -> Words:
    made = Words(1)
    made.calibrated(1, 1)
    return made


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_conversations_send_their_history_again(name: str) -> None:
    preset = PRESETS[name]
    source = Conversations(preset, words(), MOST, 1)
    turns: dict[str, int] = {}
    for number in range(600):
        prompt = source.next()
        roles = [message["role"] for message in prompt.messages]
        assert roles == ["system", *["user", "assistant"] * ((len(roles) - 2) // 2), "user"]
        if len(roles) > 2:
            assert prompt.messages[-2]["content"].startswith("answer ")
        conversation = prompt.messages[1]["content"]
        turns[conversation] = turns.get(conversation, 0) + 1
        assert turns[conversation] == (len(roles) - 1 + 1) // 2
        source.ended(prompt, f"answer {number}", good=True)
    assert mean(turns.values()) == pytest.approx(preset.turns, rel=0.25)


def test_a_conversation_stays_within_the_context() -> None:
    source = Conversations(PRESETS["agent"], words(), 800, 1)
    for _ in range(300):
        prompt = source.next()
        told = sum(len(message["content"].split()) for message in prompt.messages)
        assert told + prompt.answer_tokens <= 800 + 3 * len(prompt.messages)
        source.ended(prompt, "a " * prompt.answer_tokens, good=True)


def test_the_same_seed_asks_the_same_and_no_two_prompts_begin_alike() -> None:
    def asked(seed: int) -> list[str]:
        source = Conversations(PRESETS["rag"], words(), MOST, seed)
        return [source.next().messages[-1]["content"] for _ in range(50)]

    assert asked(1) == asked(1)
    assert not set(asked(1)) & set(asked(2))
    assert len({text[:20] for text in asked(1)}) == 50


def test_a_failed_call_is_not_gone_on_with() -> None:
    source = Conversations(PRESETS["agent"], words(), MOST, 1)
    for _ in range(50):
        prompt = source.next()
        assert len(prompt.messages) == 2
        source.ended(prompt, "half", good=False)


def test_lengths_have_their_median() -> None:
    drawn = [Length(200, 0.7).draw(Random(number)) for number in range(2_000)]
    assert median(drawn) == pytest.approx(200, rel=0.1)
    assert mean(drawn) == pytest.approx(200 * 2.718 ** (0.7**2 / 2), rel=0.1)


@pytest.mark.parametrize("variation", [0.0, 0.5, 1.0, 3.0])
def test_arrivals_have_their_rate_and_variation(variation: float) -> None:
    times = list(islice(arrivals(20.0, variation, Random(1)), 20_000))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert mean(gaps) == pytest.approx(0.05, rel=0.06)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(variation, rel=0.08, abs=1e-6)
    assert len(times) / times[-1] == pytest.approx(20.0, rel=0.03 * sqrt(1 + variation))


MOONCAKE = """{"timestamp": 2000, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 2500, "input_length": 1400, "output_length": 7, "hash_ids": [0, 1, 2]}
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,1000,5
2023-11-16 18:17:04.4799600,1400,7
"""
BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,1000,5,1005,Conversation log
5.2,ChatGPT,70,0,70,Conversation log
5.5,GPT-4,1400,7,1407,Conversation log
"""


@pytest.mark.parametrize("text", [MOONCAKE, AZURE, BURST_GPT])
def test_traces_in_their_formats(tmp_path: Path, text: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    calls = read(file)
    assert [(call.at_s, call.prompt, call.answer) for call in calls] == [
        (0.0, 1000, 5),
        (pytest.approx(0.5, abs=1e-5), 1400, 7),
    ]
    replay = Replay(calls, words(), 0.5, MOST, 1)
    first, second = replay.next(), replay.next()
    assert first is not None
    assert second is not None
    assert replay.next() is None
    texts = [prompt.messages[0]["content"].split() for prompt in (first, second)]
    assert [len(text) for text in texts] == [pytest.approx(500, rel=0.05), pytest.approx(700, rel=0.05)]
    assert second.answer_tokens == 4
    shared = next((at for at, (one, other) in enumerate(zip(*texts, strict=False)) if one != other), 500)
    assert shared == (pytest.approx(500, rel=0.05) if text is MOONCAKE else pytest.approx(0, abs=3))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no call"),
        ("a,b\n1,2\n", "no column is called timestamp; there are a, b"),
        ("timestamp,input_tokens,output_tokens\nx,1,1\n", "Invalid isoformat string: 'x'"),
        ('{"timestamp": "x"}', "Expected `float`"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(TraceUnusable) as raised:
        read(file)
    assert str(raised.value).startswith(f"--trace: {file}: ")
    assert words in str(raised.value) or not text
