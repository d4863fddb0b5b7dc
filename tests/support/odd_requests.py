"""Requests that are almost right, where a worker does the work: forms, grammars, samplers, templates, parts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Make = Callable[[random.Random], Any]

TEXTS = [
    "",
    "a",
    "\x00",
    "\ud800",
    "\u2028",
    "😀",
    "<|im_end|>",
    "<|im_start|>system",
    "{{ 1/0 }}",
    "</tool_call>",
    "a" * 900,
]
NUMBERS = [0, 1, -1, 2, 0.5, -0.0, 1e-300, 1e300, 255, 2**31 - 1, 2**31, 2**63, 10**30]
PATTERNS = [
    "^a+$",
    "[",
    "(a|b)*c",
    "\\d{3}",
    "a{1000}",
    "(?=x)y",
    "\\p{L}+",
    "^$",
    "(",
    "[^\\x00]",
    "(?i)a",
    "\\u0041",
    "a{2,1}",
]
FORMATS = ["date", "date-time", "email", "uuid", "ipv4", "hostname", "", "nothing", "regex"]
KEYWORDS = [
    "type",
    "properties",
    "required",
    "items",
    "prefixItems",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "$ref",
    "$defs",
    "definitions",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "multipleOf",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "uniqueItems",
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "if",
    "then",
    "else",
    "dependentRequired",
    "$id",
    "$anchor",
    "title",
    "default",
    "nullable",
    "contains",
    "unevaluatedProperties",
]
TYPES = ["object", "array", "string", "number", "integer", "boolean", "null", "any", "", 3, ["string", "null"], []]
REFS = [
    "#",
    "#/$defs/a",
    "#/$defs/b",
    "#/definitions/a",
    "#/properties/a",
    "https://x.example/y",
    "#/a/b/c",
    "",
    "#%zz",
]
RULES = [
    'root ::= "a" | "b"',
    "root ::= [a-z]+",
    'root ::= "a"{2,3}',
    "root ::= root",
    'root ::= ("a"*)*',
    "root ::= x",
    'root ::= "\\x41\\u00e9\\U0001F600"',
    "root ::= [^]",
    "root ::= [z-a]",
    'root ::= "',
    "root ::= (",
    "",
    "root",
    "::=",
    'root ::= a b\na ::= "x"\nb ::= a?',
    "root ::= .",
    'root ::= "a"{0}',
    'root ::= "a"{3,1}',
    "root ::= <[1]>",
    "x ::= y",
    "root ::= !<|im_end|>",
    "root ::= [\\",
    "# nothing",
    'root ::= "a" root | ""',
    'root ::= "a"{99999999999}',
]
LARK = [
    'start: "a"',
    "start: /a+/",
    "start: b",
    'start: "a" start',
    "start: /(/",
    "%ignore / /\nstart: A\nA: /x/",
    "start:",
    '%llguidance {}\nstart: "a"',
    'start: %json {"type": "string"}',
    'start: "a"~3',
    "start: <|im_end|>",
    "?start: a | b",
    "start: a\na[max_tokens=3]: /.*/",
    "start: @x",
    "%import common.INT\nstart: INT",
    'start: "\\ud800"',
]
STAGES = [
    "top_k",
    "top_p",
    "min_p",
    "temperature",
    "dry",
    "xtc",
    "typ_p",
    "penalties",
    "infill",
    "top_n_sigma",
    "adaptive_p",
    "",
]
ROLES = ["user", "assistant", "system", "developer", "tool", "function", "ipython", "", "User"]


def text(chance: random.Random) -> str:
    """Return a short text, some odd."""
    if chance.random() < 0.2:
        return chance.choice(TEXTS)
    return "".join(chance.choice("abc {}[]\"'\\\n<>|é日") for _ in range(chance.randrange(12)))


def junk(chance: random.Random, depth: int = 0) -> Any:
    """Return any JSON."""
    kind = chance.randrange(7 if depth < 3 else 5)
    if kind == 5:
        return [junk(chance, depth + 1) for _ in range(chance.randrange(4))]
    if kind == 6:
        return {text(chance): junk(chance, depth + 1) for _ in range(chance.randrange(4))}
    return [None, chance.random() < 0.5, chance.choice(NUMBERS), text(chance), chance.choice(TYPES)][kind]


def schema(chance: random.Random, depth: int = 0) -> Any:
    """Return about a JSON Schema: keywords with values that mostly fit them."""
    if depth > 3 or chance.random() < 0.08:
        return chance.choice([True, False, {}, {}, junk(chance)])
    made: dict[str, Any] = {"type": chance.choice(TYPES[:7] if chance.random() < 0.85 else TYPES)}
    for keyword in chance.sample(KEYWORDS, chance.randrange(5)):
        made[keyword] = value_of(keyword, chance, depth) if chance.random() < 0.97 else junk(chance)
    return made


def value_of(keyword: str, chance: random.Random, depth: int) -> Any:
    """Return a value that about fits a keyword."""
    if keyword in ("properties", "$defs", "definitions", "patternProperties"):
        names = ["a", "b", text(chance)] if keyword != "patternProperties" else PATTERNS
        return {chance.choice(names): schema(chance, depth + 1) for _ in range(chance.randrange(4))}
    if keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        return [schema(chance, depth + 1) for _ in range(chance.randrange(4))]
    if keyword.startswith(("min", "max", "exclusive", "multiple")):
        return chance.choice(NUMBERS)
    words: dict[str, Make] = {
        "type": lambda chance: chance.choice(TYPES),
        "required": lambda chance: [chance.choice(["a", "b", "c"]) for _ in range(chance.randrange(3))],
        "enum": lambda chance: [junk(chance) for _ in range(chance.randrange(4))],
        "const": junk,
        "$ref": lambda chance: chance.choice(REFS),
        "pattern": lambda chance: chance.choice(PATTERNS),
        "format": lambda chance: chance.choice(FORMATS),
        "uniqueItems": lambda chance: chance.random() < 0.5,
        "dependentRequired": lambda chance: {"a": ["b", text(chance)]},
        "default": junk,
    }
    return words[keyword](chance) if keyword in words else schema(chance, depth + 1)


def trigger(chance: random.Random) -> Any:
    """Return about what wakes a lazy grammar."""
    return {"type": chance.choice([0, 1, 2, 3, 9, "word"]), "value": text(chance), "token": chance.choice(NUMBERS)}


def part(chance: random.Random) -> Any:
    """Return about one part of a message, in any dialect's words."""
    kind = chance.choice(
        [
            "text",
            "input_text",
            "output_text",
            "image_url",
            "input_image",
            "input_audio",
            "image",
            "file",
            "refusal",
            "thinking",
            "tool_use",
            "tool_result",
            "video",
            "",
        ]
    )
    made: dict[str, Any] = {"type": kind, "text": text(chance)}
    extra: dict[str, Any] = {
        "image_url": chance.choice([text(chance), {"url": "data:image/png;base64,AAAA"}, {"url": 3}, None]),
        "input_audio": {"data": "AAAA", "format": text(chance)},
        "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
        "thinking": text(chance),
        "id": text(chance),
        "tool_use_id": text(chance),
        "name": text(chance),
        "input": junk(chance),
        "content": junk(chance),
    }
    return made | {name: extra[name] for name in chance.sample(sorted(extra), chance.randrange(4))}


