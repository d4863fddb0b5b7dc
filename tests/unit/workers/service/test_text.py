"""The text routes over the demo model's vocabulary."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware

from tests.contract.messages import MESSAGES
from workers.chat.prompts import Prompts
from workers.chat.template import ChatTemplate
from workers.llama.tokens.vocab import Vocab, VocabFile
from workers.protocol import framing
from workers.protocol.control import access_token
from workers.protocol.events import Failure, FailureCode
from workers.protocol.queries import (
    DETOKENIZE_PATH,
    MAX_PIECES,
    MAX_TEXT_BYTES,
    PROPS_PATH,
    RENDER_PATH,
    TEAM_HEADER,
    TOKEN_BYTES,
    TOKENIZE_PATH,
    Asker,
    Detokenize,
    Props,
    Render,
    Rendered,
    Tokenize,
    Tokenized,
    decode_asker,
    decode_detokenized,
    decode_props,
    decode_rendered,
    decode_tokenized,
)
from workers.protocol.requests import GenerateRequest, Infill, Message
from workers.service.calls.lanes import FairLane, media_lane, prompt_lane
from workers.service.routes import text
from workers.service.routes.app import Guard, WorkerAccess
from workers.service.routes.bodies import INLINE_BYTES
from workers.service.routes.text import SHORT_BYTES, TextRoutes, Texts

DEMO = Path(__file__).parents[4] / "deploy" / "demo" / "paddock-demo.gguf"
TEXT = "Grüße, 你好 <|im_end|>"
HELLO = GenerateRequest(messages=(Message("user", "Hi"),))


@pytest.fixture(scope="module")
def vocab() -> Iterator[Vocab]:
    with VocabFile.load(DEMO) as file:
        yield file.vocab


@pytest.fixture
async def client(vocab: Vocab) -> AsyncIterator[httpx2.AsyncClient]:
    begin = vocab.text(vocab.bos)
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", bos_text=begin)
    prompts = Prompts(template, vocab, bos_text=begin, num_tokens=vocab.num_tokens)
    props = MESSAGES["props.json"]
    assert isinstance(props, Props)
    routes = TextRoutes(Texts(vocab, prompts, bos_text=begin), props, prompt_lane(), media_lane()).routes()
    app = Starlette(routes=routes, middleware=[Middleware(Guard, access=WorkerAccess("s", "w", "boot"))])
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://w", headers={"authorization": f"Bearer {access_token('s', 'w', 'boot')}"}
    ) as client:
        yield client


async def post(client: httpx2.AsyncClient, path: str, message: Any) -> bytes:
    answer = await client.post(path, content=msgspec.json.encode(message))
    assert answer.status_code == 200, answer.text
    return answer.content


async def refused(client: httpx2.AsyncClient, path: str, message: Any) -> Failure:
    answer = await client.post(path, content=msgspec.json.encode(message))
    assert answer.status_code == 400
    return msgspec.json.decode(answer.content, type=Failure)


async def tokens(client: httpx2.AsyncClient, **fields: Any) -> Tokenized:
    return decode_tokenized(await post(client, TOKENIZE_PATH, Tokenize(**fields)))


async def rendered(client: httpx2.AsyncClient, request: GenerateRequest, **fields: Any) -> Rendered:
    return decode_rendered(await post(client, RENDER_PATH, Render(request=request, **fields)))


async def test_tokens_of_a_text_and_back(client: httpx2.AsyncClient, vocab: Vocab) -> None:
    plain = await tokens(client, content=TEXT)
    assert list(plain.tokens) == vocab.tokenize(TEXT, add_special=False, parse_special=True)
    assert plain.pieces is None
    back = decode_detokenized(await post(client, DETOKENIZE_PATH, Detokenize(tokens=plain.tokens)))
    assert back.content == TEXT


async def test_whose_turn_it_is_is_known_without_decoding_a_body(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 MiB held the event loop for 45 ms; of gateways that don't tell it, another thread decodes long ones."""
    teams: list[str] = []
    decoding: list[threading.Thread] = []
    run = FairLane.run

    async def heard(lane: FairLane, team: str, *work: Any) -> Any:
        teams.append(team)
        return await run(lane, team, *work)

    def decode(body: bytes) -> Asker:
        decoding.append(threading.current_thread())
        return decode_asker(body)

    monkeypatch.setattr(FairLane, "run", heard)
    monkeypatch.setattr(text, "decode_asker", decode)
    for size in (1, INLINE_BYTES):
        body = msgspec.json.encode(Tokenize(content="a " * SHORT_BYTES + "b" * size, tenant="red"))
        answer = await client.post(TOKENIZE_PATH, content=body, headers={TEAM_HEADER: "gr%C3%BCn%0A"})
        assert (answer.status_code, teams.pop(), decoding) == (200, "gr\u00fcn\n", [])
        assert (await client.post(TOKENIZE_PATH, content=body)).status_code == 200
        assert (teams.pop(), decoding.pop() is threading.current_thread()) == ("red", size == 1)


