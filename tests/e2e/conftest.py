"""Running Paddocks for the end-to-end tests: one per module of two true workers (demo model), and one for all kinds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.console import browser, context, page
from tests.support.kinds import DEMO_ALIAS, EMBEDDER, INFILLER, RERANKER, stack_of_all_kinds
from tests.support.stack import DEMO_MODEL, Stack

__all__ = ["DEMO_ALIAS", "EMBEDDER", "INFILLER", "RERANKER", "browser", "context", "page"]


@pytest.fixture(scope="module")
def demo_stack() -> Iterator[Stack]:
    with Stack() as stack:
        for _ in range(2):
            stack.worker(DEMO_MODEL, DEMO_ALIAS, slots=8)
        stack.gateway()
        yield stack


@pytest.fixture(scope="package")
def kinds_stack() -> Iterator[Stack]:
    """One worker of each kind of work; those whose models lie beside the checkout only where they do."""
    with stack_of_all_kinds() as stack:
        yield stack
