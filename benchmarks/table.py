"""How a benchmark's result is shown: one row per figure, with the bar it is held against."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """`reached` is whether the bar is met; a row without a bar is information and counts as met."""

    what: str
    figure: str
    ratio: str
    bar: str
    reached: bool


def print_rows(title: str, rows: list[Row]) -> None:
    """A Markdown table, so that it can be pasted into the docs as it is."""
    print(f"\n### {title}\n\n| what | figure | ratio | bar | |\n|---|---|---|---|---|", flush=True)
    for row in rows:
        verdict = "" if not row.bar else ("reached" if row.reached else "NOT reached")
        print(f"| {row.what} | {row.figure} | {row.ratio} | {row.bar} | {verdict} |", flush=True)
