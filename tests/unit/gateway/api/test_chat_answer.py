"""Writing OpenAI's chat dialect: order and shape of chunks, and whole objects."""

from __future__ import annotations

import json
import math
import tracemalloc
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.api.openai import chat
from gateway.api.openai.bodies import StreamUsageOptions
from gateway.api.openai.chat import WholeWriter
from gateway.api.openai.requests import ChatRequest
from gateway.api.openai.writing import ChunkWriter
from gateway.call import Call, Principal
from gateway.errors import WorkerLost
from gateway.telemetry.request_log import RequestLog
from tests.support.openai_schema import check
from tests.support.request_logs import placed_log
from workers.protocol.events import (
    CallEvent,
    Finished,
    FinishReason,
    Logprobs,
    Progress,
    Reasoning,
    Settings,
    Started,
    Text,
    Timings,
    TimingsSoFar,
    TokenLogprob,
    Tokens,
    ToolCallDelta,
    Usage,
)
from workers.protocol.requests import GenerateRequest, Sampling, Speculation

TIMINGS = Timings(cache_n=3, prompt_n=4, prompt_ms=8.0, predicted_n=2, predicted_ms=10.0)
END = Finished(1, FinishReason.STOP, Usage(7, 2, 3), TIMINGS)
TOOLS: list[CallEvent] = [
    ToolCallDelta(1, 0, "call_a", "add", ""),
    ToolCallDelta(1, 0, "", "", '{"a":'),
    ToolCallDelta(1, 1, "call_b", "sub", "{}"),
    ToolCallDelta(1, 0, "", "", "1}"),
    Finished(1, FinishReason.TOOL_CALLS, Usage(7, 2, 3), TIMINGS),
]


def probs(piece: bytes, logprob: float) -> Logprobs:
    one = TokenLogprob(len(piece), piece, logprob)
    return Logprobs(1, one, (one, TokenLogprob(99, b"\xe2", -3.5)))


PROBS: list[CallEvent] = [
    probs(b"H\xc3", -0.5),
    probs(b"\xa9", -0.25),
    Text(1, "Hé", 2),
    probs(b"!", -0.125),
    Text(1, "!"),
    probs(b"<end>", -1.0),
    END,
]


CALL = Call("r", Principal("k", "team", None, admin=False), "alias", "model", 0.0, 1.0, 1.0)


def request_log() -> RequestLog:
    return placed_log(fingerprint="fp_1")


def asked(
    *,
    include_usage: bool = False,
    n: int = 1,
    n_probs: int = 0,
    post_sampling: bool = False,
    stream: bool = True,
    as_function: bool = False,
) -> ChatRequest:
    request = GenerateRequest(n_probs=n_probs, post_sampling_probs=post_sampling)
    return ChatRequest("alias", (request,) * n, stream, StreamUsageOptions(at_end=include_usage), as_function)


def chunk_writer(*, include_usage: bool = False, n: int = 1) -> ChunkWriter:
    return chat.chunk_writer(asked(include_usage=include_usage, n=n), CALL, request_log())


def whole_writer(*, n: int = 1, n_probs: int = 0, post_sampling: bool = False) -> WholeWriter:
    return WholeWriter(asked(n=n, n_probs=n_probs, post_sampling=post_sampling, stream=False), CALL, request_log())


def chunks(writer: ChunkWriter, *steps: list[CallEvent]) -> list[dict[str, Any]]:
    raw = writer.opening() + b"".join(writer.chunks(step, 0) for step in steps) + writer.closing()
    blocks = raw.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    del blocks[-2:]
    assert all(block.startswith("data: ") for block in blocks)
    return [json.loads(block[6:]) for block in blocks]


