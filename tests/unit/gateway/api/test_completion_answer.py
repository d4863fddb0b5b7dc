"""Writing OpenAI's completions: numbering over prompts and answers, both shapes of probabilities, echoes."""

from __future__ import annotations

import json
from typing import Any

from gateway.api.openai.completion import CompletionWhole, completion_writer
from gateway.api.openai.requests import CompletionRequest, read_completion
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
    PromptLogprobs,
    Settings,
    Started,
    Text,
    Timings,
    TimingsSoFar,
    TokenLogprob,
    TokenProbs,
    Tokens,
    Usage,
)
from workers.protocol.requests import Sampling

CALL = Call("r", Principal("k", "team", None, admin=False), "alias", "model", 0.0, 1.0, 1.0)


def request_log() -> RequestLog:
    return placed_log(fingerprint="fp_1")


TIMINGS = Timings(cache_n=3, prompt_n=4, prompt_ms=8.0, predicted_n=2, predicted_ms=10.0)
START = Started(1, 0, 7, 3)
END = Finished(1, FinishReason.STOP, Usage(7, 2, 3), TIMINGS)


def read(**parameters: Any) -> CompletionRequest:
    return read_completion(json.dumps({"model": "m", "prompt": "once", **parameters}).encode())


def whole(asked: CompletionRequest, *answers: list[CallEvent]) -> dict[str, Any]:
    writer = CompletionWhole(asked, CALL, request_log())
    for number, events in enumerate(answers):
        writer.add(events, number)
    body: dict[str, Any] = json.loads(b"".join(writer.parts()))
    check("CreateCompletionResponse", body | {"choices": [specified(one) for one in body["choices"]]})
    return body


