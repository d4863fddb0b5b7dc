"""A worker whose helper processes don't start: what it can't do another one does, and alone it says 503."""

from __future__ import annotations

import aiohttp

from tests.fault.rest import at_rest
from tests.support.stack import Stack


async def test_what_it_can_t_do_another_worker_does() -> None:
    with Stack() as stack:
        stack.fake_worker("toy", worker_id="well")
        stack.fake_worker("toy", "--no-helpers", worker_id="ill")
        stack.fake_worker("lone", "--no-helpers", worker_id="lone")
        gateway = stack.gateway()
        headers = {"Authorization": f"Bearer {stack.key}"}
        async with aiohttp.ClientSession(gateway.url, headers=headers) as session:

            async def ask(path: str, model: str) -> tuple[int, str]:
                text = "content" if path == "/tokenize" else "prompt"
                async with session.post(path, json={"model": model, text: "hello"}) as answer:
                    return answer.status, await answer.text()

            for path in ("/tokenize", "/v1/completions"):
                assert [(await ask(path, "toy"))[0] for _ in range(4)] == [200] * 4
                status, told = await ask(path, "lone")
                assert status == 503, told
                assert "did not start" in told
        await at_rest(stack, "toy", "lone")
