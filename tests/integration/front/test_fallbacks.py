"""Names of several models: who answers when the first one has no place, and who never does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.routing.retries import FIRST_PAUSE_S, FLOOR
from tests.integration.front.conftest import CHAINED_KEY, QUEUE_TIMEOUT_S
from tests.support.caller import Caller, calling, seen, taken
from tests.support.stack import Stack

QUICK_CTX = 64
LONG = "word " * 100
"""Longer than that, and shorter than the context of the other models."""


async def counted(caller: Caller, name: str, **labels: str) -> float:
    """The sum of what the gateway has counted under these labels."""
    async with caller.session.get(f"{caller.url}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


async def asked(caller: Caller, path: str, **body: Any) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    """Status, answer and headers."""
    async with caller.session.post(f"{caller.url}{path}", json={"model": caller.model, **body}) as response:
        return response.status, await response.json(), response.headers


async def chat(caller: Caller, prompt: str = "Hi", **more: Any) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    return await asked(caller, "/v1/chat/completions", messages=[{"role": "user", "content": prompt}], **more)


async def test_a_call_in_flight_counts_for_the_model_that_serves_it(other_caller: Caller) -> None:
    """Or the workers that answer were scaled away, and those of a model that does nothing kept."""

    async def in_flight() -> tuple[float, float]:
        first = await counted(other_caller, "paddock_requests_in_flight", model="quick")
        return first, await counted(other_caller, "paddock_requests_in_flight", model="slow")

    other_caller.model = "roomy"
    before = await in_flight()
    async with other_caller.stream(LONG, max_tokens=60) as answer:
        await answer.until_text()
        assert await in_flight() == (before[0], before[1] + 1)
        await answer.finish()
    assert answer.headers["x-paddock-model"] == "slow"
    assert await in_flight() == before


async def test_a_model_without_workers_is_stood_in_for_at_once(other_caller: Caller) -> None:
    other_caller.model = "steady"
    before = await counted(
        other_caller, "paddock_fallbacks_total", model="absent", fallback="quick", reason="no_worker"
    )
    began = time.monotonic()
    status, body, headers = await chat(other_caller)
    assert time.monotonic() - began < QUEUE_TIMEOUT_S
    assert (status, body["model"], headers["x-paddock-model"]) == (200, "steady", "quick")
    async with other_caller.stream() as answer:
        await answer.finish()
    assert answer.text.startswith("t0 t1 ")
    assert {chunk["model"] for chunk in answer.chunks} == {"steady"}
    assert answer.headers["x-paddock-model"] == "quick"
    after = await counted(other_caller, "paddock_fallbacks_total", model="absent", fallback="quick", reason="no_worker")
    assert after == before + 2


async def test_other_dialects_are_stood_in_for_as_well(other_caller: Caller) -> None:
    other_caller.model = "steady"
    message = {"role": "user", "content": "Hi"}
    status, body, headers = await asked(other_caller, "/v1/messages", messages=[message], max_tokens=2)
    assert (status, body["model"], headers["x-paddock-model"]) == (200, "steady", "quick")
    assert body["content"] == [{"type": "text", "text": "t0 t1 "}]
    status, body, _ = await asked(other_caller, "/v1/responses", input="Hi", max_output_tokens=16)
    assert (status, body["model"]) == (200, "steady")
    body = {"model": "steady", "prompt": "Hi", "n_predict": 2, "stream": True}
    async with other_caller.session.post(f"{other_caller.url}/completion", json=body) as response:
        assert response.headers["x-paddock-model"] == "quick"
        events = [json.loads(line[6:]) for line in (await response.text()).splitlines() if line.startswith("data: ")]
    assert "".join(event["content"] for event in events) == "t0 t1 "
    assert (events[-1]["model"], events[-1]["stop"]) == ("steady", True)
    other_caller.model = "turning"
    status, body, headers = await asked(other_caller, "/v1/embeddings", input="Hi")
    assert (status, body["model"], headers["x-paddock-model"]) == (200, "turning", "vectors")
    status, body, _ = await asked(other_caller, "/tokenize", content="Hi")
    assert status == 200


async def test_a_full_line_is_gone_round(other_caller: Caller) -> None:
    other_caller.model = "slow"
    async with taken(other_caller, 2):
        waiting = [asyncio.create_task(other_caller.whole(max_tokens=1)) for _ in range(2)]
        await asyncio.sleep(0.2)
        other_caller.model = "patient"
        before = await counted(other_caller, "paddock_fallbacks_total", model="slow", reason="queue_full")
        other = await counted(other_caller, "paddock_fallbacks_total", model="slow")
        began = time.monotonic()
        status, _, headers = await chat(other_caller)
        assert (status, headers["x-paddock-model"]) == (200, "quick")
        assert time.monotonic() - began < QUEUE_TIMEOUT_S
        assert await counted(other_caller, "paddock_fallbacks_total", model="slow") == other + 1
        # What is predicted of a line that others have filled may tell as much before it is asked.
        assert await counted(other_caller, "paddock_fallbacks_total", model="slow", reason="queue_full") - before in (
            0,
            1,
        )
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)


@pytest.mark.parametrize("stream", [True, False])
async def test_who_has_waited_in_vain_goes_on(other_caller: Caller, stream: bool) -> None:
    other_caller.model = "slow"
    async with taken(other_caller, 2):
        other_caller.model = "patient"
        waits = await counted(other_caller, "paddock_queue_wait_seconds_sum", model="quick")
        overheads = await counted(other_caller, "paddock_overhead_seconds_sum", model="quick")
        began = time.monotonic()
        if stream:
            async with other_caller.stream(max_tokens=2) as answer:
                await answer.finish()
            assert (answer.text, answer.error) == ("t0 t1 ", None)
            assert answer.comments
        else:
            status, _, headers = await chat(other_caller)
            assert (status, headers["x-paddock-model"]) == (200, "quick")
        assert QUEUE_TIMEOUT_S <= time.monotonic() - began < 4 * QUEUE_TIMEOUT_S
        waited_s, until = 0.0, time.monotonic() + 5.0
        while not waited_s and time.monotonic() < until:  # it is counted just after the last byte
            await asyncio.sleep(0.05)
            waited_s = await counted(other_caller, "paddock_queue_wait_seconds_sum", model="quick") - waits
        assert waited_s > 0.9 * QUEUE_TIMEOUT_S, "waiting in vain is waiting"
        overhead_s = await counted(other_caller, "paddock_overhead_seconds_sum", model="quick") - overheads
        assert overhead_s < QUEUE_TIMEOUT_S / 2, "and no work of the gateway's"


async def test_a_caller_in_a_hurry_is_not_kept_in_line(other_caller: Caller) -> None:
    """The line is longer than its patience, as predicted: it does not even wait that long."""
    other_caller.model = "slow"
    async with taken(other_caller, 2):
        waiting = asyncio.create_task(other_caller.whole(max_tokens=1))
        await asyncio.sleep(0.2)
        other_caller.model = "patient"
        other_caller.session.headers["x-slo-ttft-ms"] = "1000"
        began = time.monotonic()
        status, _, headers = await chat(other_caller)
        assert (status, headers["x-paddock-model"]) == (200, "quick")
        assert time.monotonic() - began < QUEUE_TIMEOUT_S
        waiting.cancel()
        await asyncio.wait({waiting})


async def test_who_waits_for_workers_that_go_goes_on(other_caller: Caller, stack: Stack) -> None:
    other_caller.model = "ailing"
    leaving = stack.fake_worker("ailing", "--tokens", "1000", worker_id="ailing-z", slots=1)
    await seen(other_caller, 1)
    async with taken(other_caller, 1):
        other_caller.model = "brave"
        async with other_caller.stream(max_tokens=2) as answer:
            await asyncio.sleep(0.1)
            began = time.monotonic()
            leaving.kill()
            await answer.finish()
        assert (answer.text, answer.error) == ("t0 t1 ", None)
        assert time.monotonic() - began < QUEUE_TIMEOUT_S


async def test_workers_that_never_answer_are_left_alone(other_caller: Caller, stack: Stack) -> None:
    model = other_caller.model = "mute"
    mute = stack.fake_worker(model, "--hang", worker_id=f"{model}-a")
    await seen(other_caller, 1)
    answers = await asyncio.gather(*(chat(other_caller) for _ in range(3)))
    assert {(status, body["error"]["code"]) for status, body, _ in answers} == {(503, "request_timeout")}
    assert await counted(other_caller, "paddock_circuits_opened_total", model=model) == 1
    mute.kill()


async def test_a_model_that_has_time_is_not_stood_in_for(other_caller: Caller) -> None:
    other_caller.model = "patient"
    status, body, headers = await chat(other_caller, max_tokens=1)
    assert (status, body["model"], headers["x-paddock-model"]) == (200, "patient", "slow")


@pytest.mark.parametrize("stream", [True, False])
async def test_nobody_stands_in_after_the_first_token(other_caller: Caller, stream: bool) -> None:
    other_caller.model = "fragile"
    before = await counted(other_caller, "paddock_fallbacks_total", model="failing")
    if stream:
        async with other_caller.stream() as answer:
            await answer.finish()
        assert answer.text == "t0 t1 t2 "
        assert answer.error is not None
    else:
        assert (await chat(other_caller))[0] == 500
    assert await counted(other_caller, "paddock_fallbacks_total", model="failing") == before


async def test_a_wrong_request_is_refused_once(other_caller: Caller) -> None:
    other_caller.model = "patient"
    before = await counted(other_caller, "paddock_fallbacks_total")
    status, body, _ = await chat(other_caller, "word " * 4000)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert "4096" in body["error"]["message"]
    status, body, _ = await chat(other_caller, temperature=500)
    assert status == 400
    assert await counted(other_caller, "paddock_fallbacks_total") == before


async def test_a_stand_in_with_a_short_context_is_passed_over(other_caller: Caller) -> None:
    other_caller.model = "roomy"
    status, _, headers = await chat(other_caller, LONG, max_tokens=1)
    assert (status, headers["x-paddock-model"]) == (200, "slow")
    status, _, headers = await chat(other_caller, max_tokens=1)
    assert (status, headers["x-paddock-model"]) == (200, "quick")


async def test_what_no_stand_in_can_take_is_not_the_callers_fault(other_caller: Caller) -> None:
    other_caller.model = "narrow"
    status, body, headers = await chat(other_caller, LONG)
    assert (status, body["error"]["type"]) == (503, "unavailable_error")
    assert "`absent` has no place now" in body["error"]["message"]
    assert f"{QUICK_CTX}" in body["error"]["message"]
    assert int(headers["retry-after"]) >= 1


async def test_models_that_do_other_work_are_left_out(other_caller: Caller) -> None:
    other_caller.model = "working"
    status, body, headers = await chat(other_caller)
    assert (status, headers["x-paddock-model"]) == (200, "quick")
    other_caller.model = "turning"
    status, body, _ = await chat(other_caller)
    assert (status, body["error"]["code"]) == (503, "queue_timeout"), "a model without workers might do it"


async def test_a_conversation_stays_with_one_model(other_caller: Caller) -> None:
    other_caller.model = "shared"
    first_turns = [[{"role": "user", "content": f"Question {number}"}] for number in range(24)]
    seen_models: dict[int, set[str]] = {}
    for number, turn in enumerate(first_turns):
        later = [*turn, {"role": "assistant", "content": "t0"}, {"role": "user", "content": "Why?"}]
        for messages in (turn, later):
            _, _, headers = await asked(other_caller, "/v1/chat/completions", messages=messages, max_tokens=1)
            seen_models.setdefault(number, set()).add(headers["x-paddock-model"])
    assert all(len(models) == 1 for models in seen_models.values())
    assert set.union(*seen_models.values()) == {"quick", "failing"}


async def test_a_session_stays_with_one_model(other_caller: Caller) -> None:
    other_caller.model = "shared"
    models: dict[str, set[str]] = {}
    for number in range(32):
        session = f"session-{number % 8}"
        other_caller.session.headers["x-session-id"] = session
        _, _, headers = await chat(other_caller, f"Question {number}", max_tokens=1)
        models.setdefault(session, set()).add(headers["x-paddock-model"])
    assert all(len(found) == 1 for found in models.values())


async def test_the_card_of_a_name_tells_of_its_chain_and_who_answers_now(other_caller: Caller) -> None:
    async with other_caller.session.get(f"{other_caller.url}/v1/models") as response:
        cards = {card["id"]: card for card in (await response.json())["data"]}
    roomy = cards["roomy"]
    assert (roomy["root"], roomy["models"]) == ("quick", ["absent", "quick", "slow"])
    assert roomy["status"] == {"value": "loaded"}
    assert (cards["later"]["root"], cards["later"]["status"]) == ("absent", {"value": "unloaded"})
    assert "models" not in cards["chat"]


async def test_a_key_for_a_name_may_use_its_whole_chain(stack: Stack) -> None:
    async with calling(stack.gateways[1].url, CHAINED_KEY, "steady") as chained:
        assert (await chat(chained))[0] == 200
        for name in ("quick", "absent"):
            chained.model = name
            assert (await chat(chained))[0] == 403


async def test_a_worker_that_fails_is_left_alone_and_comes_back(caller: Caller, stack: Stack) -> None:
    model = caller.model = "sick"
    well = stack.fake_worker(model, "--step-ms", "2", worker_id=f"{model}-b", wait=False)
    sick = stack.fake_worker(
        model, "--step-ms", "2", "--refuse", "internal", "--refuse-calls", "3", worker_id=f"{model}-a"
    )
    await seen(caller, 2)
    asked_at = time.monotonic()
    while await counted(caller, "paddock_circuits_opened_total", model=model) == 0:
        asked_at = time.monotonic()
        status, _, headers = await chat(caller, max_tokens=1)
        assert (status, headers["x-paddock-worker"]) == (200, f"{model}-b"), "nobody is told of it"
    assert await counted(caller, "paddock_attempts_total", model=model, outcome="internal") == 3
    assert await counted(caller, "paddock_circuits", model=model) == 1
    while True:
        _, _, headers = await chat(caller, max_tokens=1)
        if time.monotonic() > asked_at + FIRST_PAUSE_S * 0.75:
            break
        assert (headers["x-paddock-worker"], headers["x-paddock-attempts"]) == (f"{model}-b", "1")
    async with asyncio.timeout(10):
        while headers["x-paddock-worker"] == f"{model}-b":
            await asyncio.sleep(0.05)
            _, _, headers = await chat(caller, max_tokens=1)
    assert await counted(caller, "paddock_circuits", model=model) == 0
    sick.kill()
    well.kill()


async def test_a_storm_of_retries_is_bounded(caller: Caller, stack: Stack) -> None:
    model = caller.model = "stormy"
    refusing = ("--refuse", "internal")
    workers = [stack.fake_worker(model, *refusing, worker_id=f"{model}-{n}", slots=64, wait=n == 1) for n in range(2)]
    await seen(caller, 2)
    answers = await asyncio.gather(*(chat(caller) for _ in range(40)))
    assert {status for status, _, _ in answers} == {500}
    assert "--refuse internal" in answers[0][1]["error"]["message"]
    submissions = await counted(caller, "paddock_attempts_total", model=model)
    assert 40 + FLOOR <= submissions <= 40 + FLOOR + 0.2 * 40
    assert await counted(caller, "paddock_retries_total", model=model, outcome="granted") == submissions - 40
    assert await counted(caller, "paddock_retries_total", model=model, outcome="denied") > 0
    for worker in workers:
        worker.kill()


async def test_a_model_whose_workers_all_fail_is_stood_in_for(other_caller: Caller, stack: Stack) -> None:
    """One worker, which fails whatever it is asked: its calls go on, and soon none of them asks it first."""
    other_caller.model = "sickly"
    sickly = stack.fake_worker("sickly", "--refuse", "internal", worker_id="sickly-a")
    await seen(other_caller, 1)
    other_caller.model = "feigned"
    attempts = []
    for _ in range(6):
        status, _, headers = await chat(other_caller, max_tokens=1)
        assert (status, headers["x-paddock-model"]) == (200, "quick")
        attempts.append(int(headers["x-paddock-attempts"]))
    assert attempts == [2, 2, 2, 1, 1, 1]
    sickly.kill()


async def test_a_worker_that_dies_while_it_reads_a_prompt(caller: Caller, stack: Stack) -> None:
    """Nothing was told yet, so another one answers."""
    caller.model = "reading"
    doomed = stack.fake_worker("reading", "--prefill-ms", "60000", worker_id="reading-a")
    await seen(caller, 1)
    async with caller.stream(max_tokens=2) as answer:
        await asyncio.sleep(0.3)
        heir = stack.fake_worker("reading", "--step-ms", "2", worker_id="reading-b")
        await seen(caller, 2)
        doomed.kill()
        await answer.finish()
    assert (answer.text, answer.error, answer.done) == ("t0 t1 ", None, True)
    heir.kill()
