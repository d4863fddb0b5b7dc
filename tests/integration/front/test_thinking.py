"""How much a model thinks, by every dialect's own words, as the template of a real model is told it.

The template's prompt has one word more for each thing that it is told, so that dialects that count tokens, and show no
prompt, tell it too.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.support.caller import Caller, calling
from tests.support.stack import DEMO_MODEL, Stack

TOLD = (
    "{{ 'on' if enable_thinking else 'off' }} {{ thinking if thinking is defined else '-' }} "
    "{{ reasoning_effort or '-' }} {{ colour or '-' }}"
)
OPEN = (
    "<|im_start|>user\n{{ messages[0].content }}<|im_end|>\n<|im_start|>assistant\n<think>\n{# </think> <tool_call> #}"
)
COUNTED = "{% if not enable_thinking %}" + "quiet " * 20 + "{% endif %}{{ messages[0].content }}"
ENOUGH = " ... That is enough.\n"
KWARGS = {"reasoning_effort": "low", "colour": "red"}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as stack:
        size: dict[str, Any] = {"slots": 2, "ctx": 512}
        stack.worker(DEMO_MODEL, "free", chat_template=TOLD, wait=False, **size)
        kwargs = json.dumps(KWARGS)
        stack.worker(
            DEMO_MODEL, "quiet", chat_template=TOLD, thinking="off", chat_template_kwargs=kwargs, wait=False, **size
        )
        stack.worker(DEMO_MODEL, "counted", chat_template=COUNTED, wait=False, **size)
        stack.worker(DEMO_MODEL, "open", chat_template=OPEN, tool_family="hermes", wait=False, **size)
        bounds: dict[str, Any] = {"thinking_budget": 6, "thinking_budget_message": ENOUGH}
        stack.worker(DEMO_MODEL, "brief", chat_template=OPEN, tool_family="hermes", wait=False, **bounds, **size)
        for number, alias in enumerate(("free", "quiet", "counted", "open", "brief")):
            stack.wait_for_worker(alias, f"worker-{number}", stack.workers[number])
        stack.gateway()
        yield stack


@pytest.fixture
async def caller(stack: Stack) -> AsyncIterator[Caller]:
    async with calling(stack.gateways[0].url, stack.key, "free") as caller:
        yield caller


async def ask(caller: Caller, path: str, **body: Any) -> tuple[int, Any]:
    async with caller.session.post(caller.url + path, json=body) as response:
        return response.status, await response.json(content_type=None)


HELLO = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("model", "body", "told"),
    [
        ("free", {}, "on - - -"),
        ("free", {"chat_template_kwargs": {"enable_thinking": False}}, "off False - -"),
        ("free", {"chat_template_kwargs": {"thinking": True, "colour": "blue"}}, "on True - blue"),
        ("free", {"enable_thinking": False}, "off False - -"),
        ("free", {"thinking": False}, "off False - -"),
        ("free", {"thinking": {"type": "disabled"}}, "off False - -"),
        ("free", {"thinking": {"type": "enabled", "budget_tokens": 50}}, "on True - -"),
        ("free", {"thinking": {"type": "auto"}}, "on - - -"),
        ("free", {"reasoning_effort": "none"}, "off False - -"),
        ("free", {"reasoning_effort": "minimal"}, "on - minimal -"),
        ("free", {"reasoning_budget_tokens": 0}, "off False - -"),
        ("free", {"enable_thinking": True, "thinking": False}, "on True - -"),
        ("free", {"reasoning": {"enabled": False}}, "off False - -"),
        ("free", {"reasoning": {"effort": "none"}}, "off False - -"),
        ("free", {"think": False}, "off False - -"),
        ("free", {"think": True, "enable_thinking": False}, "off False - -"),
        ("quiet", {"reasoning": {"effort": "high", "exclude": True}}, "on True high red"),
        ("quiet", {"reasoning": {"max_tokens": 100}}, "on True low red"),
        ("quiet", {"think": "medium"}, "on True medium red"),
        ("quiet", {}, "off False low red"),
        ("quiet", {"enable_thinking": True, "reasoning_effort": "high"}, "on True high red"),
        ("quiet", {"chat_template_kwargs": {"colour": "blue"}}, "off False low blue"),
    ],
)
async def test_what_a_template_is_told(caller: Caller, model: str, body: dict[str, Any], told: str) -> None:
    status, document = await ask(caller, "/apply-template", model=model, messages=HELLO, **body)
    assert (status, document.get("prompt")) == (200, told), document


async def test_messages_and_responses_say_it_in_their_own_words(caller: Caller) -> None:
    async def counted(**body: Any) -> int:
        path = "/v1/messages/count_tokens"
        status, document = await ask(caller, path, model="counted", messages=HELLO, **body)
        assert status == 200, document
        return int(document["input_tokens"])

    async def used(**body: Any) -> int:
        more = {"model": "counted", "input": "Hi", "max_output_tokens": 1, "store": False}
        status, document = await ask(caller, "/v1/responses", **more, **body)
        assert status == 200, document
        return int(document["usage"]["input_tokens"])

    loud, quiet = await counted(), await counted(thinking={"type": "disabled"})
    assert quiet > loud + 19
    assert await counted(thinking={"type": "enabled", "budget_tokens": 1024}) == loud
    assert await counted(thinking={"type": "adaptive"}) == loud
    assert await counted(output_config={"effort": "none"}) == quiet
    assert await counted(chat_template_kwargs={"enable_thinking": False}) == quiet
    assert [await used(), await used(reasoning={"effort": "none"})] == [loud, quiet]
    assert [await used(reasoning={"effort": "low"}), await used(enable_thinking=False)] == [loud, quiet]


async def test_a_budget_and_its_message(caller: Caller) -> None:
    body = {"model": "open", "messages": HELLO, "max_tokens": 60, "temperature": 0, "reasoning_budget_tokens": 6}
    status, document = await ask(caller, "/v1/chat/completions", **body, reasoning_budget_message=ENOUGH)
    assert status == 200, document
    message = document["choices"][0]["message"]
    assert message["reasoning_content"].strip().endswith("... That is enough.")
    assert "think>" not in message["reasoning_content"] + (message["content"] or "")
    _, without = await ask(caller, "/v1/chat/completions", **body)
    assert "enough" not in without["choices"][0]["message"]["reasoning_content"]


def thought_of(path: str, document: dict[str, Any]) -> str:
    """Return the thought of a whole answer, in the dialect of the route."""
    match path:
        case "/v1/chat/completions":
            return str(document["choices"][0]["message"]["reasoning_content"])
        case "/v1/messages":
            return "".join(block["thinking"] for block in document["content"] if block["type"] == "thinking")
    parts = (item["content"] for item in document["output"] if item["type"] == "reasoning")
    return "".join(part["text"] for texts in parts for part in texts)


@pytest.mark.parametrize(
    ("path", "body", "budget"),
    [
        (
            "/v1/messages",
            {"messages": HELLO, "max_tokens": 60},
            {"thinking": {"type": "enabled", "budget_tokens": 6}},
        ),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 60}, {"reasoning_budget_tokens": 6}),
    ],
)
async def test_messages_and_responses_bound_a_thought_as_chat_does(
    caller: Caller, path: str, body: dict[str, Any], budget: dict[str, Any]
) -> None:
    async def thought(path: str, **asked: Any) -> str:
        status, document = await ask(caller, path, model="open", temperature=0, **asked)
        assert status == 200, document
        assert "think>" not in json.dumps(document)
        return thought_of(path, document)

    chat: dict[str, Any] = {"messages": HELLO, "max_tokens": 60, "reasoning_budget_tokens": 6}
    for message in ({"reasoning_budget_message": ENOUGH}, {}):
        bounded = await thought(path, **body, **budget, **message)
        assert bounded == await thought("/v1/chat/completions", **chat, **message)
        assert bounded.strip().endswith("... That is enough.") == bool(message)
    free = await thought(path, **body)
    assert free.strip().startswith(bounded.strip())
    assert len(free) > len(bounded), "without a budget it goes on"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 60}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 60}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 60}),
    ],
)
async def test_the_catalogs_budget_and_message(caller: Caller, path: str, body: dict[str, Any]) -> None:
    async def thought(**more: Any) -> str:
        status, document = await ask(caller, path, model="brief", temperature=0, **body, **more)
        assert status == 200, document
        return json.dumps(document)

    assert "That is enough." in await thought()
    if path == "/v1/chat/completions":
        assert "That is enough." not in await thought(reasoning_budget_tokens=1000)
        assert "That is enough." in await thought(reasoning_budget_tokens=-1)
        assert "Stop." in await thought(reasoning_budget_message="Stop.")


async def test_the_catalogs_budget_is_for_chats(caller: Caller) -> None:
    status, document = await ask(caller, "/v1/completions", model="brief", prompt="<think>\nOnce", max_tokens=60)
    assert status == 200, document
    assert "That is enough." not in document["choices"][0]["text"]


async def test_what_contradicts_itself_is_refused(caller: Caller) -> None:
    bodies: tuple[dict[str, Any], ...] = (
        {"enable_thinking": "yes"},
        {"thinking": {"type": "sometimes"}},
        {"chat_template_kwargs": {"enable_thinking": "yes"}},
        {"reasoning_budget_message": "x" * 5000},
    )
    for body in bodies:
        status, document = await ask(caller, "/v1/chat/completions", model="free", messages=HELLO, **body)
        assert status == 400, document
        assert document["error"]["param"].startswith(next(iter(body)))
    body = {"reasoning_budget_tokens": 5, "reasoning_budget_message": "</think> and now"}
    status, document = await ask(caller, "/v1/chat/completions", model="open", messages=HELLO, **body)
    assert (status, document["error"]["param"]) == (400, "reasoning_budget_message")
