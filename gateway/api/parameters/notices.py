"""What a caller wants to be told beside the answer: llama-server's `return_progress`, `timings_per_token` and
`return_tokens` (tools/server/README.md of llama.cpp).
"""

from __future__ import annotations

from gateway.api.parameters.base import Body
from workers.protocol.requests import Notice


class NoticesBody(Body):
    return_progress: bool = False
    timings_per_token: bool = False
    return_tokens: bool = False


def read_notices(body: NoticesBody, *, stream: bool, verbose: bool = False) -> tuple[Notice, ...]:
    """Progress and times between tokens are told in streams only: a whole answer comes when both are over."""
    notices: list[Notice] = ["settings"] if verbose else []
    if body.return_progress and stream:
        notices.append("progress")
    if body.timings_per_token and stream:
        notices.append("timings")
    if body.return_tokens:
        notices.append("tokens")
    return tuple(notices)
