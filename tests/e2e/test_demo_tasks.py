"""What the demo model is for, through the whole stack: held-out prompts, greedy, nine in ten right per task."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from evaluate import ALL, LEAST, TASKS, prompts

from tests.e2e.conftest import DEMO_ALIAS
from tests.support.caller import Caller, calling
from tests.support.stack import Stack

COUNT = 60


def as_written(message: dict[str, Any]) -> str:
    """The answer as the model wrote it: tool calls came back parsed."""
    calls = [
        f'<tool_call>{{"name": {json.dumps(call["name"])}, "arguments": {call["arguments"]}}}</tool_call>'
        for call in (call["function"] for call in message.get("tool_calls") or ())
    ]
    return (message["content"] or "") + "".join(calls)


async def is_right(caller: Caller, task: str, messages: list[Any], tools: list[Any], expected: Any) -> bool:
    body = {"model": DEMO_ALIAS, "messages": messages, "temperature": 0, "max_tokens": 300}
    if tools:
        body["tools"] = tools
    async with caller.session.post(f"{caller.url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        choice = (await response.json())["choices"][0]
    return choice["finish_reason"] != "length" and ALL[task][1](as_written(choice["message"]), expected)


@pytest.mark.parametrize("task", TASKS)
async def test_nine_in_ten(demo_stack: Stack, task: str) -> None:
    async with calling(demo_stack.gateways[0].url, demo_stack.key, DEMO_ALIAS) as caller:
        asked = [is_right(caller, task, *prompt) for prompt in prompts(task, COUNT)]
        right = sum(await asyncio.gather(*asked))
    assert right >= LEAST * COUNT, f"{right} of {COUNT}"
