"""Ids of responses and of their items: an item's id says which response it belongs to."""

from __future__ import annotations

import re
import secrets

RESPONSE = "resp_"
_ITEM = re.compile(r"[a-z]{2,5}_([0-9a-f]{32})_[io]?[0-9]{1,6}")
_RESPONSE = re.compile(r"resp_[0-9a-f]{32}")

PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def new_response_id() -> str:
    return RESPONSE + secrets.token_hex(16)


def is_response_id(text: str) -> bool:
    return _RESPONSE.fullmatch(text) is not None


def stream_of(response_id: str) -> str:
    """Return the id of the stream that has a response's events."""
    return response_id.removeprefix(RESPONSE)


def output_id(response_id: str, kind: str, index: int) -> str:
    return f"{PREFIXES[kind]}_{stream_of(response_id)}_{index}"


def input_id(response_id: str, kind: str, index: int) -> str:
    return f"{PREFIXES[kind]}_{stream_of(response_id)}_i{index}"


def response_of(item_id: str) -> str | None:
    """Return the id of the response that an item belongs to; None: it is no id of ours."""
    found = _ITEM.fullmatch(item_id)
    return RESPONSE + found[1] if found else None