async def test_control_tokens_are_text_where_that_is_asked_for(client: httpx2.AsyncClient) -> None:
    as_token = (await tokens(client, content="<|im_end|>")).tokens
    as_text = (await tokens(client, content="<|im_end|>", parse_special=False)).tokens
    assert len(as_token) == 1 < len(as_text)


async def test_pieces_may_cut_characters(client: httpx2.AsyncClient) -> None:
    made = await tokens(client, content=TEXT, with_pieces=True)
    assert made.pieces is not None
    assert len(made.pieces) == len(made.tokens)
    assert b"".join(made.pieces) == TEXT.encode()
    assert made.pieces[-1] == b"<|im_end|>"


async def test_the_text_of_tokens_is_bounded(client: httpx2.AsyncClient, vocab: Vocab) -> None:
    longest = max(range(vocab.num_tokens), key=lambda token: len(vocab.special_piece(token)))
    most = MAX_TEXT_BYTES // len(vocab.special_piece(longest))
    failure = await refused(client, DETOKENIZE_PATH, Detokenize(tokens=(longest,) * (most + 1)))
    assert (failure.param, f"more than {MAX_TEXT_BYTES} bytes" in failure.message) == ("tokens", True)
    text = decode_detokenized(await post(client, DETOKENIZE_PATH, Detokenize(tokens=(longest,) * most))).content
    assert text == vocab.special_piece(longest).decode() * most


async def test_pieces_are_told_of_so_many_tokens(client: httpx2.AsyncClient) -> None:
    many = (5,) * (MAX_PIECES + 1)
    failure = await refused(client, TOKENIZE_PATH, Tokenize(content=many, with_pieces=True))
    assert (failure.param, f"at most {MAX_PIECES}" in failure.message) == ("with_pieces", True)
    assert len((await tokens(client, content=many)).ids) == TOKEN_BYTES * len(many)
    assert len((await tokens(client, content=many[1:], with_pieces=True)).pieces or ()) == MAX_PIECES


async def test_texts_and_tokens_in_turn(client: httpx2.AsyncClient) -> None:
    first, second = (await tokens(client, content="Hi")).tokens, (await tokens(client, content=" there")).tokens
    assert (await tokens(client, content=("Hi", 5, " there"))).tokens == (*first, 5, *second)


async def test_tokens_that_there_are_not(client: httpx2.AsyncClient, vocab: Vocab) -> None:
    for token in (-1, vocab.num_tokens):
        failure = await refused(client, DETOKENIZE_PATH, Detokenize(tokens=(1, token)))
        assert failure.param == "tokens"
        assert f"{token} at position 1" in failure.message
        assert (await refused(client, TOKENIZE_PATH, Tokenize(content=(token,)))).code is FailureCode.INVALID_REQUEST


async def test_bytes_that_are_no_text(client: httpx2.AsyncClient) -> None:
    made = await tokens(client, content="你", with_pieces=True)
    assert made.pieces is not None
    assert len(made.tokens) > 1, "the demo's vocabulary knows no Chinese"
    back = decode_detokenized(await post(client, DETOKENIZE_PATH, Detokenize(tokens=made.tokens[:1])))
    assert back.content == "\ufffd"