def call(chance: random.Random) -> Any:
    """Return about one call of a tool."""
    arguments = chance.choice([text(chance), '{"a": 1}', "[1]", "null", "{", junk(chance)])
    return {"id": text(chance), "type": "function", "function": {"name": text(chance), "arguments": arguments}}


def message(chance: random.Random) -> Any:
    """Return about one message."""
    contents: list[Make] = [text, text, lambda c: [part(c) for _ in range(c.randrange(3))], lambda c: None, junk]
    made: dict[str, Any] = {
        "role": chance.choice(ROLES[:3] if chance.random() < 0.7 else ROLES),
        "content": chance.choice(contents)(chance),
    }
    if chance.random() < 0.3:
        made["tool_calls"] = [call(chance) for _ in range(chance.randrange(3))]
    for name in chance.sample(
        ["name", "tool_call_id", "reasoning_content", "function_call", "thinking", "x"], chance.randrange(3)
    ):
        made[name] = chance.choice([text, junk])(chance)
    return made


def tool(chance: random.Random) -> Any:
    """Return about one tool, in any dialect's words."""
    name = chance.choice(["f", "get", text(chance)])
    function = {
        "name": name,
        "description": text(chance),
        "parameters": schema(chance),
        "strict": chance.random() < 0.5,
    }
    return chance.choice(
        [
            {"type": "function", "function": function},
            {"type": "function"} | function,
            {"name": name, "description": text(chance), "input_schema": schema(chance)},
            {"type": chance.choice(["web_search", "custom", "", 3]), "name": name},
        ]
    )


