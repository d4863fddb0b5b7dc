"""What callers do, one function per deed: each dialect as it is meant, and the ways in which callers misbehave."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from accounts.protocol import changes
from accounts.protocol.records import AccessRecord, digest
from benchmarks.soak.fleet import EMBEDDER, INFILLER, TOY
from benchmarks.soak.visitor import Refused, Surprise, Visitor, events, is_last
from workers.redis.link import run_command

Deed = Callable[[Visitor], Awaitable[None]]

CHAT, COMPLETIONS, MESSAGES, NATIVE = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/completion"
WEATHER = {
    "name": "get_weather",
    "description": "Current weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
NUM_TURNS = 71


def chat(visitor: Visitor, **more: object) -> dict[str, object]:
    message = {"role": "user", "content": visitor.text()}
    return {"model": TOY, "messages": [message], "max_tokens": visitor.tokens(), **more}


async def chat_streamed(visitor: Visitor) -> None:
    await visitor.stream(CHAT, chat(visitor, stream=True, stream_options={"include_usage": True}))


async def chat_whole(visitor: Visitor) -> None:
    answer = await visitor.post(CHAT, chat(visitor, n=visitor.chance.choice([1, 1, 2])))
    if not answer["choices"]:
        raise Surprise("a chat without choices")


async def chat_with_tools(visitor: Visitor) -> None:
    tools = [{"type": "function", "function": WEATHER}]
    choice = visitor.chance.choice(["auto", "required"])
    await visitor.stream(CHAT, chat(visitor, tools=tools, tool_choice=choice, stream=True))


async def chat_with_logprobs(visitor: Visitor) -> None:
    await visitor.post(CHAT, chat(visitor, logprobs=True, top_logprobs=5))


async def chat_in_a_schema(visitor: Visitor) -> None:
    """A schema that nobody has sent before, three times out of four: caches of compiled ones must be bounded."""
    name = f"f{visitor.chance.randrange(1 << 30) if visitor.chance.random() < 0.75 else 0}"
    schema = {"type": "object", "properties": {name: {"enum": ["a", "b", 1]}}, "required": [name]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    await visitor.post(CHAT, chat(visitor, response_format=form))


async def chat_in_a_grammar(visitor: Visitor) -> None:
    word = visitor.chance.randrange(1 << 30)
    await visitor.post(CHAT, chat(visitor, grammar=f'root ::= "yes" | "no" | "n{word}"'))


async def completions(visitor: Visitor) -> None:
    prompts = [visitor.text() for _ in range(visitor.chance.randrange(1, 4))]
    body = {"model": TOY, "prompt": prompts, "n": visitor.chance.choice([1, 2]), "max_tokens": visitor.tokens()}
    if visitor.chance.random() < 0.5:
        await visitor.stream(COMPLETIONS, body | {"stream": True})
    else:
        await visitor.post(COMPLETIONS, body | {"logprobs": 2})


async def embeddings(visitor: Visitor) -> None:
    texts = [visitor.text() for _ in range(visitor.chance.randrange(1, 5))]
    await visitor.post("/v1/embeddings", {"model": EMBEDDER, "input": texts})


async def messages(visitor: Visitor) -> None:
    body = {"model": TOY, "max_tokens": visitor.tokens(), "messages": [{"role": "user", "content": visitor.text()}]}
    if visitor.chance.random() < 0.7:
        await visitor.stream(MESSAGES, body | {"stream": True})
    else:
        await visitor.post(MESSAGES, body)
        await visitor.post(f"{MESSAGES}/count_tokens", body)


async def native(visitor: Visitor) -> None:
    body = {"model": TOY, "prompt": visitor.text(), "n_predict": visitor.tokens(), "n_probs": 2, "return_tokens": True}
    if visitor.chance.random() < 0.5:
        await visitor.stream(NATIVE, body | {"stream": True, "return_progress": True, "timings_per_token": True})
    else:
        await visitor.post(NATIVE, body)


async def infill(visitor: Visitor) -> None:
    """Two of one editor's window: the newer one ends the older one."""
    if INFILLER not in visitor.models:
        return
    body = {"model": INFILLER, "input_prefix": "def f(", "input_suffix": "return x", "n_predict": 24}
    older = asyncio.create_task(visitor.post("/infill", body, allowed=(409,)))
    await visitor.pause(0.2)
    try:
        await visitor.post("/infill", body, allowed=(409,))
    finally:
        await asyncio.gather(older, return_exceptions=True)
    older.result()


