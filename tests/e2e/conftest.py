"""One running Paddock for the end-to-end tests of a module: Redis, two true workers (demo model), one gateway."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stack import DEMO_MODEL, Stack

DEMO_ALIAS = "paddock-demo"


@pytest.fixture(scope="module")
def demo_stack() -> Iterator[Stack]:
    with Stack() as stack:
        for _ in range(2):
            stack.worker(DEMO_MODEL, DEMO_ALIAS, slots=8)
        stack.gateway()
        yield stack
