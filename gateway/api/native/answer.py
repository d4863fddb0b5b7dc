"""Makes the last object of one answer, streamed or whole, and the entries of its `completion_probabilities`.

Sources: `server_task_result_cmpl_final` and `completion_token_output` in tools/server/server-task.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from gateway.api.http.answers import EncodedArray
from gateway.api.native.request import CompletionRequest
from gateway.api.shapes import Entry, Likely, settings_object, stop_type, timings_object
from gateway.call import Call
from gateway.telemetry.request_log import RequestLog
from workers.protocol.events import Finished, Logprobs, Settings, Started, TokenLogprob
from workers.protocol.requests import AdapterUse, GenerateRequest

LOWEST = -3.4028234663852886e38
"""The lowest 32-bit float. It is written in place of minus infinity, which JSON lacks."""


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """One token with its probability after the samplers."""

    id: int
    token: str
    bytes: list[int]
    prob: float


class SampledEntry(Sampled, frozen=True, gc=False):
    top_probs: list[Sampled]


def entry(event: Logprobs, *, post_sampling: bool) -> Entry | SampledEntry:
    """Return a token's entry in `completion_probabilities`. `post_sampling`: probabilities after the samplers."""
    if post_sampling:
        return SampledEntry(*_fields(event.chosen), [Sampled(*_fields(token)) for token in event.top])
    return Entry(*_fields(event.chosen), [Likely(*_fields(token)) for token in event.top])


def _fields(token: TokenLogprob) -> tuple[int, str, list[int], float]:
    piece, logprob = token.piece, token.logprob
    return token.token, piece.decode("utf-8", "ignore"), list(piece), logprob if logprob > LOWEST else LOWEST


class FleetInfo(Protocol):
    """Provides what a completion's answer tells about the fleet: numbers of slots, names of adapters."""

    def number_slot(self, model: str, worker: str, slot: int) -> int:
        """Return a worker's slot as a number among the slots of all the model's workers; -1: not known."""
        ...

    def adapters(self, call: Call, asked: tuple[AdapterUse, ...]) -> tuple[AdapterUse, ...]:
        """Return the adapters a call uses. Numbers in `asked` become names. Raises InvalidRequest, PermissionDenied."""
        ...


class Answer:
    """Collects what the last object of one answer shows beside its text."""

    def __init__(
        self, number: int, asked: CompletionRequest, call: Call, request_log: RequestLog, fleet: FleetInfo
    ) -> None:
        self.number = number
        self.request: GenerateRequest = asked.requests[number]
        self.slot = -1
        self.num_prompt_tokens = 0
        self.has_new_line = False
        self._asked = asked
        self._call = call
        self._request_log = request_log
        self._fleet = fleet
        self._adapters = fleet.adapters(call, self.request.adapters)
        self._settings: Settings | None = None

    def note(self, event: Started | Settings) -> None:
        if isinstance(event, Settings):
            self._settings = event
            return
        self.num_prompt_tokens = event.num_prompt_tokens
        if len(self._asked.requests) == 1:
            # Several answers can run on several workers, and the request log has only the worker of the first.
            self.slot = self._fleet.number_slot(self._request_log.model, self._request_log.worker, event.slot)

    def final(
        self,
        end: Finished,
        content: str,
        tokens: Sequence[int],
        probabilities: Sequence[Entry | SampledEntry] | EncodedArray | None,
    ) -> dict[str, Any]:
        """Return the answer's last object: only its `response_fields`, if the caller named any."""
        usage, ran_with = end.usage, self._settings
        sampling = self.request.sampling if ran_with is None else ran_with.sampling
        document = {
            "index": self.number,
            "content": content,
            "tokens": tokens,
            "id_slot": self.slot,
            "stop": True,
            "model": self._call.alias,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "generation_settings": settings_object(self.request, sampling, self._adapters, stream=self._asked.stream),
            "prompt": "" if ran_with is None else ran_with.prompt,
            "has_new_line": self.has_new_line,
            "truncated": end.truncated,
            "stop_type": stop_type(end),
            "stopping_word": end.stop or "",
            # The last token was sampled and never computed.
            "tokens_cached": usage.prompt_tokens + max(0, usage.completion_tokens - 1),
            "timings": timings_object(end.timings),
        }
        if probabilities is not None:
            document["completion_probabilities"] = probabilities
        wanted = self._asked.response_fields
        return _pick_fields(document, wanted) if wanted else document


def _pick_fields(document: dict[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
    """Return path -> value for the wanted paths, such as `timings/prompt_n`; unknown paths are left out."""
    found: dict[str, Any] = {}
    for path in wanted:
        value: Any = document
        for name in path.split("/"):
            value = value.get(name, _MISSING) if isinstance(value, dict) else _MISSING
        if value is not _MISSING:
            found[path] = value
    return found


_MISSING = object()
