from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.media_reader import MediaReader, media_reader
from tests.support.projectors import PROJECTORS, Pair, write_pair


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """A small text model and its projector of each kind, by name."""
    folder = tmp_path_factory.mktemp("projectors")
    return {name: write_pair(folder, name) for name in PROJECTORS}


@pytest.fixture(scope="module", params=list(PROJECTORS))
def reader(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Iterator[MediaReader]:
    """Each of them in turn."""
    with media_reader(request.param, pairs[request.param]) as one:
        yield one


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "reader" in request.fixturenames:
        one: MediaReader = request.getfixturevalue("reader")
        one.lone.memory.clear()
