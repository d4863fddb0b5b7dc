"""Probabilities that a gateway holds of an answer are counted, and are not without bound."""

from __future__ import annotations

import pytest

from gateway.api.held_probs import HeldProbs
from gateway.errors import InvalidRequest
from workers.protocol.events import CallEvent, Logprobs, Text, TokenLogprob
from workers.protocol.requests import GenerateRequest

ONE = TokenLogprob(5, b"a", -1.0)
EVENTS: list[CallEvent] = [Logprobs(1, ONE, (ONE, ONE)), Text(1, "a")]


def test_the_chosen_one_and_those_in_its_place_count() -> None:
    held = HeldProbs([GenerateRequest(n_probs=2)], 6)
    held.add(EVENTS)
    held.add(EVENTS)
    with pytest.raises(InvalidRequest, match="more than 6 probabilities"):
        held.add(EVENTS)


def test_what_was_written_is_held_no_more() -> None:
    held = HeldProbs([GenerateRequest(n_probs=2)], 6)
    for _ in range(10):
        held.add(EVENTS)
        held.clear()


def test_only_answers_that_tell_any_are_looked_at() -> None:
    assert not HeldProbs([GenerateRequest()], 6).are_told
    assert HeldProbs([GenerateRequest(), GenerateRequest(n_probs=-1)], 6).are_told
