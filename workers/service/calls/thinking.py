"""The thought that a model may write before its answer: how it ends, and how long a call lets it be."""

from __future__ import annotations

from collections.abc import Sequence

from workers.chat.answers import Answers
from workers.constraint.thought import Thought
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.requests import UNBOUNDED, GenerateRequest


def thought_before(request: GenerateRequest, prompt: Sequence[int], answers: Answers) -> Thought | None:
    """Return the thought before a call's answer; None: there is none, or its end is not known.

    Raises CallFailed: INVALID_REQUEST for a budget's message that would end the thought before the message ends.
    """
    family, thinking = answers.family, answers.bounds_of_thought(request)
    marks = family.thought
    is_chat = request.prompt is None and request.infill is None
    if marks is None or not (is_chat or thinking.budget != UNBOUNDED):
        return None
    if fault := answers.closing_fault(thinking.message):
        name = "reasoning_budget_message"
        raise CallFailed(Failure(FailureCode.INVALID_REQUEST, f"`{name}` {fault}", name))
    is_open = answers.is_thinking(request, prompt)
    if not (is_open or answers.has_thought(request)):
        return None
    # Where a form or calls are possible, they say what follows the thought.
    closing = marks.close if request.tools or request.constraint else family.thought_close
    ends = family.syntax.triggers if family.calls_end_thoughts and request.tools else ()
    return Thought(
        open=marks.open.strip(),
        close=marks.close.strip(),
        closing=closing,
        ends=ends,
        is_open=is_open,
        budget=thinking.budget,
        message=thinking.message,
        again=marks.anywhere,
    )
