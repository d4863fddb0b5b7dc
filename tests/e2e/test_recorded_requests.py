"""What programs sent, with their versions, is answered in the shape that its dialect promises."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.clients.recording import FOLDER, Recording, Sent, recordings
from tests.clients.replay import fleet, replay
from tests.support.kinds import DEMO_ALIAS, EMBEDDER
from tests.support.stack import ROOT, Stack

RECORDINGS = recordings()

REFUSED = {
    "anthropic-python": ["thread"],
    "anthropic-js": ["thread"],
    "llama-ui": ["GET /tools", "POST /tools", "POST /v1/streams/lookup", "no key"],
}
"""By which parameters, routes or want of a key calls of a program are refused. The SDKs ask again without a thread, by
what the error says; the page goes on.
"""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with fleet() as running:
        yield running


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RECORDINGS)
def test_it_is_answered(name: str, stack: Stack) -> None:
    outcomes = list(replay(RECORDINGS[name], stack.gateways[0].url, stack.key))
    assert [str(outcome) for outcome in outcomes if outcome.fate == "failed"] == []
    assert [outcome.parameter for outcome in outcomes if outcome.fate == "refused"] == REFUSED.get(name, [])


def test_a_call_that_is_not_answered_is_told(stack: Stack) -> None:
    """A refusal that is documented, an error that is not, and an answer that is not what was asked for."""
    asked = {"model": DEMO_ALIAS, "messages": [{"role": "user", "content": "Who are you?"}]}
    calls = [
        Sent("POST", "/v1/chat/completions", {}, "bearer", {**asked, "audio": {"voice": "alloy"}}),
        Sent("POST", "/v1/chat/completions", {}, "none", asked),
        Sent("POST", "/v1/chat/completions", {}, "bearer", asked | {"temperature": "warm"}),
        Sent("POST", "/v1/embeddings", {}, "bearer", {"model": EMBEDDER, "input": ["a", "b"]}),
    ]
    recording = Recording("A program", "1", "recorded", calls=calls)
    outcomes = list(replay(recording, stack.gateways[0].url, stack.key))
    assert [outcome.fate for outcome in outcomes] == ["refused", "failed", "failed", "answered"]
    assert outcomes[0].parameter == "audio"
    assert outcomes[1].reason.startswith("401 ")
    assert "temperature" in outcomes[2].reason


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_recording_tells_what_it_is(name: str) -> None:
    recording = RECORDINGS[name]
    assert recording.calls
    assert re.search(r"\d", recording.version)
    assert bool(recording.source) == (recording.how == "read from source")
    text = (FOLDER / f"{name}.json").read_text()
    assert "127.0.0.1" not in text
    assert max(map(len, re.findall(r'"((?:[^"\\]|\\.)*)"', text))) <= 200, "a long text is the program's own"


def test_the_page_tells_the_versions() -> None:
    page = (ROOT / "docs" / "clients.md").read_text()
    for recording in RECORDINGS.values():
        row = f"| {recording.program} | {recording.version} | {recording.how} | {len(recording.calls)} |"
        assert row in page, row


def test_what_a_call_is_called() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"stream": True, "tools": [tool], "tool_choice": "required", "response_format": {"type": "json_object"}}
    call = Sent("POST", "/v1/chat/completions?beta=1", {}, "bearer", json.loads(json.dumps(body)))
    assert str(call) == "POST /v1/chat/completions streamed, 1 tools, tool_choice required, answer as json_object"
