"""Writes the golden files anew: `python -m tests.contract.write_golden`."""

from __future__ import annotations

import msgspec

from tests.contract.messages import BINARIES, MESSAGES, PREFIXES
from tests.contract.test_golden import GOLDEN, STEP
from workers.protocol.events import encode_alive, encode_step
from workers.protocol.framing import ALIVE_EVENT, encode_frame, event_id


def main() -> None:
    for name, message in MESSAGES.items():
        (GOLDEN / name).write_bytes(msgspec.json.encode(message))
    for name, data in BINARIES.items():
        (GOLDEN / name).write_bytes(data)
    (GOLDEN / "prefixes.json").write_bytes(msgspec.json.encode(PREFIXES))
    (GOLDEN / "frame_step.txt").write_bytes(encode_frame(encode_step(STEP), event_id("0badcafe", 12)))
    (GOLDEN / "frame_alive.txt").write_bytes(encode_frame(encode_alive([7, 9]), event_id("0badcafe", 13), ALIVE_EVENT))


if __name__ == "__main__":
    main()
