"""The Python client against a running Paddock, and with the same keywords against a llama-server where one is built."""

from __future__ import annotations

import importlib.metadata
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reference import bench_dir
from gateway.client import (
    AsyncClient,
    AuthenticationFailed,
    BadRequest,
    Client,
    ContextOverflow,
    LoraScale,
    Message,
    NotFound,
    NotSupported,
    StopType,
    StreamGone,
)
from tests.support.cutting_proxy import cutting_proxy
from tests.support.pooled_models import write_bert, write_reranker
from tests.support.stack import DEMO_MODEL, ROOT, Stack, free_port

MODEL = "paddock-demo"
ADAPTER = DEMO_MODEL.with_name("paddock-demo-pirate-lora.gguf")
POOLED = {"vectors": write_bert, "ranks": write_reranker}
N_CTX = 512
QUESTION = [Message("user", "Who are you?")]
STORY = [Message("user", "Tell me a short story about a fox.")]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="pd-client-"))
    shutil.copy(ADAPTER, path / "pirate.gguf")
    (path / "slots").mkdir()
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[Stack]:
    with Stack() as running:
        settings: dict[str, Any] = {"slots": 2, "ctx": N_CTX, "adapters_dir": folder, "slot_save_dir": folder / "slots"}
        running.worker(DEMO_MODEL, MODEL, worker_id="a", wait=False, **settings)
        for alias, write in POOLED.items():
            write(running.folder / f"{alias}.gguf")
            running.worker(running.folder / f"{alias}.gguf", alias, worker_id=alias, wait=False)
        for _ in range(2):
            running.gateway(wait=False)
        for process in running.workers:
            running.wait_for_worker(MODEL if process.name == "a" else process.name, process.name, process)
        for gateway in running.gateways:
            running.wait_until_ready(gateway)
        yield running


