"""Tells callers who ask for `verbose` what a chat's or completion's answer ran with: llama-server's `__verbose`.

Source: `to_json_oaicompat_chat` and `to_json_non_oaicompat` in tools/server/server-task.cpp of llama.cpp. The text is
told once, in the answer itself.
"""

from __future__ import annotations

from typing import Any

from gateway.api.generation_settings import settings_object, stop_type
from gateway.api.tallies import timings_object
from workers.protocol.events import Finished, Settings
from workers.protocol.requests import GenerateRequest


class Verbose:
    """Tells the prompt of one answer as the model read it, and the settings that the answer was drawn with."""

    def __init__(self, request: GenerateRequest, *, wanted: bool, stream: bool) -> None:
        self._request = request
        self._wanted = wanted
        self._stream = stream
        self._ran: Settings | None = None

    def note(self, event: Settings) -> None:
        self._ran = event

    def fields(self, end: Finished) -> dict[str, Any]:
        """Return `__verbose` as a field of the answer, or no field where the caller did not ask."""
        if not self._wanted:
            return {}
        ran, usage = self._ran, end.usage
        sampling = self._request.sampling if ran is None else ran.sampling
        return {
            "__verbose": {
                "prompt": "" if ran is None else ran.prompt,
                "generation_settings": settings_object(
                    self._request, sampling, self._request.adapters, stream=self._stream
                ),
                "tokens_predicted": usage.completion_tokens,
                "tokens_evaluated": usage.prompt_tokens,
                "truncated": end.truncated,
                "stop_type": stop_type(end),
                "stopping_word": end.stop or "",
                "timings": timings_object(end.timings),
            }
        }
