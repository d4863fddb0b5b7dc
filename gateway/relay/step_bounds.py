"""Bounds the values in one frame of a worker's event stream, counted in its bytes before it is decoded.

A frame is the output of one engine step for this gateway's calls. Its length does not bound the work: 16 MiB are the
text of one long prompt, or 800,000 events that take the event loop three seconds.
"""

from __future__ import annotations

_OTHERS = bytes(set(range(256)) - set(b"[]{},"))

UNCHECKED_BYTES = 64 << 10
"""Length up to which a frame is not checked: decoding it takes milliseconds at most. Nearly every frame is shorter."""
ITEMS = 1 << 17
"""Most brackets and commas of any frame; some 50 ms at worst. A token with a hundred alternatives has 500."""
ITEMS_PER_CALL = 4096
"""Brackets and commas allowed in addition for each call under way there: a few tokens with their alternatives."""


class StepTooLarge(ValueError):
    """A frame holds more than the steps of its calls can."""


def check_step(data: bytes, num_calls: int) -> None:
    """Raise StepTooLarge for too many values, in 5 ms per MiB at most. `num_calls`: calls under way on the worker."""
    if len(data) <= UNCHECKED_BYTES:
        return
    most = ITEMS + ITEMS_PER_CALL * num_calls
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    # No event has more strings than brackets and commas, and taking strings out makes an object of each.
    too_many = data.count(b'"') > 2 * most
    if too_many or len(b"".join(data.split(b'"')[::2]).translate(None, _OTHERS)) > most:
        raise StepTooLarge(f"a step of more than {most} values for {num_calls} calls")
