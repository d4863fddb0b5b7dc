"""Writes the result as one HTML page without scripts or external resources, with a light and a dark theme.

`STYLE` is the style sheet, `page` makes the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from gateway.bench.document import Document, Spread
from gateway.bench.plots import NARROW, Axes, Axis, Line, Mark, exact, linear, logarithmic, plot, shares
from gateway.bench.terminal import COLUMNS, time_text

STYLE = """
:root { --ground: #fbfbfa; --card: #fff; --ink: #1b1f24; --soft: #69707a; --edge: #e3e5e8; --faint: #f0f1f3;
  --tone1: #2f6fdb; --tone2: #128a6b; --tone3: #8a55c8; --tone4: #cf3f3a; --good: #e5f5ec; --bad: #fbe6e4;
  --hint: #fdf3d8; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171b; --card: #1b1f25; --ink: #e7eaee; --soft: #98a1ad;
  --edge: #2d333b; --faint: #242931; --tone1: #6ea3ff; --tone2: #41c79e; --tone3: #bb90f2; --tone4: #ff7b72;
  --good: #17372a; --bad: #44211f; --hint: #3b3218; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  font-variant-numeric: tabular-nums; }
main { max-width: 1340px; margin: 0 auto; padding: 32px 24px 48px; }
h1 { font-size: 30px; line-height: 1.2; margin: 2px 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 10px; }
header p { margin: 0; color: var(--soft); }
.over { font-size: 13px; letter-spacing: .02em; }
section { margin-top: 24px; }
.banner { margin: 12px 0 0; padding: 9px 14px; border-radius: 8px; background: var(--hint); }
.banner.good { background: var(--good); } .banner.bad { background: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.tile { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 12px 16px; }
.tile span { display: block; color: var(--soft); font-size: 13px; } .tile b { font-size: 25px; font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(350px, 100%), 1fr)); gap: 16px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--edge); border-radius: 10px;
  padding: 14px 14px 6px; }
