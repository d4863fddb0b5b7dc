"""Text over the wire of whole workers: a real vocabulary, a template in its process, what is served."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.integration.service.conftest import ROOT, Process, RedisServer
from tests.integration.service.wire import Gateway
from tests.support.small_models import Draft, write_model
from workers.llama.tokens.vocab import VocabFile
from workers.protocol import keys
from workers.protocol.events import Failure, FailureCode
from workers.protocol.heartbeat import decode_heartbeat
from workers.protocol.queries import (
    DETOKENIZE_PATH,
    PROPS_PATH,
    RENDER_PATH,
    TOKENIZE_PATH,
    Detokenize,
    Props,
    Render,
    Rendered,
    Tokenize,
    decode_detokenized,
    decode_props,
    decode_rendered,
    decode_tokenized,
)
from workers.protocol.requests import Accepted, GenerateRequest, Infill, Message

DEMO = ROOT / "deploy" / "demo" / "paddock-demo.gguf"
SECRET = "a-secret"

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
HELLO = (Message("user", "Hi"),)

Start = Callable[..., Process]


@pytest.fixture(scope="module")
def start(redis_server: RedisServer, folder: Path) -> Iterator[Start]:
    """Starts a worker for this file under this name, and waits for it."""
    started: list[Process] = []

    def start(path: Path, name: str, *flags: str) -> Process:
        environment = {
            "PADDOCK_REDIS_URL": redis_server.url,
            "PADDOCK_WORKER_SECRET": SECRET,
            "PADDOCK_STATE_DIR": str(folder),
            "OMP_NUM_THREADS": "1",
        }
        argv = [sys.executable, "-m", "workers.cli", "worker", "--model", str(path), "--alias", name]
        process = Process([*argv, "--worker-id", "w", *flags], folder, environment)
        started.append(process)
        deadline = time.monotonic() + 30
        while not process.address:
            assert time.monotonic() < deadline, process.errors()
            data = redis_server.client.hget(keys.worker(name, "w"), "beat")
            process.address = decode_heartbeat(data).address if isinstance(data, bytes) else ""
            time.sleep(0.02)
        return process

    yield start
    for process in started:
        process.kill()


@pytest.fixture(scope="module")
def filling(folder: Path) -> Path:
    """A tiny model whose vocabulary has fill-in-the-middle tokens: four ordinary ones that serve as such."""

    def fill(draft: Draft) -> None:
        for name, token in {"pre": 301, "suf": 302, "mid": 303, "sep": 304}.items():
            draft.writer.add_uint32(f"tokenizer.ggml.fim_{name}_token_id", token)
        draft.shape(1)
        draft.ends()
        draft.attention("blk.0")
        draft.forward("blk.0")

    path = folder / "filling.gguf"
    write_model(path, "llama", fill)
    return path


@pytest.fixture(scope="module")
def worker(start: Start, filling: Path) -> Process:
    flags = ("--slots", "3", "--ctx", "512", "--chat-template", TEMPLATE, "--sampling", '{"temperature": 0.25}')
    return start(filling, "filling", *flags, "--llama", '{"n_threads": 1, "n_batch": 128, "n_ubatch": 64}')


async def asked(gateway: Gateway, path: str, message: Any) -> bytes | Failure:
    status, body = await gateway.post(path, msgspec.json.encode(message))
    return body if status == 200 else msgspec.json.decode(body, type=Failure)


async def rendered(gateway: Gateway, **fields: Any) -> Rendered | Failure:
    answer = await asked(gateway, RENDER_PATH, Render(request=GenerateRequest(**fields)))
    return answer if isinstance(answer, Failure) else decode_rendered(answer)


async def props_of(gateway: Gateway) -> Props:
    status, body = await gateway.get(PROPS_PATH, **await gateway.headers())
    assert status == 200
    return decode_props(body)


async def test_what_is_served(session: aiohttp.ClientSession, worker: Process) -> None:
    props = await props_of(Gateway(session, worker.address, "g", SECRET))
    assert (props.kind, props.model, props.slots, props.n_ctx) == ("generate", "filling", 3, 512)
    assert (props.model_file, props.architecture, props.ftype) == ("filling.gguf", "llama", "(guessed) all F32")
    assert props.facts.n_vocab == 768
    assert props.chat_templates == {"default": TEMPLATE}
    assert props.chat_template_caps["supports_system_role"]
    assert not props.chat_template_caps["supports_tools"]
    assert (props.has_infill, props.input_modalities) == (True, ("text",))
    assert props.build_info.startswith("llama-cpp-python ")
    sampling = props.sampling
    assert (sampling.temperature, sampling.top_k, sampling.repeat_last_n, sampling.seed) == (0.25, 40, 64, None)


async def test_a_prompt_as_the_call_has_it(session: aiohttp.ClientSession, worker: Process) -> None:
    gateway = Gateway(session, worker.address, "prompt", SECRET)
    async with gateway.connected() as heard:
        made = await rendered(gateway, messages=HELLO)
        accepted = await gateway.submit(1, "Hi", max_tokens=1)
        assert isinstance(accepted, Accepted)
        assert made == Rendered(prompt="[user]Hi[assistant]", num_tokens=accepted.num_prompt_tokens)
        await heard.until_end(1)


async def test_text_to_tokens_and_back(session: aiohttp.ClientSession, worker: Process) -> None:
    gateway = Gateway(session, worker.address, "g", SECRET)
    body = await asked(gateway, TOKENIZE_PATH, Tokenize(content="Grüße 你好", with_pieces=True))
    assert isinstance(body, bytes)
    made = decode_tokenized(body)
    assert b"".join(made.pieces or ()) == "Grüße 你好".encode()
    body = await asked(gateway, DETOKENIZE_PATH, Detokenize(tokens=made.tokens))
    assert isinstance(body, bytes)
    assert decode_detokenized(body).content == "Grüße 你好"


async def test_a_gap_in_code(session: aiohttp.ClientSession, worker: Process, filling: Path) -> None:
    gateway = Gateway(session, worker.address, "infill", SECRET)
    with VocabFile.load(filling) as file:
        before, behind, name = (
            file.vocab.tokenize(text, add_special=False, parse_special=False) for text in ("def f(", "):", "filename\n")
        )
    async with gateway.connected() as heard:
        accepted = await gateway.submit(1, infill=Infill("def f(", "):"), max_tokens=2)
        assert isinstance(accepted, Accepted)
        assert accepted.num_prompt_tokens == len([304, *name, 301, *before, 302, *behind, 303])
        await heard.until_end(1)


async def test_a_worker_that_makes_vectors(session: aiohttp.ClientSession, start: Start) -> None:
    process = start(DEMO, "vectors", "--ctx", "256", "--llama", '{"embeddings": true, "n_threads": 1}')
    gateway = Gateway(session, process.address, "g", SECRET)
    props = await props_of(gateway)
    assert (props.kind, props.chat_templates, props.chat_template_caps) == ("embed", {}, {})
    body = await asked(gateway, TOKENIZE_PATH, Tokenize(content="Hi"))
    assert isinstance(body, bytes)
    assert len(decode_tokenized(body).tokens) > 0
    failure = await rendered(gateway, messages=HELLO)
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.UNSUPPORTED
    assert await rendered(gateway, prompt="Hi") == Rendered(prompt="Hi", num_tokens=len(decode_tokenized(body).tokens))
