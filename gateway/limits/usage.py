"""Counts what the answers to one request took, from their logs, however they ended."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from gateway.telemetry.answer_log import AnswerLog
from workers.protocol.events import NO_USAGE, Finished, Usage


def usage_of_logs(answers: Sequence[AnswerLog], num_prompts: int) -> Usage:
    """Return the usage of all answers to a request: a prompt counts once, however many answers it has.

    Answers that were cut off count as far as they came. `num_prompts`: number of prompts, each with equally many
    answers, which come one prompt after the other."""
    per_prompt = max(1, len(answers) // max(1, num_prompts))
    total, prompt = NO_USAGE, NO_USAGE
    for number, answer in enumerate(answers):
        if number % per_prompt == 0:
            total, prompt = total + prompt, NO_USAGE
        usage = _usage_of(answer)
        total += usage.of_answer
        if not prompt.prompt_tokens:
            prompt = usage.of_prompt
    return total + prompt


def compute_ms(answers: Sequence[AnswerLog]) -> float:
    """Return the milliseconds from each answer's last submission to a worker to its end, added up."""
    now, total_s = monotonic(), 0.0
    for answer in answers:
        attempt = answer.last_attempt
        if attempt is not None:
            total_s += (attempt.ended_at or now) - attempt.submitted_at
    return total_s * 1000


def _usage_of(answer: AnswerLog) -> Usage:
    attempt = answer.last_attempt
    if attempt is None:
        return NO_USAGE
    if isinstance(attempt.last_event, Finished):
        return attempt.last_event.usage
    return Usage(attempt.num_prompt, answer.num_generated, attempt.num_prompt - attempt.num_prompt_computed)
