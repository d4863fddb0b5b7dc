"""When a worker counts as short of memory, and until when."""

from __future__ import annotations

import errno

import pytest

from workers.process.limits import can_take
from workers.protocol.events import RETRYABLE
from workers.service import lifecycle
from workers.service.lifecycle import PROBE_BYTES, Shortage, is_shortage


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (RuntimeError("can't start new thread"), True),
        (ExceptionGroup("several", [ValueError(), MemoryError()]), True),
        (OSError(errno.EPIPE, "Broken pipe"), False),
        (RuntimeError("something else"), False),
        (None, False),
    ],
)
def test_what_is_one(error: BaseException | None, is_one: bool) -> None:
    assert is_shortage(error) is is_one


def test_it_lasts_until_memory_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, room = list[bool](), 0
    monkeypatch.setattr(lifecycle, "LOOK_S", 0.0)
    short = Shortage(lambda num_bytes: num_bytes <= room)
    short.listen(lambda: begun.append(True))
    before = short.lasts
    for _ in range(3):
        assert short.note().code in RETRYABLE
    assert begun == [True]
    during, room = short.lasts, PROBE_BYTES
    assert (before, during, short.lasts) == (False, True, False)
    short.note()
    assert begun == [True, True]


def test_memory_can_be_had_here() -> None:
    assert can_take(PROBE_BYTES)
    assert not can_take(1 << 62)
