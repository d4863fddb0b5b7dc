from __future__ import annotations

import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.step.answer_text import AnswerText

cuts = st.lists(st.integers(1, 4), max_size=40)


def pieces(data: bytes, sizes: list[int]) -> list[bytes]:
    found, at = [], 0
    for size in sizes:
        found.append(data[at : at + size])
        at += size
    return [*found, data[at:]]


def reference(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Character by character: the first stop string that is complete ends the text; of two, the longer."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(st.binary(max_size=60), cuts)
def test_bytes_become_whole_characters_however_they_are_cut(data: bytes, sizes: list[int]) -> None:
    answer = AnswerText()
    out = [answer.push(piece) for piece in pieces(data, sizes)]
    assert "".join(out) + answer.finish() == data.decode("utf-8", "replace")


@given(st.text(max_size=30))
def test_a_character_leaves_with_its_last_byte(text: str) -> None:
    answer = AnswerText()
    data, seen = text.encode("utf-8", "ignore"), ""
    for number in range(len(data)):
        seen += answer.push(data[number : number + 1])
        assert seen == data[: number + 1].decode("utf-8", "ignore")


def test_bytes_that_cannot_become_a_character_leave_at_once() -> None:
    answer = AnswerText()
    assert answer.push(b"a\xe2\x82") == "a"
    assert answer.push(b"b") == "\ufffdb"
    assert answer.push(b"\xff") == "\ufffd"
    assert answer.push(b"\xf0\x9f") == ""
    assert answer.finish() == "\ufffd"


few = st.text("abé", max_size=24)
some_stops = st.lists(st.text("abé", min_size=1, max_size=5), max_size=4).map(tuple)


@given(few, some_stops, cuts)
def test_stop_strings_cut_at_the_same_place_however_tokens_fall(
    text: str, stops: tuple[str, ...], sizes: list[int]
) -> None:
    answer = AnswerText(stops)
    out = "".join(answer.push(piece) for piece in pieces(text.encode(), sizes)) + answer.finish()
    assert (out, answer.stop) == reference(text, stops)


@given(few, some_stops)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: tuple[str, ...]) -> None:
    answer, seen = AnswerText(stops), ""
    for end, character in enumerate(text, 1):
        seen += answer.push(character.encode())
        if answer.stop is not None:
            return
        held = text[len(seen) : end]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert not any(text[: len(seen)].endswith(stop) for stop in stops)


def test_nothing_leaves_after_a_stop_string() -> None:
    answer = AnswerText(("END",))
    assert answer.push(b"one EN") == "one "
    assert answer.push(b"D two") == ""
    assert answer.push(b" three") == ""
    assert answer.finish() == ""
    assert answer.stop == "END"


def test_a_beginning_that_comes_to_nothing_is_released() -> None:
    answer = AnswerText(("aab",))
    assert [answer.push(piece) for piece in (b"a", b"a", b"a", b"c")] == ["", "", "a", "aac"]


def test_the_beginning_of_a_stop_string_leaves_when_the_model_ends() -> None:
    answer = AnswerText(("###",))
    assert answer.push(b"x##") == "x"
    assert answer.finish() == "##"
    assert answer.stop is None


@pytest.mark.parametrize("stops", [(), ("",)])
def test_empty_stop_strings_are_none(stops: tuple[str, ...]) -> None:
    assert AnswerText(stops).push(b"abc") == "abc"


@pytest.mark.serial
def test_a_token_costs_the_same_however_many_stop_strings_have_begun() -> None:
    """Each end of what was held back was compared with each of 128 stop strings: 16 ms for a token."""
    stops = tuple("a" * 60 + chr(97 + number % 26) + chr(97 + number // 26) + "!" for number in range(128))
    answer = AnswerText(stops)
    answer.push(b"a" * 60)
    start = time.perf_counter()
    for _ in range(200):
        answer.push(b"aaaa")
    assert time.perf_counter() - start < 0.5
    assert answer.push(b"bc!") == "aa", "as much was held back as may have become the longest of them"
    assert answer.stop == "a" * 60 + "bc!"


def test_kept_stop_strings_take_little_memory() -> None:
    tracemalloc.start()
    try:
        for number in range(8):
            AnswerText(tuple(f"{number}{place:03}" + chr(97 + place % 26) * 60 for place in range(128)))
        assert tracemalloc.get_traced_memory()[0] < 4 << 20
    finally:
        tracemalloc.stop()
