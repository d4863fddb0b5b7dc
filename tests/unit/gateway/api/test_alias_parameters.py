"""What an alias sets or drops, in every dialect: as if the caller had said it, under whichever name the dialect has."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel
from starlette.types import Scope

from gateway.api.anthropic.request import read_messages_request, read_prompt
from gateway.api.http.diagnostics import begin_request_log
from gateway.api.media.attachments import Attachments
from gateway.api.native.body import GenerationBody
from gateway.api.native.completion import CompletionDialect
from gateway.api.native.embedding import EmbeddingDialect
from gateway.api.openai.bodies import ChatBody, CompletionBody
from gateway.api.openai.pooled import EmbeddingsBody, EmbeddingsDialect, RerankBody, RerankDialect
from gateway.api.openai.requests import read_chat, read_completion
from gateway.api.parameters.base import names_of
from gateway.api.responses.request import read_draft
from gateway.call import Principal
from gateway.catalog.call_names import CallNames
from gateway.catalog.names import ModelNames
from gateway.errors import InvalidRequest
from gateway.telemetry.request_log import Ignored
from workers.models.alias_parameters import DROPPABLE
from workers.models.catalog import convert
from workers.protocol.requests import GenerateRequest
from workers.tracing.tracer import OFF

ANYBODY = Principal(key_id="k", team="t", aliases=None, admin=False)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def call_names(
    alias: dict[str, Any], principal: Principal = ANYBODY, default: str = "", unknown: str = "refuse"
) -> CallNames:
    document = {
        "models": [{"name": "m", "path": "m.gguf"}, {"name": "o", "path": "o.gguf"}],
        "aliases": {"a": {"targets": ["m"], **alias}, "plain": "m"},
        "default": {"chat": default} if default else {},
        "unknown_model": unknown,
    }
    names = ModelNames(convert(document, "catalog.yaml"))
    return CallNames(names, principal, (), {}, {}, "chat", is_complete=True)


def ignored_of(alias: dict[str, Any], **more: Any) -> Ignored:
    ignored = Ignored()
    ignored.names = call_names(alias, **more)
    return ignored


def scope_of(ignored: Ignored, path: str = "/completion") -> Scope:
    scope: Scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    begin_request_log(scope, OFF).ignored = ignored
    return scope


def _chat(body: dict[str, Any], ignored: Ignored) -> GenerateRequest:
    return read_chat(json.dumps({**CHAT, **body}).encode(), ignored).requests[0]


def _completion(body: dict[str, Any], ignored: Ignored) -> GenerateRequest:
    return read_completion(json.dumps({"prompt": "hi", **body}).encode(), ignored).requests[0]


def _responses(body: dict[str, Any], ignored: Ignored) -> GenerateRequest:
    return read_draft(json.dumps({"input": "hi", **body}).encode(), ignored).request


def _messages(body: dict[str, Any], ignored: Ignored) -> GenerateRequest:
    return read_messages_request(json.dumps({**CHAT, "max_tokens": 99, **body}).encode(), ignored).requests[0]


class NoFleet:
    """What the native dialect needs only for its answers."""


def _native(body: dict[str, Any], ignored: Ignored) -> GenerateRequest:
    raw = json.dumps({"prompt": "hi", **body}).encode()
    dialect = CompletionDialect(NoFleet())  # type: ignore[arg-type]
    return dialect.read(raw, scope_of(ignored)).requests[0]


def _infill(body: dict[str, Any], ignored: Ignored) -> GenerateRequest:
    raw = json.dumps({"input_prefix": "a", "input_suffix": "b", **body}).encode()
    dialect = CompletionDialect(NoFleet(), infill=True)  # type: ignore[arg-type]
    return dialect.read(raw, scope_of(ignored)).requests[0]


Reader = Callable[[dict[str, Any], Ignored], GenerateRequest]
READERS: dict[str, Reader] = {
    "chat": _chat,
    "completion": _completion,
    "responses": _responses,
    "messages": _messages,
    "native": _native,
    "infill": _infill,
}
LENGTH = {
    "chat": ("max_tokens", "max_completion_tokens", "n_predict", "max_new_tokens", "num_predict"),
    "completion": ("max_tokens", "n_predict", "num_predict"),
    "responses": ("max_output_tokens", "max_tokens", "max_completion_tokens"),
    "messages": ("max_tokens",),
    "native": ("n_predict", "max_tokens", "max_completion_tokens", "num_predict"),
    "infill": ("n_predict", "max_tokens"),
}
"""Dialect -> the names by which its callers bound an answer."""


@pytest.mark.parametrize("name", READERS)
def test_a_default_counts_where_the_caller_does_not_say(name: str) -> None:
    alias = {"defaults": {"temperature": 0.25, "stop": ["END"], "max_tokens": 7, "seed": 3}}
    request = READERS[name]({"model": "a"}, ignored_of(alias))
    assert (request.sampling.temperature, request.sampling.seed, request.stop) == (0.25, 3, ("END",))
    assert request.max_tokens == (99 if name == "messages" else 7), "messages always say"
    said = {"temperature": 0.5, "seed": 4, "stop_sequences" if name == "messages" else "stop": ["X"]}
    ignored = ignored_of(alias)
    request = READERS[name]({"model": "a", **said}, ignored)
    assert (request.sampling.temperature, request.sampling.seed, request.stop) == (0.5, 4, ("X",))
    assert not ignored.header
    for other in ("m", "plain"):
        request = READERS[name]({"model": other}, ignored_of(alias))
        assert (request.sampling.temperature, request.stop) == (None, ()), "it is the alias's alone"


@pytest.mark.parametrize(("name", "spelling"), [(name, one) for name, all_ in LENGTH.items() for one in all_])
def test_no_other_name_leads_round_a_fixed_value(name: str, spelling: str) -> None:
    ignored = ignored_of({"set": {"max_tokens": 5}})
    assert READERS[name]({"model": "a", spelling: 50}, ignored).max_tokens == 5
    assert spelling in ignored.header.split(", "), "the caller is told"
    ignored = ignored_of({"set": {"max_tokens": 5}})
    assert READERS[name]({"model": "a", spelling: 5}, ignored).max_tokens == 5
    assert not ignored.header, "the caller says the same"
    assert READERS[name]({"model": "a", spelling: 50}, ignored_of({"defaults": {"max_tokens": 5}})).max_tokens == 50


@pytest.mark.parametrize("name", READERS)
def test_what_is_dropped_counts_as_not_sent(name: str) -> None:
    ignored = ignored_of({"strip": ["seed", "stop", "logit_bias"]})
    said = {"seed": 4, "stop_sequences" if name == "messages" else "stop": ["X"], "logit_bias": {"5": 1}}
    request = READERS[name]({"model": "a", **said}, ignored)
    assert (request.sampling.seed, request.sampling.logit_bias, request.stop) == (None, None, ())
    assert len(ignored.header.split(", ")) == 3


EFFORTS: dict[str, tuple[dict[str, Any], ...]] = {
    "chat": (
        {},
        {"reasoning_effort": "high"},
        {"reasoning": {"effort": "high"}},
        {"think": "high"},
        {"chat_template_kwargs": {"reasoning_effort": "high"}},
    ),
    "responses": ({}, {"reasoning": {"effort": "high", "summary": "auto"}}, {"reasoning_effort": "high"}),
    "messages": ({}, {"output_config": {"effort": "high"}}, {"chat_template_kwargs": {"reasoning_effort": "high"}}),
}


@pytest.mark.parametrize(("name", "said"), [(name, one) for name, all_ in EFFORTS.items() for one in all_])
def test_how_much_to_think_is_set_however_it_is_said(name: str, said: dict[str, Any]) -> None:
    assert READERS[name]({"model": "a", **said}, ignored_of({"set": {"reasoning_effort": "low"}})).thinking.effort == (
        "low"
    )
    by_default = READERS[name]({"model": "a", **said}, ignored_of({"defaults": {"reasoning_effort": "low"}}))
    assert by_default.thinking.effort == ("high" if said else "low")
    assert READERS[name]({"model": "a", **said}, ignored_of({"strip": ["reasoning_effort"]})).thinking.effort is None


SWITCHES: dict[str, tuple[dict[str, Any], ...]] = {
    "chat": (
        {"enable_thinking": True},
        {"thinking": True},
        {"thinking": {"type": "enabled", "budget_tokens": 5}},
        {"chat_template_kwargs": {"enable_thinking": True, "other": 1}},
        {"reasoning": {"enabled": True}},
        {"think": True},
    ),
    "responses": ({"enable_thinking": True}, {"thinking": True}, {"chat_template_kwargs": {"thinking": True}}),
    "messages": ({"thinking": {"type": "enabled", "budget_tokens": 5}}, {"chat_template_kwargs": {"thinking": True}}),
}


@pytest.mark.parametrize(("name", "said"), [(name, one) for name, all_ in SWITCHES.items() for one in all_])
def test_whether_to_think_is_set_however_it_is_said(name: str, said: dict[str, Any]) -> None:
    read = READERS[name]
    assert read({"model": "a"}, ignored_of({"set": {"enable_thinking": False}})).thinking.enabled is False
    assert read({"model": "a", **said}, ignored_of({"set": {"enable_thinking": False}})).thinking.enabled is False
    assert read({"model": "a", **said}, ignored_of({"defaults": {"enable_thinking": False}})).thinking.enabled is True
    assert read({"model": "a", **said}, ignored_of({"strip": ["enable_thinking"]})).thinking.enabled is None


@pytest.mark.parametrize("name", SWITCHES)
def test_a_budget_of_thought_is_kept_apart_from_the_switch(name: str) -> None:
    said = {"thinking": {"type": "enabled", "budget_tokens": 500}}
    read = READERS[name]
    thinking = read({"model": "a", **said}, ignored_of({"set": {"reasoning_budget_tokens": 20}})).thinking
    assert thinking.budget == 20
    assert read({"model": "a"}, ignored_of({"set": {"reasoning_budget_tokens": 20}})).thinking.budget == 20
    kept = read({"model": "a", **said}, ignored_of({"strip": ["enable_thinking"]})).thinking
    assert (kept.enabled, kept.budget) == (None, 500)


def test_variables_of_the_template_are_set_each_for_itself() -> None:
    alias = {
        "defaults": {"chat_template_kwargs": {"tone": "dry", "date": "today"}},
        "set": {"chat_template_kwargs": {"rules": 1}},
    }
    said = {"chat_template_kwargs": {"tone": "warm", "rules": 9}}
    for name in ("chat", "responses", "messages"):
        ignored = ignored_of(alias)
        values = json.loads(READERS[name]({"model": "a", **said}, ignored).template_values)
        assert values == {"tone": "warm", "date": "today", "rules": 1}
        assert ignored.header == "chat_template_kwargs.rules"
    request = CHAT | {"model": "a"}
    _, counted = read_prompt(json.dumps(request).encode(), ignored_of(alias))
    assert json.loads(counted.template_values) == {"tone": "dry", "date": "today", "rules": 1}, "also where it counts"


def test_vectors_and_scores_have_parameters_of_their_own() -> None:
    alias = {"set": {"dimensions": 4, "embd_normalize": 2, "top_n": 1, "temperature": 0.5, "max_tokens": 5}}
    scope = scope_of(ignored_of(alias), "/v1/embeddings")
    asked = EmbeddingsDialect().read(json.dumps({"model": "a", "input": "x", "dimensions": 9}).encode(), scope)
    assert asked.width == 4
    native = {"set": {"embd_normalize": -1}}
    scope = scope_of(ignored_of(native))
    scope["query_string"] = b"model=a"
    assert EmbeddingDialect().read(json.dumps({"content": "x"}).encode(), scope).request.normalize == -1
    body = {"model": "a", "query": "q", "documents": ["x", "y"]}
    ranked = RerankDialect().read(json.dumps(body).encode(), scope_of(ignored_of(alias), "/v1/rerank"))
    assert ranked.top_n == 1


def test_a_set_value_is_checked_with_the_rest_of_the_request() -> None:
    with pytest.raises(InvalidRequest, match="`min_tokens` is 50, and the answer may have 5"):
        _chat({"model": "a", "min_tokens": 50}, ignored_of({"set": {"max_tokens": 5}}))
    assert _chat({"model": "a", "best_of": 3}, ignored_of({"strip": ["best_of"]})).max_tokens is None
    with pytest.raises(InvalidRequest):
        _chat({"model": "m", "best_of": 3}, ignored_of({"strip": ["best_of"]}))


def test_a_call_that_names_no_model_goes_by_the_default() -> None:
    alias = {"set": {"max_tokens": 5}}
    assert _chat({}, ignored_of(alias, default="a")).max_tokens == 5
    assert _chat({"model": None}, ignored_of(alias, default="a")).max_tokens == 5
    assert _chat({}, ignored_of(alias, default="plain")).max_tokens is None
    assert _chat({"model": "gpt-9"}, ignored_of(alias, default="a", unknown="default")).max_tokens == 5
    assert _chat({"model": "gpt-9"}, ignored_of(alias, default="a")).max_tokens is None, "it will be refused"
    only = Principal(key_id="k", team="t", aliases=frozenset({"plain"}), admin=False)
    assert _chat({}, ignored_of(alias, default="a", principal=only)).max_tokens is None, "not its default"
    assert _chat({"model": "a"}, ignored_of(alias, principal=only)).max_tokens is None, "it will be refused"


def test_what_is_set_is_read_anew_for_each_call() -> None:
    """No call may change the catalog's own values."""
    names = call_names({"set": {"chat_template_kwargs": {"deep": {"x": 1}}, "stop": ["END"]}})
    for _ in range(2):
        ignored = Ignored()
        ignored.names = names
        request = _chat({"model": "a", "chat_template_kwargs": {"mine": 2}}, ignored)
        assert json.loads(request.template_values) == {"mine": 2, "deep": {"x": 1}}
    assert names.catalog.rules["a"].fixed == {"chat_template_kwargs": {"deep": {"x": 1}}, "stop": ["END"]}