def specified(choice: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's servers tell null of the first token of an echo, which their specification has no place for."""
    if not choice["logprobs"] or choice["logprobs"].get("token_logprobs", [0])[:1] != [None]:
        return choice
    return choice | {"logprobs": {name: values[1:] for name, values in choice["logprobs"].items()}}


def chunks(asked: CompletionRequest, *steps: tuple[int, list[CallEvent]]) -> list[dict[str, Any]]:
    writer = completion_writer(asked, CALL, request_log())
    raw = writer.opening() + b"".join(writer.chunks(events, number) for number, events in steps) + writer.closing()
    blocks = raw.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    said = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
    for chunk in said:
        # OpenAI's servers stream `finish_reason: null`, which their specification has no place for.
        choices = [specified(one) | {"finish_reason": one["finish_reason"] or "stop"} for one in chunk["choices"]]
        usage = chunk.get("usage") or {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        check("CreateCompletionResponse", chunk | {"choices": choices, "usage": usage})
    return said


def probs(token: int, piece: bytes, logprob: float, *others: TokenLogprob) -> Logprobs:
    one = TokenLogprob(token, piece, logprob)
    return Logprobs(1, one, (*others, one))


PROBS: list[CallEvent] = [
    probs(1, b"H\xc3", -0.5, TokenLogprob(9, b"He", -0.25)),
    probs(2, b"\xa9", -0.25, TokenLogprob(8, b"\xaa", -0.125)),
    Text(1, "Hé", 2),
    probs(3, b"!", -0.125),
    Text(1, "!"),
    probs(4, b"<end>", -1.0),
    END,
]
LEGACY = {
    "text_offset": [0, 1, 2],
    "token_logprobs": [-0.5, -0.25, -0.125],
    "tokens": ["bytes:\\x48\\xc3", "bytes:\\xa9", "!"],
    "top_logprobs": [
        {"He": -0.25, "bytes:\\x48\\xc3": -0.5},
        {"bytes:\\xaa": -0.125, "bytes:\\xa9": -0.25},
        {"!": -0.125},
    ],
}


def test_choices_are_numbered_over_prompts_and_answers() -> None:
    asked = read(prompt=["a", "b"], n=2)
    texts = ["a0", "a1", "b0", "b1"]
    answers: list[list[CallEvent]] = [[START, Text(1, text), END] for text in texts]
    body = whole(asked, *answers)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == list(enumerate(texts))
    assert body["usage"]["prompt_tokens"] == 14, "each prompt counts once"
    assert body["usage"]["completion_tokens"] == 8
    assert body["choices"][1]["timings"]["cache_n"] == 3
    steps: list[tuple[int, list[CallEvent]]] = [(3, [START, Text(1, "b1")]), (0, [START]), (0, [Text(1, "a0"), END])]
    steps += [(number, [END]) for number in (1, 2, 3)]
    said = chunks(read(prompt=["a", "b"], n=2, stream=True, stream_options={"include_usage": True}), *steps)
    told = [(one["index"], one["text"], one["finish_reason"]) for chunk in said[:-1] for one in chunk["choices"]]
    assert told == [
        (3, "b1", None),
        (0, "a0", None),
        (0, "", "stop"),
        (1, "", "stop"),
        (2, "", "stop"),
        (3, "", "stop"),
    ]
    assert all(chunk["usage"] is None for chunk in said[:-1])
    assert said[-1]["choices"] == []
    assert said[-1]["usage"]["prompt_tokens"] == 14


def test_probabilities_in_the_older_shape() -> None:
    body = whole(read(logprobs=2), [START, *PROBS])
    assert body["choices"][0]["logprobs"] == LEGACY
    assert body["choices"][0]["text"] == "Hé!"
    said = chunks(read(logprobs=2, stream=True), *((0, [event]) for event in PROBS))
    told = [chunk["choices"][0]["logprobs"] for chunk in said]
    assert [one["text_offset"] if one else None for one in told] == [[0, 1], [2], None]
    assert told[0]["tokens"] + told[1]["tokens"] == LEGACY["tokens"]


def test_probabilities_in_llama_servers_shape() -> None:
    body = whole(read(n_probs=2), [START, *PROBS])
    content = body["choices"][0]["logprobs"]["content"]
    assert [(one["id"], one["logprob"]) for one in content] == [(1, -0.5), (2, -0.25), (3, -0.125)]
    assert whole(read(), [START, Text(1, "a"), END])["choices"][0]["logprobs"] is None


def test_an_echo_is_the_prompt_before_the_answer() -> None:
    settings = Settings(1, "<s>as read", Sampling())
    body = whole(read(prompt=["once", [5]], echo=True), [START, Text(1, " more"), END], [START, settings, END])
    assert [choice["text"] for choice in body["choices"]] == ["once more", "<s>as read"]
    said = chunks(read(prompt=[[5]], echo=True, stream=True), (0, [START, settings, Text(1, "x"), END]))
    assert [chunk["choices"][0]["text"] for chunk in said] == ["<s>as read", "x", ""]
    said = chunks(read(echo=True, stream=True), (0, [START]), (0, [Text(1, "x"), END]))
    assert [chunk["choices"][0]["text"] for chunk in said] == ["once", "x", ""]


def likely(token: int, piece: bytes, logprob: float, *others: TokenLogprob) -> TokenProbs:
    return TokenLogprob(token, piece, logprob), others


LIKELY = (
    likely(1, b"<s>", 0.0),
    likely(7, b" once", -2.0, TokenLogprob(8, b" The", -0.5)),
    likely(9, b" \xc3", -1.0, TokenLogprob(9, b" \xc3", -1.0)),
    likely(10, b"\xa9", -0.25, TokenLogprob(10, b"\xa9", -0.25)),
)
"""Of a prompt "once é": the model's begin token and the blank before the first word are no text of it."""

WEIGHED = {
    "text_offset": [0, 0, 4, 5, 6],
    "token_logprobs": [None, -2.0, -1.0, -0.25, -0.125],
    "tokens": ["<s>", " once", "bytes:\\x20\\xc3", "bytes:\\xa9", "!"],
    "top_logprobs": [
        None,
        {" The": -0.5, " once": -2.0},
        {"bytes:\\x20\\xc3": -1.0},
        {"bytes:\\xa9": -0.25},
        {"!": -0.125},
    ],
}


def test_an_echo_with_probabilities_has_a_place_for_each_token() -> None:
    """Whatever parts they come in. Programs that weigh texts count the places: the end token has one as well."""
    start = Started(1, 0, 4, 0)
    answer: list[CallEvent] = [probs(3, b"!", -0.125), Text(1, "!"), probs(2, b"</s>", -0.5), END]
    for cut in range(4):
        prompt = [PromptLogprobs(1, part) for part in (LIKELY[:cut], LIKELY[cut:]) if part]
        asked = {"prompt": "once é", "echo": True, "logprobs": 1}
        [choice] = whole(read(**asked), [start, *prompt, *answer])["choices"]
        assert choice["text"] == "once é!"
        assert {name: values[:5] for name, values in choice["logprobs"].items()} == WEIGHED
        assert choice["logprobs"]["tokens"][5:] == ["</s>"]
        said = chunks(read(stream=True, **asked), *((0, [event]) for event in (start, *prompt, *answer)))
        assert [chunk["choices"][0]["text"] for chunk in said] == ["once é", "!", ""]
        told = [chunk["choices"][0]["logprobs"] for chunk in said]
        assert {name: told[0][name] + told[1][name] for name in WEIGHED} == WEIGHED
        assert told[2]["tokens"] == ["</s>"]


def test_the_echo_of_tokens_with_probabilities() -> None:
    """A prompt alone is weighed, and its text is what the worker reads: nothing of it is left out."""
    settings = Settings(1, "<s> once é", Sampling())
    events: list[CallEvent] = [Started(1, 0, 4, 0), settings, PromptLogprobs(1, LIKELY), END]
    asked = read(prompt=[1, 7, 9, 10], echo=True, logprobs=1, max_tokens=0)
    [choice] = whole(asked, events)["choices"]
    assert choice["text"] == "<s> once é"
    assert choice["logprobs"]["text_offset"] == [0, 3, 8, 9]


def test_what_was_asked_to_be_told() -> None:
    told: list[CallEvent] = [START, Progress(1, 7, 3, 5, 12), Tokens(1, (5, 6)), TimingsSoFar(1, TIMINGS)]
    told += [Text(1, "ab", 2), Text(1, "c"), END]
    said = chunks(read(stream=True), (0, told))
    assert said[0]["prompt_progress"]["processed"] == 5
    assert said[1]["choices"][0]["tokens"] == [5, 6]
    assert said[1]["timings"]["prompt_n"] == 4
    assert "timings" not in said[2]
    assert whole(read(return_tokens=True), told)["choices"][0]["tokens"] == [5, 6]


def test_who_asks_for_it_is_told_what_the_answer_ran_with() -> None:
    events: list[CallEvent] = [START, Settings(1, "<s>once", Sampling(seed=7)), Text(1, "a"), END]
    for body in (whole(read(verbose=True), events), chunks(read(verbose=True, stream=True), (0, events))[-1]):
        assert body["__verbose"]["prompt"] == "<s>once"
        assert body["__verbose"]["generation_settings"]["seed"] == 7
        assert body["choices"][0]["text"] in ("a", ""), "it is no echo"
    assert "__verbose" not in whole(read(), [START, Text(1, "a"), END])
    assert read(verbose=True).requests[0].tell == ("settings",)


def test_the_last_chunk_has_the_times() -> None:
    [_, last] = chunks(read(stream=True), (0, [START, Text(1, "a"), END]))
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["timings"]["predicted_per_second"] == 100.0


def test_a_broken_answer_says_why_and_ends() -> None:
    blocks = completion_writer(read(stream=True), CALL, request_log()).broken(WorkerLost("gone")).decode().split("\n\n")
    assert json.loads(blocks[0].removeprefix("data: "))["error"]["message"] == "gone"
    assert blocks[1:] == ["data: [DONE]", ""]
