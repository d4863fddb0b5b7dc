"""The header that tells how soon the first token is wanted."""

from __future__ import annotations

import time

import pytest

from gateway.api.request_headers import read_ttft_deadline
from gateway.errors import InvalidRequest


def read(value: bytes) -> float:
    return read_ttft_deadline({"headers": [(b"host", b"x"), (b"x-slo-ttft-ms", value)]})


def test_milliseconds_from_now() -> None:
    assert read(b"250") - time.time() == pytest.approx(0.25, abs=0.05)
    assert read(b" 1e3 ") - time.time() == pytest.approx(1, abs=0.05)
    assert read_ttft_deadline({"headers": [(b"host", b"x")]}) == 0


@pytest.mark.parametrize("value", [b"", b"0", b"-5", b"soon", b"nan", b"inf", b"1e9", b"\xff", b"9" * 500])
def test_what_is_no_time_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidRequest, match="milliseconds") as caught:
        read(value)
    assert caught.value.param == "x-slo-ttft-ms"
    assert len(caught.value.message) < 200
