"""The marks of models' thoughts, as their chat templates show them."""

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
    """Return the marks around the thoughts of a template's model; None: the template shows no thoughts."""
    return next((thought for thought in THOUGHTS if thought.close in template), None)


HARMONY = "<|channel|>analysis<|message|>"

SPOKEN_TURNS: Mapping[str, ThoughtMarks] = MappingProxyType(
    {
        HARMONY[: len("<|channel|>")]: ThoughtMarks(HARMONY, "<|end|><|start|>assistant<|channel|>final<|message|>"),
        "<|channel>": ThoughtMarks("<|channel>thought\n", "<channel|>"),
        "<atem:function_calls>": ThoughtMarks(" to=self<|message|>", "<|eom|><|start|>assistant to=user<|message|>"),
    }
)
"""Mark in a template -> marks around the thought of a turn, as llama-server writes them, for models whose template does
not show it."""


def turn_marks_of(template: str) -> ThoughtMarks | None:
    """Return the marks around the thought of a turn that the answer continues; None: such a turn has no thought."""
    if any(mark in template for mark in NOT_FOUND):
        return None
    return spoken_turn_of(template) or thought_of(template)


def spoken_turn_of(template: str) -> ThoughtMarks | None:
    return next((marks for mark, marks in SPOKEN_TURNS.items() if mark in template), None)


def is_deepseek_v4(template: str) -> bool:
    """Return whether a template is DeepSeek V4's, by its word for calls, as llama-server does; V3.2 has its markup."""
    return "dsml_token" in template and "function_calls" not in template
