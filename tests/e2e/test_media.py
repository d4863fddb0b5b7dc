"""Pictures and sounds through the front door: each dialect, turns, forms, counts, teams, and workers that go away."""

from __future__ import annotations

import base64
import json
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import anthropic
import httpx2
import openai
import pytest
import redis
from PIL import Image

from accounts.protocol.records import digest
from tests.support.media_files import picture_file, sound_file
from tests.support.projectors import SAMPLE_RATE, Pair, Sizes, phi4, picture, sound, write_pair, write_projector
from tests.support.stack import DEMO_MODEL, Process, Stack
from workers.protocol import keys

SEER, HEARER, SLOW = "seer", "hearer", "slow"
TEAMS = {"red": "pk-red-0123456789", "blue": "pk-blue-0123456789"}
TEMPLATE = DEMO_MODEL.with_name("chat_template.jinja")
CTX = 4096
SLOW_SIZES = Sizes(width=384, n_head=6, n_ff=1536, n_layer=8, patch=16)
SLOW_CELLS, NUM_SLOW = 256, 8
"""Cells of a picture whose encoding takes some tenths of a second, and how many of those a call has."""
NUM_GUESSES, NEWS_S = 4, 0.5
"""Pictures, and seconds after which a gateway knows that a worker has one."""
FORM = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
WEATHER = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"enum": ["sky", "sea"]}}}},
}


def png(seed: int, height: int = 48, width: int = 64) -> str:
    return base64.b64encode(picture_file(Image.fromarray(picture(seed, height, width)), "PNG")).decode()


def wav(seed: int) -> str:
    return base64.b64encode(sound_file(sound(seed), SAMPLE_RATE)).decode()


def seen(*seeds: int, text: str = "What is it?", height: int = 48, width: int = 64) -> dict[str, Any]:
    """Return a user's message with these pictures."""
    urls = [f"data:image/png;base64,{png(seed, height, width)}" for seed in seeds]
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [{"type": "text", "text": text}, *shown]}


def until(happened: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        common: dict[str, Any] = {"wait": False, "chat_template": TEMPLATE.read_text(), "ctx": CTX}
        pairs = {SEER: write_pair(running.folder, "phi4"), HEARER: write_pair(running.folder, "ultravox")}
        slow = running.folder / "mmproj-slow.gguf"
        write_projector(slow, partial(phi4, sizes=SLOW_SIZES, least=SLOW_CELLS, most=SLOW_CELLS))
        pairs[SLOW] = Pair(pairs[SEER].model, slow)
        places = [(SEER, "seer"), (HEARER, "hearer"), *((SLOW, f"slow-{number}") for number in range(3))]
        for alias, name in places:
            pair = pairs[alias]
            running.worker(pair.model, alias, worker_id=name, projector=pair.projector, slots=2, **common)
        records = [{"name": name, "team": name, "sha256": digest(key)} for name, key in TEAMS.items()]
        gateway = running.gateway(wait=False, api_keys=json.dumps(records))
        for (alias, name), process in zip(places, running.workers, strict=True):
            running.wait_for_worker(alias, name, process)
        running.wait_until_ready(gateway)
        running.wait_until_listed(gateway, *pairs)
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    url = f"{stack.gateways[0].url}/v1"
    with openai.OpenAI(base_url=url, api_key=TEAMS["red"], max_retries=0) as opened:
        yield opened


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx2.Client]:
    headers = {"Authorization": f"Bearer {TEAMS['red']}"}
    with httpx2.Client(base_url=stack.gateways[0].url, headers=headers, timeout=60) as opened:
        yield opened


def asked(client: openai.OpenAI, *messages: Any, model: str = SEER, **more: Any) -> Any:
    more = {"temperature": 0, "max_tokens": 12, **more}
    return client.chat.completions.create(model=model, messages=list(messages), **more)


def said(answer: Any) -> str:
    text: str = answer.choices[0].message.content
    return text


def logprobs(answer: Any) -> list[float]:
    """Return how likely the tokens were, by name, that might have come first."""
    return [one.logprob for one in answer.choices[0].logprobs.content[0].top_logprobs]


