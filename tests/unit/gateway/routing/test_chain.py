"""Which model of a chain a call goes to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.routing.retries import Outlook, choose_model

BIG, SMALL, TINY = "big", "small", "tiny"


def outlook(model: str, wait_s: float | None) -> Outlook:
    """No wait: it is not ready."""
    return Outlook(model, wait_s is not None, wait_s or 0.0)


@pytest.mark.parametrize(
    ("waits", "patience_s", "model"),
    [
        ((0, 0, 0), 10, BIG),
        ((5, 0, 0), 10, BIG),
        ((None, 0, 0), 10, SMALL),
        ((None, None, 9), 10, TINY),
        ((None, None, None), 10, None),
        ((11, 0, 0), 10, SMALL),
        ((11, None, 3), 10, TINY),
        ((30, 20, None), 10, SMALL),
        ((30, 40, 50), 10, BIG),
        ((0, 0, 0), -1, BIG),
        ((2, 0, 0), -1, SMALL),
    ],
)
def test_the_first_that_is_ready_in_time_or_else_the_soonest(
    waits: tuple[float | None, ...], patience_s: float, model: str | None
) -> None:
    found = choose_model(map(outlook, (BIG, SMALL, TINY), waits), patience_s)
    assert (found and found.model) == model


def test_those_behind_the_first_that_will_do_are_not_looked_at() -> None:
    def outlooks() -> Iterator[Outlook]:
        yield outlook(BIG, 1)
        raise AssertionError("looked at in vain")

    assert choose_model(outlooks(), 2) == outlook(BIG, 1)
