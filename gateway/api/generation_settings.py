"""The settings that a call ran with, in llama-server's form.

Source of the names: `task_params::to_json` in tools/server/server-task.cpp of llama.cpp. Adapters go by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import asdict

from workers.protocol.events import Finished, FinishReason
from workers.protocol.requests import AdapterUse, GenerateRequest, Sampling

_LISTS = frozenset({"dry_sequence_breakers", "samplers", "logit_bias"})

LAST_SEED = 2**32 - 1
"""llama.cpp's seed for "draw one"."""

FIXED: dict[str, Any] = {
    "n_discard": 0,
    "chat_format": "Content-only",
    "reasoning_format": "none",
    "reasoning_in_content": False,
    "generation_prompt": "",
    "speculative.types": "none",
    "backend_sampling": False,
}
"""Settings that can't be set here."""


def default_settings(sampling: Sampling) -> dict[str, Any]:
    """Return the settings of a caller who sets none, without those that can be long."""
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
