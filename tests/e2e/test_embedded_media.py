"""Pictures and sounds in what is embedded, through the front door: forms, counts, callers at once, what is refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from PIL import Image

from tests.integration.pooled.test_media import SeeingBench, rows_by_hand, seeing
from tests.support.media_files import picture_file, sound_file
from tests.support.pooled_models import write_bert, write_reranker
from tests.support.projectors import SAMPLE_RATE, Pair, picture, sound, write_pair
from tests.support.stack import DEMO_MODEL, Stack
from workers.engine.pooled.jobs import Vectors
from workers.llama.media.parts import Picture, Sound

SEER, GRID, HEARER, BLIND, ENCODER, RANKER = "seer", "grid", "hearer", "blind", "encoder", "ranker"
KINDS = {SEER: "phi4", GRID: "qwen2vl", HEARER: "ultravox"}
TEMPLATE = DEMO_MODEL.with_name("chat_template.jinja")
CTX = 1024
BEFORE, BETWEEN, AFTER = "Once upon a time there was a cat. Say what ", " and then ", " was there, and what was not?"
TEXTS = ["Once upon a time", "The cat sat on the mat and slept. " * 6, "x"]


def png(seed: int, height: int = 48, width: int = 64) -> str:
    return base64.b64encode(picture_file(Image.fromarray(picture(seed, height, width)), "PNG")).decode()


def wav(seed: int) -> str:
    return base64.b64encode(sound_file(sound(seed), SAMPLE_RATE)).decode()


def marked(*files: str) -> dict[str, Any]:
    """Return an input with these files, in llama-server's form."""
    text = "<__media__>".join([BEFORE, *[BETWEEN] * (len(files) - 1), AFTER])
    return {"prompt_string": text, "multimodal_data": list(files)}


def shown(file: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{file}"}}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("projectors")
    return {alias: write_pair(folder, kind) for alias, kind in KINDS.items()}


@pytest.fixture(scope="module")
def stack(pairs: dict[str, Pair]) -> Iterator[Stack]:
    with Stack() as running:
        common: dict[str, Any] = {"wait": False, "chat_template": TEMPLATE.read_text(), "ctx": CTX, "slots": 2}
        llama = {"n_threads": 1, "embeddings": True, "n_ubatch": 128}
        for alias, pair in pairs.items():
            pooling = {"pooling": "mean"} if alias == GRID else {}
            own = json.dumps(llama | pooling)
            running.worker(pair.model, alias, worker_id=alias, projector=pair.projector, llama=own, **common)
        running.worker(pairs[SEER].model, BLIND, worker_id=BLIND, llama=json.dumps(llama), **common)
        for alias, write in ((ENCODER, write_bert), (RANKER, write_reranker)):
            path = running.folder / f"{alias}.gguf"
            write(path)
            running.worker(path, alias, worker_id=alias, wait=False, projector=pairs[SEER].projector)
        gateway = running.gateway(wait=False)
        aliases = [*pairs, BLIND, ENCODER, RANKER]
        for alias, process in zip(aliases, running.workers, strict=True):
            running.wait_for_worker(alias, alias, process)
        running.wait_until_ready(gateway)
        running.wait_until_listed(gateway, *aliases)
        yield running


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx2.Client]:
    headers = {"Authorization": f"Bearer {stack.key}"}
    with httpx2.Client(base_url=stack.gateways[0].url, headers=headers, timeout=60) as opened:
        yield opened


def embedded(http: httpx2.Client, model: str, **body: Any) -> tuple[Vectors, int]:
    """Return the vectors, and how many tokens were counted."""
    answer = http.post("/v1/embeddings", json={"model": model, **body})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    vectors = np.array([one["embedding"] for one in told["data"]], dtype=np.float32)
    assert told["usage"]["prompt_tokens"] == told["usage"]["total_tokens"]
    return vectors, told["usage"]["prompt_tokens"]


