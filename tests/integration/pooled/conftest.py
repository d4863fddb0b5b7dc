from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.pooled.bench import settings
from tests.integration.service.conftest import folder, redis_server
from tests.support.pooled_models import write_bert, write_reranker
from workers.llama.model import Model

__all__ = ["DEMO", "folder", "redis_server"]

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "deploy" / "demo" / "paddock-demo.gguf"


@pytest.fixture(scope="session")
def bert_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert") / "bert.gguf"
    write_bert(path)
    return path


@pytest.fixture(scope="session")
def reranker_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reranker") / "reranker.gguf"
    write_reranker(path)
    return path


@pytest.fixture(scope="session")
def demo() -> Iterator[Model]:
    with Model.load(DEMO, settings()) as model:
        yield model


@pytest.fixture(scope="session")
def bert(bert_file: Path) -> Iterator[Model]:
    with Model.load(bert_file, settings()) as model:
        yield model


@pytest.fixture(scope="session")
def reranker(reranker_file: Path) -> Iterator[Model]:
    with Model.load(reranker_file, settings()) as model:
        yield model
