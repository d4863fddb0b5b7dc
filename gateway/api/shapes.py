"""Writes the parts that answers of several dialects have in common: usage, timings, probabilities, settings, vectors.

Source of the settings' names: `task_params::to_json` in tools/server/server-task.cpp of llama.cpp. An adapter's `id` is
a number there, and its name here.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import asdict

from workers.protocol.events import Finished, FinishReason, Progress, Timings, Usage
from workers.protocol.pooled import FLOAT_BYTES, PoolResult
from workers.protocol.requests import AdapterUse, GenerateRequest, Sampling

INPUT_TOKENS = {"object": "response.input_tokens"}
"""The fields of OpenAI's answer about how many tokens a prompt has, except the number itself."""

_encode = msgspec.json.Encoder().encode


class Likely(msgspec.Struct, frozen=True, gc=False):
    """A token and its log probability. A struct is encoded faster than a dict, and many are written per token."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class Entry(Likely, frozen=True, gc=False):
    """A token of the answer, with the most likely tokens at its position."""

    top_logprobs: list[Likely]


def usage_object(usage: Usage, num_thought: int = 0, *, is_foretold: bool = False) -> dict[str, Any]:
    """Return `usage` as in OpenAI's API reference; `num_thought`: how many completion tokens are reasoning.
    `is_foretold`: whether the caller sent a prediction of the answer, and the answer has ended."""
    document: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    details = {"reasoning_tokens": num_thought} if num_thought else {}
    if is_foretold:
        details["accepted_prediction_tokens"] = usage.accepted_prediction_tokens
        details["rejected_prediction_tokens"] = usage.rejected_prediction_tokens
    if details:
        document["completion_tokens_details"] = details
    return document


def timings_object(timings: Timings) -> dict[str, Any]:
    """Return `timings` as in tools/server/README.md of llama.cpp.

    The prefill yields the first token. The rate of generation counts only the later tokens; it is 0 if there are none.
    """
    prompt_n, prompt_ms = timings.prompt_n, timings.prompt_ms
    predicted_n, predicted_ms = timings.predicted_n, timings.predicted_ms
    steps = max(0, predicted_n - 1)
    document = {
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
    if timings.draft_n:
        document |= {"draft_n": timings.draft_n, "draft_n_accepted": timings.draft_n_accepted}
    return document


def progress_object(progress: Progress) -> dict[str, int]:
    """Return `prompt_progress` as in tools/server/README.md of llama.cpp."""
    return {
        "total": progress.total,
        "cache": progress.cache,
        "processed": progress.processed,
        "time_ms": progress.time_ms,
    }


def progress_timings(progress: Progress) -> dict[str, Any]:
    """Return the timings of a call whose prompt is still being processed."""
    num_read = max(0, progress.processed - progress.cache)
    return timings_object(Timings(progress.cache, num_read, float(progress.time_ms), 0, 0.0))


def progress_fields(progress: Progress, *, timings: bool) -> bytes:
    """Return a chunk's JSON fields about progress, to put after its choices. `timings`: whether to add the timings."""
    fields = b',"prompt_progress":' + _encode(progress_object(progress))
    return fields + (b',"timings":' + _encode(progress_timings(progress)) if timings else b"")


_LISTS = frozenset({"dry_sequence_breakers", "samplers", "logit_bias"})

LAST_SEED = 2**32 - 1
"""The seed that tells llama.cpp to draw a random one."""

FIXED: dict[str, Any] = {
    "n_discard": 0,
    "chat_format": "Content-only",
    "reasoning_format": "none",
    "reasoning_in_content": False,
    "generation_prompt": "",
    "speculative.types": "none",
    "backend_sampling": False,
}
"""llama-server's settings that can't be changed here, with the values that are reported."""


def default_settings(sampling: Sampling) -> dict[str, Any]:
    """Return the default settings (those of a request that sets none), except the ones whose values can be long."""
    return _numbers(sampling) | _limits(GenerateRequest(), stream=False) | _samplers(sampling) | FIXED | {"lora": []}


def settings_object(
    request: GenerateRequest, sampling: Sampling, adapters: Sequence[AdapterUse], *, stream: bool
) -> dict[str, Any]:
    """Return a call's settings; `sampling` and `adapters` as the worker used them."""
    constraint = request.constraint
    triggers = constraint.triggers if constraint else ()
    return {
        **_numbers(sampling),
        "dry_sequence_breakers": sampling.dry_sequence_breakers or (),
        **_limits(request, stream=stream),
        "stop": request.stop,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in sampling.logit_bias or ()],
        "grammar": constraint.text if constraint else "",
        "grammar_lazy": bool(triggers),
        "grammar_triggers": [{"type": 1, "value": word} for word in triggers],
        "preserved_tokens": [],
        **_samplers(sampling),
        **FIXED,
        "lora": [{"id": use.name, "scale": use.scale} for use in adapters],
    }


def stop_type(end: Finished) -> str:
    """Return llama-server's word for why an answer ended."""
    if end.reason is FinishReason.LENGTH:
        return "limit"
    return "eos" if end.stop is None else "word"


def _numbers(sampling: Sampling) -> dict[str, Any]:
    numbers = {name: value for name, value in asdict(sampling).items() if name not in _LISTS}
    return numbers | {"seed": LAST_SEED if sampling.seed is None else sampling.seed}


def _limits(request: GenerateRequest, *, stream: bool) -> dict[str, Any]:
    n_predict = -1 if request.max_tokens is None else request.max_tokens
    return {
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "n_keep": request.n_keep,
        "ignore_eos": request.ignore_eos,
        "stream": stream,
        "n_probs": request.n_probs,
        "timings_per_token": "timings" in request.tell,
        "post_sampling_probs": request.post_sampling_probs,
    }


def _samplers(sampling: Sampling) -> dict[str, Any]:
    return {"samplers": sampling.samplers or ()}


PART_BYTES = 256 << 10
"""Approximate bytes of each part in which an answer is written; other tasks run between two parts."""
NUM_PARTS = 3
"""Parts of an answer in memory while it is sent: one in the connection's buffer, one to be sent, and the next."""
DECIMAL_BYTES = 24
"""Maximum bytes of one number of a vector in JSON."""


def answer_bytes(num_bytes: int, width: int) -> int:
    """Return the bytes of memory that an answer takes while it is sent: its `num_bytes` of vectors, each of `width`
    numbers, and the parts being written."""
    written = DECIMAL_BYTES * num_bytes // FLOAT_BYTES
    # A part ends with a whole row, which can reach beyond PART_BYTES.
    return num_bytes + min(written, NUM_PARTS * (PART_BYTES + DECIMAL_BYTES * width))


def rows_of(result: PoolResult) -> Iterator[array[float]]:
    """Yield the rows of a result in order, each as an array of float32."""
    row_bytes = result.width * FLOAT_BYTES
    for start in range(0, len(result.vectors), row_bytes):
        row = array("f")
        row.frombytes(result.vectors[start : start + row_bytes])
        if sys.byteorder == "big":
            row.byteswap()
        yield row


def base64_of(row: array[float]) -> str:
    """Return the row as little-endian float32 in base64."""
    if sys.byteorder == "big":
        row = row[:]
        row.byteswap()
    return base64.b64encode(row.tobytes()).decode("ascii")


def shortened(row: array[float], width: int) -> array[float]:
    """Return the first `width` numbers of a row, scaled to Euclidean length 1 again."""
    head = row[:width]
    length = math.sqrt(sum(number * number for number in head))
    return array("f", [number / length for number in head]) if length else head
