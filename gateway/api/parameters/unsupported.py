"""Parses a JSON body into its class: resolves synonyms, and ignores or refuses parameters that Paddock does not read.

A parameter that changes nothing here is ignored: it is noted, and a header of the answer names it. Others are refused
with a remedy, except with a value that asks for nothing (`harmless`): many clients send every parameter they know.
Each dialect has a table of ignored and one of refused parameters. The tables below have parameters of vLLM, Ollama,
llama-cpp-python and web clients that no dialect reads: those that would change an answer are refused, those for
loading a model or for a client's own use are ignored.

Sources: "OpenAI-Compatible Server" of vLLM's documentation and its SamplingParams; "Parameter" of Ollama's Modelfile
reference and its API; llama-cpp-python's server (`llama_cpp/server/types.py`); tools/server/README.md of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gateway.api.parameters.alias_parameters import apply_rules
from gateway.api.parameters.base import nesting_error, synonyms_of, translate_error
from gateway.errors import UnsupportedParameter
from gateway.telemetry.request_log import Ignored

BodyT = TypeVar("BodyT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Refusal:
    remedy: str
    harmless: tuple[Any, ...] = ()
    is_hint: bool = False
    """Whether the parameter leaves an answer's meaning as it is. Then it is ignored unless `Ignored.refuses`."""


def read_body(
    kind: type[BodyT],
    document: dict[str, Any],
    unread: tuple[Mapping[str, str], Mapping[str, Refusal]],
    ignored: Ignored,
) -> BodyT:
    """Return the parsed body. `unread`: the dialect's tables of ignored parameters and of refused ones.

    Raises InvalidRequest and UnsupportedParameter, each naming the parameter by its path."""
    document = _with_alias_parameters(kind, document, ignored)
    of_end_user = frozenset[str]() if ignored.end_user is None else ignored.end_user.read(document)
    kept = _rename_synonyms(kind, sift(document, *unread, ignored, of_end_user), ignored)
    try:
        return kind.model_validate(kept, context=ignored)
    except ValidationError as error:
        raise translate_error(error) from None
    except RecursionError:
        raise nesting_error() from None


def _with_alias_parameters(kind: type[BaseModel], document: dict[str, Any], ignored: Ignored) -> dict[str, Any]:
    """Return the document with the parameters that the catalog sets for the name that it calls."""
    if ignored.names is None:
        return document
    name = document.get("model")
    rules = ignored.names.rules(name if isinstance(name, str) else "")
    return document if rules is None else apply_rules(rules, document, kind, ignored)


def sift(
    document: dict[str, Any],
    known: Mapping[str, str],
    refused: Mapping[str, Refusal],
    ignored: Ignored,
    of_end_user: Container[str] = (),
) -> dict[str, Any]:
    """Return the parameters that are neither in `known` nor in `refused`; note the ignored ones in `ignored`.

    `known`: ignored parameter -> reason; those in `of_end_user` are not ignored, as they name the end user. Null counts
    as not sent. Raises UnsupportedParameter for the first refused."""
    kept: dict[str, Any] = {}
    for name, value in document.items():
        if value is None:
            continue
        refusal = refused.get(name)
        if name in known:
            if name not in of_end_user:
                ignored.note(name)
        elif refusal is None:
            kept[name] = value
        elif _harmless(value, refusal.harmless):
            continue
        elif refusal.is_hint and not ignored.refuses:
            ignored.note(name)
        else:
            raise UnsupportedParameter(f"`{name}` is not supported with this value. {refusal.remedy}", param=name)
    return kept


def _rename_synonyms(kind: type[BaseModel], kept: dict[str, Any], ignored: Ignored) -> dict[str, Any]:
    """Rename the synonyms in `kept` to the body's own names of these parameters, and return `kept`.

    If a parameter comes under several names, its own name counts, else its first synonym, as in llama-server. A synonym
    with another value is noted in `ignored` or, if `ignored.refuses`, raises UnsupportedParameter."""
    for name, others in synonyms_of(kind).items():
        for other in others:
            if other not in kept:
                continue
            value = kept.pop(other)
            if kept.setdefault(name, value) == value:
                continue
            if ignored.refuses:
                message = f"`{other}` is another name of `{name}`, and both have values. Send one of them."
                raise UnsupportedParameter(message, param=other)
            ignored.note(other)
    return kept


def _harmless(value: Any, harmless: tuple[Any, ...]) -> bool:
    # `True == 1` in Python, so the types must be the same, too.
    return any(value == other and type(value) is type(other) for other in harmless)


_LOADING = "how a model is loaded is the catalog's and the workers' to say"
_BEAMS = "it counts in a beam search only"
_GUIDES = "forms are kept to in one way"

OTHERS_IGNORED = {
    "chat_id": "a label of the client's own",
    "early_stopping": _BEAMS,
    "guided_decoding_backend": _GUIDES,
    "guided_whitespace_pattern": _GUIDES,
    "keep_alive": "a model stays as long as the catalog says",
    "kv_transfer_params": "where cached prompts lie is the workers' affair",
    "length_penalty": _BEAMS,
    "logit_bias_type": "in `logit_bias` numbers are tokens, and other texts are texts",
    "low_vram": _LOADING,
    "main_gpu": _LOADING,
    "mm_processor_kwargs": "how pictures are prepared is the model's affair",
    "num_batch": _LOADING,
    "num_ctx": _LOADING,
    "num_gpu": _LOADING,
    "num_thread": _LOADING,
    "numa": _LOADING,
    "penalize_newline": "llama.cpp penalises line ends like other tokens",
    "penalize_nl": "llama.cpp penalises line ends like other tokens",
    "raw": "conversations go through the model's template, prompts of completions never do",
    "request_id": "the header `x-request-id` names a request",
    "spaces_between_special_tokens": "a text has the spaces that its tokens have",
    "tfs_z": "llama.cpp has no such sampler any more",
    "use_mlock": _LOADING,
    "use_mmap": _LOADING,
}
"""Parameters that are accepted and have no effect, and why."""

OTHERS_REFUSED: dict[str, Refusal] = {
    "allowed_token_ids": Refusal("Rule other tokens out by `logit_bias`, or send a `grammar`.", ([],)),
    "bad_words": Refusal("Rule texts out by `logit_bias`, with false.", ([],)),
    "format": Refusal("Send `response_format`.", ("",)),
    "include_stop_str_in_output": Refusal("A stop string is never part of an answer; leave it out.", (False,)),
    "logits_processors": Refusal("Paddock runs no code of callers; leave it out.", ([],)),
    "prompt_embeds": Refusal("Send the prompt as text or tokens."),
    "prompt_logprobs": Refusal(
        "`/v1/completions` tells how likely a prompt is, with `echo` and `logprobs`; leave it out.", (0,)
    ),
    "return_tokens_as_token_ids": Refusal("`return_tokens` tells the tokens; leave it out.", (False,)),
    "truncate_prompt_tokens": Refusal("A prompt that is too long is refused; send a shorter one."),
    "use_beam_search": Refusal("Answers are drawn token by token; leave it out.", (False,)),
}
"""Parameters that are refused, with what to do instead."""

ONE_OF_SEVERAL = Refusal("Of several answers none is chosen here; ask for them with `n`.", (0, 1))
"""The refusal of `best_of`."""
