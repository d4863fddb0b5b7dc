"""Makes docs/compatibility.md: what each endpoint does with each parameter, by the models and tables that decide it.

`paddock config compatibility` prints the page. `TABLES` lists every body that the gateway reads; the fuzzer sends them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from gateway.api.anthropic import body as anthropic
from gateway.api.anthropic.body import MessagesBody, PromptBody
from gateway.api.native import body as native
from gateway.api.native.body import CompletionBody as NativeCompletionBody
from gateway.api.native.body import InfillBody
from gateway.api.native.embedding import EmbeddingBody
from gateway.api.native.lora import LoadBody, UnloadBody
from gateway.api.native.slots import ActionBody
from gateway.api.native.texts import DetokenizeBody, TokenizeBody
from gateway.api.openai import bodies as openai
from gateway.api.openai import transcription
from gateway.api.openai.bodies import ChatBody, CompletionBody
from gateway.api.openai.pooled import EmbeddingsBody, RerankBody
from gateway.api.openai.transcription import TranscriptionBody, TranslationBody
from gateway.api.parameters.base import synonyms_of
from gateway.api.parameters.unsupported import Refusal
from gateway.api.responses import body as responses
from gateway.api.responses.body import ResponsesBody
from gateway.api.routes import spellings


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A request body, and the routes that accept it."""

    routes: tuple[str, ...]
    """The routes that accept the body, each as `POST /path`; the first one names the endpoint in the table."""
    body: type[BaseModel]
    ignored: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, Refusal] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DialectTable:
    """The part of the page about one dialect."""

    title: str
    about: str
    endpoints: tuple[Endpoint, ...]
    plain: Mapping[str, str] = field(default_factory=dict)
    """Route without a table of parameters -> what its body can be."""


HEAD = """\
# Compatibility

What each endpoint does with each parameter: **yes** with what it takes, **ignored** with why it changes nothing,
**refused** with what to do instead. `null` counts as left out everywhere, and a refused parameter passes with a value
that asks for nothing. An answer names what was ignored in its header `x-paddock-ignored`. This page is made from the
models and tables that decide it, by `paddock config compatibility`; what the parameters mean stands in
[api.md](api.md).
"""


def page(tables: Sequence[DialectTable]) -> str:
    return "\n".join([HEAD, *(_section(table) for table in tables)])


def _section(table: DialectTable) -> str:
    lines = [f"## {table.title}", "", table.about, "", "| endpoint | parameter | | |", "|---|---|---|---|"]
    for endpoint in table.endpoints:
        lines += [f"| `{endpoint.routes[0]}` | {row} |" for row in _rows(endpoint)]
    lines.append("")
    for endpoint in table.endpoints:
        if len(endpoint.routes) > 1:
            others = ", ".join(f"`{route}`" for route in endpoint.routes[1:])
            lines += [f"The same as `{endpoint.routes[0]}`: {others}.", ""]
    lines += [f"- `{route}`: {takes}" for route, takes in table.plain.items()]
    if table.plain:
        lines.append("")
    return "\n".join(lines)


def _rows(endpoint: Endpoint) -> Iterator[str]:
    schema = endpoint.body.model_json_schema()
    named, defs = schema["properties"], schema.get("$defs", {})
    required, synonyms = schema.get("required", ()), synonyms_of(endpoint.body)
    for name in sorted(named):
        words = describe(named[name], defs)
        if name in required:
            words += "; must be there"
        elif "default" in named[name] and named[name]["default"] not in (None, "", {}):
            words += f"; {_value(named[name]['default'])} unless given"
        if name in synonyms:
            words += "; also as " + ", ".join(f"`{other}`" for other in synonyms[name])
        yield f"`{name}` | yes | {_cell(words)}"
    for name, why in sorted(endpoint.ignored.items()):
        yield f"`{name}` | ignored | {_cell(why)}"
    for name, refusal in sorted(endpoint.refused.items(), key=lambda item: (not item[1].is_hint, item[0])):
        yield f"`{name}` | {'ignored' if refusal.is_hint else 'refused'} | {_cell(_remedy(refusal))}"
    yield f"any other | ignored | {_STRICT}"


_STRICT = "refused with `unknown_parameters: refuse`"


def _remedy(refusal: Refusal) -> str:
    passing = " or ".join(_value(value) for value in refusal.harmless)
    if refusal.is_hint:
        return f"{refusal.remedy} {_STRICT.capitalize()}{f', but as {passing}' if passing else ''}."
    return f"{refusal.remedy} Passes as {passing}." if passing else refusal.remedy


