from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.engine.listener import ONE_THREAD, Bench, running
from tests.support.small_models import SMALL_MODELS, write_small_model, write_stories_model
from workers.llama.model import Model

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "deploy" / "demo" / "paddock-demo.gguf"


@pytest.fixture(scope="session")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("stories") / "stories.gguf"
    write_stories_model(path)
    with Model.load(path, ONE_THREAD) as model:
        yield model


@pytest.fixture(scope="session")
def demo() -> Iterator[Model]:
    with Model.load(DEMO, ONE_THREAD) as model:
        yield model


@pytest.fixture(scope="session", params=["stories", "demo"])
def any_model(request: pytest.FixtureRequest) -> Model:
    model: Model = request.getfixturevalue(request.param)
    return model


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny model for each kind of memory, by name."""
    folder = tmp_path_factory.mktemp("small-models")
    return {name: write_small_model(folder, name) for name in SMALL_MODELS}


@pytest.fixture
def bench(stories: Model) -> Iterator[Bench]:
    with running(stories) as one:
        yield one
