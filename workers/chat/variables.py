"""The variables that every chat template gets beside the conversation.

Source of names and defaults: tools/server/server-common.cpp, common/chat.cpp and `caps_apply_*` in
common/jinja/caps.cpp of llama.cpp; `thinking` and `thinking_effort` are other names for the same, in templates of
Granite, DeepSeek and Kimi K3, which llama.cpp does not set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from workers.chat.reasoning import NOT_FOUND, is_deepseek_v4

EFFORT_NAMES = ("reasoning_effort", "reasoning_strength", "thinking_effort")

ANSWER_SCHEMA = "answer_schema"
"""The JSON Schema of the answer, as text. Like llama-server, only DeepSeek V4 gets it: it is trained to read it."""

PRESERVED: Mapping[str, bool] = {
    "preserve_thinking": True,
    "clear_thinking": False,
    "truncate_history_thinking": False,
    "drop_thinking": False,
}
"""Variables that tell templates to show the thoughts of earlier turns; llama.cpp's list."""


def variables(values: Mapping[str, Any], source: str = "") -> dict[str, Any]:
    """Return a conversation's values with llama-server's defaults, by all names that templates have for them: a model
    may think, and its thoughts of earlier turns are shown.

    A name that `values` has keeps its value. Only a caller or the catalog sets `thinking`: by default llama-server
    leaves it out, and some templates ask for more than a switch with it. `source`: of the template.
    """
    preserve = values.get("preserve_reasoning", True) is True
    given: dict[str, Any] = {name: value if preserve else not value for name, value in PRESERVED.items()}
    given["enable_thinking"] = not any(mark in source for mark in NOT_FOUND)
    if "enable_thinking" in values:
        given["thinking"] = values["enable_thinking"]
    if isinstance(effort := values.get("reasoning_effort"), str):
        given |= dict.fromkeys(EFFORT_NAMES, effort)
    given |= values
    schema = given.pop(ANSWER_SCHEMA, None)
    if schema is not None and is_deepseek_v4(source):
        given.setdefault("response_format", json.loads(schema))
    return given