figcaption { color: var(--soft); font-size: 13px; padding: 0 4px 6px; }
figcaption b { color: var(--ink); font-size: 15px; margin-right: 6px; }
.plot { display: block; width: 100%; height: auto; }
.plot text { font-size: 13px; fill: var(--soft); } .plot .note { fill: var(--ink); font-weight: 600; }
.grid { stroke: var(--edge); fill: none; } .grid.faint { stroke: var(--faint); }
.base { stroke: var(--soft); fill: none; }
.line { fill: none; stroke-width: 2.2; stroke-linejoin: round; } .area { opacity: .16; stroke: none; }
.dot { fill: var(--card); stroke: var(--ink); stroke-width: 2; }
.line.tone1 { stroke: var(--tone1); } .line.tone2 { stroke: var(--tone2); } .line.tone3 { stroke: var(--tone3); }
.line.tone4 { stroke: var(--tone4); } .area.tone1 { fill: var(--tone1); } .area.tone2 { fill: var(--tone2); }
.area.tone3 { fill: var(--tone3); } .area.tone4 { fill: var(--tone4); }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--edge); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: right; padding: 7px 14px; border-bottom: 1px solid var(--faint); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } tr:last-child td { border-bottom: 0; }
th:first-child, td:first-child { text-align: left; } td:last-child { white-space: normal; }
.few { max-width: 560px; }
@media print { body { background: #fff; } figure, .tile { break-inside: avoid; } }
"""


CURVES = (
    ("ttft_s", "Time to first token", 1),
    ("itl_s", "Between tokens", 2),
    ("e2e_s", "Whole answer", 3),
)
MARKED = (50, 95)
FIRST = 1
SHORTEST_S = 1e-5
"""Shorter times, in seconds, are plotted as this: pieces that came in one read are 0 s apart; 0 has no logarithm."""


def page(done: Document) -> str:
    model = str(done.settings.get("model", ""))
    return "".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta name="color-scheme" content="light dark"><title>{escape(model)} - paddock bench</title>',
            f"<style>{STYLE}</style></head><body><main>",
            _head(done, model),
            *_warnings(done),
            _tiles(done),
            _latencies(done),
            _time(done),
            _limit(done),
            _numbers(done),
            _errors(done),
            _teams(done),
            _settings(done),
            "</main></body></html>\n",
        ]
    )


def _head(done: Document, model: str) -> str:
    calls = done.calls
    way = ", ".join(_way(done))
    return (
        f'<header><p class="over">paddock bench {escape(done.version)}</p><h1>{escape(model)}</h1>'
        f"<p>{escape(str(done.settings.get('url', '')))} &middot; {escape(done.started_at)} &middot; {escape(way)}</p>"
        f"<p>{calls.finished:,} of {calls.sent:,} calls answered in {done.measured_s:,.1f} s measured"
        f" ({calls.warmup:,} calls of the first {done.warmup_s:g} s left out)</p></header>"
    )


def _way(done: Document) -> Iterator[str]:
    asked = done.settings
    yield f"trace {asked['trace']}" if "trace" in asked else f"workload {asked.get('workload')}"
    if done.limit is not None:
        yield f"searching the limit of {done.limit.objectives}"
    elif "rate" in asked:
        yield f"{asked['rate']:g} calls/s by the clock"
    elif "concurrency" in asked:
        yield f"{asked['concurrency']} callers at once"
    else:
        yield f"at the trace's own times, {asked.get('speed', 1)} x"


def _warnings(done: Document) -> Iterator[str]:
    if done.generator.saturated:
        yield (
            '<p class="banner bad">The generator was saturated: these times are its own as much as the server\'s.'
            " Ask for less, or share the load among several.</p>"
        )
    if done.ended == "interrupted":
        yield f'<p class="banner">Interrupted: {done.calls.unfinished:,} calls were left unfinished.</p>'
    for verdict in done.asserts:
        found = "nothing was measured" if verdict.value is None else f"{verdict.value:.4g}"
        kind, word = ("good", "held") if verdict.held else ("bad", "broken")
        yield f'<p class="banner {kind}"><b>{word}</b> {escape(verdict.expression)}: {found}</p>'


def _tiles(done: Document) -> str:
    tiles = [
        ("first token", _time_or_dash(done.ttft_s, "p50"), f"p95 {_time_or_dash(done.ttft_s, 'p95')}"),
        ("between tokens", _time_or_dash(done.itl_s, "p50"), f"p99 {_time_or_dash(done.itl_s, 'p99')}"),
        ("throughput", f"{done.rates.tokens_per_s:,.0f}", "tokens/s"),
        ("calls", f"{done.rates.finished_per_s:,.2f}", f"per s, {done.rates.in_flight_mean:,.1f} at once"),
        ("failed", f"{done.calls.failed:,}", f"of {done.calls.sent:,} calls"),
    ]
    if done.limit is not None:
        tiles.insert(0, ("sustainable", f"{done.limit.sustainable_rate:.3g}", "calls/s"))
    if done.goodput is not None:
        tiles.append(("goodput", f"{done.goodput.share:.1%}", f"{done.goodput.per_s:,.2f} calls/s"))
    if done.tokens.cached_share is not None:
        tiles.append(("cached", f"{done.tokens.cached_share:.0%}", "of prompt tokens"))
    made = (
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b><span>{escape(more)}</span></div>'
        for name, value, more in tiles
    )
    return f'<section class="tiles">{"".join(made)}</section>'


def _time_or_dash(spread: Spread, part: str) -> str:
    return time_text(getattr(spread, part)) if spread.count else "-"


def _latencies(done: Document) -> str:
    figures = [_distribution(name, done.curves[key], tone) for key, name, tone in CURVES if done.curves.get(key)]
    return f'<section class="plots">{"".join(figures)}</section>' if figures else ""


def _distribution(name: str, percentiles: Sequence[float], tone: int) -> str:
    values = [max(SHORTEST_S, value) for value in percentiles]
    # The very shortest values would take up most of a logarithmic axis.
    points = [(value, at / 100) for at, value in enumerate(values) if at >= FIRST]
    axes = Axes(logarithmic(values[FIRST], values[-1], "", _tick), shares(""), NARROW)
    marks = [Mark(values[at], at / 100, f"p{at} {time_text(percentiles[at])}") for at in MARKED]
    return _figure(name, "share that took no longer", plot([Line(name, tone, points)], axes, name, marks))


def _time(done: Document) -> str:
    if not done.series:
        return ""
    width = done.series[1].at_s if len(done.series) > 1 else 1.0
    ends = done.series[-1].at_s + width
    x = exact(ends, "seconds", lambda value: f"{value:g}")
    out = [(second.at_s, second.tokens_per_s) for second in done.series]
    running = [(second.at_s, second.in_flight) for second in done.series]
    failed = [(second.at_s, float(second.failed)) for second in done.series]
    for points in (out, running, failed):
        points.append((ends, points[-1][1]))
    figures = [
        _figure(
            "Throughput",
            "tokens of answers per second",
            plot([Line("tokens/s", 2, out, filled=True, stepped=True)], Axes(x, _counted(out)), "Throughput"),
        ),
        _figure(
            "In flight",
            f"calls that ran at once, mean of {_interval(width)}",
            plot([Line("in flight", 1, running, filled=True, stepped=True)], Axes(x, _counted(running)), "In flight"),
        ),
    ]
    if done.calls.failed:
        drawn = plot([Line("failed", 4, failed, filled=True, stepped=True)], Axes(x, _counted(failed)), "Failed")
        figures.append(_figure("Failed", f"calls that failed in {_interval(width)}", drawn))
    return f'<section class="plots">{"".join(figures)}</section>'


def _counted(points: Sequence[tuple[float, float]]) -> Axis:
    return linear(max(4.0, *(value for _, value in points)), "", lambda value: f"{value:,.0f}")


def _interval(width: float) -> str:
    return "each second" if width == 1 else f"each {width:g} seconds"


def _limit(done: Document) -> str:
    if done.limit is None:
        return ""
    rows = [
        (
            f"{step.rate:.3g}",
            f"{step.sent:,}",
            time_text(step.ttft_p95_s),
            time_text(step.itl_p95_s),
            f"{step.tokens_per_s:,.0f}",
            "held" if step.held else step.why,
        )
        for step in done.limit.steps
    ]
    names = ("calls/s", "calls", "first token p95", "between tokens p95", "tokens/s", "")
    return f"<section><h2>Search for the limit of {escape(done.limit.objectives)}</h2>{_table(names, rows)}</section>"


def _numbers(done: Document) -> str:
    named = (
        ("first token", done.ttft_s),
        ("between tokens", done.itl_s),
        ("per token after the first", done.tpot_s),
        ("whole answer", done.e2e_s),
        ("calls sent late by", done.generator.late_s),
        ("loop late by", done.generator.loop_lag_s),
    )
    rows = [
        (name, *(_time_or_dash(spread, column) for column in COLUMNS), f"{spread.count:,}") for name, spread in named
    ]
    generator = done.generator
    note = (
        f"The generator took {generator.cpu_share:.0%} of a core, {generator.cpu_us_per_piece:.1f} us per token."
        " Waits count from when a call was due."
    )
    return f"<section><h2>Times</h2>{_table(('', *COLUMNS, 'count'), rows)}<p>{note}</p>{_queue(done)}</section>"


def _queue(done: Document) -> str:
    queue = done.queue
    if not queue.waited:
        return ""
    return (
        f"<p>{queue.waited:,} of {queue.told:,} calls waited in the server's queue, at position"
        f" {queue.position.p50:.0f} (p50), {queue.position.max:.0f} (max).</p>"
    )


def _errors(done: Document) -> str:
    if not done.errors:
        return ""
    rows = [(kind, f"{count:,}", done.error_details.get(kind, "")) for kind, count in done.errors.items()]
    return f"<section><h2>Errors</h2>{_table(('kind', 'calls', 'what the first one said'), rows)}</section>"


def _teams(done: Document) -> str:
    if not done.teams:
        return ""
    rows = [
        (
            name,
            f"{team.finished:,}",
            f"{team.failed:,}",
            f"{team.generated:,}",
            _time_or_dash(team.ttft_s, "p50"),
            _time_or_dash(team.ttft_s, "p95"),
            _time_or_dash(team.e2e_s, "p50"),
        )
        for name, team in done.teams.items()
    ]
    names = ("team", "answered", "failed", "tokens", "first token p50", "p95", "whole answer p50")
    return f"<section><h2>Teams</h2>{_table(names, rows)}</section>"


def _settings(done: Document) -> str:
    rows = [(name, str(value)) for name, value in done.settings.items()]
    shown = _table(("setting", "value"), rows)
    return f'<section><h2>Settings</h2><div class="few">{shown}</div></section>'


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _figure(title: str, what: str, drawn: str) -> str:
    return f"<figure><figcaption><b>{escape(title)}</b> {escape(what)}</figcaption>{drawn}</figure>"


def _tick(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:g} s"
    return f"{seconds * 1e3:g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:g} us"