BODIES: tuple[type[BaseModel], ...] = (ChatBody, CompletionBody, EmbeddingsBody, RerankBody, GenerationBody)


@pytest.mark.parametrize("name", sorted(DROPPABLE))
def test_each_name_that_can_be_dropped_is_a_parameter(name: str) -> None:
    """One that no dialect knows would be dropped in vain."""
    assert any(name in names_of(kind) for kind in BODIES)


def test_each_value_that_can_be_set_is_one_that_a_caller_may_send() -> None:
    """Within the bounds of both, or a call would be refused for what an operator has written."""
    least = {"max_tokens": 1, "min_tokens": 1, "n": 32, "stop": ["x" * 512], "reasoning_effort": "none"}
    for values in (least, {"speculation": False, "t_max_predict_ms": 1, "ignore_eos": True, "context_shift": True}):
        for read in READERS.values():
            assert read({"model": "a"}, ignored_of({"set": values}))
    assert _chat({"model": "a"}, ignored_of({"set": {"reasoning_budget_message": "x" * 4096, "n": 32}}))


def test_attachments_stay_where_they_are() -> None:
    """The texts that stand for files in a body are not touched."""
    body = {"model": "a", "messages": [{"role": "user", "content": "hi"}], "seed": 1}
    request = read_chat(json.dumps(body).encode(), ignored_of({"set": {"seed": 2}}), Attachments()).requests[0]
    assert (request.messages[0].content, request.sampling.seed) == ("hi", 2)
    assert msgspec.json.encode(request)
