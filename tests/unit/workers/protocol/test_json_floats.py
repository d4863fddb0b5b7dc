"""Floats that take msgspec long to read, in what gateways ask of workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.support.tools import json_of, tool_of
from workers.chat.conversation import Conversation
from workers.chat.render_process import decode_conversation
from workers.protocol.queries import Render, decode_render
from workers.protocol.requests import GenerateRequest, Submit, decode_submit

FLOATS = [5e-324, 1e308, 2.2250738585072011e-308] * 7_000
TOOLS = (tool_of("f", schema={"type": "object", "examples": FLOATS}),)
CONVERSATION = Conversation(messages=(), tools=TOOLS, values={"x": FLOATS})
REQUEST = GenerateRequest(tools=TOOLS, template_values=json_of({"x": FLOATS}))


@pytest.mark.serial
@pytest.mark.parametrize(
    ("decode", "message"),
    [
        pytest.param(decode_submit, Submit(gateway="g", call=1, request=REQUEST, tenant="t"), id="submit"),
        pytest.param(decode_render, Render(request=REQUEST), id="render"),
        pytest.param(decode_conversation, CONVERSATION, id="conversation"),
    ],
)
def test_floats_at_the_limits_take_no_longer_than_python_reading_them(
    decode: Callable[[bytes], Any], message: msgspec.Struct
) -> None:
    """2,300 of them are a body of 16 KiB: each of its answers took 14 ms of a worker, which held the interpreter."""
    raw = msgspec.json.encode(message)
    texts = [str(number) for number in 2 * FLOATS]
    began = time.process_time()
    _ = [float(text) for text in texts]
    read = time.process_time()
    assert decode(raw) == message
    assert time.process_time() - read < 8 * (read - began)
