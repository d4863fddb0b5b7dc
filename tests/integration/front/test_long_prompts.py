"""Prompts that are too long, told in words by which clients' libraries know it, in what their users' SDKs raise.

The scripts that record these programs (`tests/clients/scripts`) do the same with the libraries themselves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest

from tests.support.caller import Caller
from tests.support.stack import Process, Stack

LONG = "word " * 800
MESSAGES: Any = [{"role": "user", "content": LONG}]

LITELLM = ("this model's maximum context length is", "exceeds the available context size")
"""litellm 1.106.2: `is_error_str_context_window_exceeded` in litellm_core_utils/exception_mapping_utils.py searches the
SDK's message, in small letters, for one of these, among others; it raises ContextWindowExceededError then."""
LANGCHAIN = ("context_length_exceeded", "prompt is too long", "Input tokens exceed the configured limit")
"""langchain-openai 1.7.3: `_handle_openai_bad_request` in chat_models/base.py; OpenAIContextOverflowError."""
LANGCHAIN_JS = (
    "context_length_exceeded",
    "exceeds the context window",
    "maximum context length",
    "Input tokens exceed the configured limit",
)
"""@langchain/openai 1.5.8: dist/utils/client.js; ContextOverflowError."""
OF_ANTHROPIC = "prompt is too long"
"""litellm 1.106.2: `_map_anthropic_exception`; langchain-anthropic 1.7.7: `_handle_anthropic_bad_request`."""

OPENAI_CALLS: dict[str, Callable[[openai.AsyncOpenAI], Awaitable[Any]]] = {
    "chat": lambda client: client.chat.completions.create(model="quick", messages=MESSAGES),
    "chat streamed": lambda client: client.chat.completions.create(model="quick", messages=MESSAGES, stream=True),
    "completions": lambda client: client.completions.create(model="quick", prompt=LONG),
    "responses": lambda client: client.responses.create(model="quick", input=LONG),
}


async def refused(stack: Stack, gateway: Process, name: str) -> openai.BadRequestError:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=stack.key, max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await OPENAI_CALLS[name](client)
    assert caught.value.code == "context_length_exceeded"
    return caught.value


def whole_text(error: openai.BadRequestError) -> str:
    """Return the error's text as openai 2.54 has it, which litellm asks with: the body as Python writes it.

    A quotation mark more in the message would change the words.
    """
    return f"Error code: {error.status_code} - {error.response.json()}"


@pytest.mark.parametrize("name", OPENAI_CALLS)
async def test_words_that_litellm_and_langchain_look_for(stack: Stack, gateway: Process, name: str) -> None:
    error = await refused(stack, gateway, name)
    for told in (str(error), whole_text(error)):
        assert any(words in told.lower() for words in LITELLM), told
        assert any(words in told for words in LANGCHAIN_JS), told
    assert any(words in whole_text(error) for words in LANGCHAIN)


async def test_words_that_langchain_looks_for_in_the_message_alone(stack: Stack, gateway: Process) -> None:
    """openai 3.40 and later leave the code out of an error's text."""
    told = str(await refused(stack, gateway, "chat"))
    assert any(words in told for words in LANGCHAIN), told


@pytest.mark.parametrize("stream", [False, True])
async def test_words_of_anthropics_dialect(stack: Stack, gateway: Process, stream: bool) -> None:
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=stack.key, max_retries=0) as client:
        with pytest.raises(anthropic.BadRequestError, match=OF_ANTHROPIC) as caught:
            await client.messages.create(model="quick", messages=MESSAGES, max_tokens=8, stream=stream)
    assert OF_ANTHROPIC in caught.value.message


@pytest.mark.parametrize("stream", [False, True])
async def test_words_of_llama_servers_routes(caller: Caller, stream: bool) -> None:
    """litellm knows these too; llama.cpp's web page shows both numbers."""
    body = {"model": "quick", "prompt": LONG, "stream": stream}
    async with caller.session.post(f"{caller.url}/completion", json=body) as response:
        error = (await response.json())["error"]
    assert (response.status, error["type"], error["n_ctx"]) == (400, "exceed_context_size_error", 64)
    assert error["n_prompt_tokens"] > 64
    assert LITELLM[1] in error["message"]
