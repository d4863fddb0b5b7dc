"""Headers that tell a client what to do about an error."""

from __future__ import annotations

import pytest

from gateway.api.errors import error_headers
from gateway.errors import InvalidRequest, NotSupported, PaddockError, QueueFull, Unavailable


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (InvalidRequest("x"), []),
        (NotSupported("x"), [(b"x-should-retry", b"false")]),
        (QueueFull("x", retry_after_s=1.5), [(b"retry-after", b"2")]),
        (Unavailable("x"), [(b"retry-after", b"1")]),
    ],
)
def test_whether_and_when_to_ask_again(error: PaddockError, headers: list[tuple[bytes, bytes]]) -> None:
    assert error_headers(error) == headers