def refused(http: httpx2.Client, model: str, path: str = "/v1/embeddings", **body: Any) -> tuple[int, dict[str, Any]]:
    answer = http.post(path, json={"model": model, **body})
    return answer.status_code, answer.json()["error"]


def cosine(one: Vectors, other: Vectors) -> float:
    return float(np.dot(one, other) / np.linalg.norm(one) / np.linalg.norm(other))


@pytest.fixture(scope="module")
def hands(pairs: dict[str, Pair]) -> Iterator[dict[str, SeeingBench]]:
    with (
        seeing("phi4", pairs[SEER]) as seer,
        seeing("qwen2vl", pairs[GRID]) as grid,
        seeing("ultravox", pairs[HEARER]) as hearer,
    ):
        yield {SEER: seer, GRID: grid, HEARER: hearer}


@pytest.mark.parametrize("model", [SEER, GRID])
def test_vectors_are_those_of_a_context_driven_by_hand(
    model: str, http: httpx2.Client, hands: dict[str, SeeingBench]
) -> None:
    given = [marked(png(1)), marked(png(2), png(1)), marked(png(3, 320, 320))]
    media = [(Picture(picture(1)),), (Picture(picture(2)), Picture(picture(1))), (Picture(picture(3, 320, 320)),)]
    rows = [rows_by_hand(hands[model], *one) for one in media]
    vectors, num_tokens = embedded(http, model, input=given)
    assert num_tokens == sum(map(len, rows)), "the cells of the pictures count"
    expected = [one.mean(axis=0) if model == GRID else one[-1] for one in rows]
    assert all(cosine(one, other) > 0.999 for one, other in zip(vectors, expected, strict=True))
    assert cosine(vectors[0], vectors[1]) < 0.999
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1, 1], abs=1e-5)
    other, _ = embedded(http, model, input=marked(png(9)))
    assert cosine(other[0], vectors[0]) < 0.9999
    again, _ = embedded(http, model, input=marked(png(1)))
    assert cosine(again[0], vectors[0]) > 0.9999


def test_a_sound(http: httpx2.Client, hands: dict[str, SeeingBench]) -> None:
    vectors, num_tokens = embedded(http, HEARER, input=[marked(wav(1)), marked(wav(2))])
    rows = rows_by_hand(hands[HEARER], Sound(sound(1)))
    assert num_tokens == 2 * len(rows) > 600
    assert cosine(vectors[0], rows[-1]) > 0.99, "the file has 16 bits for each sample"
    assert cosine(vectors[0], vectors[1]) < 0.9999


def test_all_forms_of_an_input_are_the_same(http: httpx2.Client, stack: Stack) -> None:
    expected, num_tokens = embedded(http, SEER, input=marked(png(4)))
    parts = [{"type": "text", "text": BEFORE}, shown(png(4)), {"type": "text", "text": AFTER}]
    found, same = embedded(http, SEER, input=["a text", {"content": parts}])
    assert cosine(found[1], expected[0]) > 0.9999
    assert same > num_tokens
    for name in ("content", "input"):
        answer = http.post("/embedding", json={"model": SEER, name: marked(png(4)), "embd_normalize": -1})
        assert answer.status_code == 200, answer.text
        [native] = answer.json()[0]["embedding"]
        assert cosine(np.array(native, dtype=np.float32), expected[0]) > 0.9999
    with openai.OpenAI(base_url=f"{stack.gateways[0].url}/v1", api_key=stack.key, max_retries=0) as client:
        one: Any = [marked(png(4))]
        told = client.embeddings.create(model=SEER, input=one)
    assert cosine(np.array(told.data[0].embedding, dtype=np.float32), expected[0]) > 0.9999
    shortened, _ = embedded(http, SEER, input=marked(png(4)), dimensions=8)
    assert shortened.shape == (1, 8)


