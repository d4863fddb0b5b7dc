from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.engine.listener import ONE_THREAD, Bench, running
from tests.support.small_models import SMALL_MODELS, write_small_model
from workers.llama.model import Model

ROOT = Path(__file__).parents[3]
STORIES = ROOT.parent / "shared" / "models" / "stories260K.gguf"
DEMO = ROOT / "deploy" / "demo" / "paddock-demo.gguf"


def load(path: Path) -> Iterator[Model]:
    if not path.exists():
        pytest.skip(f"{path} is not there")
    with Model.load(path, ONE_THREAD) as model:
        yield model


@pytest.fixture(scope="session")
def stories() -> Iterator[Model]:
    yield from load(STORIES)


@pytest.fixture(scope="session")
def demo() -> Iterator[Model]:
    yield from load(DEMO)


@pytest.fixture(scope="session", params=[STORIES, DEMO], ids=["stories", "demo"])
def any_model(request: pytest.FixtureRequest) -> Iterator[Model]:
    path: Path = request.param
    yield from load(path)


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny model for each kind of memory, by name."""
    folder = tmp_path_factory.mktemp("small-models")
    return {name: write_small_model(folder, name) for name in SMALL_MODELS}


@pytest.fixture
def bench(stories: Model) -> Iterator[Bench]:
    with running(stories) as one:
        yield one
