"""Pictures and sounds from a client's request to the worker's submit, through a true gateway."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.support.caller import Caller, calling
from tests.support.sent_forms import CONTENT_TYPE, form
from tests.support.sent_media import PNG, WAV, base64_of, data_url, picture
from tests.support.stack import Stack

MIB = 1 << 20
SUBMITS = "submits"
ALIASES = ("seer", "reader", "seeing-embedder", "embedder", "ranker")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        flags = ("--step-ms", "1", "--tokens", "3", "--submits", str(running.folder / SUBMITS))
        running.fake_worker("seer", *flags, "--inputs", "text,image,audio", wait=False)
        running.fake_worker("reader", *flags, wait=False)
        pooled = ("--kind", "embed", "--submits", str(running.folder / SUBMITS))
        running.fake_worker("seeing-embedder", *pooled, "--inputs", "text,image", wait=False)
        running.fake_worker("embedder", *pooled, wait=False)
        running.fake_worker("ranker", "--kind", "rank", "--submits", str(running.folder / SUBMITS), wait=False)
        settings = {"max_body_bytes": MIB, "max_media_body_mib": 16, "max_media_mib": 8, "media_timeout_s": 2}
        running.gateway(wait=False, media_allowed_hosts="127.0.0.1:*", media_allow_private=True, **settings)
        running.gateway(wait=False, media_allowed_hosts="127.0.0.1:*", **settings)
        for alias, process in zip(ALIASES, running.workers, strict=True):
            running.wait_for_worker(alias, process.name, process)
        for gateway in running.gateways:
            running.wait_until_ready(gateway)
            running.wait_until_listed(gateway, *ALIASES)
        yield running


@pytest.fixture
async def caller(stack: Stack) -> AsyncIterator[Caller]:
    async with calling(stack.gateways[0].url, stack.key, "seer") as asking:
        yield asking


@pytest.fixture
def submits(stack: Stack) -> Path:
    file = stack.folder / SUBMITS
    file.unlink(missing_ok=True)
    return file


def noted(submits: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in submits.read_bytes().splitlines()] if submits.exists() else []


def told(kind: str, data: bytes, param: str) -> list[object]:
    return [kind, len(data), sha256(data).hexdigest(), param]


async def post(caller: Caller, path: str, **body: Any) -> tuple[int, Any]:
    data = BytesIO(json.dumps({"model": caller.model, **body}).encode())
    headers = {"Content-Type": "application/json"}
    async with caller.session.post(caller.url + path, data=data, headers=headers) as response:
        return response.status, await response.json(content_type=None)


def asked(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def shown(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


async def test_a_picture_of_megabytes_reaches_the_worker(caller: Caller, submits: Path) -> None:
    large, small = picture(7 * MIB), picture(3 * MIB, 1)
    sound = {"type": "input_audio", "input_audio": {"data": base64_of(WAV), "format": "wav"}}
    parts = ({"type": "text", "text": "What is it?"}, shown(large), shown(small), sound)
    status, answer = await post(caller, "/v1/chat/completions", messages=asked(*parts))
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "t0 t1 t2 ")
    [submit] = noted(submits)
    assert submit["messages"] == [["user", "What is it?", [11, 11, 11]]]
    assert submit["media"] == [
        told("picture", large, "messages.0.content.1"),
        told("picture", small, "messages.0.content.2"),
        told("sound", WAV, "messages.0.content.3"),
    ]


async def test_every_dialect_reaches_the_worker(caller: Caller, submits: Path) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(PNG)}}
    given = [{"role": "user", "content": [{"type": "input_image", "image_url": data_url(PNG)}]}]
    prompt = {"prompt_string": "see <__media__>!", "multimodal_data": [base64_of(PNG)]}
    for path, body in (
        ("/v1/messages", {"max_tokens": 3, "messages": asked(image)}),
        ("/v1/responses", {"input": given}),
        ("/completion", {"prompt": prompt}),
    ):
        status, answer = await post(caller, path, **body)
        assert status == 200, answer
    params = ("messages.0.content.0", "input.0.content.0", "prompt.multimodal_data.0")
    assert [submit["media"] for submit in noted(submits)] == [[told("picture", PNG, param)] for param in params]
    assert (noted(submits)[2]["prompt"], noted(submits)[2]["places"]) == ("see !", [4])


async def test_a_conversation_keeps_its_pictures(caller: Caller, submits: Path) -> None:
    large = picture(300_000)
    part = {"type": "input_image", "image_url": data_url(large), "detail": "auto"}
    _, first = await post(caller, "/v1/responses", input=[{"role": "user", "content": [part]}])
    status, _ = await post(caller, "/v1/responses", input="And the sky?", previous_response_id=first["id"])
    assert status == 200
    [_, second] = noted(submits)
    assert [one[:3] for one in second["media"]] == [told("picture", large, "")[:3]]
    assert second["messages"][0][2] == [0]
    async with caller.session.get(f"{caller.url}/v1/responses/{first['id']}/input_items") as response:
        assert (await response.json())["data"][0]["content"] == [part]


async def test_a_model_that_reads_refuses_at_once(caller: Caller, submits: Path) -> None:
    caller.model = "reader"
    for path, body in (
        ("/v1/chat/completions", {"messages": asked(shown(PNG))}),
        ("/v1/chat/completions/input_tokens", {"messages": asked(shown(PNG))}),
        ("/apply-template", {"messages": asked(shown(PNG))}),
    ):
        status, answer = await post(caller, path, **body)
        assert status == 501
        assert "`reader` reads text only" in answer["error"]["message"]
    assert not noted(submits)


async def test_what_a_model_takes_is_told(caller: Caller) -> None:
    async with caller.session.get(f"{caller.url}/v1/models") as response:
        cards = {card["id"]: card["architecture"]["input_modalities"] for card in (await response.json())["data"]}
    inputs = {"seer": ["text", "image", "audio"], "seeing-embedder": ["text", "image"]}
    assert cards == {alias: inputs.get(alias, ["text"]) for alias in ALIASES}
    async with caller.session.get(f"{caller.url}/props?model=seer") as response:
        props = await response.json()
    assert props["modalities"] == {"vision": True, "audio": True, "video": False}
    assert props["media_marker"] == "<__media__>"


async def test_counting_and_rendering_take_pictures(caller: Caller) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(PNG)}}
    for path, body in (
        ("/v1/chat/completions/input_tokens", {"messages": asked(shown(PNG))}),
        ("/v1/messages/count_tokens", {"messages": asked(image)}),
        (
            "/v1/responses/input_tokens",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": data_url(PNG)}]}]},
        ),
        ("/apply-template", {"messages": asked(shown(PNG))}),
    ):
        status, answer = await post(caller, path, **body)
        assert status == 200, answer


async def test_a_long_text_is_refused_beside_a_picture(caller: Caller) -> None:
    status, answer = await post(
        caller, "/v1/chat/completions", messages=asked(shown(PNG), {"type": "text", "text": "x" * MIB})
    )
    assert status == 413
    assert "PADDOCK_MAX_BODY_BYTES" in answer["error"]["message"]
    status, answer = await post(caller, "/v1/chat/completions", messages=asked(shown(picture(9 * MIB))))
    assert (status, answer["error"]["param"]) == (400, "messages.0.content.0.image_url.url")


@asynccontextmanager
async def serving() -> AsyncIterator[int]:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/note.txt":
            return web.Response(text="a note")
        return web.Response(body=PNG, content_type="image/png")

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def test_links_are_fetched_where_the_operator_allows(caller: Caller, stack: Stack, submits: Path) -> None:
    async with serving() as port:
        link = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{port}/a.png"}}
        note = {"type": "input_file", "file_url": f"http://127.0.0.1:{port}/note.txt"}
        status, _ = await post(caller, "/v1/chat/completions", messages=asked(link), n=2)
        assert status == 200
        given = [{"role": "user", "content": [{"type": "input_text", "text": "Read."}, note]}]
        status, _ = await post(caller, "/v1/responses", input=given)
        assert status == 200
        async with calling(stack.gateways[1].url, stack.key, "seer") as other:
            status, answer = await post(other, "/v1/chat/completions", messages=asked(link))
            assert (status, answer["error"]["param"]) == (400, "messages.0.content.0")
    lines = noted(submits)
    assert [line["media"] for line in lines[:2]] == [[told("picture", PNG, "messages.0.content.0")]] * 2
    assert lines[2]["messages"] == [["user", "Read.\na note", []]]
    elsewhere = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    status, answer = await post(caller, "/v1/chat/completions", messages=asked(elsewhere))
    assert status == 501
    assert "PADDOCK_MEDIA_ALLOWED_HOSTS" in answer["error"]["message"]


@pytest.mark.parametrize(("heading", "package"), [("A picture", "openai"), ("A message with a picture", "anthropic")])
def test_the_examples_of_the_page(
    stack: Stack, submits: Path, capsys: pytest.CaptureFixture[str], heading: str, package: str
) -> None:
    pytest.importorskip(package)
    page = (Path(__file__).resolve().parents[3] / "docs" / "clients.md").read_text()
    [code] = re.findall(rf"^### {heading}\n.*?```py\n(.*?)```", page, re.MULTILINE | re.DOTALL)
    (stack.folder / "cat.png").write_bytes(PNG)
    code = code.replace("http://127.0.0.1:8080", stack.gateways[0].url).replace("<the printed key>", stack.key)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the page's `open` is left to the garbage collector
        exec(compile(code.replace("cat.png", str(stack.folder / "cat.png")), "clients.md", "exec"), {})
    assert capsys.readouterr().out == "t0 t1 t2 \n"
    assert [one[0] for one in noted(submits)[0]["media"]] == ["picture"]


def sent_form(**fields: str | bytes) -> dict[str, Any]:
    """Return how a client sends a form with these fields."""
    headers = {"Content-Type": CONTENT_TYPE.decode()}
    return {"data": BytesIO(form(*fields.items())), "headers": headers}


async def test_a_form_with_a_sound_reaches_the_worker(caller: Caller, submits: Path) -> None:
    sound = WAV + bytes(3 * MIB)
    sent = sent_form(prompt="Write it down.", file=sound, model="seer", temperature="0.5")
    async with caller.session.post(f"{caller.url}/v1/audio/transcriptions", **sent) as response:
        answer = await response.json()
        assert (response.status, answer["text"]) == (200, "t0 t1 t2 ")
        assert response.headers["x-paddock-model"] == "seer"
    [submit] = noted(submits)
    assert submit["messages"] == [["user", "Write it down.", [14]]]
    assert submit["media"] == [told("sound", sound, "file")]


async def test_a_streamed_form_can_be_gone_on_from(caller: Caller) -> None:
    """The same form is the same request, though its file was cut out of it."""

    async def streamed(file: bytes, **headers: str) -> tuple[int, str]:
        sent = sent_form(file=file, model="seer", stream="true")
        sent["headers"] |= {"x-resume-grace": "5", **headers}
        async with caller.session.post(f"{caller.url}/v1/audio/transcriptions", **sent) as response:
            return response.status, await response.text()

    status, whole = await streamed(WAV + bytes(MIB))
    assert status == 200, whole
    first = next(line for line in whole.splitlines() if line.startswith("id:"))
    again = {"last-event-id": first.removeprefix("id:").strip()}
    status, rest = await streamed(WAV + bytes(MIB), **again)
    assert status == 200, rest
    assert whole.endswith(rest)
    assert "transcript.text.done" in rest
    status, refused = await streamed(WAV + bytes(MIB - 1), **again)
    assert (status, "of another request" in refused) == (400, True), "another file is another request"


async def test_forms_at_models_that_hear_nothing_and_bodies_that_are_no_form(caller: Caller) -> None:
    url = f"{caller.url}/v1/audio/transcriptions"
    async with caller.session.post(url, **sent_form(file=WAV, model="reader")) as response:
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (501, "file")
        assert "`reader`" in error["message"]
    async with caller.session.post(url, json={"file": "", "model": "seer"}) as response:
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, "content-type")
        assert "multipart/form-data" in error["message"]
    async with caller.session.post(url, **sent_form(file=WAV + bytes(9 * MIB), model="seer")) as response:
        error = (await response.json())["error"]
        assert (response.status, error["param"], error["code"]) == (413, "file", "request_too_large")


async def test_pictures_to_embed_reach_the_worker(caller: Caller, submits: Path) -> None:
    caller.model = "seeing-embedder"
    large, small = picture(7 * MIB), picture(3 * MIB, 1)
    marked = {"prompt_string": "see <__media__>!", "multimodal_data": [base64_of(large)]}
    parts = {"content": [{"type": "text", "text": "a "}, shown(small)]}
    for path, body in (
        ("/v1/embeddings", {"input": [marked, "plain", parts], "cache_salt": "salt"}),
        ("/embedding", {"content": [marked, "plain", parts], "cache_salt": "salt"}),
        ("/v1/embeddings", {"messages": asked(shown(small), {"type": "text", "text": "Embed it."})}),
    ):
        status, answer = await post(caller, path, **body)
        assert status == 200, answer
        if "input" in body:
            assert len(answer["data"]) == 3
            assert answer["usage"]["prompt_tokens"] > 3
    lines = noted(submits)
    for line, field in zip(lines[:2], ("input", "content"), strict=True):
        assert line["inputs"] == [{"text": "see !", "media": [4]}, "plain", {"text": "a ", "media": [2]}]
        assert line["media"] == [
            told("picture", large, f"{field}.0.multimodal_data.0"),
            told("picture", small, f"{field}.2.content.1"),
        ]
        assert line["salt"] == "salt"
    [conversation] = lines[2]["inputs"]
    assert conversation["messages"] == [{"role": "user", "content": "Embed it.", "media": [0]}]
    assert lines[2]["media"] == [told("picture", small, "messages.0.content.0")]


async def test_embedders_and_rerankers_that_read_refuse_pictures(caller: Caller, submits: Path) -> None:
    marked = {"prompt_string": "<__media__>", "multimodal_data": [base64_of(PNG)]}
    caller.model = "embedder"
    for path, body in (
        ("/v1/embeddings", {"input": ["a", marked]}),
        ("/embedding", {"content": ["a", marked]}),
        ("/v1/embeddings", {"messages": asked(shown(PNG))}),
    ):
        status, answer = await post(caller, path, **body)
        assert status == 501
        assert "the model `embedder` reads text only" in answer["error"]["message"]
    caller.model = "ranker"
    status, answer = await post(caller, "/v1/rerank", query="q", documents=["a", {"content": [shown(PNG)]}])
    assert (status, answer["error"]["param"]) == (501, "documents.1.content")
    status, answer = await post(caller, "/v1/rerank", query="q", documents=["a", {"text": "b"}])
    assert status == 200
    assert len(noted(submits)) == 1
    caller.model = "seeing-embedder"
    sound = {"content": [{"type": "input_audio", "input_audio": {"data": base64_of(WAV), "format": "wav"}}]}
    status, answer = await post(caller, "/v1/embeddings", input=sound)
    assert (status, answer["error"]["param"]) == (501, "input.content.0")
    assert "reads image and text" in answer["error"]["message"]


async def test_bounds_of_media_hold_for_embeddings(caller: Caller) -> None:
    caller.model = "seeing-embedder"
    large = {"prompt_string": "<__media__>", "multimodal_data": [base64_of(picture(9 * MIB))]}
    status, answer = await post(caller, "/v1/embeddings", input=large)
    assert (status, answer["error"]["param"]) == (400, "input.multimodal_data.0")
    status, answer = await post(caller, "/v1/embeddings", input="x" * (2 * MIB))
    assert status == 413
    many = {"prompt_string": "<__media__>" * 17, "multimodal_data": [base64_of(PNG)] * 17}
    status, answer = await post(caller, "/v1/embeddings", input=[many, many])
    assert (status, answer["error"]["param"]) == (400, "input.1.multimodal_data.15")


async def test_links_to_embed_are_fetched_where_the_operator_allows(caller: Caller, submits: Path) -> None:
    caller.model = "seeing-embedder"
    async with serving() as port:
        link = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{port}/a.png"}}
        note = {"type": "input_file", "file_url": f"http://127.0.0.1:{port}/note.txt"}
        status, answer = await post(caller, "/v1/embeddings", input={"content": [link, note]})
        assert status == 200, answer
    [line] = noted(submits)
    assert line["inputs"] == [{"text": "a note", "media": [0]}]
    assert line["media"] == [told("picture", PNG, "input.content.0")]
