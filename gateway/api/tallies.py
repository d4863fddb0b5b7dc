"""Usage and timings in the shapes of OpenAI and llama-server, which several bodies carry."""

from __future__ import annotations

from typing import Any

from workers.protocol.events import Progress, Timings, Usage


def usage_object(usage: Usage, num_thought: int = 0) -> dict[str, Any]:
    """OpenAI's API reference, `usage` of a completion; `num_thought` of its tokens were thought, not said."""
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
    """tools/server/README.md of llama.cpp, `timings`."""
    return {
        "cache_n": timings.cache_n,
        "prompt_n": timings.prompt_n,
        "prompt_ms": timings.prompt_ms,
        **_rates("prompt", timings.prompt_n, timings.prompt_ms),
        "predicted_n": timings.predicted_n,
        "predicted_ms": timings.predicted_ms,
        **_rates("predicted", timings.predicted_n, timings.predicted_ms),
    }


def progress_object(progress: Progress) -> dict[str, int]:
    """tools/server/README.md of llama.cpp, `prompt_progress`."""
    return {
        "total": progress.total,
        "cache": progress.cache,
        "processed": progress.processed,
        "time_ms": progress.time_ms,
    }


def _rates(name: str, count: int, total_ms: float) -> dict[str, float]:
    return {
        f"{name}_per_token_ms": total_ms / count if count else 0.0,
        f"{name}_per_second": count * 1e3 / total_ms if total_ms > 0 else 0.0,
    }