async def texts(visitor: Visitor) -> None:
    told = await visitor.post("/tokenize", {"model": TOY, "content": visitor.text(), "with_pieces": True})
    await visitor.post("/detokenize", {"model": TOY, "tokens": [token["id"] for token in told["tokens"]]})
    await visitor.post("/apply-template", chat(visitor))


async def slots(visitor: Visitor) -> None:
    """Who saves must not find another's conversation: empty slots and busy ones are refused, and that is fine."""
    await visitor.ask("GET", f"/slots?model={TOY}")
    number, name = visitor.chance.randrange(4), f"slot-{visitor.chance.randrange(3)}.bin"
    for action in ("save", "restore", "erase"):
        path = f"/slots/{number}?action={action}"
        await visitor.post(path, {"model": TOY, "filename": name}, allowed=(400, 404, 409, 501, 503))


async def adapters(visitor: Visitor) -> None:
    """Loaded, used, left to others, taken away."""
    visitor.key = visitor.fleet.stack.key
    name = f"pirate-{visitor.chance.randrange(3)}"
    told = {"lora_name": name, "lora_path": "pirate.gguf", "model": TOY}
    await visitor.post("/v1/load_lora_adapter", told, allowed=(400, 404, 409))
    body = chat(visitor, lora=[{"id": name, "scale": 0.5}])
    for _ in range(2):
        await visitor.post(CHAT, body, allowed=(400, 404))
    await visitor.ask("GET", f"/lora-adapters?model={TOY}")
    if visitor.chance.random() < 0.5:
        away = {"lora_name": name, "model": TOY, "timeout_s": 2}
        await visitor.post("/v1/unload_lora_adapter", away, allowed=(400, 404, 409))


async def asides(visitor: Visitor) -> None:
    """What boards, probes and curious clients ask."""
    for path in ("/health", "/ready", "/metrics", "/v1/models", f"/v1/models/{TOY}", f"/props?model={TOY}"):
        await visitor.ask("GET", path, allowed=(503,))
    visitor.key = visitor.fleet.stack.key
    await visitor.ask("GET", f"/admin/explain?model={TOY}", allowed=(503,))
    await visitor.ask("POST", "/admin/explain", chat(visitor), allowed=(503,))


async def leaving(visitor: Visitor) -> None:
    """At any moment: before the head, before the first token, within the answer."""
    path, body = visitor.chance.choice(
        [
            (CHAT, chat(visitor, stream=True)),
            (CHAT, chat(visitor)),
            (MESSAGES, chat(visitor, stream=True)),
            (NATIVE, {"model": TOY, "prompt": visitor.text(), "n_predict": 200, "stream": True, "ignore_eos": True}),
            (COMPLETIONS, {"model": TOY, "prompt": [visitor.text()] * 3, "max_tokens": 60, "stream": True}),
        ]
    )
    asking = asyncio.create_task(visitor.stream(path, body))
    await visitor.pause(0.4)
    asking.cancel()
    await asyncio.wait([asking])
    if not asking.cancelled() and (error := asking.exception()) is not None and body.get("stream"):
        raise error


async def long_chat(visitor: Visitor) -> None:
    """A hundred short messages: as many beginnings that workers and gateways remember, and half of a cache."""
    turns = [{"role": ("user", "assistant")[n % 2], "content": visitor.words(1, 3)} for n in range(NUM_TURNS)]
    turns[0]["content"] += str(visitor.chance.random())
    await visitor.post(CHAT, chat(visitor, messages=turns, max_tokens=1))


async def long_infill(visitor: Visitor) -> None:
    if INFILLER in visitor.models:
        body = {"model": INFILLER, "input_prefix": visitor.words(120, 160), "input_suffix": "x", "n_predict": 1}
        await visitor.post("/infill", body)


