"""Reading OpenAI's completions: one canonical request per prompt and answer."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from gateway.api.openai.bodies import COMPLETION_IGNORED, COMPLETION_REFUSED, CompletionBody, StreamUsageOptions
from gateway.api.openai.requests import MAX_PROMPT_PROBS, CompletionRequest, read_completion
from gateway.errors import InvalidRequest, PaddockError, UnsupportedParameter
from tests.support.openai_schema import properties
from workers.protocol.requests import MAX_PROMPT_CHARS, Constraint, Infill, Thinking


def read(**parameters: Any) -> CompletionRequest:
    return read_completion(json.dumps({"model": "m", "prompt": "once", **parameters}).encode())


def test_the_smallest_request() -> None:
    asked = read()
    [request] = asked.requests
    assert (asked.model, asked.stream, asked.echo, asked.prompts) == ("m", False, False, ("once",))
    assert (request.prompt, request.messages, request.max_tokens) == ("once", (), 16)
    assert request.thinking == Thinking(split=False), "nothing of a raw answer is taken away"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("", ("",)),
        ([1, 2], (array("i", [1, 2]),)),
        (["a", "b"], ("a", "b")),
        ([[1], [2, 3]], (array("i", [1]), array("i", [2, 3]))),
        (["a", [1, 2]], ("a", array("i", [1, 2]))),
        ([1, "a", 2], ((1, "a", 2),)),
        ([["a", 1], ["b"]], (("a", 1), ("b",))),
    ],
)
def test_forms_of_a_prompt(prompt: Any, prompts: tuple[Any, ...]) -> None:
    asked = read(prompt=prompt, n=2)
    assert asked.prompts == prompts
    assert tuple(request.prompt for request in asked.requests) == tuple(one for one in prompts for _ in range(2))


def test_seeds_follow_each_other_within_a_prompt() -> None:
    seeds = [request.sampling.seed for request in read(prompt=["a", "b"], n=2, seed=7).requests]
    assert seeds == [7, 8, 7, 8]


@pytest.mark.parametrize(
    ("parameters", "max_tokens"),
    [
        ({}, 16),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": -1}, None),
        ({"n_predict": -1}, None),
        ({"n_predict": 99}, 99),
        ({"max_tokens": 5}, 5),
    ],
)
def test_lengths(parameters: dict[str, Any], max_tokens: int | None) -> None:
    assert read(**parameters).requests[0].max_tokens == max_tokens


@pytest.mark.parametrize(
    ("parameters", "n_probs", "legacy"),
    [({}, 0, False), ({"logprobs": 0}, -1, True), ({"logprobs": 5}, 5, True), ({"n_probs": 5}, 5, False)],
)
def test_probabilities(parameters: dict[str, Any], n_probs: int, legacy: bool) -> None:
    asked = read(**parameters)
    assert (asked.requests[0].n_probs, asked.legacy_logprobs) == (n_probs, legacy)


def test_a_suffix_asks_for_what_is_between() -> None:
    asked = read(prompt=["a", "b"], suffix="z")
    assert [request.infill for request in asked.requests] == [Infill("a", "z"), Infill("b", "z")]
    assert all(request.prompt is None for request in asked.requests)
    assert read(suffix="").requests[0].infill is None


def test_the_text_of_echoed_tokens_comes_from_the_worker() -> None:
    asked = read(prompt=["a", [1]], echo=True, return_tokens=True)
    assert [request.tell for request in asked.requests] == [("tokens",), ("tokens", "settings", "prompt")]


def test_an_echo_with_probabilities_asks_for_those_of_the_prompt() -> None:
    """However many answers there are, and likely ones beside each token: what is told of all has one bound."""
    [request] = read(echo=True, logprobs=1).requests
    assert (request.n_probs, request.cache_prompt, request.prompt_probs) == (1, False, MAX_PROMPT_PROBS // 2)
    [request] = read(echo=True, logprobs=0).requests
    assert (request.n_probs, request.prompt_probs) == (-1, MAX_PROMPT_PROBS)
    for request in read(prompt=["a", [1]], n=3, echo=True, logprobs=4).requests:
        assert request.prompt_probs == MAX_PROMPT_PROBS // 5 // 6
    assert min(one.prompt_probs for one in read(prompt=["a"] * 128, echo=True, logprobs=20).requests) > 0
    for plain in (read(logprobs=1), read(echo=True), read(n_probs=1)):
        assert [(one.prompt_probs, one.cache_prompt) for one in plain.requests] == [(0, True)]


def test_what_it_shares_with_chat() -> None:
    asked = read(
        stream=True,
        stream_options={"include_usage": True},
        grammar='root ::= "a"',
        lora=[{"id": "poet"}],
        priority=3,
        top_k=1,
        stop="x",
    )
    [request] = asked.requests
    assert asked.usage == StreamUsageOptions(at_end=True)
    assert request.constraint == Constraint("gbnf", 'root ::= "a"', param="grammar")
    assert (request.adapters[0].name, request.priority, request.sampling.top_k, request.stop) == ("poet", -3, 1, ("x",))


@pytest.mark.parametrize(
    ("parameters", "kind", "param"),
    [
        ({"prompt": None}, InvalidRequest, "prompt"),
        ({"prompt": []}, InvalidRequest, "prompt"),
        ({"prompt": {}}, InvalidRequest, "prompt"),
        ({"prompt": [1, -1]}, InvalidRequest, "prompt.1"),
        ({"prompt": [1, True]}, InvalidRequest, "prompt.1"),
        ({"prompt": [[]]}, InvalidRequest, "prompt.0"),
        ({"prompt": ["a", 1.5]}, InvalidRequest, "prompt.1"),
        ({"prompt": [["a", None]]}, InvalidRequest, "prompt.0.1"),
        ({"prompt": ["a"] * 129}, InvalidRequest, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, InvalidRequest, "n"),
        ({"n": 33}, InvalidRequest, "n"),
        ({"best_of": 2}, UnsupportedParameter, "best_of"),
        ({"echo": True, "n_probs": 1}, UnsupportedParameter, "n_probs"),
        ({"echo": True, "logprobs": 1, "suffix": "z"}, UnsupportedParameter, "suffix"),
        ({"logprobs": 1, "n_probs": 1}, InvalidRequest, "n_probs"),
        ({"suffix": "z", "prompt": [1]}, InvalidRequest, "suffix"),
        ({"logprobs": True}, InvalidRequest, "logprobs"),
        ({"max_tokens": 1, "n_predict": 2}, InvalidRequest, "n_predict"),
        ({"prompt_logprobs": 1}, UnsupportedParameter, "prompt_logprobs"),
        ({"stream_options": {}}, InvalidRequest, "stream_options"),
    ],
)
def test_what_is_wrong_is_named(parameters: dict[str, Any], kind: type[PaddockError], param: str) -> None:
    with pytest.raises(PaddockError) as caught:
        read(**parameters)
    error = caught.value
    assert (type(error), error.param) == (kind, param)
    assert f"`{param}`" in error.message


def test_every_parameter_of_openai_is_read_ignored_or_refused() -> None:
    read_names = set(CompletionBody.model_fields)
    assert properties("CreateCompletionRequest") <= read_names | {*COMPLETION_IGNORED, *COMPLETION_REFUSED}
    assert not read_names & {*COMPLETION_IGNORED, *COMPLETION_REFUSED}


def test_the_prompts_that_are_told_have_one_bound_for_all_answers() -> None:
    for request in read(prompt=[[1]] * 4, n=8, echo=True).requests:
        assert request.max_prompt_chars == MAX_PROMPT_CHARS // 32
    assert read(prompt="a" * (MAX_PROMPT_CHARS // 2), n=2, echo=True).echo
    with pytest.raises(InvalidRequest) as caught:
        read(prompt="a" * (MAX_PROMPT_CHARS // 2), n=3, echo=True)
    assert caught.value.param == "echo"
