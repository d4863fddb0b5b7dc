"""Running Paddocks for the end-to-end tests: one per module of two true workers (demo model), and one for all kinds."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.stack import DEMO_MODEL, SHARED_MODELS, Stack

DEMO_ALIAS = "paddock-demo"
EMBEDDER, RERANKER, INFILLER = "embedder", "reranker", "infiller"


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
    with Stack() as stack:
        stack.worker(DEMO_MODEL, DEMO_ALIAS, slots=8, wait=False)
        vectors = json.dumps({"n_threads": 1, "embeddings": True})
        stack.worker(DEMO_MODEL, EMBEDDER, slots=2, ctx=512, llama=vectors, wait=False)
        if SHARED_MODELS.exists():
            stack.worker(SHARED_MODELS / "jina-reranker-random.gguf", RERANKER, slots=2, wait=False)
            stack.worker(SHARED_MODELS / "stories260K-infill.gguf", INFILLER, slots=2, wait=False)
        names = (DEMO_ALIAS, EMBEDDER, RERANKER, INFILLER)
        for number, (name, process) in enumerate(zip(names, stack.workers, strict=False)):
            stack.wait_for_worker(name, f"worker-{number}", process)
        stack.gateway()
        yield stack