async def half_a_request(visitor: Visitor) -> None:
    """A head, a part of the body, and no more."""
    address = urlsplit(visitor.url)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {visitor.key}\r\ncontent-length: 1000\r\n\r\n"
    writer.write(head.encode()[: visitor.chance.randrange(1, 200)] if visitor.chance.random() < 0.5 else head.encode())
    await writer.drain()
    await visitor.pause(1.0)
    writer.transport.abort()


async def slow_reader(visitor: Visitor) -> None:
    """Reads a little, sleeps, reads on or leaves; behind by too much it is cut off, and that is fine."""
    long = chat(visitor, stream=True, max_tokens=400, ignore_eos=True, logprobs=True, top_logprobs=20)
    async with visitor.opened(CHAT, long) as response:
        for _ in range(visitor.chance.randrange(1, 4)):
            await response.content.readany()
            await visitor.pause(1.5)
        try:
            async for event in events(response):
                if is_last(event):
                    return
        except Refused as refused:
            if refused.code not in ("client_too_slow", "memory_share_taken", "memory_full"):
                raise


async def resumed(visitor: Visitor) -> None:
    """A stream that is cut and gone on with at either gateway, or given up."""
    body = chat(visitor, stream=True, max_tokens=60, ignore_eos=True)
    last, url = "", visitor.url
    for _ in range(visitor.chance.randrange(1, 4)):
        headers = {"x-resume-grace": "2"} | ({"last-event-id": last} if last else {})
        async with visitor.opened(CHAT, body, headers, url=url) as response:
            left = visitor.chance.randrange(1, 60)
            async for line in response.content:
                last = line[4:].strip().decode() if line.startswith(b"id: ") else last
                left -= 1
                if not left:
                    break
            else:
                return
        if not last:
            return
        await visitor.pause(0.3)
        url = visitor.chance.choice([visitor.url, visitor.other])


async def bad_requests(visitor: Visitor) -> None:
    wrong = [
        (CHAT, b"{", 400),
        (CHAT, {"model": "no-such-model", "messages": [{"role": "user", "content": "x"}]}, 404),
        (CHAT, chat(visitor, temperature="warm"), 400),
        (CHAT, chat(visitor, max_tokens="many"), 400),
        (CHAT, chat(visitor, response_format={"type": "json_schema", "json_schema": {"schema": {"not": {}}}}), 400),
        (CHAT, {"model": TOY, "messages": [{"role": "user", "content": "word " * 4000}]}, 400),
        (NATIVE, {"model": TOY, "prompt": [1, -5]}, 400),
        (MESSAGES, {"model": TOY, "messages": []}, 400),
        ("/v1/no-such-route", {}, 404),
        ("/v1/embeddings", {"model": TOY, "input": "x"}, 501),
    ]
    for path, body, status in visitor.chance.sample(wrong, 4):
        await visitor.refuses("POST", path, body, status)
    visitor.key = "pk-nobody"
    await visitor.refuses("POST", CHAT, chat(visitor), 401, 429)


async def oversized(visitor: Visitor) -> None:
    body = json.dumps(chat(visitor, user="x" * (1 << 20) + "y")).encode()
    await visitor.refuses("POST", CHAT, body, 413)


async def key_changes(visitor: Visitor) -> None:
    """A key that comes and goes in Redis; each with a team of its own, of twenty."""
    number = visitor.chance.randrange(20)
    secret = hashlib.sha256(str(visitor.chance.random()).encode()).hexdigest()
    made = AccessRecord(name=f"passing-{number}", team=f"team-{number}", sha256=digest(secret))
    added = changes.put(made, visitor.fleet.stack.gateway_secret)
    await run_command(visitor.fleet.client, changes.command([added]))
    await asyncio.sleep(1.5)
    visitor.key = secret
    try:
        await visitor.post(CHAT, chat(visitor), allowed=(401, 429))
    finally:
        await run_command(visitor.fleet.client, changes.command([changes.delete(added.member)]))
