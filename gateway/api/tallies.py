"""Writes usage and timings in the shapes of OpenAI and llama-server, which several bodies carry."""

from __future__ import annotations

from typing import Any

import msgspec

from workers.protocol.events import Progress, Timings, Usage

_encode = msgspec.json.Encoder().encode


def usage_object(usage: Usage, num_thought: int = 0) -> dict[str, Any]:
    """Return `usage` as in OpenAI's API reference; `num_thought` of its completion tokens were thought, not said."""
    document: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if num_thought:
        document["completion_tokens_details"] = {"reasoning_tokens": num_thought}
    return document


def timings_object(timings: Timings) -> dict[str, Any]:
    """Return `timings` as in tools/server/README.md of llama.cpp.

    The first token comes with the prompt: the rate is that of the tokens after it, 0 where there are none.
    """
    prompt_n, prompt_ms = timings.prompt_n, timings.prompt_ms
    predicted_n, predicted_ms = timings.predicted_n, timings.predicted_ms
    steps = max(0, predicted_n - 1)
    return {
        "cache_n": timings.cache_n,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt_n if prompt_n else 0.0,
        "prompt_per_second": prompt_n * 1e3 / prompt_ms if prompt_ms > 0 else 0.0,
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / steps if steps else 0.0,
        "predicted_per_second": steps * 1e3 / predicted_ms if predicted_ms > 0 else 0.0,
    }


def progress_object(progress: Progress) -> dict[str, int]:
    """Return `prompt_progress` as in tools/server/README.md of llama.cpp."""
    return {
        "total": progress.total,
        "cache": progress.cache,
        "processed": progress.processed,
        "time_ms": progress.time_ms,
    }


def progress_timings(progress: Progress) -> dict[str, Any]:
    """Return the timings of a prompt that is still read."""
    num_read = max(0, progress.processed - progress.cache)
    return timings_object(Timings(progress.cache, num_read, float(progress.time_ms), 0, 0.0))


def progress_fields(progress: Progress, *, timings: bool) -> bytes:
    """Return the fields of a chunk that stand behind its choices; `timings`: those are wanted as well."""
    fields = b',"prompt_progress":' + _encode(progress_object(progress))
    return fields + (b',"timings":' + _encode(progress_timings(progress)) if timings else b"")
