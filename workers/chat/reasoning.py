"""Where models put what they think before they answer, as their chat templates give it away."""

from __future__ import annotations

from workers.chat.tools.family import ThoughtMarks

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
