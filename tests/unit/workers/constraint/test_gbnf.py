from __future__ import annotations

import contextlib
import time

import pytest

from workers.constraint.gbnf import MAX_BYTES, check, names_tokens
from workers.constraint.mask import Unusable


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('root ::= "a"{1,100000}', "above 1000"),
        ('root ::= "a"{100000}', "above 1000"),
        ('root ::= "a"{9' + "9" * 40 + ",}", "above 1000"),
        ("root ::= " + " ".join(['"a"{0,1000}'] * 21), "add up to 21000"),
        ("root ::= " + "(" * 51 + '"a"' + ")" * 51, "51 levels"),
        ("root ::= \0", "NUL"),
        ("#" * (MAX_BYTES + 1), "64 KiB"),
    ],
)
def test_too_much_is_refused_before_llama_cpp_sees_it(text: str, words: str) -> None:
    with pytest.raises(Unusable, match=words):
        check(text)


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "{1,100000}" [({9999999})] # {1,100000} ' + "(" * 60,
        "root ::= " + "(" * 50 + '"a"' + ")" * 50,
        'root ::= ("(" "\\"" "(")* "a"{,1000} [\\]{9999}]',
    ],
)
def test_brackets_in_texts_and_comments_do_not_count(text: str) -> None:
    check(text)


@pytest.mark.parametrize("sign", ["[", '"', "[\\", '"\\', '["', "{", "(["])
def test_what_has_no_end_is_read_once(sign: str) -> None:
    """Looking for each one's end anew held the interpreter, and every stream, for minutes."""
    start = time.thread_time()
    with contextlib.suppress(Unusable):
        check(sign * (MAX_BYTES // len(sign)))
    assert time.thread_time() - start < 2


@pytest.mark.parametrize("begun", ["{", "{1,"])
def test_repetitions_without_an_end_are_read_once(begun: str) -> None:
    """Every way to share the digits between two numbers was tried: half a minute, with every thread at rest."""
    start = time.thread_time()
    check(f'root ::= "a"{begun}' + "1" * (MAX_BYTES - 100))
    assert time.thread_time() - start < 2


def test_grammars_that_name_tokens() -> None:
    assert names_tokens("root ::= <[12]> | <think>")
    assert not names_tokens('root ::= "<a>" [<>] # <b>')