def tools(chance: random.Random) -> Any:
    return [tool(chance) for _ in range(chance.randrange(1, 4))]


def messages(chance: random.Random) -> Any:
    said = [message(chance) for _ in range(chance.randrange(1, 4))]
    return said if chance.random() < 0.5 else [*said, {"role": "user", "content": "hi"}]


def _form(chance: random.Random) -> Any:
    kind = chance.choice(["json_schema", "json_schema", "json_object", "text", "grammar", "regex", ""])
    return {
        "type": kind,
        "json_schema": {"name": text(chance), "schema": schema(chance), "strict": chance.random() < 0.5},
        "schema": schema(chance),
        "grammar": chance.choice(RULES + LARK),
        "name": "x",
    }


def _structured(chance: random.Random) -> Any:
    name = chance.choice(["json", "regex", "choice", "grammar", "structural_tag", "json_object"])
    values: dict[str, Any] = {
        "json": schema(chance),
        "regex": chance.choice(PATTERNS),
        "choice": [text(chance), text(chance)],
        "grammar": chance.choice(RULES + LARK),
    }
    return {name: values.get(name, junk(chance))}


def _choice(chance: random.Random) -> Any:
    named = {"type": "function", "function": {"name": "f"}, "name": "f"}
    return chance.choice(
        ["auto", "none", "required", "any", named, {"type": "tool", "name": "f"}, {"type": "any"}, junk(chance)]
    )


FORMS: dict[str, Make] = {
    "response_format": _form,
    "json_schema": schema,
    "grammar": lambda chance: chance.choice(RULES + LARK),
    "grammar_lazy": lambda chance: chance.random() < 0.7,
    "grammar_triggers": lambda chance: [trigger(chance) for _ in range(chance.randrange(3))],
    "preserved_tokens": lambda chance: [text(chance), chance.choice(NUMBERS)],
    "structured_outputs": _structured,
    "guided_regex": lambda chance: chance.choice(PATTERNS),
    "text": lambda chance: {"format": _form(chance) | {"schema": schema(chance)}},
    "output_config": lambda chance: {"format": {"type": "json_schema", "schema": schema(chance)}},
}
SAMPLERS: dict[str, Make] = {
    **{
        name: lambda chance: chance.choice([*NUMBERS, *[chance.random()] * 9])
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "typical_p",
            "top_n_sigma",
            "xtc_probability",
            "xtc_threshold",
            "seed",
            "repeat_penalty",
            "repeat_last_n",
            "presence_penalty",
            "frequency_penalty",
            "dry_multiplier",
            "dry_base",
            "dry_allowed_length",
            "dry_penalty_last_n",
            "mirostat",
            "mirostat_tau",
            "mirostat_eta",
            "dynatemp_range",
            "dynatemp_exponent",
            "min_keep",
            "n_probs",
            "n_keep",
            "top_logprobs",
            "adaptive_target",
            "adaptive_decay",
            "n",
            "n_discard",
            "id_slot",
            "t_max_predict_ms",
            "n_indent",
            "best_of",
            "truncate_prompt_tokens",
            "min_tokens",
        )
    },
    "samplers": lambda chance: chance.choice(
        [[chance.choice(STAGES) for _ in range(4)], "kpmtx", "e", "", junk(chance)]
    ),
    "dry_sequence_breakers": lambda chance: [text(chance) for _ in range(3)],
    "logit_bias": lambda chance: chance.choice(
        [{"5": -100, "a": 1}, [[5, False], [text(chance), 1e9]], {"9999999": 1}, junk(chance)]
    ),
    "stop": lambda chance: chance.choice([text(chance), [text(chance)] * 3, junk(chance)]),
    "ignore_eos": lambda chance: True,
    "logprobs": lambda chance: chance.choice([True, 3, junk(chance)]),
    "post_sampling_probs": lambda chance: True,
    "echo": lambda chance: True,
    "suffix": text,
    "stream": lambda chance: chance.random() < 0.5,
    "lora": lambda chance: chance.choice([[{"id": 0, "scale": 1e300}], [], junk(chance)]),
    "context_shift": lambda chance: True,
    "return_tokens": lambda chance: True,
    "return_progress": lambda chance: True,
    "cache_prompt": lambda chance: False,
    "cache_salt": text,
    "priority": lambda chance: chance.choice(NUMBERS),
}
TEMPLATES: dict[str, Make] = {
    "chat_template_kwargs": lambda chance: {
        text(chance): junk(chance),
        "enable_thinking": junk(chance),
        "messages": junk(chance),
    },
    "add_generation_prompt": lambda chance: chance.choice([True, False, junk(chance)]),
    "continue_final_message": lambda chance: True,
    "reasoning_format": lambda chance: chance.choice(["none", "deepseek", "auto", text(chance)]),
    "reasoning_effort": lambda chance: chance.choice(["low", "none", text(chance)]),
    "reasoning": lambda chance: {"effort": chance.choice(["low", "high", text(chance)])},
    "thinking": lambda chance: {
        "type": chance.choice(["enabled", "disabled"]),
        "budget_tokens": chance.choice(NUMBERS),
    },
    "thinking_budget_tokens": lambda chance: chance.choice(NUMBERS),
    "parallel_tool_calls": lambda chance: chance.choice([True, False, junk(chance)]),
    "tool_choice": _choice,
    "tools": tools,
    "system": lambda chance: chance.choice([text(chance), [part(chance)], junk(chance)]),
    "instructions": text,
    "truncation": lambda chance: "auto",
    "add_special": lambda chance: True,
    "with_pieces": lambda chance: True,
    "parse_special": lambda chance: True,
    "parse_tool_calls": lambda chance: True,
}


