"""Queries about usage: what they take, and how far each role reaches."""

from __future__ import annotations

from itertools import pairwise

import pytest

from accounts.api.api import AdminRequest, read_query
from accounts.errors import Forbidden, Invalid
from accounts.protocol.caller import Caller
from accounts.usage.query import Selection, calls_of, read_cursor, time_of, write_cursor
from accounts.usage.routes import CallsQuery
from accounts.usage.summary import cut_range, month_begin

ADMIN = Caller(key="first", team="default", role="admin")
MANAGER = Caller(key="boss", team="red", user="ann", role="manager")
PERSON = Caller(key="anns", team="red", user="ann", role="user")
SERVICE = Caller(key="ci", team="red", role="user")


def parsed(query: dict[str, str]) -> CallsQuery:
    return read_query(AdminRequest(ADMIN, {}, query, b"", {}), CallsQuery)


@pytest.mark.parametrize(
    ("caller", "scope"),
    [(ADMIN, {}), (MANAGER, {"team": "red"}), (PERSON, {"user": "ann"}), (SERVICE, {"key": "ci", "team": "red"})],
)
def test_a_role_sees_its_own(caller: Caller, scope: dict[str, str]) -> None:
    assert calls_of(Selection(), caller).equal == scope
    assert calls_of(Selection(model="llama"), caller).equal == {"model": "llama", **scope}


@pytest.mark.parametrize(
    ("caller", "asked"),
    [
        (MANAGER, {"team": "blue"}),
        (PERSON, {"user": "bob"}),
        (SERVICE, {"key": "other"}),
        (Caller(role="manager", key="k"), {}),
        (Caller(role="user"), {}),
    ],
)
def test_what_is_another_s_is_refused(caller: Caller, asked: dict[str, str]) -> None:
    with pytest.raises(Forbidden):
        calls_of(Selection(**asked), caller)


def test_a_user_of_several_teams_sees_its_calls_in_each_and_no_others() -> None:
    assert calls_of(Selection(team="blue", key="ci"), PERSON).equal == {"team": "blue", "key": "ci", "user": "ann"}


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2026-11-28", 1795824000.0),
        ("2026-11-28T12:00:00Z", 1795867200.0),
        ("2026-11-28T12:00:00 01:00", 1795863600.0),
        ("1795824000.5", 1795824000.5),
        ("", None),
    ],
)
def test_times(text: str, at: float | None) -> None:
    assert time_of(text, "from") == at


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"colour": "red"}, "colour"),
        ({"limit": "0"}, "limit"),
        ({"limit": "many"}, "limit"),
        ({"team": "x" * 300}, "team"),
    ],
)
def test_a_query_that_is_none_names_the_parameter(query: dict[str, str], said: str) -> None:
    with pytest.raises(Invalid, match=said):
        parsed(query)


@pytest.mark.parametrize(
    "asked",
    [
        {"from": "soon"},
        {"from": "nan"},
        {"to": "inf"},
        {"to": "-1"},
        {"to": "1e300"},
        {"from": "2026-02-01", "to": "2026-01-01"},
    ],
)
def test_a_time_that_is_none(asked: dict[str, str]) -> None:
    with pytest.raises(Invalid):
        calls_of(parsed(asked), ADMIN)


def test_cursors_come_back_as_they_were_and_others_are_refused() -> None:
    assert read_cursor(write_cursor(("red", 5, 1.25)), tuple[str, int, float]) == ("red", 5, 1.25)
    for text in ("x", "%%%", write_cursor((1, 2, 3)), "W10" * 5000):
        with pytest.raises(Invalid, match="cursor"):
            read_cursor(text, tuple[str, int, float])


def test_a_range_is_cut_into_pieces_without_gap_or_overlap() -> None:
    begin = month_begin(1_795_824_000.0)
    for first_h, last_h in ((0, 1), (5, 30), (0, 24), (1, 24 * 33 + 5), (24 * 3, 24 * 100), (24 * 30 - 1, 24 * 61 + 1)):
        begins_at, ends_at = begin + first_h * 3600, begin + last_h * 3600
        for has_months in (False, True):
            pieces = sorted(
                (piece.begins_at, piece.ends_at) for piece in cut_range(begins_at, ends_at, has_months=has_months)
            )
            assert [pieces[0][0], pieces[-1][1]] == [begins_at, ends_at]
            assert all(earlier[1] == later[0] for earlier, later in pairwise(pieces))
