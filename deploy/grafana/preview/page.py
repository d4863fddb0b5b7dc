"""The panels of a board on one page, placed as Grafana would place them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from preview.plots import (
    COLOURS,
    STEP_COLOURS,
    Frame,
    heat_plot,
    line_plot,
    rounded_up,
    spark,
    stacked_top,
)
from preview.source import Line, Source
from preview.words import words

COLUMN_PX, ROW_PX, GAP_PX = 56, 34, 8
MOST_IN_LEGEND = 5
LEGEND_LINE_PX = 17
HEAD_PX = 30

STYLE = """
body { margin: 0; background: #111217; color: #ccccdc; font: 13px/1.3 "DejaVu Sans", system-ui, sans-serif; }
h1 { font-size: 19px; font-weight: 500; margin: 14px 12px 4px; }
.board { position: relative; margin: 0 8px; }
.panel { position: absolute; background: #181b1f; border: 1px solid #25282e; border-radius: 3px; overflow: hidden; }
.panel h3 { font-size: 13px; font-weight: 500; margin: 7px 10px 4px; white-space: nowrap; color: #d8d9e3; }
.row { position: absolute; font-size: 15px; padding: 9px 6px; color: #d8d9e3; }
.figure { font-size: 29px; text-align: center; padding-top: 4px; white-space: nowrap; }
svg text { fill: #9fa3b1; font-size: 11px; }
svg .grid { stroke: #2a2d34; }
svg.plot { display: block; }
svg.spark { position: absolute; bottom: 0; left: 0; width: 100%; height: 44px; }
.legend { padding: 0 10px; font-size: 11.5px; color: #b4b7c3; }
.legend div { height: 17px; display: flex; justify-content: space-between; white-space: nowrap; }
.legend i { display: inline-block; width: 12px; height: 3px; margin: 0 6px 3px 0; }
table { border-collapse: collapse; width: calc(100% - 20px); margin: 2px 10px; }
td, th { text-align: left; padding: 5px 8px; border-bottom: 1px solid #25282e; font-weight: 400; }
th { color: #6e9fff; }
"""


def page(board: dict[str, Any], source: Source) -> str:
    panels = [panel for panel in board["panels"] if panel["type"] != "text"]
    parts = [_row(panel) if panel["type"] == "row" else _panel(panel, source) for panel in panels]
    title = escape(board["title"])
    return (
        f'<!doctype html><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f'<h1>{title}</h1><div class="board" style="height:{height(board)}px">{"".join(parts)}</div>'
    )


def width() -> int:
    """Of a page, in pixels."""
    return 24 * COLUMN_PX + 16


def height(board: dict[str, Any]) -> int:
    return int(max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])) * ROW_PX


def _box(panel: dict[str, Any]) -> tuple[int, int, str]:
    """Inner width and height, and where it stands."""
    place = panel["gridPos"]
    wide, tall = place["w"] * COLUMN_PX - GAP_PX, place["h"] * ROW_PX - GAP_PX
    left, top = place["x"] * COLUMN_PX, place["y"] * ROW_PX
    return wide - 2, tall - 2, f"left:{left}px;top:{top}px;width:{wide - 2}px;height:{tall - 2}px"


def _row(panel: dict[str, Any]) -> str:
    return f'<div class="row" style="{_box(panel)[2]}">{escape(panel["title"])}</div>'


def _panel(panel: dict[str, Any], source: Source) -> str:
    wide, tall, style = _box(panel)
    lines = source.lines(panel)
    draw = {"stat": _figure, "table": _table, "heatmap": _heat}.get(panel["type"], _lines)
    inside = draw(panel, lines, source, wide, tall)
    return f'<div class="panel" style="{style}"><h3>{escape(panel["title"])}</h3>{inside}</div>'


def _unit(panel: dict[str, Any]) -> str:
    return str(panel["fieldConfig"]["defaults"]["unit"])


def _steps(panel: dict[str, Any]) -> list[tuple[float, str]]:
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"][1:]
    return [(step["value"], step["color"]) for step in steps]


def _figure(panel: dict[str, Any], lines: Sequence[Line], source: Source, wide: int, tall: int) -> str:
    line = lines[0] if lines else Line("", {}, ())
    passed = [name for value, name in _steps(panel) if line.last >= value]
    colour = STEP_COLOURS[passed[-1] if passed else "green"]
    told = words(line.last, _unit(panel))
    size = 29 if len(told) < 9 else 23
    return (
        f'<div class="figure" style="color:{colour};font-size:{size}px">{escape(told)}</div>'
        f"{spark(line.points, colour, wide, 44)}"
    )


def _lines(panel: dict[str, Any], lines: Sequence[Line], source: Source, wide: int, tall: int) -> str:
    stacked = panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    drawn = sorted(lines, key=lambda line: -line.last) if stacked else list(lines)
    told = drawn[:MOST_IN_LEGEND]
    top = stacked_top(drawn) if stacked else max((value for line in drawn for _, value in line.points), default=0.0)
    limit = panel["fieldConfig"]["defaults"].get("max")
    frame_height = tall - HEAD_PX - len(told) * LEGEND_LINE_PX - 6
    frame = Frame(
        wide,
        frame_height,
        source.start,
        source.end,
        limit if limit is not None else rounded_up(top, _unit(panel)),
        _unit(panel),
    )
    legend = "".join(_legend(told, frame.unit))
    return f'{line_plot(drawn, frame, stacked, _steps(panel))}<div class="legend">{legend}</div>'


def _legend(lines: Sequence[Line], unit: str) -> Iterator[str]:
    for number, line in enumerate(lines):
        mark = f'<i style="background:{COLOURS[number % len(COLOURS)]}"></i>'
        yield f"<div><span>{mark}{escape(line.name)}</span><span>{escape(words(line.last, unit))}</span></div>"


def _heat(panel: dict[str, Any], lines: Sequence[Line], source: Source, wide: int, tall: int) -> str:
    frame = Frame(wide, tall - HEAD_PX - 4, source.start, source.end, 1.0, _unit(panel))
    return heat_plot(lines, frame, source.step_s)


def _table(panel: dict[str, Any], lines: Sequence[Line], source: Source, wide: int, tall: int) -> str:
    columns = list(dict.fromkeys(target["legendFormat"] for target in panel["targets"]))
    units = {one["matcher"]["options"]: one["properties"][0]["value"] for one in panel["fieldConfig"]["overrides"]}
    shared = _shared_labels(lines)
    rows: dict[tuple[str, ...], dict[str, float]] = {}
    for line in lines:
        key = tuple(line.labels.get(name) or f"(no {name})" for name in shared)
        rows.setdefault(key, {})[line.name] = line.last
    head = "".join(f"<th>{escape(name)}</th>" for name in (*shared, *columns))
    body = ""
    for key, values in sorted(rows.items()):
        cells = [words(values[name], units.get(name, _unit(panel))) if name in values else "" for name in columns]
        body += "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in (*key, *cells)) + "</tr>"
    return f"<table><tr>{head}</tr>{body}</table>"


def _shared_labels(lines: Sequence[Line]) -> list[str]:
    """Return the labels that every column has, by which its lines are joined to rows.

    Prometheus leaves out a label whose value is empty, as the team of a call with a wrong key is: that a line lacks one
    which others of its column have says nothing."""
    of_column: dict[str, set[str]] = {}
    for line in lines:
        of_column.setdefault(line.name, set()).update(line.labels)
    labelled = [labels for labels in of_column.values() if labels]
    names = dict.fromkeys(label for line in lines for label in line.labels)
    return [name for name in names if all(name in labels for labels in labelled)]