class TestDialects:
    def test_chat_sees_which_picture_it_is(self, client: openai.OpenAI) -> None:
        more: dict[str, Any] = {"logprobs": True, "top_logprobs": 5}
        first, other = (asked(client, seen(seed), **more) for seed in (1, 2))
        fresh = asked(client, seen(1), extra_body={"cache_salt": "fresh"}, **more)
        assert said(fresh) == said(first)
        assert fresh.usage.prompt_tokens_details.cached_tokens == 0
        assert logprobs(fresh) == pytest.approx(logprobs(first), abs=0.02)
        assert logprobs(other) != pytest.approx(logprobs(first), abs=0.02)

    def test_chat_streams_the_same(self, client: openai.OpenAI) -> None:
        whole = asked(client, seen(3))
        options = {"include_usage": True}
        chunks = list(asked(client, seen(3), stream=True, stream_options=options, extra_body={"cache_salt": "other"}))
        assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == said(whole)
        assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens

    def test_responses(self, client: openai.OpenAI) -> None:
        part = {"type": "input_image", "image_url": f"data:image/png;base64,{png(4)}", "detail": "auto"}
        given: Any = [{"role": "user", "content": [{"type": "input_text", "text": "What is it?"}, part]}]
        first = client.responses.create(model=SEER, input=given, temperature=0, max_output_tokens=12)
        assert first.output_text == said(asked(client, seen(4)))
        more: Any = {"model": SEER, "temperature": 0, "max_output_tokens": 12}
        second = client.responses.create(input="And the sky?", previous_response_id=first.id, **more)
        assert first.usage is not None
        assert second.usage is not None
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
        kinds = [event.type for event in client.responses.create(input=given, stream=True, **more)]
        assert kinds[-1] in ("response.completed", "response.incomplete")

    def test_anthropic(self, stack: Stack, client: openai.OpenAI) -> None:
        source = {"type": "base64", "media_type": "image/png", "data": png(5)}
        parts = [{"type": "text", "text": "What is it?"}, {"type": "image", "source": source}]
        messages: Any = [{"role": "user", "content": parts}]
        key = TEAMS["red"]
        with anthropic.Anthropic(base_url=stack.gateways[0].url, api_key=key, max_retries=0) as opened:
            counted = opened.messages.count_tokens(model=SEER, messages=messages)
            greedy = {"temperature": 0, "cache_salt": "anthropic"}
            with opened.messages.stream(model=SEER, max_tokens=12, messages=messages, extra_body=greedy) as stream:
                text = "".join(stream.text_stream)
                usage = stream.get_final_message().usage
        assert text == said(asked(client, seen(5)))
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)

    def test_completion_of_llama_server(self, http: httpx2.Client) -> None:
        def complete(seed: int) -> dict[str, Any]:
            prompt = {"prompt_string": "I see <__media__> and", "multimodal_data": [png(seed)]}
            body = {"model": SEER, "prompt": prompt, "n_predict": 8, "temperature": 0}
            answer: dict[str, Any] = http.post("/completion", json=body).raise_for_status().json()
            return answer

        first, again, other = (complete(seed) for seed in (6, 6, 7))
        assert first["content"] == again["content"]
        assert first["tokens_evaluated"] > 16
        assert again["timings"]["cache_n"] >= first["tokens_evaluated"] - 1
        assert other["timings"]["cache_n"] < 16

    def test_a_sound(self, client: openai.OpenAI) -> None:
        def heard(seed: int) -> Any:
            part = {"type": "input_audio", "input_audio": {"data": wav(seed), "format": "wav"}}
            message = {"role": "user", "content": [{"type": "text", "text": "What was that?"}, part]}
            return asked(client, message, model=HEARER, logprobs=True, top_logprobs=5)

        first, other = heard(1), heard(2)
        assert first.usage.prompt_tokens > 300
        assert logprobs(first) != pytest.approx(logprobs(other), abs=0.02)

    def test_what_models_take_is_told(self, http: httpx2.Client) -> None:
        cards = http.get("/v1/models").raise_for_status().json()["data"]
        inputs = {card["id"]: card["architecture"]["input_modalities"] for card in cards}
        assert inputs == {SEER: ["text", "image"], HEARER: ["text", "audio"], SLOW: ["text", "image"]}
        props = http.get("/props", params={"model": SEER}).raise_for_status().json()
        assert props["modalities"] == {"vision": True, "audio": False, "video": False}


class TestTurns:
    def test_a_second_turn_finds_the_picture(self, client: openai.OpenAI) -> None:
        first = asked(client, seen(11))
        turn = [seen(11), {"role": "assistant", "content": said(first)}, {"role": "user", "content": "And now?"}]
        second = asked(client, *turn)
        assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
        fresh = asked(client, *turn, extra_body={"cache_salt": "fresh"})
        assert said(fresh) == said(second)

    def test_several_pictures_in_several_turns(self, client: openai.OpenAI, http: httpx2.Client) -> None:
        turns = [seen(12, 13), {"role": "assistant", "content": "Two."}, seen(14, text="And this?")]
        body = {"model": SEER, "messages": turns}
        counted = http.post("/v1/chat/completions/input_tokens", json=body).raise_for_status().json()
        answer = asked(client, *turns)
        assert counted["input_tokens"] == answer.usage.prompt_tokens
        swapped = asked(client, seen(13, 12), *turns[1:])
        assert swapped.usage.prompt_tokens == answer.usage.prompt_tokens
        assert swapped.usage.prompt_tokens_details.cached_tokens < 64

    def test_two_answers_of_one_prompt(self, client: openai.OpenAI) -> None:
        answer = asked(client, seen(15), n=2)
        texts = {choice.message.content for choice in answer.choices}
        assert (len(answer.choices), len(texts)) == (2, 1)

    def test_another_team_finds_nothing(self, stack: Stack, client: openai.OpenAI) -> None:
        first = asked(client, seen(16))
        assert asked(client, seen(16)).usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1
        url = f"{stack.gateways[0].url}/v1"
        with openai.OpenAI(base_url=url, api_key=TEAMS["blue"], max_retries=0) as theirs:
            answer = asked(theirs, seen(16))
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        assert said(answer) == said(first)


