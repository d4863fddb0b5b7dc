"""Callers whose key was good lately are known from the bytes of a request; keys themselves are not kept."""

from __future__ import annotations

import pytest

from workers.http_server import pacer as callers_module
from workers.http_server.pacer import LOOKED_AT_BYTES, KnownCallers

KEY = b"pk-one-0123456789"


@pytest.mark.parametrize(
    "header",
    [
        b"authorization: Bearer %b",
        b"Authorization:bearer  %b ",
        b"AUTHORIZATION: BEARER\t%b",
        b"x-api-key: %b",
        b"Api-Key: %b",
        b"x-goog-api-key:%b",
        b"X-Api-Key:%b\t",
    ],
)
def test_a_caller_is_known_by_its_key_however_it_is_sent(header: bytes) -> None:
    known = KnownCallers()
    head = b"GET / HTTP/1.1\r\nhost: x\r\n" + header % KEY + b"\r\naccept: */*\r\n\r\n"
    assert known.caller_of(head) == ""
    known.verified(KEY)
    name = known.caller_of(head)
    assert name
    assert name == known.caller_of(b"POST / HTTP/1.1\r\nauthorization: Bearer " + KEY + b"\r\n\r\n")
    assert KEY.decode() not in name


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nauthorization: Bearer pk-two-0123456789\r\n\r\n",
        b"GET / HTTP/1.1\r\nauthorization: Basic %b\r\n\r\n" % KEY,
        b"GET / HTTP/1.1\r\nx: authorization: Bearer %b\r\n\r\n" % KEY,
        b"GET / HTTP/1.1\r\nx: %b\r\nx-api-key: %b\r\n\r\n" % (b"a" * LOOKED_AT_BYTES, KEY),
        b"",
    ],
)
def test_nobody_else_is(head: bytes) -> None:
    known = KnownCallers()
    known.verified(KEY)
    assert known.caller_of(head) == ""


def test_two_keys_are_two_callers_and_names_differ_by_process() -> None:
    def named(known: KnownCallers, key: bytes) -> str:
        known.verified(key)
        return known.caller_of(b"GET / HTTP/1.1\r\nx-api-key: " + key + b"\r\n\r\n")

    one, other = KnownCallers(), KnownCallers()
    assert len({named(one, KEY), named(one, b"pk-two"), named(other, KEY)}) == 3


def test_the_longest_unused_are_forgotten() -> None:
    known = KnownCallers(most=2)
    for key in (b"a", b"b", b"a", b"c"):
        known.verified(key)
    heads = {key: b"GET / HTTP/1.1\r\nx-api-key: " + key + b"\r\n\r\n" for key in (b"a", b"b", b"c")}
    assert [key for key, head in heads.items() if known.caller_of(head)] == [b"a", b"c"]


def test_a_key_that_was_good_long_ago_is_anybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    known = KnownCallers()
    known.verified(KEY)
    head = b"GET / HTTP/1.1\r\nx-api-key: " + KEY + b"\r\n\r\n"
    assert known.caller_of(head)
    monkeypatch.setattr(callers_module, "LATELY_S", -1.0)
    assert known.caller_of(head) == ""
