"""The bytes of each message on the worker wire. A change here is a change of the protocol: think of the gateways that
still speak the old one, and raise `PROTOCOL_VERSION` where they would misunderstand.

`python -m tests.contract.write_golden` writes the files anew.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.contract import messages
from tests.contract.messages import BINARIES, MESSAGES, PREFIXES
from workers.protocol.events import CallEvent, WireEvent, decode_alive, decode_step, encode_alive, encode_step
from workers.protocol.framing import ALIVE_EVENT, Frame, FrameReader, encode_frame, event_id, parse_event_id
from workers.protocol.heartbeat import decode_heartbeat, decode_news, unpack_heads
from workers.protocol.prefixes import Prefix

GOLDEN = Path(__file__).parent / "golden"

STEP: list[CallEvent] = [messages.STARTED, messages.TEXT, messages.TOOL_CALL_BEGUN, messages.FINISHED, messages.FAILED]


@pytest.mark.parametrize("name", MESSAGES)
def test_encodes_to_the_golden_bytes(name: str) -> None:
    assert msgspec.json.encode(MESSAGES[name]) == (GOLDEN / name).read_bytes()


@pytest.mark.parametrize("name", MESSAGES)
def test_golden_bytes_decode_to_the_value(name: str) -> None:
    message = MESSAGES[name]
    kind = WireEvent if name.startswith("event_") else type(message)
    assert msgspec.json.decode((GOLDEN / name).read_bytes(), type=kind) == message


def test_every_golden_file_has_a_message() -> None:
    others = {"frame_step.txt", "frame_alive.txt", "prefixes.json", *BINARIES}
    assert {path.name for path in GOLDEN.iterdir()} == set(MESSAGES) | others


@pytest.mark.parametrize("name", BINARIES)
def test_binaries_are_the_golden_ones(name: str) -> None:
    assert (GOLDEN / name).read_bytes() == BINARIES[name]


def test_news_and_heads_can_be_read() -> None:
    assert decode_news((GOLDEN / "news.msgpack").read_bytes()) == messages.NEWS
    assert unpack_heads((GOLDEN / "heads.bin").read_bytes()) == (17, messages.HEADS)


def test_heads_of_these_requests_are_the_golden_ones() -> None:
    golden = msgspec.json.decode((GOLDEN / "prefixes.json").read_bytes(), type=dict[str, Prefix])
    assert golden == PREFIXES
    assert all(prefix.digests for prefix in golden.values())


def test_a_step_frame() -> None:
    data = (GOLDEN / "frame_step.txt").read_bytes()
    assert encode_frame(encode_step(STEP), event_id("0badcafe", 12)) == data
    [frame] = FrameReader().feed(data)
    assert (frame.event, parse_event_id(frame.id)) == ("", ("0badcafe", 12))
    assert decode_step(frame.data) == STEP


def test_an_alive_frame() -> None:
    data = (GOLDEN / "frame_alive.txt").read_bytes()
    assert encode_frame(encode_alive([7, 9]), event_id("0badcafe", 13), ALIVE_EVENT) == data
    [frame] = FrameReader().feed(data)
    assert frame == Frame("alive", "0badcafe-13", b"[7,9]")
    assert decode_alive(frame.data) == [7, 9]


def test_a_heartbeat_of_a_later_version_with_more_fields_can_be_read() -> None:
    data = (GOLDEN / "heartbeat.json").read_bytes().replace(b'"worker":', b'"novelty":[1],"worker":', 1)
    assert decode_heartbeat(data) == messages.HEARTBEAT


def test_a_heartbeat_of_an_earlier_version_is_that_of_a_worker_that_generates() -> None:
    data = (GOLDEN / "heartbeat_embed.json").read_bytes().replace(b',"kind":"embed","width":768', b"", 1)
    assert decode_heartbeat(data) == messages.HEARTBEAT
