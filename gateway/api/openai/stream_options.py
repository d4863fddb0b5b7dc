"""`stream_options`: OpenAI's, with vLLM's `continuous_usage_stats`."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.api.parameters.base import Body
from gateway.errors import InvalidRequest


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


@dataclass(frozen=True, slots=True)
class UsageWish:
    """The chunks in which a stream tells how many tokens were used."""

    at_end: bool = False
    """Usage comes in a chunk of its own, after the answers."""
    always: bool = False
    """Usage so far comes in every chunk."""


NOT_TOLD = UsageWish()


def read_stream_options(options: StreamOptions | None, *, stream: bool) -> UsageWish:
    """Return what the options ask for. Raises InvalidRequest."""
    if options is None:
        return NOT_TOLD
    if not stream:
        message = "`stream_options` needs `stream: true`. Leave it out, or stream."
        raise InvalidRequest(message, param="stream_options")
    always = bool(options.continuous_usage_stats)
    return UsageWish(bool(options.include_usage), always)
