"""What `/openapi.json` describes, asked of a gateway: schemathesis makes requests of it, and looks at the answers.

Its bodies fit the description; those that break it are `tests/support/json_fuzz.py`'s. No answer may be a failure of
the gateway's own (500), and each is in the form that the description has for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.api.operations.document import openapi
from gateway.api.routes import DECLARED
from tests.support.stack import Stack

MODEL = "small"
ENDLESS = frozenset({"/models/sse", "/admin/events"})
"""Streams without an end."""
LAST = frozenset({"/health/drain"})
"""What nothing is answered after."""
OWN = frozenset(row.shown_path for row in DECLARED)
"""Paths that are no aliases."""
CHECKS = [
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
]
REFUSALS = frozenset({501, 503})
"""Statuses above 500 that a gateway means: what is not served, and what is not there just now."""
SOME, MANY = 3, 40
"""Requests for each route, in `make test` and in `make test-full`."""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        running.fake_worker(MODEL, "--step-ms", "1", "--tokens", "4")
        running.gateway()
        yield running


def ask(stack: Stack, document: dict[str, Any], num_examples: int, *, has_aliases: bool = False) -> list[str]:
    """Ask each route; return what is wrong with the answers."""
    wrong: list[str] = []
    with requests.Session() as session:
        session.headers["authorization"] = f"Bearer {stack.key}"
        for result in schemathesis.openapi.from_dict(document).get_all_operations():
            assert isinstance(result, Ok)
            operation = result.ok()
            if operation.path in ENDLESS | LAST or not (has_aliases or operation.path in OWN):
                continue
            wrong += _ask_one(stack, session, operation, num_examples)
    return wrong


def _ask_one(stack: Stack, session: requests.Session, operation: Any, num_examples: int) -> list[str]:
    wrong: list[str] = []

    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    def run(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body["model"] = MODEL
        answer = case.call(base_url=stack.gateways[0].url, session=session, timeout=20)
        asked = f"{operation.label}: {answer.status_code} {answer.text[:300]} for {case.as_curl_command()[:1000]}"
        if answer.status_code >= 500 and answer.status_code not in REFUSALS:
            wrong.append(asked)
            return
        try:
            case.validate_response(answer, checks=CHECKS)
        except FailureGroup as failures:
            wrong.extend(f"{type(one).__name__}: {one.title}: {asked}" for one in failures.exceptions)

    run()
    return wrong


def test_answers_are_what_is_described(stack: Stack) -> None:
    assert ask(stack, openapi(), SOME) == []
    assert "Traceback" not in stack.gateways[0].text()


def test_what_is_not_described_is_found(stack: Stack) -> None:
    document = openapi()
    told = document["paths"]["/v1/rerank"]["post"]
    told["responses"] = {"200": told["responses"]["200"]}
    document["paths"] = {"/v1/rerank": {"post": told}}
    wrong = ask(stack, document, SOME)
    assert wrong
    assert all("UndefinedStatusCode" in one for one in wrong)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_many_answers_are_what_is_described(stack: Stack) -> None:
    assert ask(stack, openapi(), MANY, has_aliases=True) == []
    assert "Traceback" not in stack.gateways[0].text()
