"""Where an answer of indented lines ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.cache.prompt import Prompt
from workers.engine.request import EngineRequest
from workers.engine.step.token_hooks import Indent, TokenHooks
from workers.protocol.events import CallEvent, FinishReason, Text, Timings, Tokens
from workers.protocol.requests import GenerateRequest, Sampling


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("return 1", None),
        ("(a):\n    return a", None),
        ("(a):\n    return a\n\treturn", 19),
        ("(a):\n    x\n  y", 13),
        ("(a):\n    x\ny", 11),
        ("(a):\n    x\n\n    y", 11),
        ("a\n      deeper\n    x", None),
        ("a\n", None),
        ("a\n  ", None),
    ],
)
def test_where_it_ends(text: str, end: int | None) -> None:
    assert Indent(4).end_in(text) == end


@given(st.text(alphabet="a \t\n", max_size=30), st.integers(1, 4), st.lists(st.integers(0, 30), max_size=4))
def test_pieces_make_no_difference(text: str, least: int, cuts: list[int]) -> None:
    whole = Indent(least).end_in(text)
    indent, start, found = Indent(least), 0, None
    for cut in [*sorted(cuts), len(text)]:
        end = indent.end_in(text[start:cut]) if cut > start else None
        if end is not None:
            found = start + end
            break
        start = max(start, cut)
    assert found == whole


class Said:
    """An answer whose tokens are its characters' numbers."""

    first_token_at = 0.0

    def accept(self, token: int, events: list[CallEvent]) -> FinishReason | None:
        events.append(Text(1, chr(token)))
        return None

    def timings(self, now: float) -> Timings:
        return Timings(0, 0, 0.0, 0, 0.0)

    def flush(self, events: list[CallEvent]) -> None:
        raise AssertionError("nothing is held back here")


def test_a_watched_answer_ends_before_the_line() -> None:
    request = EngineRequest(1, GenerateRequest(n_indent=2, tell=("tokens",)), Prompt([1]), Sampling())
    assert request.has_hooks
    watch = TokenHooks(request)
    events: list[CallEvent] = []
    reasons = [watch.accept(Said(), ord(character), events) for character in "a\n  b\nc"]
    assert reasons == [None] * 6 + [FinishReason.LENGTH]
    assert "".join(event.text for event in events if isinstance(event, Text)) == "a\n  b\n"
    assert sum(isinstance(event, Tokens) for event in events) == 7
