"""Errors: headers that tell a client what to do, and no more of what it sent than helps."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from accounts.protocol.errors import MAX_MESSAGE_CHARS, MAX_PARAM_CHARS
from gateway.api.http.answers import error_headers
from gateway.api.parameters.base import MAX_PATH_CHARS, SHOWN_CHARS, quote
from gateway.api.responses.request import read_draft
from gateway.errors import (
    ContextOverflow,
    InvalidRequest,
    NotSupported,
    PaddockError,
    QueueFull,
    Unavailable,
)
from gateway.telemetry.request_log import Ignored

LONG = "x" * (8 << 20)


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


@pytest.mark.parametrize(
    "fault", [{"metadata": {LONG: 1}}, {"metadata": {LONG: "v"}}, {"metadata": LONG}, {"user": [LONG]}]
)
def test_what_a_caller_sent_is_not_told_back_at_length(fault: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        read_draft(json.dumps({"input": "x", **fault}).encode(), Ignored())
    assert len(raised.value.message) < 4 * MAX_PATH_CHARS
    assert len(raised.value.param or "") <= MAX_PATH_CHARS


@pytest.mark.parametrize("error", [InvalidRequest(LONG, param=LONG), ContextOverflow(LONG, param=LONG)])
def test_no_error_is_long(error: PaddockError) -> None:
    assert len(error.message) == len(str(error)) == MAX_MESSAGE_CHARS
    assert len(error.param or "") == MAX_PARAM_CHARS
    assert error.message.endswith("...")


def test_a_long_text_is_cut_before_it_is_written_out() -> None:
    tracemalloc.start()
    try:
        text = quote(LONG)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert text == "'" + "x" * (SHOWN_CHARS - 4) + "..."
    assert most < 1 << 20
    assert [quote("x" * number) for number in (38, 39)] == ["'" + "x" * 38 + "'", text]
