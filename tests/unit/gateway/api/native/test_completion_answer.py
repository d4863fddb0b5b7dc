"""Writing llama-server's completions, streamed and whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.api.native.completion import ChunkWriter, WholeWriter
from gateway.api.native.request import CompletionRequest
from gateway.call import Call, Principal
from gateway.errors import WorkerLost
from gateway.telemetry.request_log import RequestLog
from tests.support.request_logs import placed_log
from workers.protocol.events import (
    CallEvent,
    Finished,
    FinishReason,
    Logprobs,
    Progress,
    Settings,
    Started,
    Text,
    Timings,
    TimingsSoFar,
    TokenLogprob,
    Tokens,
    Usage,
)
from workers.protocol.requests import AdapterUse, Constraint, GenerateRequest, Sampling

CALL = Call("r", Principal("k", "team", None, admin=False), "alias", "model", 0.0, 1.0, 1.0)
TIMINGS = Timings(cache_n=3, prompt_n=4, prompt_ms=8.0, predicted_n=3, predicted_ms=10.0)
STARTED = Started(1, 2, 7, 3)
SETTINGS = Settings(1, "<s>hi", Sampling(temperature=0.5, seed=9, samplers=("top_k",), dry_sequence_breakers=("\n",)))


def asked(*, n: int = 1, stream: bool = True, fields: tuple[str, ...] = (), **request: Any) -> CompletionRequest:
    one = GenerateRequest(prompt="hi", max_tokens=5, **request)
    return CompletionRequest("alias", (one,) * n, stream, fields)


class Fleet:
    """Ten slots lie before those of the worker."""

    def number_slot(self, model: str, worker: str, slot: int) -> int:
        assert (model, worker) == ("model", "w-b")
        return 10 + slot

    def adapters(self, call: Call, asked: tuple[AdapterUse, ...]) -> tuple[AdapterUse, ...]:
        return tuple(AdapterUse(f"the {use.name}", use.scale) for use in asked)


def request_log() -> RequestLog:
    return placed_log("w-b")


def end(reason: FinishReason = FinishReason.STOP, stop: str | None = None, *, truncated: bool = False) -> Finished:
    return Finished(1, reason, Usage(7, 3, 3), TIMINGS, stop, truncated)


def events_of(raw: bytes) -> list[dict[str, Any]]:
    frames = raw.decode().split("\n\n")
    assert frames.pop() == ""
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def stream(asked: CompletionRequest, *steps: list[CallEvent]) -> list[dict[str, Any]]:
    writer = ChunkWriter(asked, CALL, request_log(), Fleet())
    raw = writer.opening() + b"".join(writer.chunks(step, 0) for step in steps) + writer.closing()
    return events_of(raw)


def whole(asked: CompletionRequest, *events: CallEvent) -> dict[str, Any]:
    writer = WholeWriter(asked, CALL, request_log(), Fleet())
    writer.add(list(events), 0)
    document: dict[str, Any] = json.loads(b"".join(writer.parts()))
    return document


def probs(token: int, piece: bytes, logprob: float) -> Logprobs:
    one = TokenLogprob(token, piece, logprob)
    return Logprobs(1, one, (one, TokenLogprob(99, b"\xe2", float("-inf"))))


def test_a_stream() -> None:
    first, second, last = stream(
        asked(), [STARTED, SETTINGS, Tokens(1, (5,)), Text(1, "a")], [Tokens(1, (6,)), Text(1, "\n")], [end()]
    )
    assert first == {
        "index": 0,
        "content": "a",
        "tokens": [5],
        "stop": False,
        "id_slot": 12,
        "tokens_predicted": 1,
        "tokens_evaluated": 7,
    }
    assert (second["content"], second["tokens"], second["tokens_predicted"]) == ("\n", [6], 2)
    assert (last["content"], last["tokens"], last["stop"], last["stop_type"]) == ("", [], True, "eos")
    assert last["has_new_line"] is True
    assert last["generation_settings"]["stream"] is True
    assert "completion_probabilities" not in last


def test_tokens_that_made_no_text_yet_come_with_the_next() -> None:
    (first, _) = stream(asked(), [STARTED], [Tokens(1, (5,))], [Tokens(1, (6,)), Text(1, "é", 2)], [end()])
    assert (first["tokens"], first["tokens_predicted"]) == ([5, 6], 2)


def test_progress_and_times_are_events_of_their_own_and_parts_of_others() -> None:
    progress, text, _ = stream(
        asked(), [STARTED, Progress(1, 7, 3, 5, 4)], [TimingsSoFar(1, TIMINGS), Tokens(1, (5,)), Text(1, "a")], [end()]
    )
    assert progress["prompt_progress"] == {"total": 7, "cache": 3, "processed": 5, "time_ms": 4}
    assert (progress["content"], progress["tokens"], progress["stop"]) == ("", [], False)
    assert text["timings"]["predicted_n"] == 3
    assert "prompt_progress" not in text


def test_a_whole_answer() -> None:
    document = whole(asked(stream=False), STARTED, SETTINGS, Text(1, "a"), Text(1, "b"), end())
    settings = document.pop("generation_settings")
    assert document.pop("timings")["prompt_n"] == 4
    assert document == {
        "index": 0,
        "content": "ab",
        "tokens": [],
        "id_slot": 12,
        "stop": True,
        "model": "alias",
        "tokens_predicted": 3,
        "tokens_evaluated": 7,
        "prompt": "<s>hi",
        "has_new_line": False,
        "truncated": False,
        "stop_type": "eos",
        "stopping_word": "",
        "tokens_cached": 9,
    }
    assert (settings["temperature"], settings["seed"], settings["n_predict"]) == (0.5, 9, 5)
    assert settings["samplers"] == ["top_k"]
    assert settings["stream"] is False


@pytest.mark.parametrize(
    ("finished", "kind", "word", "truncated"),
    [
        (end(), "eos", "", False),
        (end(stop="x"), "word", "x", False),
        (end(FinishReason.LENGTH), "limit", "", False),
        (end(FinishReason.LENGTH, truncated=True), "limit", "", True),
    ],
)
def test_why_it_stopped(finished: Finished, kind: str, word: str, truncated: bool) -> None:
    document = whole(asked(), STARTED, finished)
    assert (document["stop_type"], document["stopping_word"], document["truncated"]) == (kind, word, truncated)


def test_tokens_of_a_whole_answer_where_they_were_asked_for() -> None:
    assert whole(asked(), STARTED, Tokens(1, (5, 6)), Text(1, "a", 2), end())["tokens"] == [5, 6]


def test_probabilities() -> None:
    request = asked(stream=False, n_probs=2)
    document = whole(request, STARTED, probs(5, b"a", -0.5), Text(1, "a"), probs(2, b"<end>", -1.0), end())
    first, last = document["completion_probabilities"]
    top = first.pop("top_logprobs")
    assert first == {"id": 5, "token": "a", "bytes": [97], "logprob": -0.5}
    assert top[1]["token"] == ""
    assert top[1]["logprob"] < -1e38
    assert last["id"] == 2


def test_probabilities_of_a_stop_string_are_not_told() -> None:
    document = whole(asked(n_probs=2), STARTED, probs(5, b"a", -0.5), Text(1, "a"), probs(6, b"x", -1.0), end(stop="x"))
    assert [one["id"] for one in document["completion_probabilities"]] == [5]


def test_probabilities_after_the_samplers_have_other_names() -> None:
    request = asked(n_probs=2, post_sampling_probs=True)
    first, _ = stream(request, [STARTED, probs(5, b"a", 0.5), Text(1, "a")], [end()])
    (one,) = first["completion_probabilities"]
    assert (one["prob"], one["top_probs"][0]["prob"]) == (0.5, 0.5)
    assert "logprob" not in one


def test_wanted_fields_only_by_their_paths() -> None:
    wanted = ("content", "timings/prompt_n", "generation_settings/seed", "nothing", "content/inside")
    document = whole(asked(fields=wanted), STARTED, SETTINGS, Text(1, "a"), end())
    assert document == {"content": "a", "timings/prompt_n": 4, "generation_settings/seed": 9}
    *_, last = stream(asked(fields=("stop",)), [STARTED, Text(1, "a")], [end()])
    assert last == {"stop": True}


def test_several_answers_are_an_array_in_order() -> None:
    writer = WholeWriter(asked(n=2), CALL, request_log(), Fleet())
    writer.add([STARTED, Text(1, "b"), end()], 1)
    writer.add([STARTED, Text(1, "a"), end()], 0)
    documents = json.loads(b"".join(writer.parts()))
    assert [(one["index"], one["content"], one["id_slot"]) for one in documents] == [(0, "a", -1), (1, "b", -1)]


def test_events_of_several_answers_say_whose_they_are() -> None:
    writer = ChunkWriter(asked(n=2), CALL, request_log(), Fleet())
    raw = writer.chunks([STARTED, Text(1, "b")], 1) + writer.chunks([STARTED, Text(1, "a")], 0)
    raw += writer.chunks([end()], 1) + writer.chunks([end()], 0)
    assert [(one["index"], one["stop"]) for one in events_of(raw)] == [(1, False), (0, False), (1, True), (0, True)]


def test_a_broken_stream_ends_in_an_error() -> None:
    writer = ChunkWriter(asked(), CALL, request_log(), Fleet())
    (event,) = events_of(writer.broken(WorkerLost("gone")))
    assert event == {"error": {"code": 502, "message": "gone", "type": "unavailable_error"}}


def test_what_an_answer_ran_with() -> None:
    request = asked(adapters=(AdapterUse("pirate", 0.5),), stop=("x",), ignore_eos=True)
    biased = Settings(1, "", Sampling(logit_bias=((5, -1.0), ("word", None))))
    settings = whole(request, STARTED, biased, end())["generation_settings"]
    assert settings["lora"] == [{"id": "the pirate", "scale": 0.5}]
    assert settings["logit_bias"] == [{"token": 5, "bias": -1.0}, {"token": "word", "bias": None}]
    assert (settings["stop"], settings["ignore_eos"], settings["seed"]) == (["x"], True, 2**32 - 1)


def test_the_settings_of_many_answers_are_written_some_at_a_time() -> None:
    """A hundred with a long grammar and a thousand biases were 11 MB, and 75 ms of the loop."""
    biases = tuple((token, 1.5) for token in range(1024))
    grammar = Constraint("gbnf", "x" * 60_000)
    writer = WholeWriter(asked(n=100, stream=False, constraint=grammar), CALL, request_log(), Fleet())
    ran = Settings(1, "hi", Sampling(logit_bias=biases))
    for number in range(100):
        writer.add([STARTED, ran, Text(1, f"{number}"), end()], number)
    parts = list(writer.parts())
    assert max(map(len, parts)) < 256 << 10
    documents = json.loads(b"".join(parts))
    assert [document["content"] for document in documents] == [f"{number}" for number in range(100)]
    assert {len(document["generation_settings"]["logit_bias"]) for document in documents} == {1024}


def test_a_few_short_answers_are_one_part() -> None:
    writer = WholeWriter(asked(n=3, stream=False), CALL, request_log(), Fleet())
    for number in range(3):
        writer.add([STARTED, SETTINGS, end()], number)
    (part,) = writer.parts()
    assert [document["index"] for document in json.loads(part)] == [0, 1, 2]
