"""Runs the steps of a program's script, each by itself: what one is refused, the next one still sends."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

URL, KEY = os.environ["PADDOCK_URL"], os.environ["PADDOCK_KEY"]
"""Of the recorder, without `/v1`."""
CHAT, EMBEDDER = "paddock-demo", "embedder"
WHO, WEATHER = "Who are you?", "What is the weather in Paris?"
PERSON = "Anna is 31 years old. Answer as JSON with the keys name and age."
RESULT = "sunny, 21 degrees"


def run(*steps: Callable[[], Any]) -> None:
    failed = 0
    # One loop for all: a program's connections outlive a step.
    with asyncio.Runner() as runner:
        for step in steps:
            try:
                result = step()
                if inspect.isawaitable(result):
                    runner.run(_awaited(result))
            except Exception as error:  # noqa: BLE001 - whatever a program raises is told, and the next step is taken
                failed += 1
                print(f"{step.__name__}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
    sys.exit(1 if failed else 0)


async def _awaited(result: Any) -> Any:
    return await result
