from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import SHARED
from tests.integration.pooled.bench import settings
from tests.integration.service.conftest import folder, redis_server
from workers.llama.model import Model

__all__ = ["BERT", "DEMO", "RERANKER", "folder", "redis_server"]

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "deploy" / "demo" / "paddock-demo.gguf"
BERT = SHARED / "models" / "bert-bge-small-random.gguf"
RERANKER = SHARED / "models" / "jina-reranker-random.gguf"


def load(path: Path) -> Iterator[Model]:
    if not path.exists():
        pytest.skip(f"{path} is not there")
    with Model.load(path, settings()) as model:
        yield model


@pytest.fixture(scope="session")
def demo() -> Iterator[Model]:
    yield from load(DEMO)


@pytest.fixture(scope="session")
def bert() -> Iterator[Model]:
    yield from load(BERT)


@pytest.fixture(scope="session")
def reranker() -> Iterator[Model]:
    yield from load(RERANKER)