def describe(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    """Return a value's JSON Schema in words."""
    if "description" in schema and "$ref" not in schema and schema.get("type") != "object":
        return str(schema["description"])
    if "$ref" in schema:
        return describe(defs[schema["$ref"].rsplit("/", 1)[-1]], defs)
    for union in ("anyOf", "oneOf"):
        if union in schema:
            kinds = [describe(kind, defs) for kind in schema[union] if kind.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if "const" in schema:
        return _value(schema["const"])
    if "enum" in schema:
        return ", ".join(_value(value) for value in schema["enum"])
    return _of_type(schema, defs)


def _of_type(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    match schema.get("type"):
        case "boolean":
            return "true or false"
        case "integer" | "number" as kind:
            return " ".join([kind, *_bounds(schema, "minimum", "maximum", "")])
        case "string":
            pattern = [f"that matches `{schema['pattern']}`"] if "pattern" in schema else []
            return " ".join(["string", *_bounds(schema, "minLength", "maxLength", "characters"), *pattern])
        case "array":
            items = describe(schema["items"], defs) if schema.get("items") else "anything"
            return " ".join(["array", *_bounds(schema, "minItems", "maxItems", "items"), f"of: {items}"])
        case "object":
            names = ", ".join(f"`{name}`" for name in sorted(schema.get("properties", {})))
            return f"object with {names}" if names else "object"
        case _:
            return "anything that the endpoint reads"


_HUGE = 2**31 - 1
"""Upper bounds of this or more are left off the page: they say only what an integer can hold."""


def _bounds(schema: Mapping[str, Any], least: str, most: str, unit: str) -> list[str]:
    low, high = schema.get(least), schema.get(most)
    high = None if high is not None and high >= _HUGE else high
    words = [unit] if unit else []
    if low is not None and high is not None:
        return [f"{low:g} to {high:g}", *words]
    if low is not None:
        return [f"from {low:g}", *words]
    return [f"up to {high:g}", *words] if high is not None else []


def _value(value: Any) -> str:
    words = {True: "true", False: "false", None: "null"}
    if value is None or isinstance(value, bool):
        return words[value]
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`".replace("'", '"')


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


UNSERVED = "nothing: it answers 501 with what to do instead"

OPENAI = DialectTable(
    "OpenAI",
    "OpenAI's API with llama-server's and vLLM's extensions; reranking has no place in OpenAI's and is Jina's. "
    "The routes of `/v1/audio` take forms (`multipart/form-data`), all others JSON.",
    (
        Endpoint(
            (
                *spellings("POST", "/v1/chat/completions"),
                *spellings("POST", "/v1/chat/completions/input_tokens"),
                "POST /admin/explain",
            ),
            ChatBody,
            openai.IGNORED,
            openai.REFUSED,
        ),
        Endpoint(("POST /v1/completions",), CompletionBody, openai.COMPLETION_IGNORED, openai.COMPLETION_REFUSED),
        Endpoint(("POST /v1/embeddings",), EmbeddingsBody, openai.POOLED_IGNORED),
        Endpoint(
            spellings("POST", "/v1/rerank"),
            RerankBody,
            openai.POOLED_IGNORED,
            openai.RERANK_REFUSED,
        ),
        Endpoint(
            spellings("POST", "/v1/audio/transcriptions"),
            TranscriptionBody,
            transcription.TRANSCRIPTION_IGNORED,
            transcription.TRANSCRIPTION_REFUSED,
        ),
        Endpoint(
            spellings("POST", "/v1/audio/translations"),
            TranslationBody,
            transcription.TRANSCRIPTION_IGNORED,
            transcription.TRANSCRIPTION_REFUSED,
        ),
    ),
    {
        "POST /admin/catalog/check": "`text`, a catalog",
        "POST /admin/catalog/reload": "nothing",
        "POST /admin/workers/{worker}/drain": "nothing",
        "POST /health/drain": "nothing; `timeout_s` and `settle_s` stand in the address",
        "POST /ui/session": "`key`, an API key, which the console's cookie keeps",
        "POST /v1/moderations": UNSERVED,
    },
)

RESPONSES = DialectTable(
    "OpenAI's Responses",
    "With the extensions of chat.",
    (
        Endpoint(
            (*spellings("POST", "/v1/responses"), *spellings("POST", "/v1/responses/input_tokens")),
            ResponsesBody,
            responses.IGNORED,
            responses.REFUSED,
        ),
    ),
    {
        **dict.fromkeys(spellings("POST", "/v1/responses/{response_id}/cancel"), "nothing"),
        **dict.fromkeys(spellings("POST", "/v1/responses/compact"), UNSERVED),
        "POST /v1/conversations": UNSERVED,
    },
)

ANTHROPIC = DialectTable(
    "Anthropic",
    "Anthropic's messages, with llama-server's sampling parameters.",
    (
        Endpoint(("POST /v1/messages",), MessagesBody, anthropic.IGNORED, anthropic.REFUSED),
        Endpoint(("POST /v1/messages/count_tokens",), PromptBody),
    ),
)

NATIVE = DialectTable(
    "llama-server",
    "llama-server's own routes. The model is `model` of the body, "
    "else `?model=`, else the default for the route (docs/catalog.md).",
    (
        Endpoint(
            spellings("POST", "/completion"),
            NativeCompletionBody,
            native.IGNORED,
            native.REFUSED,
        ),
        Endpoint(("POST /infill",), InfillBody, native.IGNORED, native.REFUSED),
        Endpoint(("POST /tokenize",), TokenizeBody),
        Endpoint(("POST /detokenize",), DetokenizeBody),
        Endpoint(spellings("POST", "/embedding"), EmbeddingBody),
        Endpoint(("POST /slots/{id_slot}",), ActionBody),
    ),
    {
        "POST /apply-template": "the body of `POST /v1/chat/completions`",
        "POST /props": "any object; nothing in it can be changed",
        "POST /lora-adapters": 'an array of `{"id", "scale"}`',
        "POST /models/load": "an object with `model`",
        "POST /models/unload": "an object with `model`",
        "POST /models": "an object with `model`, a reference to the hub, and `machine` if there are several (`*`: all)",
        "POST /v1/chat/completions/control": UNSERVED,
        "POST /v1/streams/lookup": UNSERVED,
        "POST /tools": UNSERVED,
    },
)

VLLM = DialectTable(
    "vLLM",
    "vLLM's routes for LoRA adapters.",
    (
        Endpoint(("POST /v1/load_lora_adapter",), LoadBody),
        Endpoint(("POST /v1/unload_lora_adapter",), UnloadBody),
    ),
)

TABLES = (OPENAI, RESPONSES, ANTHROPIC, NATIVE, VLLM)


def compatibility_page() -> str:
    return page(TABLES)
