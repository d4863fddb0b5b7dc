"""Lines that tell how far a download is."""

from __future__ import annotations

import pytest

from workers.models.hub.progress import LINE_EVERY_S, PlainProgress, size_text

MIB = 1 << 20


def test_a_line_comes_now_and_then() -> None:
    now, lines = [0.0], list[str]()
    progress = PlainProgress("m.gguf", 100 * MIB, 1100 * MIB, lines.append, lambda: now[0])
    for second in range(1, 41):
        now[0] = second * LINE_EVERY_S / 4
        progress.update((100 + 25 * second) * MIB)
    progress.finish()
    assert lines[0] == "m.gguf: fetching 1.1 GiB, 100.0 MiB of which are there"
    assert lines[1:4] == [
        "m.gguf: 18 %, 10.0 MiB/s, 90 s left",
        "m.gguf: 27 %, 10.0 MiB/s, 80 s left",
        "m.gguf: 36 %, 10.0 MiB/s, 70 s left",
    ]
    assert lines[-1] == "m.gguf: fetched in 100 s"
    assert len(lines) == 11, "the last of ten is the end"


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 bytes"), (2048, "2.0 KiB"), (3 * MIB, "3.0 MiB"), (4 << 30, "4.0 GiB")]
)
def test_sizes_are_readable(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
