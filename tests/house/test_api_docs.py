"""What a client or an operator of the gateway can meet is told in the docs."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel

from accounts.protocol.records import AccessRecord
from gateway import errors
from gateway.access.control import Access
from gateway.api.intake.body import BODY_TIMEOUT_S
from gateway.api.openai.bodies import IGNORED, REFUSED, ChatBody
from gateway.api.parameters.unsupported import OTHERS_IGNORED, OTHERS_REFUSED
from gateway.api.responses import body as responses_body
from gateway.api.responses import body as responses_refused
from gateway.api.routes import ROUTES
from gateway.commands.config import accounts_groups, gateway_groups, metrics_of, metrics_page, worker_groups
from gateway.dispatch.dispatcher import MAX_ATTEMPTS

DOCS = Path(__file__).resolve().parents[2] / "docs"

OTHERS = {*OTHERS_IGNORED, *OTHERS_REFUSED}
"""The page of chat names them."""


def page(name: str) -> str:
    return (DOCS / name).read_text()


def rows(name: str, heading: str = "") -> list[list[str]]:
    """Cells of the table rows below a heading (or anywhere)."""
    text = page(name)
    text = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0] if heading else text
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_every_route_and_who_may_call_it() -> None:
    told = {
        cells[0]: cells[1].partition(",")[0]
        for cells in rows("api.md")
        if cells[0].startswith(("`GET", "`POST", "`PUT", "`PATCH", "`DELETE", "`WEBSOCKET"))
    }
    words = {Access.OPEN: "no", Access.KEY: "yes", Access.ADMIN: "admin"}
    assert told == {f"`{row.method} {row.shown_path}`": words[row.access] for row in ROUTES}


def names_of(body: type[BaseModel]) -> list[str]:
    """Return the names of a body's fields, as callers send them."""
    return [field.alias or name for name, field in body.model_fields.items()]


def test_every_parameter() -> None:
    told = {name for cells in rows("api.md", "Chat completions") for name in re.findall(r"`([\w.]+)`", cells[0])}
    assert told == set(names_of(ChatBody))
    text = page("api.md")
    assert all(f"`{name}`" in text for name in {*IGNORED, *REFUSED})


def test_every_parameter_of_the_responses_api() -> None:
    text = page("responses.md")
    assert {name for name in names_of(responses_body.ResponsesBody) if f"`{name}`" not in text} == set()
    assert {
        name for name in {*responses_refused.IGNORED, *responses_refused.REFUSED} - OTHERS if f"`{name}`" not in text
    } == set()
    listed = {name for cells in rows("responses.md", "Parameters") for name in re.findall(r"`([\w.]+)`", cells[0])}
    assert listed <= set(names_of(responses_body.ResponsesBody))


def test_the_bounds_that_are_no_settings() -> None:
    text = page("api.md")
    assert f"at most {BODY_TIMEOUT_S:g} seconds" in text
    assert f"{MAX_ATTEMPTS} submissions in all" in text


def test_every_error() -> None:
    told = {
        (cells[0], cells[1].strip("`"), code)
        for cells in rows("api.md", "Errors")[2:]
        for code in re.findall(r"`(\w+)`|(null)", cells[2])
        for code in code
        if code
    }
    tree = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.PaddockError)]
    declared = {(str(kind.status), kind.type, kind.code or "null") for kind in tree if kind is not errors.PaddockError}
    assert told == declared


def test_every_metric() -> None:
    assert page("metrics.md") == metrics_page(), "run: paddock config metrics > docs/metrics.md"
    told = {cells[0].strip("`") for cells in rows("metrics.md")} - {"metric", "---"}
    groups = (*gateway_groups(), *worker_groups(), *accounts_groups())
    declared = metrics_of(groups)
    assert told == {metric.name for metric in declared}


def test_every_field_of_a_key() -> None:
    assert {cells[0].strip("`") for cells in rows("keys.md")[2:]} == set(AccessRecord.__struct_fields__)
