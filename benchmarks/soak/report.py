"""What a soak found: tables for a terminal, JSON for machines, one page with plots for people."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from benchmarks.soak.record import Record
from benchmarks.soak.verdict import Finding, Growth, growths
from benchmarks.table import Row, print_rows

WIDTH, HEIGHT, LEFT, BOTTOM = 900, 300, 56, 24
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#e377c2", "#7f7f7f")
FAULT_COLOR = "#cccccc"


def print_report(record: Record, found: Sequence[Finding]) -> None:
    """Growth per process, then one row per finding."""
    print("\n### growth of each process after warm-up, per hour, with its 95 % interval\n")
    print("| process | started | RSS, MiB | RSS/h | USS/h | fds/h | tasks/h | measured |\n" + "|---" * 8 + "|")
    by_subject: dict[str, dict[str, Growth]] = {}
    for growth in growths(record):
        by_subject.setdefault(growth.subject, {})[growth.measure] = growth
    for name, measures in by_subject.items():
        rss, lives = measures["rss"], len(record.subjects[name].lives)
        cells = [_cell(measures.get(measure)) for measure in ("rss", "uss", "fds", "tasks")]
        print(f"| {name} | {lives} x | {rss.last:.0f} | {' | '.join(cells)} | {rss.slope.span_s / 60:.1f} min |")
    print_rows("soak", [Row(one.what, one.told, "", one.bar, one.good) for one in found])


def _cell(growth: Growth | None) -> str:
    if growth is None:
        return "-"
    slope = growth.slope
    return f"{slope.per_hour:+.1f} ({slope.low:+.1f} to {slope.high:+.1f})"


def write_report(record: Record, found: Sequence[Finding], folder: Path) -> None:
    """`soak.json` and `soak.html`, which needs nothing beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "soak.json").write_bytes(msgspec.json.format(msgspec.json.encode(_document(record, found)), indent=1))
    (folder / "soak.html").write_text(_page(record, found), encoding="utf-8")


def _document(record: Record, found: Sequence[Finding]) -> dict[str, object]:
    return {"findings": found, "growth": list(growths(record)), "record": record}


def _page(record: Record, found: Sequence[Finding]) -> str:
    subjects = {name: subject for name, subject in sorted(record.subjects.items()) if "passing" not in name}
    plots = []
    for measure, title in (("rss", "RSS, MiB"), ("fds", "open files"), ("tasks", "tasks of the event loop")):
        lines = {
            name: [[(s.at_s, float(getattr(s, measure))) for s in life.samples] for life in subject.lives]
            for name, subject in subjects.items()
        }
        plots.append(
            plot(
                title,
                lines,
                [struck.at_s for struck in record.faults],
                [rest.at_s for rest in record.rests if rest.is_long],
            )
        )
    used = {"used_memory": [[(stock.at_s, stock.used_mib) for stock in record.stocks]]}
    plots.append(plot("Redis: memory used, MiB", used, [], []))
    rows = "".join(
        f"<tr class={'good' if one.good else 'bad'}><td>{html.escape(one.what)}</td><td>{html.escape(one.told)}</td>"
        f"<td>{html.escape(one.bar)}</td></tr>"
        for one in found
    )
    deeds = html.escape(json.dumps({n: dict(e) for n, e in sorted(record.endings.items())}, indent=1))
    return (
        "<!doctype html><meta charset=utf-8><title>Soak</title><style>body{font:14px sans-serif;margin:2em}"
        "td{padding:2px 8px;border-top:1px solid #ddd}.bad{background:#fdd}svg{display:block;margin:1em 0}</style>"
        f"<h1>Soak, {record.plan.total_s / 60:.0f} minutes</h1><table>{rows}</table>{''.join(plots)}<pre>{deeds}</pre>"
    )


def plot(
    title: str,
    lines: dict[str, list[list[tuple[float, float]]]],
    faults: Iterable[float],
    rests: Iterable[float],
) -> str:
    """An SVG of lines over minutes; each name has a colour, and a line per life. Grey: faults; black: rests."""
    shown = {
        name: kept for name, lives in lines.items() if (kept := [[p for p in life if p[1] >= 0] for life in lives])
    }
    points = [point for lives in shown.values() for life in lives for point in life]
    if not points:
        return ""
    right_s, top = max(at_s for at_s, _ in points) or 1.0, max(value for _, value in points) * 1.05 or 1.0

    def x(at_s: float) -> float:
        return LEFT + (WIDTH - LEFT - 180) * at_s / right_s

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 20) * value / top

    parts = [f'<text x="{LEFT}" y="14">{html.escape(title)}</text>']
    for at_s, color in [*((at_s, FAULT_COLOR) for at_s in faults), *((at_s, "#000") for at_s in rests)]:
        parts.append(f'<line x1="{x(at_s):.1f}" x2="{x(at_s):.1f}" y1="20" y2="{HEIGHT - BOTTOM}" stroke="{color}"/>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<text x="2" y="{y(top * share) + 4:.1f}" font-size="11">{top * share:.4g}</text>')
        parts.append(
            f'<text x="{x(right_s * share):.1f}" y="{HEIGHT - 6}" font-size="11">{right_s * share / 60:.1f}</text>'
        )
    for number, (name, lives) in enumerate(shown.items()):
        color = COLORS[number % len(COLORS)]
        parts.append(f'<text x="{WIDTH - 170}" y="{34 + 16 * number}" fill="{color}">{html.escape(name)}</text>')
        for life in lives:
            path = " ".join(f"{x(at_s):.1f},{y(value):.1f}" for at_s, value in life)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}"/>')
    return f'<svg width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="13">{"".join(parts)}</svg>'