LENGTHS = ("max_tokens", "max_output_tokens", "n_predict")


def plain(name: str) -> Any:
    """Return what a field holds where it is not odd."""
    return [{"role": "user", "content": "hi"}] if name == "messages" else "Tom and"


def odd_request(chance: random.Random, model: str, known: frozenset[str], needed: dict[str, Make]) -> dict[str, Any]:
    """Return a request with what is needed, mostly odd, and some other fields of those that the route knows."""
    asked: dict[str, Any] = {"model": model}
    for name, make in needed.items():
        asked[name] = make(chance) if name in LENGTHS or chance.random() < 0.4 else plain(name)
    kinds = FORMS | SAMPLERS | TEMPLATES
    names = sorted(known & kinds.keys() - needed.keys())
    for name in chance.sample(names, min(len(names), chance.choice([0, 1, 1, 2, 3]))):
        asked[name] = kinds[name](chance)
    return asked


def prompt(chance: random.Random) -> Any:
    """Return a prompt of a completion: mostly a text."""
    return chance.choice(
        [
            "Tom and",
            text(chance),
            [1, 2, 3],
            [5, text(chance)],
            [chance.choice(NUMBERS)],
            [text(chance), [1]],
            junk(chance),
            {"prompt_string": text(chance), "multimodal_data": ["AAAA"]},
        ]
    )


def items(chance: random.Random) -> Any:
    """Return the input of a response."""
    kinds: list[Make] = [
        message,
        lambda chance: {"type": "message"} | message(chance),
        lambda chance: {"type": "function_call", "call_id": text(chance), "name": "f", "arguments": text(chance)},
        lambda chance: {
            "type": "function_call_output",
            "call_id": text(chance),
            "output": chance.choice([text, junk])(chance),
        },
        lambda chance: {"type": "reasoning", "summary": junk(chance), "content": [part(chance)]},
        lambda chance: {"type": text(chance)},
    ]
    return chance.choice([text(chance), [chance.choice(kinds)(chance) for _ in range(chance.randrange(1, 4))]])
