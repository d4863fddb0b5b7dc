"""What is to become of a stream whose connection breaks: whose it is, found by a hash of its request."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import closing
from functools import partial

import pytest
from starlette.types import Message, Scope

from gateway.api.intake.decoding import INLINE_BYTES, DecodingThread
from gateway.api.intake.intake import Intake
from gateway.api.intake.memory_budget import MemoryBudget
from gateway.api.request_headers import read_resume_options
from gateway.call import Principal
from tests.support.sent_media import data_url, picture

SCOPE: Scope = {
    "type": "http",
    "method": "POST",
    "path": "/v1/completions",
    "query_string": b"a=b",
    "headers": [(b"x-resume-grace", b"5")],
}
ASKER = Principal("key", "red", None, admin=False)


@pytest.mark.parametrize(("num_bytes", "is_aside"), [(INLINE_BYTES, False), (INLINE_BYTES + 1, True)])
async def test_a_long_request_is_hashed_on_a_thread(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int, is_aside: bool
) -> None:
    """8 MiB held the event loop, and every stream with it, for 12 to 14 ms."""
    hashed_on: list[int] = []

    def sha256(data: bytes) -> hashlib._Hash:
        hashed_on.append(threading.get_ident())
        return hashlib.new("sha256", data)

    monkeypatch.setattr(hashlib, "sha256", sha256)
    raw = b"x" * num_bytes
    intake = Intake(8 << 20, MemoryBudget(1 << 30), DecodingThread(), partial(int, 4096))
    with closing(intake.message(ASKER, raw)) as body:
        read = await read_resume_options(SCOPE, body)
    assert read is not None
    assert (hashed_on[0] != threading.get_ident()) == is_aside
    whole = hashlib.new("sha256", b"POST /v1/completions?a=b\n" + raw).hexdigest()
    assert (read.owner.team, read.owner.request, read.grace_s) == ("red", whole, 5.0)


async def test_without_the_headers_nothing_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashlib, "sha256", None)
    intake = Intake(8 << 20, MemoryBudget(1 << 30), DecodingThread(), partial(int, 4096))
    with closing(intake.message(ASKER, b"{}")) as body:
        assert await read_resume_options({**SCOPE, "headers": []}, body) is None


async def test_a_request_with_a_picture_is_the_same_each_time() -> None:
    """Its text has other names for the cut files each time; in whatever parts it comes."""
    raw = json.dumps({"model": "m", "messages": [{"content": [{"image_url": {"url": data_url(picture(300_000))}}]}]})
    found = []
    for part_bytes in (1 << 20, 50_000, 4_999):
        parts = [raw.encode()[n : n + part_bytes] for n in range(0, len(raw), part_bytes)]

        async def receive(parts: list[bytes] = parts) -> Message:
            part = parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(parts)}

        intake = Intake(8 << 20, MemoryBudget(1 << 30), DecodingThread(), partial(int, 4096))
        async with intake.open_body(ASKER, dict(SCOPE), receive, takes_media=True) as body:
            found.append(await read_resume_options(SCOPE, body))
    assert found[0] is not None
    assert found[0] == found[1] == found[2]
    whole = hashlib.new("sha256", b"POST /v1/completions?a=b\n" + raw.encode()).hexdigest()
    assert found[0].owner.request == whole