@pytest.fixture(scope="module")
def llama_server(folder: Path) -> Iterator[str]:
    """Its address."""
    version = importlib.metadata.version("llama-cpp-python")
    binary = next(bench_dir().glob(f"build-{version}*/bin/llama-server"), None)
    if binary is None:
        pytest.skip("no llama-server is built; `python -m benchmarks.reference` builds it")
    port = free_port()
    command: list[str | Path] = [binary, "-m", DEMO_MODEL, "--alias", MODEL, "--port", str(port)]
    command += ["-c", str(2 * N_CTX), "-np", "2", "-t", "1"]
    command += ["--slot-save-path", f"{folder}/slots", "--metrics", "--props", "--no-webui"]
    command += ["--lora", folder / "pirate.gguf", "--lora-init-without-apply"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait()


@pytest.fixture(params=["paddock", "llama-server"])
def either(request: pytest.FixtureRequest) -> Iterator[Client]:
    if request.param == "paddock":
        stack: Stack = request.getfixturevalue("stack")
        client = Client(f"{stack.gateways[0].url}/v1", stack.key, timeout=60)
    else:
        client = Client(request.getfixturevalue("llama_server"), timeout=60)
    with client:
        client.wait_until_ready(timeout=30, poll_interval=0.05)
        yield client


@pytest.fixture
def paddock(stack: Stack) -> Iterator[Client]:
    with Client(stack.gateways[0].url, stack.key, timeout=60) as client:
        yield client


@pytest.fixture
async def for_tasks(stack: Stack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(stack.gateways[0].url, stack.key, timeout=60) as client:
        yield client


def test_what_a_server_says_of_itself(either: Client) -> None:
    assert either.is_ready()
    assert either.health().ok
    (model,) = [model for model in either.models.list() if model.id == MODEL]
    assert model.meta is not None
    assert model.meta.n_vocab == 768
    assert model.meta.n_ctx is not None
    assert model.meta.n_ctx >= N_CTX
    props = either.props(model=MODEL)
    assert (props.total_slots, props.model_alias) == (2, MODEL)
    assert "im_start" in (props.chat_template or "")
    assert props.default_generation_settings["params"]["top_k"] == 40
    either.set_props({}, model=MODEL)
    assert "# TYPE" in either.metrics()


def test_a_chat(either: Client) -> None:
    answer = either.chat.completions.create(QUESTION, model=MODEL, temperature=0, max_tokens=60)
    assert "Paddock" in answer.text
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.timings is not None
    assert answer.timings.predicted_n > 5
    turns = [*QUESTION, answer.choices[0].message, Message("user", "What is 2 plus 3?")]
    assert "5" in either.chat.completions.create(turns, model=MODEL, temperature=0).text


def test_a_streamed_chat_is_the_whole_one(either: Client) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 60}
    whole = either.chat.completions.create(QUESTION, **asked)
    with either.chat.completions.create(
        QUESTION, stream=True, stream_options={"include_usage": True}, **asked
    ) as stream:
        chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert len(chunks) > 10
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_log_probabilities(either: Client) -> None:
    answer = either.chat.completions.create(
        QUESTION, model=MODEL, temperature=0, max_tokens=5, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    for token in logprobs.content:
        assert token.logprob is not None
        assert token.logprob <= 0
        assert token.top_logprobs is not None
        assert token.top_logprobs[0].token == token.token


def test_a_completion(either: Client) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "n_predict": 12}
    prompt = "Once upon a time"
    answer = either.complete(prompt, return_tokens=True, n_probs=1, **asked)
    assert (answer.stop, answer.stop_type, answer.tokens_predicted) == (True, StopType.LIMIT, 12)
    assert either.detokenize(answer.tokens, model=MODEL) == answer.content
    assert answer.generation_settings["n_predict"] == 12
    assert answer.completion_probabilities is not None
    assert [one.id for one in answer.completion_probabilities] == [*answer.tokens]
    assert answer.timings is not None
    assert answer.tokens_evaluated == len(either.tokenize(prompt, model=MODEL, add_special=True).tokens)
    chunks = list(either.complete(prompt, stream=True, **asked))
    assert "".join(chunk.content for chunk in chunks) == answer.content == either.simple_completion(prompt, **asked)
    assert [chunk.stop for chunk in chunks].count(True) == 1
    assert chunks[-1].stop_type is StopType.LIMIT
    stopped = either.complete(prompt, stop=[answer.content[3:6]], **asked)
    assert (stopped.stop_type, stopped.stopping_word) == (StopType.WORD, answer.content[3:6])
    few = either.complete(prompt, response_fields=["content", "generation_settings/n_predict"], **asked)
    assert (few.content, few.model, few.extra) == (answer.content, "", {"generation_settings/n_predict": 12})


def test_several_prompts(either: Client) -> None:
    prompts: list[Any] = ["Once upon", [1, 2, 3]]
    answers = either.complete_many(prompts, model=MODEL, n_predict=3, temperature=0)
    assert sorted(answer.index for answer in answers) == [0, 1]
    twice = either.complete_many(["Once upon"], model=MODEL, n_predict=3, n_cmpl=2)
    assert sorted(answer.index for answer in twice) == [0, 1]


def test_a_form(either: Client) -> None:
    answer = either.complete("x", model=MODEL, grammar='root ::= "yes" | "no"')
    assert answer.content in ("yes", "no")


def test_texts_and_tokens(either: Client) -> None:
    told = either.tokenize("A café <|im_end|>", model=MODEL, with_pieces=True)
    assert told.pieces is not None
    raw = b"".join(piece if isinstance(piece, bytes) else piece.encode() for piece in told.pieces)
    assert raw.decode().lstrip() == "A café <|im_end|>"
    assert len(either.tokenize("<|im_end|>", model=MODEL, parse_special=False).tokens) > 1
    plain = either.tokenize("A café", model=MODEL).tokens
    assert either.detokenize(plain, model=MODEL).lstrip() == "A café"
    prompt = either.apply_template([Message("user", "hi")], model=MODEL)
    assert prompt.index("hi") > prompt.index("user")
    assert prompt.rstrip().endswith("assistant")


def test_slots(either: Client) -> None:
    either.complete("Once upon a time there was a fox", model=MODEL, n_predict=4, id_slot=1, temperature=0)
    assert [slot.n_ctx for slot in either.slots.list(model=MODEL, fail_on_no_slot=True)] == [N_CTX, N_CTX]
    saved = either.slots.save(1, "fox", model=MODEL)
    assert (saved.id_slot, saved.filename) == (1, "fox")
    assert saved.n_saved > 5
    assert saved.n_written > 0
    assert either.slots.erase(1, model=MODEL).n_erased == saved.n_saved
    assert either.slots.restore(1, "fox", model=MODEL).n_restored == saved.n_saved


def test_adapters(either: Client) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "n_predict": 24, "cache_prompt": False}
    prompt = either.apply_template(STORY, model=MODEL)
    loads = not either.lora.list(model=MODEL)
    if not loads:
        either.lora.set_scales([], model=MODEL)
    plain = either.simple_completion(prompt, **asked)
    if loads:
        either.lora.load("pirate", "pirate.gguf", model=MODEL)
    (adapter,) = either.lora.list(model=MODEL)
    assert adapter.id == 0
    assert either.simple_completion(prompt, lora=[LoraScale(0, 1.0)], **asked) != plain
    either.lora.set_scales([LoraScale(0, 1.0)], model=MODEL)
    until_scale(either, 1.0)
    either.lora.set_scales([], model=MODEL)
    until_scale(either, 0.0)
    if loads:
        assert either.simple_completion(prompt, **{**asked, "model": "pirate"}) != plain
        either.lora.unload("pirate", model=MODEL)
        assert either.lora.list(model=MODEL) == ()


