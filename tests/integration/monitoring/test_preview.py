"""What the preview of a board makes of the answers of a Prometheus."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import preview_board
from preview.page import page
from preview.source import Line, Source

SPENT = {"blue": 31.0, "red": 7.0}


@dataclass(frozen=True)
class Answers(Source):
    """A Prometheus whose answers are these lines, by panel."""

    by_title: dict[str, list[Line]]

    def lines(self, panel: dict[str, Any]) -> list[Line]:
        return self.by_title.get(panel["title"], [])


def rows_of_teams(lines: list[Line]) -> list[list[str]]:
    drawn = page(preview_board.load("teams"), Answers("", 0.0, 60.0, 60, {"Usage by team": lines}))
    (table,) = re.findall("<table>.*?</table>", drawn)
    return [re.findall("<t[dh]>(.*?)</t[dh]>", row) for row in re.findall("<tr>.*?</tr>", table)]


def of_teams(column: str, values: dict[str, float]) -> list[Line]:
    """Prometheus leaves out the label of a team that has no name."""
    return [Line(column, {"team": team} if team else {}, ((60.0, value),)) for team, value in values.items()]


def test_calls_without_a_team_leave_each_team_its_row() -> None:
    """A call with a wrong key is nobody's: it ends with 401 before a team is known."""
    head, *rows = rows_of_teams([*of_teams("Requests", SPENT | {"": 2.0}), *of_teams("Waited", SPENT)])
    assert [head[0], head[1], head[-1]] == ["team", "Requests", "Waited"]
    told = {row[0]: (row[1], row[-1]) for row in rows}
    assert told == {"blue": ("31", "31 s"), "red": ("7", "7 s"), "(no team)": ("2", "")}


def test_a_column_of_calls_without_a_team_alone_joins_nothing_together() -> None:
    _, *rows = rows_of_teams([*of_teams("Requests", SPENT), *of_teams("Not answered", {"": 2.0})])
    assert {row[0]: row[2] for row in rows} == {"blue": "", "red": "", "(no team)": "2"}


def test_a_label_that_one_column_has_alone_parts_no_rows() -> None:
    """As the version in the first column of the workers' board does."""
    lines = [
        Line("Requests", {"team": "blue", "version": "1"}, ((60.0, 3.0),)),
        Line("Waited", {"team": "blue"}, ((60.0, 1.0),)),
    ]
    _, *rows = rows_of_teams(lines)
    assert [(row[0], row[1], row[-1]) for row in rows] == [("blue", "3", "1 s")]
