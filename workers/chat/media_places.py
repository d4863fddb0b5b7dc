"""Finds the places of pictures and sounds in the text that a chat template makes of messages.

Before messages are rendered, a marker is put where each medium stands; after it, the text is cut at the markers. The
marker is drawn at random for each request, so that no text of a caller's can be taken for one, and has letters and
digits only: templates may write texts as JSON.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from msgspec.structs import replace

from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.requests import GenerateRequest

SHOWN = "<__media__>"
"""Marker that callers see in a prompt's text; llama-server's default."""

MARKER_BYTES = 16


def new_marker() -> str:
    return f"media{secrets.token_hex(MARKER_BYTES)}"


def with_markers(text: str, places: Sequence[int], marker: str) -> str:
    """Return a text with the marker before the characters with these numbers."""
    if not places:
        return text
    starts, ends = (0, *places), (*places, len(text))
    return marker.join(text[start:end] for start, end in zip(starts, ends, strict=True))


def marked(request: GenerateRequest, marker: str) -> GenerateRequest:
    """Return a request whose messages have the marker in place of each medium. Raises CallFailed if there are more or
    fewer places than media."""
    num_places = sum(len(message.media) for message in request.messages)
    if num_places != len(request.media):
        raise _refused(f"there are {num_places} places for {len(request.media)} pictures and sounds; send as many")
    messages = tuple(
        replace(one, content=with_markers(one.content or "", one.media, marker), media=()) if one.media else one
        for one in request.messages
    )
    return replace(request, messages=messages)


def cut(text: str, marker: str, num_media: int) -> list[str]:
    """Return the runs of text between the markers. Raises CallFailed if the template left some out or wrote them
    twice."""
    runs = text.split(marker)
    if len(runs) != num_media + 1:
        raise _refused(
            f"the model's chat template shows {len(runs) - 1} of {num_media} pictures and sounds; move them to the "
            "last message of the user"
        )
    return runs


def _refused(message: str) -> CallFailed:
    return CallFailed(Failure(FailureCode.INVALID_REQUEST, message, "messages"))
