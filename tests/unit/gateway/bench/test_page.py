"""The report stands alone, and the docs list what the JSON has and what the command takes."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.bench import command, options
from gateway.bench.bounds import SINGLE
from gateway.bench.document import SCHEMA, Document, Spread
from gateway.bench.findings import curve, quantile, spread
from gateway.bench.page import page
from gateway.bench.plots import LEFT, LETTER_PX, NARROW, RIGHT, logarithmic
from gateway.bench.terminal import time_text
from gateway.bench.workload import PRESETS
from tests.support.timed_server import Timing, timed_server
from tests.unit.gateway.bench.conftest import Bench

INNER_PX = NARROW - LEFT - RIGHT
DOCS = (Path(__file__).resolve().parents[4] / "docs" / "bench.md").read_text()


class Balanced(HTMLParser):
    """Every element is closed in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "a.html"
    with timed_server(lambda number: Timing(0.01, (0.01,) * 5, status=500 if number == 3 else 200)) as server:
        flags = ("--concurrency", "2", "--count", "30", "--html", str(file), "--assert", "ttft_p95<5,errors<1")
        _, found, _ = bench("--url", server.url, *flags)
    html = file.read_text()
    reader = Balanced()
    reader.feed(html)
    assert not reader.open
    assert reader.seen["svg"] == 6  # three distributions, throughput, in flight, failed
    assert "script" not in reader.seen
    assert "@import" not in html
    assert "url(" not in html
    assert "prefers-color-scheme: dark" in html
    assert "NaN" not in html
    assert "inf" not in re.sub(r"[a-z]+inf|inf[a-z]+", "", html)
    assert f"<td>{found['calls']['finished']}</td>" in html
    assert msgspec.json.decode(json.dumps(found), type=Document).schema == SCHEMA


def test_a_page_of_nothing(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "a.html"
    with timed_server(lambda number: Timing(status=500)) as server:
        code, _, _ = bench("--url", server.url, "--concurrency", "1", "--count", "2", "--html", str(file))
    assert code == 1
    assert "http_500" in file.read_text()


def test_names_in_the_page_can_not_be_markup() -> None:
    with timed_server() as server:
        assert server
    done = Document(
        **{
            **{field.name: None for field in msgspec.structs.fields(Document)},
            "schema": 1,
            "settings": {"model": "<script>x</script>", "workload": "<b>"},
            "series": (),
            "curves": {},
            "errors": {"<i>": 1},
            "error_details": {"<i>": "<u>"},
            "teams": {},
            "asserts": (),
            **_empty(),
        }
    )
    html = page(done)
    assert not any(tag in html for tag in ("<script", "<i>", "<u>"))


def _empty() -> dict[str, Any]:
    hints = {field.name: field.type for field in msgspec.structs.fields(Document)}
    made: dict[str, Any] = {
        name: hint() for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, msgspec.Struct)
    }
    return made | {"version": "0", "started_at": "now", "ended": "done", "warmup_s": 0.0, "measured_s": 1.0}


def test_percentiles_by_nearest_rank() -> None:
    values = [float(number) for number in range(1, 101)]
    assert spread(values) == Spread(100, 50.5, 50.0, 90.0, 95.0, 99.0, 100.0)
    assert spread([3.0, 1.0]) == Spread(2, 2.0, 1.0, 3.0, 3.0, 3.0, 3.0)
    assert spread([]) == Spread()
    assert [quantile(values, share) for share in (0.0, 0.001, 0.5, 0.501, 1.0)] == [1.0, 1.0, 50.0, 51.0, 100.0]
    assert curve(values)[1:] == tuple(values)


def names_of(struct: type[msgspec.Struct]) -> set[str]:
    found = set()
    for field in msgspec.structs.fields(struct):
        found.add(field.name)
        for inner in (field.type, *getattr(field.type, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct) and inner is not Spread:
                found |= names_of(inner)
    return found


@pytest.mark.parametrize("name", sorted(names_of(Document)))
def test_every_field_of_the_json_is_documented(name: str) -> None:
    assert f"`{name}`" in DOCS


def test_every_flag_workload_and_bound_is_documented() -> None:
    flags = {
        flag for action in options.make_parser()._actions for flag in action.option_strings if flag.startswith("--")
    }
    assert flags
    for flag in flags:
        assert flag in (command.__doc__ or ""), flag
        assert f"`{flag}" in DOCS, flag
    for name in (*PRESETS, *SINGLE):
        assert f"`{name}`" in DOCS, name


@pytest.mark.parametrize(("least", "most"), [(1e-6, 900.0), (0.5, 0.5), (0.02, 0.021), (1e-3, 1.0), (0.0, 0.0)])
def test_an_axis_of_any_width_has_a_few_marks(least: float, most: float) -> None:
    axis = logarithmic(least, most, "", str)
    assert 1 <= len(axis.ticks) <= 6
    assert 0 <= axis.place(least) <= axis.place(most) <= 1


@pytest.mark.parametrize("least", [1.1e-5, 0.0015, 0.02, 0.09, 0.11, 0.8, 1.4, 9.0])
@pytest.mark.parametrize("times", [1.01, 1.2, 2.0, 5.0, 12.0, 40.0, 1e4])
def test_the_labels_of_an_axis_stand_apart(least: float, times: float) -> None:
    axis = logarithmic(least, least * times, "", time_text)
    edges = [(INNER_PX * axis.place(value), len(text) * LETTER_PX / 2) for value, text in axis.ticks]
    for (left, half), (right, other) in pairwise(edges):
        assert left + half < right - other