class TestForms:
    def test_a_schema(self, client: openai.OpenAI) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "seen", "schema": FORM, "strict": True}}
        answer = asked(client, seen(21), response_format=form, max_tokens=40)
        assert json.loads(said(answer))["colour"] in ("red", "blue")

    def test_a_tool(self, client: openai.OpenAI) -> None:
        choice = {"type": "function", "function": {"name": "look"}}
        answer = asked(client, seen(22), tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, max_tokens=80)
        [call] = answer.choices[0].message.tool_calls
        assert call.function.name == "look"
        assert json.loads(call.function.arguments).get("at", "sky") in ("sky", "sea")


def slow_body(seed: int, num: int = NUM_SLOW) -> dict[str, Any]:
    """Return a request with pictures that take a second or more to encode."""
    shown = seen(*range(seed, seed + num), height=448, width=448)
    return {"model": SLOW, "messages": [shown], "max_tokens": 4, "temperature": 0}


def holder(stack: Stack) -> str:
    """Return the worker that has a call now; empty: none has."""
    with redis.Redis(unix_socket_path=str(stack.redis.socket)) as known:
        names = [f"slow-{number}" for number in range(3)]
        return next((name for name in names if known.zcard(keys.worker_leases(SLOW, name))), "")


def worker_of(stack: Stack, name: str) -> Process:
    return next(one for one in stack.workers if one.name == name)


def encoding(stack: Stack, answer: Future[Any]) -> Process:
    """Return the worker that encodes the pictures of a call."""
    until(lambda: bool(holder(stack)))
    time.sleep(0.3)
    assert not answer.done()
    return worker_of(stack, holder(stack))


@pytest.mark.serial
def test_another_team_can_not_tell_whether_a_picture_was_shown(stack: Stack, http: httpx2.Client) -> None:
    """What an attacker does: ask with a picture that the other team may have shown, and with one that nobody has."""
    took: dict[str, list[float]] = {"shown": [], "new": []}
    own: list[float] = []

    def ask(seed: int, team: str) -> float:
        headers = {"Authorization": f"Bearer {TEAMS[team]}"}
        began = time.monotonic()
        answer = http.post("/v1/chat/completions", json=slow_body(seed, 2), headers=headers).raise_for_status().json()
        if team == "blue":
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] < 16, "of its own texts"
        return time.monotonic() - began

    for number in range(NUM_GUESSES):
        seed = 1000 + 10 * number
        ask(seed, "red")
        time.sleep(NEWS_S)
        own.append(ask(seed, "red"))
        # In turns, so that whatever else this machine does is no sign.
        guesses = [("shown", seed), ("new", seed + 5)]
        for what, guess in guesses if number % 2 else reversed(guesses):
            took[what].append(ask(guess, "blue"))
    shown, new = statistics.median(took["shown"]), statistics.median(took["new"])
    assert statistics.median(own) < new / 2, "whoever has shown it is answered sooner: the test would see it"
    assert shown > 0.75 * new, (took, own)


@pytest.mark.serial
class TestWorkersThatGoAway:
    """In this order: each takes a worker away, and the last one is left with one."""

    def test_a_call_that_is_cancelled_is_not_encoded_to_its_end(self, stack: Stack, http: httpx2.Client) -> None:
        began = time.monotonic()
        http.post("/v1/chat/completions", json=slow_body(100)).raise_for_status()
        whole_s = time.monotonic() - began
        with pytest.raises(httpx2.TimeoutException):
            http.post("/v1/chat/completions", json=slow_body(200), timeout=0.3)
        until(lambda: not holder(stack), whole_s / 2 + 1)
        began = time.monotonic()
        http.post("/v1/chat/completions", json=slow_body(300, 1)).raise_for_status()
        assert time.monotonic() - began < whole_s / 2 + 1

    def test_a_worker_is_drained_while_it_encodes(self, stack: Stack, http: httpx2.Client) -> None:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(http.post, "/v1/chat/completions", json=slow_body(400))
            worker = encoding(stack, answer)
            stopped = threading.Thread(target=worker.stop)
            stopped.start()
            found = answer.result(60)
            stopped.join()
        assert found.status_code == 200, found.text
        assert worker.popen.poll() == 0

    def test_a_worker_is_killed_while_it_encodes(self, stack: Stack, http: httpx2.Client) -> None:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(http.post, "/v1/chat/completions", json=slow_body(500))
            encoding(stack, answer).signal(signal.SIGKILL)
            found = answer.result(60)
        assert found.status_code == 200, found.text
        assert found.json()["usage"]["prompt_tokens"] > NUM_SLOW * SLOW_CELLS