def test_chunks_in_order() -> None:
    writer = chunk_writer()
    said = chunks(writer, [Started(1, 0, 7, 3)], [Text(1, "Hé")], [Text(1, '"\n'), Text(1, "\u2028😀"), END])
    assert [chunk["choices"][0]["delta"] for chunk in said] == [
        {"role": "assistant", "content": ""},
        {"content": "Hé"},
        {"content": '"\n'},
        {"content": "\u2028😀"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in said] == [None] * 4 + ["stop"]
    assert len({chunk["id"] for chunk in said}) == 1
    assert said[0]["model"] == "alias"
    assert all("usage" not in chunk for chunk in said)
    assert said[-1]["timings"] == {
        "cache_n": 3,
        "prompt_n": 4,
        "prompt_ms": 8.0,
        "prompt_per_token_ms": 2.0,
        "prompt_per_second": 500.0,
        "predicted_n": 2,
        "predicted_ms": 10.0,
        "predicted_per_token_ms": 10.0,
        "predicted_per_second": 100.0,
    }
    for chunk in said:
        check("CreateChatCompletionStreamResponse", chunk)


def test_usage_comes_last_with_no_choices() -> None:
    said = chunks(chunk_writer(include_usage=True), [Text(1, "a")], [END])
    assert [chunk["usage"] for chunk in said[:-1]] == [None] * 3
    assert said[-1]["choices"] == []
    assert said[-1]["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert "timings" in said[-1]
    assert "timings" not in said[-2]
    for chunk in said:
        check("CreateChatCompletionStreamResponse", chunk)


def test_tool_calls_in_a_stream() -> None:
    said = chunks(chunk_writer(), *([event] for event in TOOLS))
    deltas = [chunk["choices"][0]["delta"]["tool_calls"][0] for chunk in said[1:-1]]
    first = {"index": 0, "id": "call_a", "type": "function", "function": {"name": "add", "arguments": ""}}
    assert deltas[0] == first
    assert deltas[1] == {"index": 0, "function": {"arguments": '{"a":'}}
    assert [delta["index"] for delta in deltas] == [0, 0, 1, 0]
    assert said[-1]["choices"][0]["finish_reason"] == "tool_calls"
    for chunk in said:
        check("CreateChatCompletionStreamResponse", chunk)


def test_a_broken_answer_says_why_and_ends() -> None:
    blocks = chunk_writer().broken(WorkerLost("gone")).decode().split("\n\n")
    assert json.loads(blocks[0].removeprefix("data: "))["error"]["message"] == "gone"
    assert blocks[1:] == ["data: [DONE]", ""]


def test_thought_is_told_apart() -> None:
    said = chunks(chunk_writer(), [Reasoning(1, "hm")], [Text(1, "a"), END])
    assert [chunk["choices"][0]["delta"] for chunk in said[1:3]] == [{"reasoning_content": "hm"}, {"content": "a"}]
    writer = whole_writer()
    writer.add([Reasoning(1, "h"), Reasoning(1, "m"), Text(1, "a"), END], 0)
    message = json.loads(b"".join(writer.parts()))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "a")
    for chunk in said:
        check("CreateChatCompletionStreamResponse", chunk)


def test_several_answers_are_told_apart() -> None:
    writer = chunk_writer(include_usage=True, n=2)
    raw = writer.opening() + writer.chunks([Text(7, "b")], 1) + writer.chunks([Text(6, "a"), END], 0)
    raw += writer.chunks([END], 1) + writer.closing()
    said = [json.loads(block[6:]) for block in raw.decode().split("\n\n")[:-2]]
    told = [(chunk["choices"][0]["index"], chunk["choices"][0]["delta"]) for chunk in said[2:-1]]
    assert told == [(1, {"content": "b"}), (0, {"content": "a"}), (0, {}), (1, {})]
    assert said[-1]["usage"]["prompt_tokens"] == 7, "the prompt counts once"
    assert said[-1]["usage"]["completion_tokens"] == 4
    whole = whole_writer(n=2)
    whole.add([Text(6, "a"), END], 1)
    whole.add([Text(7, "b"), END], 0)
    body = json.loads(b"".join(whole.parts()))
    assert [(choice["index"], choice["message"]["content"]) for choice in body["choices"]] == [(0, "b"), (1, "a")]
    assert all("timings" in choice for choice in body["choices"]), "each has its own"
    check("CreateChatCompletionResponse", body)


def test_a_whole_answer() -> None:
    writer = whole_writer()
    writer.add([Started(1, 0, 7, 3), Text(1, "a")], 0)
    writer.add([Text(1, "b"), END], 0)
    body = json.loads(b"".join(writer.parts()))
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "ab", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["total_tokens"] == 9
    assert body["timings"]["predicted_per_second"] == 100.0
    check("CreateChatCompletionResponse", body)


def test_a_whole_answer_with_tool_calls() -> None:
    writer = whole_writer()
    writer.add(TOOLS, 0)
    message = json.loads(b"".join(writer.parts()))["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"] == [
        {"id": "call_a", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
        {"id": "call_b", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
    ]
    check("CreateChatCompletionResponse", json.loads(b"".join(writer.parts())))


def test_log_probabilities_of_a_whole_answer() -> None:
    writer = whole_writer(n_probs=2)
    writer.add(PROBS[:2], 0)
    writer.add(PROBS[2:], 0)
    body = json.loads(b"".join(writer.parts()))
    content = body["choices"][0]["logprobs"]["content"]
    assert [(one["id"], one["token"], one["bytes"], one["logprob"]) for one in content] == [
        (2, "H\ufffd", [0x48, 0xC3], -0.5),
        (1, "\ufffd", [0xA9], -0.25),
        (1, "!", [0x21], -0.125),
    ], "the end token became no text"
    assert content[0]["top_logprobs"][1] == {"id": 99, "token": "\ufffd", "bytes": [0xE2], "logprob": -3.5}
    check("CreateChatCompletionResponse", body)


def test_log_probabilities_come_with_the_text_that_they_became() -> None:
    said = chunks(chunk_writer(), PROBS[:1], PROBS[1:3], *([event] for event in PROBS[3:]))
    told = [chunk["choices"][0] for chunk in said]
    assert [choice["delta"] for choice in told] == [
        {"role": "assistant", "content": ""},
        {"content": "Hé"},
        {"content": "!"},
        {},
    ]
    assert [[one["logprob"] for one in (choice["logprobs"] or {"content": []})["content"]] for choice in told] == [
        *([], [-0.5, -0.25], [-0.125], []),
    ]
    for chunk in said:
        check("CreateChatCompletionStreamResponse", chunk)


def test_probabilities_after_sampling_have_llama_servers_names_too() -> None:
    writer = whole_writer(n_probs=2, post_sampling=True)
    one, none = TokenLogprob(1, b"H", 0.25), TokenLogprob(2, b"I", 0.0)
    writer.add([Logprobs(1, one, (one, none)), Text(1, "H"), END], 0)
    body = json.loads(b"".join(writer.parts()))
    [entry] = body["choices"][0]["logprobs"]["content"]
    assert (entry["prob"], entry["logprob"]) == (0.25, pytest.approx(math.log(0.25)))
    assert [token["prob"] for token in entry["top_probs"]] == [0.25, 0.0]
    assert entry["top_logprobs"][1]["logprob"] < -80
    check("CreateChatCompletionResponse", body)


def test_probabilities_are_encoded_as_they_come() -> None:
    """As objects, those of a long answer take three times the memory, and encoding them all holds up others."""
    tops = tuple(TokenLogprob(token, b" token%d" % token, -0.125 * token) for token in range(100))
    step: list[CallEvent] = [Logprobs(1, tops[0], tops), Text(1, " token")]
    writer = whole_writer(n_probs=100)
    tracemalloc.start()
    for _ in range(100):
        writer.add(step, 0)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    writer.add([END], 0)
    body = b"".join(writer.parts())
    assert held < 1.3 * len(body)
    assert len(json.loads(body)["choices"][0]["logprobs"]["content"]) == 100


def test_an_answer_without_text_has_no_probabilities() -> None:
    writer = whole_writer(n_probs=-1)
    writer.add([probs(b"<end>", -1.0), END], 0)
    assert json.loads(b"".join(writer.parts()))["choices"][0]["logprobs"] == {"content": [], "refusal": None}


def test_the_older_form_of_a_call() -> None:
    whole = WholeWriter(asked(as_function=True, stream=False), CALL, request_log())
    whole.add([TOOLS[0], TOOLS[1], TOOLS[3], TOOLS[4]], 0)
    body = json.loads(b"".join(whole.parts()))
    [choice] = body["choices"]
    assert choice["message"]["function_call"] == {"name": "add", "arguments": '{"a":1}'}
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "function_call")
    assert "tool_calls" not in choice["message"]
    check("CreateChatCompletionResponse", body)
    said = chunks(chat.chunk_writer(asked(as_function=True), CALL, request_log()), *([event] for event in TOOLS))
    assert [chunk["choices"][0]["delta"] for chunk in said[1:]] == [
        {"function_call": {"name": "add", "arguments": ""}},
        {"function_call": {"arguments": '{"a":'}},
        {"function_call": {"arguments": "1}"}},
        {},
    ], "there is room for one call"
    assert said[-1]["choices"][0]["finish_reason"] == "function_call"
    for chunk in said:
        check("CreateChatCompletionStreamResponse", chunk)


def test_what_was_asked_to_be_told_comes_with_the_text() -> None:
    so_far = TimingsSoFar(1, TIMINGS)
    told: list[CallEvent] = [Progress(1, 7, 3, 5, 12), Tokens(1, (5, 6)), so_far, Text(1, "ab", 2), Text(1, "c"), END]
    said = chunks(chunk_writer(), *([event] for event in told))
    assert said[1]["prompt_progress"] == {"total": 7, "cache": 3, "processed": 5, "time_ms": 12}
    assert said[1]["choices"][0]["delta"] == {}
    assert said[2]["choices"][0]["tokens"] == [5, 6]
    assert said[2]["timings"]["predicted_n"] == 2
    assert said[2]["choices"][0]["delta"] == {"content": "ab"}
    assert "timings" not in said[3]
    assert "tokens" not in said[3]["choices"][0]
    for chunk in said:
        check("CreateChatCompletionStreamResponse", chunk)
    request = GenerateRequest(tell=("tokens",))
    whole = WholeWriter(ChatRequest("alias", (request,), stream=False), CALL, request_log())
    whole.add(told, 0)
    body = json.loads(b"".join(whole.parts()))
    assert body["choices"][0]["tokens"] == [5, 6]
    check("CreateChatCompletionResponse", body)


def test_who_asks_for_it_is_told_what_the_answer_ran_with() -> None:
    ran = Settings(1, "<s>the prompt", Sampling(temperature=0.25, seed=7))
    events: list[CallEvent] = [Started(1, 0, 7, 3), ran, Text(1, "ab", 2), END]
    for verbose in (True, False):
        request = ChatRequest("alias", (GenerateRequest(),), stream=False, verbose=verbose)
        whole = WholeWriter(request, CALL, request_log())
        whole.add(events, 0)
        bodies = [json.loads(b"".join(whole.parts()))]
        bodies.append(chunks(chat.chunk_writer(request, CALL, request_log()), *([event] for event in events))[-1])
        assert [body["timings"]["predicted_n"] for body in bodies] == [2, 2]
        for body in bodies:
            assert ("__verbose" in body) == verbose
        if verbose:
            for told in (body["__verbose"] for body in bodies):
                assert (told["prompt"], told["stop_type"], told["tokens_evaluated"]) == ("<s>the prompt", "eos", 7)
                assert (told["generation_settings"]["temperature"], told["generation_settings"]["seed"]) == (0.25, 7)
    usage = ChatRequest("alias", (GenerateRequest(),), stream=True, usage=StreamUsageOptions(at_end=True), verbose=True)
    said = chunks(chat.chunk_writer(usage, CALL, request_log()), *([event] for event in events))
    assert ["__verbose" in chunk for chunk in said] == [False, False, True, False]


def test_usage_so_far_in_every_chunk() -> None:
    writer = chat.chunk_writer(
        ChatRequest("alias", (GenerateRequest(),) * 2, stream=True, usage=StreamUsageOptions(True, True)),
        CALL,
        request_log(),
    )
    raw = writer.chunks([Started(1, 0, 7, 3), Reasoning(1, "hm", 2), Text(1, "a")], 0)
    raw += writer.chunks([Started(1, 0, 7, 3), Text(1, "b")], 1)
    raw += writer.chunks([END], 0) + writer.chunks([END], 1) + writer.closing()
    said = [json.loads(block[6:]) for block in raw.decode().split("\n\n")[:-2]]
    counts = [(chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]) for chunk in said]
    assert counts == [(7, 2), (7, 3), (7, 4), (7, 3), (7, 4), (7, 4)], "the ends tell exact counts"
    assert said[-1]["choices"] == []
    assert said[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    for chunk in said:
        check("CreateChatCompletionStreamResponse", chunk)


def test_usage_tells_what_came_of_a_prediction() -> None:
    """In a stream and in a whole answer; without a `prediction` nothing is said."""
    end = replace(END, usage=Usage(7, 4, 3, accepted_prediction_tokens=3, rejected_prediction_tokens=5))
    events: list[CallEvent] = [Started(1, 0, 7, 3), Text(1, "ab", 2), end]
    at_end = StreamUsageOptions(at_end=True)
    for prediction, details in (
        ("abc", {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 10}),
        ("", None),
    ):
        one = GenerateRequest(speculation=Speculation(prediction=prediction))
        asked = ChatRequest("alias", (one, one), stream=True, usage=at_end)
        whole, writer = WholeWriter(asked, CALL, request_log()), chat.chunk_writer(asked, CALL, request_log())
        for number in range(2):
            whole.add(events, number)
            writer.chunks(events, number)
        told = [json.loads(b"".join(whole.parts()))]
        told += [json.loads(block[6:]) for block in writer.closing().decode().split("\n\n")[:-2]]
        assert [one["usage"].get("completion_tokens_details") for one in told] == [details, details]
        check("CreateChatCompletionResponse", told[0])