@pytest.mark.parametrize("opened", [False, True])
def test_messages_are_embedded_as_the_template_renders_them(opened: bool, http: httpx2.Client) -> None:
    parts = [{"type": "text", "text": "What is "}, shown(png(5)), {"type": "text", "text": "?"}]
    messages = [{"role": "system", "content": "Represent it."}, {"role": "user", "content": parts}]
    asked = {"messages": messages, "add_generation_prompt": opened}
    rendered = http.post("/apply-template", json={"model": SEER, **asked}).raise_for_status().json()["prompt"]
    assert rendered.count("<__media__>") == 1
    assert rendered.endswith("assistant\n") is opened
    given = {"prompt_string": rendered, "multimodal_data": [png(5)]}
    expected, num_tokens = embedded(http, SEER, input=given)
    found, same = embedded(http, SEER, **asked)
    assert same == num_tokens
    assert cosine(found[0], expected[0]) > 0.9999
    assert embedded(http, SEER, messages=[{"role": "user", "content": "no picture"}])[0].shape[0] == 1


def test_several_callers_at_once(http: httpx2.Client) -> None:
    inputs = [[marked(png(seed)), TEXTS[seed % 3], marked(png(seed + 1), png(6))] for seed in range(6)]
    alone = [embedded(http, GRID, input=one)[0] for one in inputs]
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(lambda one: embedded(http, GRID, input=one, cache_salt="other")[0], inputs * 2))
    for number, vectors in enumerate(together):
        assert all(cosine(a, b) > 0.999 for a, b in zip(vectors, alone[number % 6], strict=True))


def test_texts_have_the_vectors_that_they_have_without_a_projector(http: httpx2.Client) -> None:
    found, num_tokens = embedded(http, SEER, input=TEXTS)
    expected, same = embedded(http, BLIND, input=TEXTS)
    assert num_tokens == same
    assert found == pytest.approx(expected, abs=1e-6)


def test_what_models_take_is_told(http: httpx2.Client) -> None:
    cards = http.get("/v1/models").raise_for_status().json()["data"]
    inputs = {card["id"]: card["architecture"]["input_modalities"] for card in cards}
    seen = {SEER: ["text", "image"], GRID: ["text", "image"], HEARER: ["text", "audio"]}
    assert inputs == {alias: seen.get(alias, ["text"]) for alias in (*seen, BLIND, ENCODER, RANKER)}


def test_what_can_not_be_embedded_is_refused_by_name(http: httpx2.Client, stack: Stack) -> None:
    for model in (BLIND, ENCODER):
        status, error = refused(http, model, input=["a", marked(png(1))])
        assert (status, error["param"]) == (501, "input.1.multimodal_data.0")
        assert f"the model `{model}` reads text only" in error["message"]
    log = next(one for one in stack.workers if one.name == ENCODER).text()
    assert "reads text only" in log
    assert "all of its tokens see each other" in log
    status, error = refused(http, RANKER, "/v1/rerank", query="q", documents=["a", {"text": "b", "image": png(1)}])
    assert (status, error["param"]) == (501, "documents.1.image")
    status, error = refused(http, BLIND, messages=[{"role": "user", "content": "a"}])
    assert (status, error["param"]) == (400, "messages")
    assert "renders no messages" in error["message"]


def test_files_that_are_no_pictures_and_inputs_that_are_too_long(http: httpx2.Client) -> None:
    cut = base64.b64encode(base64.b64decode(png(1))[:60]).decode()
    status, error = refused(http, SEER, input=["a", marked(png(1), cut)])
    assert (status, error["param"]) == (400, "input.1.multimodal_data.1")
    many = {"prompt_string": "<__media__>" * 4, "multimodal_data": [png(7, 320, 320)] * 4}
    status, error = refused(http, GRID, input=["a", many])
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "of input 1 are too many or too large" in error["message"]
    long = {**marked(png(1)), "prompt_string": "word " * 2000 + "<__media__>"}
    status, error = refused(http, SEER, input=[marked(png(1)), long])
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "input 1 is too large" in error["message"]
    assert embedded(http, GRID, input=marked(png(1)))[0].shape[0] == 1, "and it goes on"
