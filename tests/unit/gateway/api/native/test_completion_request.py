"""Reading llama-server's completions: what is taken, what is left alone, and what is refused with which words."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from starlette.types import Scope

from gateway.api.native.body import IGNORED, REFUSED, CompletionBody
from gateway.api.native.request import CompletionRequest, read_completion, read_infill
from gateway.errors import InvalidRequest, PaddockError, UnsupportedParameter
from workers.protocol.requests import AdapterUse, Constraint, Infill, InfillFile

SCOPE: Scope = {"type": "http", "query_string": b""}


def read(query: bytes = b"", **parameters: Any) -> CompletionRequest:
    return read_completion(json.dumps({"prompt": "hi", **parameters}).encode(), {**SCOPE, "query_string": query})


def refused(**parameters: Any) -> PaddockError:
    with pytest.raises(PaddockError) as caught:
        read(**parameters)
    return caught.value


def test_the_smallest_request() -> None:
    asked = read()
    (request,) = asked.requests
    assert (asked.model, asked.stream, asked.response_fields) == ("", False, ())
    assert (request.prompt, request.max_tokens, request.stop, request.messages) == ("hi", None, (), ())
    assert request.tell == ("settings",)


def test_the_model_is_named_in_the_body_or_behind_the_question_mark() -> None:
    assert read(b"model=a%2Fb").model == "a/b"
    assert read(b"model=a", model="b").model == "b"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("text", ["text"]),
        ([1, 2], [array("i", [1, 2])]),
        ([1, "a", 2], [(1, "a", 2)]),
        (["a", "b"], ["a", "b"]),
        ([[1, "a"], [3], "b", {"prompt_string": "c"}], [(1, "a"), array("i", [3]), "b", "c"]),
        ({"prompt_string": "c"}, ["c"]),
    ],
)
def test_every_form_of_a_prompt(prompt: Any, prompts: list[Any]) -> None:
    assert [request.prompt for request in read(prompt=prompt).requests] == prompts


def test_several_answers_to_several_prompts_lie_beside_each_other() -> None:
    requests = read(prompt=["a", "b"], n_cmpl=2, seed=7).requests
    assert [(one.prompt, one.sampling.seed) for one in requests] == [("a", 7), ("a", 8), ("b", 7), ("b", 8)]


@pytest.mark.parametrize(("n_predict", "max_tokens"), [(-1, None), (0, 0), (5, 5)])
def test_lengths(n_predict: int, max_tokens: int | None) -> None:
    assert read(n_predict=n_predict).requests[0].max_tokens == max_tokens


def test_other_names_count_where_the_first_is_missing() -> None:
    (request,) = read(max_tokens=5, logprobs=3).requests
    assert (request.max_tokens, request.n_probs) == (5, 3)
    assert len(read(n=3).requests) == 3
    assert read(n_predict=4, max_completion_tokens=5, max_tokens=6).requests[0].max_tokens == 4


def test_hints_and_adapters_arrive() -> None:
    lora = [{"id": "pirate", "scale": 0.5}, {"id": 1}]
    (request,) = read(
        cache_prompt=False,
        id_slot=3,
        t_max_predict_ms=9,
        n_keep=-1,
        ignore_eos=True,
        n_indent=4,
        lora=lora,
        stop=["", "x"],
    ).requests
    assert (request.cache_prompt, request.slot, request.max_predict_ms, request.n_keep) == (False, 3, 9, -1)
    assert (request.ignore_eos, request.stop, request.n_indent) == (True, ("x",), 4)
    assert request.adapters == (AdapterUse("pirate", 0.5), AdapterUse("1", 1.0))


def test_what_is_to_be_told() -> None:
    assert read(return_tokens=True).requests[0].tell == ("tokens", "settings")
    streamed = read(stream=True, return_progress=True, timings_per_token=True).requests[0]
    assert set(streamed.tell) == {"progress", "timings", "tokens", "settings"}
    assert read(response_fields=["content", "timings/prompt_n"]).requests[0].tell == ()
    assert read(response_fields=["generation_settings/seed"]).requests[0].tell == ("settings",)


def test_forms() -> None:
    assert read(grammar="root ::= [ab]").requests[0].constraint == Constraint("gbnf", "root ::= [ab]", param="grammar")
    constraint = read(json_schema={}).requests[0].constraint
    assert constraint is not None
    assert json.loads(constraint.text) == {"type": "object"}


def test_a_lazy_grammar_waits_for_its_words() -> None:
    triggers = [{"type": 1, "value": "<go>"}, {"type": 0, "value": "<tool>", "token": 7}]
    (request,) = read(grammar="root ::= [ab]", grammar_lazy=True, grammar_triggers=triggers).requests
    assert request.constraint is not None
    assert request.constraint.triggers == ("<go>", "<tool>")
    (eager,) = read(grammar="root ::= [ab]", grammar_triggers=triggers).requests
    assert eager.constraint is not None
    assert eager.constraint.triggers == ()


def test_numbers_out_of_bounds_are_the_nearest_where_llama_server_takes_them_so() -> None:
    far = read(temperature=-1, top_k=-40, top_p=1.5, min_p=-0.1, xtc_probability=7, mirostat=3, adaptive_target=1.5)
    near = read(temperature=0, top_k=0, top_p=1, min_p=0, xtc_probability=1, mirostat=2, adaptive_target=1)
    assert far.requests == near.requests
    with pytest.raises(InvalidRequest):
        read(min_keep=-1)


def test_unknown_names_and_null_are_left_alone() -> None:
    assert read(tfs_z=1, messages=[], temperature=None).requests == read().requests


@pytest.mark.parametrize("name", IGNORED)
def test_ignored(name: str) -> None:
    ignored: dict[str, Any] = {name: "anything"}
    assert read(**ignored).requests == read().requests


def test_no_parameter_is_read_and_refused() -> None:
    assert not CompletionBody.model_fields.keys() & (IGNORED.keys() | REFUSED.keys())


@pytest.mark.parametrize(
    ("parameters", "param", "kind"),
    [
        ({"prompt": 5}, "prompt", InvalidRequest),
        ({"prompt": []}, "prompt", InvalidRequest),
        ({"prompt": [[]]}, "prompt.0", InvalidRequest),
        ({"prompt": [1, -1]}, "prompt.1", InvalidRequest),
        ({"prompt": [1, True]}, "prompt.1", InvalidRequest),
        ({"prompt": {"text": "a"}}, "prompt.prompt_string", InvalidRequest),
        (
            {"prompt": {"prompt_string": "a", "multimodal_data": ["eA=="]}},
            "prompt.multimodal_data",
            InvalidRequest,
        ),
        ({"prompt": ["a"] * 100, "n_cmpl": 2}, "n_cmpl", InvalidRequest),
        ({"n_predict": -2}, "n_predict", InvalidRequest),
        ({"n_predict": "5"}, "n_predict", InvalidRequest),
        ({"n_cmpl": 0}, "n_cmpl", InvalidRequest),
        ({"model": 5}, "model", InvalidRequest),
        ({"grammar": "root ::= [ab]", "grammar_lazy": True}, "grammar_triggers", InvalidRequest),
        (
            {"grammar": "x", "grammar_lazy": True, "grammar_triggers": [{"type": 2, "value": "a"}]},
            "grammar_triggers.0.type",
            UnsupportedParameter,
        ),
        ({"n_discard": 5}, "n_discard", UnsupportedParameter),
        ({"reasoning_budget_tokens": 5}, "reasoning_budget_tokens", UnsupportedParameter),
        ({"lora": [{"id": -1}]}, "lora.0.id", InvalidRequest),
        ({"response_fields": ["x" * 200]}, "response_fields.0", InvalidRequest),
    ],
)
def test_refused(parameters: dict[str, Any], param: str, kind: type[PaddockError]) -> None:
    error = refused(**parameters)
    assert type(error) is kind
    assert error.param == param
    assert param.split(".")[0] in error.message


def test_a_prompt_is_needed() -> None:
    with pytest.raises(InvalidRequest, match="`prompt` is missing"):
        read_completion(b"{}", SCOPE)


def test_infill() -> None:
    body = {"input_prefix": "def f(", "input_suffix": "): pass", "prompt": "a", "n_predict": 3}
    body["input_extra"] = [{"filename": "b.py", "text": "b = 1"}, {"text": "c = 2"}]
    (request,) = read_infill(json.dumps(body).encode(), SCOPE).requests
    files = (InfillFile("b.py", "b = 1"), InfillFile("", "c = 2"))
    assert request.infill == Infill("def f(", "): pass", "a", files)
    assert (request.prompt, request.max_tokens) == (None, 3)


@pytest.mark.parametrize("missing", ["input_prefix", "input_suffix"])
def test_infill_needs_both_ends(missing: str) -> None:
    body = {"input_prefix": "a", "input_suffix": "b"}
    del body[missing]
    with pytest.raises(InvalidRequest, match=f"`{missing}` is missing"):
        read_infill(json.dumps(body).encode(), SCOPE)
