"""A stack of its own for each fault: what a test kills, nobody else needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stack import Stack


@pytest.fixture
def stack() -> Iterator[Stack]:
    with Stack() as running:
        yield running