def until_scale(client: Client, scale: float) -> None:
    deadline = time.monotonic() + 5
    while [adapter.scale for adapter in client.lora.list(model=MODEL)] != [scale]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_errors_have_the_same_names(either: Client) -> None:
    with pytest.raises(ContextOverflow) as caught:
        either.complete("word " * 2000, model=MODEL)
    assert caught.value.status == 400
    assert re.search(r"\d+", caught.value.message)
    with pytest.raises(ContextOverflow):
        either.chat.completions.create([Message("user", "word " * 2000)], model=MODEL, stream=True)
    with pytest.raises(BadRequest):
        either.complete("x", model=MODEL, grammar="root ::= missing")
    with pytest.raises(NotSupported):
        either.infill("def f(", "return 1", model=MODEL)


def test_leaving_a_stream_frees_the_slot(either: Client) -> None:
    with either.complete("Once", model=MODEL, stream=True, n_predict=-1, ignore_eos=True, id_slot=0) as stream:
        for _ in stream:
            break
    deadline = time.monotonic() + 5
    while any(slot.is_processing for slot in either.slots.list(model=MODEL)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_keys_and_names(stack: Stack, paddock: Client) -> None:
    with Client(stack.gateways[0].url, "wrong") as stranger:
        with pytest.raises(AuthenticationFailed) as caught:
            stranger.models.list()
        assert caught.value.request_id
        assert stranger.is_ready()
    assert paddock.models.retrieve(MODEL).id == MODEL
    with pytest.raises(NotFound):
        paddock.models.retrieve("nobody")
    with pytest.raises(NotSupported, match="No supervisor"):
        paddock.models.unload(MODEL)


@pytest.mark.parametrize("alias", POOLED)
def test_vectors_and_ranks(stack: Stack, paddock: Client, alias: str) -> None:
    if alias == "ranks":
        ranked = paddock.rerank("a fox", ["a fox", "a boat", "nothing"], model=alias, top_n=2)
        scores = [result.relevance_score for result in ranked.results]
        assert len(scores) == 2
        assert scores == sorted(scores, reverse=True)
        return
    both = [
        paddock.embeddings.create(["a fox", "a boat"], model=alias, encoding_format=form)
        for form in ("float", "base64")
    ]
    for one, other in zip(both[0].data, both[1].data, strict=True):
        assert one.vector == pytest.approx(other.vector, abs=1e-6)
    assert math.hypot(*both[0].data[0].vector) == pytest.approx(1, abs=1e-3)
    (own,) = paddock.embed("a fox", model=alias)
    assert own.vector == pytest.approx(both[0].data[0].vector, abs=1e-6)


async def test_tasks(for_tasks: AsyncClient) -> None:
    await for_tasks.wait_until_ready(timeout=5)
    assert MODEL in [model.id for model in await for_tasks.models.list()]
    whole = await for_tasks.chat.completions.create(QUESTION, model=MODEL, temperature=0)
    stream = await for_tasks.chat.completions.create(QUESTION, model=MODEL, temperature=0, stream=True)
    assert "".join([chunk.text async for chunk in stream]) == whole.text
    assert (await for_tasks.tokenize("A fox", model=MODEL)).tokens
    async with await for_tasks.complete("Once", model=MODEL, stream=True, n_predict=5) as chunks:
        assert (await anext(chunks)).stop is False


@pytest.mark.parametrize("dialect", ["chat", "native"])
@pytest.mark.parametrize("cut_after", [4000, 9000])
async def test_a_stream_goes_on_over_broken_connections(
    stack: Stack, paddock: Client, dialect: str, cut_after: int
) -> None:
    """Each answer breaks off after so many bytes, and the next connection goes to the other gateway."""
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "n_predict": 200, "ignore_eos": True}
    whole = paddock.complete("Once", **asked).content
    chat = paddock.chat.completions.create(STORY, **asked).text
    with cutting_proxy([gateway.url for gateway in stack.gateways]) as proxy:
        proxy.cut_after = cut_after
        with Client(proxy.url, stack.key, timeout=10) as client:
            if dialect == "native":
                pieces = [c.content for c in client.complete("Once", stream=True, resume_grace=20, **asked)]
                assert "".join(pieces) == whole
            else:
                stream = client.chat.completions.create(STORY, stream=True, resume_grace=20, **asked)
                assert "".join(chunk.text for chunk in stream) == chat
        assert proxy.num_connections > 3
        async with AsyncClient(proxy.url, stack.key, timeout=10) as for_tasks:
            stream_of_tasks = await for_tasks.complete("Once", stream=True, resume_grace=20, **asked)
            assert "".join([chunk.content async for chunk in stream_of_tasks]) == whole


def test_a_stream_of_another_server_is_gone(stack: Stack, paddock: Client) -> None:
    with (
        Client(paddock._connection._server.root, stack.key, headers={"last-event-id": f"{'0' * 32}:1"}) as client,
        pytest.raises(StreamGone),
    ):
        client.chat.completions.create(STORY, model=MODEL, stream=True, resume_grace=5)


def test_the_examples_of_the_page(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "client.md").read_text()
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        own = code.replace("http://127.0.0.1:8080", stack.gateways[0].url).replace("<the printed key>", stack.key)
        exec(compile(own.replace("models.list()[0].id", f"models.retrieve({MODEL!r}).id"), "client.md", "exec"), {})
        assert "Paddock" in capsys.readouterr().out


def test_paddock_chat_on_a_pipe(stack: Stack) -> None:
    command = [sys.executable, "-m", "gateway.cli", "chat", "--url", stack.gateways[0].url, "--api-key", stack.key]
    command += ["--model", MODEL, "--temperature", "0"]
    done = subprocess.run(command, cwd=ROOT, input="Who are you?\n", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Paddock" in done.stdout
