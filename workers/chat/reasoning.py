"""Where models put what they think before they answer, as their chat templates give it away."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from workers.chat.tools.family import ThoughtMarks

NOT_FOUND = ("<|inner_prefix|>",)
"""Marks of templates (Apertus) in which llama-server finds no thoughts, so that it tells them not to think."""

THINK = ThoughtMarks("<think>", "</think>")

THOUGHTS = (
    ThoughtMarks("<|channel>thought\n", "<channel|>", anywhere=True),  # Gemma 4
    ThoughtMarks("[THINK]", "[/THINK]", anywhere=True),  # Mistral
    ThoughtMarks("<|START_THINKING|>", "<|END_THINKING|>", anywhere=True),  # Command-R
    ThoughtMarks("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThoughtMarks("<mm:think>", "</mm:think>"),  # MiniMax M3
    ThoughtMarks("<|inner_prefix|>", "<|inner_suffix|>", anywhere=True),  # Apertus
    ThoughtMarks("<thinking>", "</thinking>"),  # Apriel
    THINK,
)


def thought_of(template: str) -> ThoughtMarks | None:
    """What the template's model thinks between; None: it shows no thoughts."""
    return next((thought for thought in THOUGHTS if thought.close in template), None)


HARMONY = "<|channel|>analysis<|message|>"

SPOKEN_TURNS: Mapping[str, ThoughtMarks] = MappingProxyType(
    {
        HARMONY[: len("<|channel|>")]: ThoughtMarks(HARMONY, "<|end|><|start|>assistant<|channel|>final<|message|>"),
        "<|channel>": ThoughtMarks("<|channel>thought\n", "<channel|>"),
        "<atem:function_calls>": ThoughtMarks(" to=self<|message|>", "<|eom|><|start|>assistant to=user<|message|>"),
    }
)
"""By a mark in their templates: models whose turn has a thought that the template does not show, as llama-server writes
it."""


def turn_marks_of(template: str) -> ThoughtMarks | None:
    """Return what stands around the thought of a turn that is gone on from; None: such a turn has no thought."""
    if any(mark in template for mark in NOT_FOUND):
        return None
    return spoken_turn_of(template) or thought_of(template)


def spoken_turn_of(template: str) -> ThoughtMarks | None:
    return next((marks for mark, marks in SPOKEN_TURNS.items() if mark in template), None)


def is_deepseek_v4(template: str) -> bool:
    """DeepSeek V4 has the markup of V3.2, and another word for its calls; llama-server tells them apart by that."""
    return "dsml_token" in template and "function_calls" not in template
