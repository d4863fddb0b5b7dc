"""Writes tools, calls and results as text, for templates that can't show them.

A template may show tools and leave it to the model's own text how they are called (LFM2, Granite 3), write calls and
show no tools (DeepSeek R1), or neither (Gemma 2). The text then has the form of the model's family
(`workers.chat.families`), found by the same marks of its template. Everywhere else calls look like Hermes' and Qwen's,
which most models have seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from workers.chat.environment import to_json
from workers.protocol.requests import Tool

Call = tuple[str, Any]
"""A call's name, and its arguments as an object."""

EXAMPLE: Call = ("function_name", {"argument": "value"})


def signatures(tools: Sequence[Tool], source: str) -> str:
    """Return a description of the tools and of the form of calls. `source`: of the template."""
    lines = [
        to_json({"name": tool.name, "description": tool.description or "", "parameters": tool.parameters or {}})
        for tool in tools
    ]
    listed = "\n".join(lines)
    return (
        "You can call functions. Each line between <tools> and </tools> describes one, with a JSON Schema of its "
        f"arguments:\n<tools>\n{listed}\n</tools>\nTo call a function, answer with its name and its arguments in this "
        f"form:\n{calls([EXAMPLE], source)}"
    )


def calls(made: Sequence[Call], source: str) -> str:
    """Return calls as the model writes them. `source`: of the template."""
    write = next((write for marks, write in WRITERS if all(mark in source for mark in marks)), _hermes)
    return write(made)


def result(content: str) -> str:
    return f"<tool_response>\n{content}\n</tool_response>"


def _hermes(made: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_object(call)}\n</tool_call>" for call in made)


def _granite(made: Sequence[Call]) -> str:
    return f"<|tool_call|>[{', '.join(map(_object, made))}]"


def _lfm2(made: Sequence[Call]) -> str:
    return f"<|tool_call_start|>[{', '.join(map(_python, made))}]<|tool_call_end|>"


def _gemma(made: Sequence[Call]) -> str:
    return f"```tool_code\n[{', '.join(map(_python, made))}]\n```"


def _deepseek_r1(made: Sequence[Call]) -> str:
    return _deepseek(f"function<｜tool▁sep｜>{name}\n```json\n{to_json(arguments)}\n```" for name, arguments in made)


def _deepseek_v3_1(made: Sequence[Call]) -> str:
    return _deepseek(f"{name}<｜tool▁sep｜>{to_json(arguments)}" for name, arguments in made)


def _deepseek(bodies: Iterable[str]) -> str:
    inner = "".join(f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>" for body in bodies)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _object(call: Call) -> str:
    name, arguments = call
    return to_json({"name": name, "arguments": arguments})


def _python(call: Call) -> str:
    name, arguments = call
    if not isinstance(arguments, dict):
        return f"{name}({to_json(arguments)})"
    return f"{name}({', '.join(f'{key}={_literal(value)}' for key, value in arguments.items())})"


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


WRITERS: Sequence[tuple[Sequence[str], Callable[[Sequence[Call]], str]]] = (
    (("<|tool_list_start|>",), _lfm2),
    (("List of tools: [",), _lfm2),
    (("<start_of_turn>",), _gemma),
    (("<|tool_call|>",), _granite),
    (("<｜tool▁sep｜>", "```json"), _deepseek_r1),
    (("<｜tool▁sep｜>",), _deepseek_v3_1),
)
"""Marks -> writer of calls. The first entry whose marks are all in a template's source counts."""
