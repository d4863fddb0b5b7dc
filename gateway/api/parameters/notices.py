"""Reads what a caller wants to be told beside the answer: llama-server's `return_progress`, `timings_per_token` and
`return_tokens` (tools/server/README.md of llama.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from gateway.api.parameters.base import Body
from workers.protocol.requests import MAX_PROMPT_CHARS, GenerateRequest, Notice


class ProgressBody(Body):
    return_progress: bool = False
    timings_per_token: bool = False


class NoticesBody(ProgressBody):
    return_tokens: bool = False


def read_notices(body: NoticesBody, *, stream: bool, verbose: bool = False) -> tuple[Notice, ...]:
    """Return what is told beside the answer; `verbose`: the settings are told as well."""
    notices: list[Notice] = ["settings"] if verbose else []
    notices += read_progress_notices(body, stream=stream)
    if body.return_tokens:
        notices.append("tokens")
    return tuple(notices)


def read_progress_notices(body: ProgressBody, *, stream: bool) -> tuple[Notice, ...]:
    """Return what streams tell of an answer's progress; a whole answer comes when that is over."""
    wanted: list[tuple[bool, Notice]] = [(body.return_progress, "progress"), (body.timings_per_token, "timings")]
    return tuple(notice for is_wanted, notice in wanted if is_wanted and stream)


def sharing_prompts(requests: Sequence[GenerateRequest]) -> tuple[GenerateRequest, ...]:
    """Give each of a request's answers its share of the characters of prompts that one request is told."""
    most = MAX_PROMPT_CHARS // max(1, len(requests))
    return tuple(replace(one, max_prompt_chars=most) if "settings" in one.tell else one for one in requests)