async def test_a_request_as_the_model_reads_it(client: httpx2.AsyncClient, vocab: Vocab) -> None:
    made = await rendered(client, HELLO)
    assert made.prompt == "Hi", "the begin token, which is added anyway, is not shown"
    assert made.num_tokens == 1 + len(vocab.tokenize("Hi", add_special=False, parse_special=True))
    assert await rendered(client, HELLO, text=False) == Rendered(num_tokens=made.num_tokens)
    assert await rendered(client, HELLO, count=False) == Rendered(prompt="Hi")


async def test_prompts_that_need_no_template(client: httpx2.AsyncClient) -> None:
    assert (await rendered(client, GenerateRequest(prompt=TEXT))).prompt == TEXT
    ids = (await tokens(client, content=TEXT)).tokens
    made = await rendered(client, GenerateRequest(prompt=ids))
    assert made == Rendered(prompt=TEXT, num_tokens=len(ids))


async def test_what_can_not_be_rendered(client: httpx2.AsyncClient) -> None:
    assert (await refused(client, RENDER_PATH, Render(request=GenerateRequest()))).param == "messages"
    failure = await refused(client, RENDER_PATH, Render(request=GenerateRequest(infill=Infill("a", "b"))))
    assert failure.code is FailureCode.UNSUPPORTED


async def test_no_more_of_a_prompt_is_told_than_of_other_texts(client: httpx2.AsyncClient) -> None:
    """A template may say a short message many times, and what is told is decoded in one call by a gateway."""
    long, longer = (
        GenerateRequest(messages=(Message("user", "x" * num_chars),))
        for num_chars in (MAX_TEXT_BYTES >> 1, MAX_TEXT_BYTES)
    )
    assert len((await rendered(client, long, count=False)).prompt or "") == MAX_TEXT_BYTES >> 1
    failure = await refused(client, RENDER_PATH, Render(request=longer, count=False))
    assert (failure.param, f"at most {MAX_TEXT_BYTES} can be shown" in failure.message) == ("messages", True)


async def test_no_call_encodes_megabytes(client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other thread runs meanwhile: 8 million line ends took 66 ms."""
    sizes: list[int] = []

    def measured(message: Any) -> bytes:
        made = msgspec.json.encode(message)
        sizes.append(len(made))
        return made

    monkeypatch.setattr(framing, "encode", measured)
    text = "\n" * (1 << 20)
    asked = Render(request=GenerateRequest(messages=(Message("user", text),)))
    assert decode_rendered(await post(client, RENDER_PATH, asked)).prompt == text
    assert sum(sizes) >= 2 * len(text)
    assert max(sizes) < 4 * framing.PART_CHARS


async def test_props(client: httpx2.AsyncClient) -> None:
    assert decode_props((await client.get(PROPS_PATH)).content) == MESSAGES["props.json"]


async def test_what_is_too_long(client: httpx2.AsyncClient) -> None:
    failure = await refused(client, TOKENIZE_PATH, Tokenize(content="x" * MAX_TEXT_BYTES))
    assert str(MAX_TEXT_BYTES) in failure.message


@pytest.mark.parametrize("path", [TOKENIZE_PATH, DETOKENIZE_PATH, RENDER_PATH])
async def test_what_is_no_message(client: httpx2.AsyncClient, path: str) -> None:
    for body in (b"", b"{}", b"[]", b'{"tokens": ["a"], "content": {}, "request": 1}'):
        answer = await client.post(path, content=body)
        assert answer.status_code == 400
        assert b"worker protocol" in answer.content


@pytest.mark.parametrize("path", [TOKENIZE_PATH, DETOKENIZE_PATH, RENDER_PATH, PROPS_PATH])
async def test_the_secret_is_wanted(client: httpx2.AsyncClient, path: str) -> None:
    answer = await client.request("GET" if path == PROPS_PATH else "POST", path, headers={"authorization": "Bearer x"})
    assert answer.status_code == 401
