"""A question that ends the worker which it is put to."""

from __future__ import annotations

import aiohttp

from tests.fault.rest import at_rest
from tests.support.stack import Stack
from tests.support.waiting import until


async def test_it_ends_one_worker_and_is_put_to_no_other() -> None:
    with Stack() as stack:
        for name in ("a", "b", "c"):
            stack.fake_worker("toy", "--die-of", "deadly", worker_id=name)
        gateway = stack.gateway()
        headers = {"Authorization": f"Bearer {stack.key}"}
        async with aiohttp.ClientSession(gateway.url, headers=headers) as session:
            questions = {
                "/tokenize": {"model": "toy", "content": "deadly"},
                "/v1/messages/count_tokens": {"model": "toy", "messages": [{"role": "user", "content": "deadly"}]},
            }
            for dead, (path, body) in enumerate(questions.items(), start=1):
                async with session.post(path, json=body) as answer:
                    told = await answer.json()
                assert answer.status in (502, 529), told  # the second is Anthropic's for it
                assert "did not answer" in told["error"]["message"]
                await until(lambda: _dead(stack) >= dead, 5.0, "the worker that was asked has ended")  # noqa: B023
                assert _dead(stack) == dead, told
            async with session.post("/tokenize", json={"model": "toy", "content": "mild"}) as answer:
                assert answer.status == 200, "who can't be reached has not heard of the question: the next one is asked"
        await at_rest(stack, "toy")


def _dead(stack: Stack) -> int:
    return sum(worker.popen.poll() is not None for worker in stack.workers)
