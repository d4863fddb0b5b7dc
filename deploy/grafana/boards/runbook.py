"""The runbook as a board: at three in the morning it is where the alert's numbers are."""

from __future__ import annotations

import re

from boards.board import Board
from boards.panel import Panel, Row, Shape

LINK = re.compile(r"\[([^]]+)\]\((?!https?:)[^)]+\)")
LINES_TALL = 36


def board(page: str) -> Board:
    """`page`: docs/runbook.md. Its links into other pages lead nowhere from here, so their words are kept only."""
    title, _, text = LINK.sub(r"\1", page).partition("\n")
    told = Panel(title.lstrip("# "), "", shape=Shape.TEXT, width=24, height=LINES_TALL, text=text.strip())
    return Board("runbook", "Paddock: runbook", "What to do about each alert.", (Row("Runbook", (told,)),), ())
