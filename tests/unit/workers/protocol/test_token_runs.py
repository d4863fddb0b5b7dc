"""Arrays and lists of tokens that are made run by run."""

from __future__ import annotations

from array import array

import pytest

from workers.protocol.pieces import INT32, RUN_TOKENS, extend, in_array, in_list, joined
from workers.protocol.queries import ints_of, packed

MANY = list(range(2 * RUN_TOKENS + 3))


@pytest.mark.parametrize("tokens", [[], [7], MANY, array("q", MANY), array(INT32, MANY), tuple(MANY)], ids=type)
def test_tokens_stay_what_they_are(tokens: list[int]) -> None:
    assert in_array(tokens) == array(INT32, list(tokens))
    assert in_list(tokens) == list(tokens)
    assert list(ints_of(packed(tokens))) == list(tokens)
    assert joined([1], tokens, [2]).tolist() == [1, *tokens, 2]


def test_what_is_right_already_is_not_copied() -> None:
    whole = array(INT32, MANY)
    assert in_array(whole) is whole
    assert in_list(MANY) is MANY
    assert joined(whole) is not whole


def test_no_number_of_more_bits_gets_in() -> None:
    tokens = array(INT32)
    with pytest.raises(OverflowError):
        extend(tokens, [1, 2**31])
    with pytest.raises(OverflowError):
        in_array(array("q", [2**40]))
