"""How many requests for signing in are taken."""

from __future__ import annotations

import pytest

from accounts.errors import TooManySignIns
from accounts.sso.pace import Pace


def test_an_address_has_its_share_and_others_theirs() -> None:
    pace = Pace(per_address=2, in_all=100)
    for _ in range(2):
        pace.take("192.0.2.1")
    with pytest.raises(TooManySignIns) as caught:
        pace.take("192.0.2.1")
    assert 0 < (caught.value.retry_after_s or 0) <= 60
    pace.take("192.0.2.2")


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("", "no address", True),
    ],
)
def test_addresses_of_one_caller_count_together(one: str, other: str, are_same: bool) -> None:
    pace = Pace(per_address=1, in_all=100)
    pace.take(one)
    if are_same:
        with pytest.raises(TooManySignIns):
            pace.take(other)
    else:
        pace.take(other)


def test_all_together_are_bounded() -> None:
    pace = Pace(per_address=10, in_all=3)
    for number in range(3):
        pace.take(f"192.0.2.{number}")
    with pytest.raises(TooManySignIns):
        pace.take("192.0.2.9")
