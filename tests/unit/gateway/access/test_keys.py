"""API keys: from headers to principals, records in settings."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace

from accounts.protocol.records import AccessRecord, KeysInvalid, digest, first_record, read_records
from gateway.access.directory import Directory
from gateway.access.keys import Keys
from gateway.call import CallBounds
from gateway.errors import AuthenticationFailed

RECORDS = (
    first_record("pk-first"),
    AccessRecord(name="app", team="blue", sha256=digest("pk-app"), aliases=("small", "big")),
)


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer pk-app")],
        [(b"authorization", b"bearer   pk-app ")],
        [(b"x-api-key", b"pk-app")],
        [(b"api-key", b" pk-app")],
        [(b"x-goog-api-key", b"pk-app")],
        [(b"api-key", b"wrong"), (b"x-goog-api-key", b"wrong"), (b"x-api-key", b"pk-app")],
        [(b"x-api-key", b"pk-app"), (b"x-api-key", b"pk-app")],
        [(b"authorization", b"Basic abc"), (b"x-api-key", b"pk-app")],
        [(b"x-api-key", b"wrong"), (b"authorization", b"Bearer pk-app")],
    ],
)
def test_a_key_is_found_in_either_header(headers: list[tuple[bytes, bytes]]) -> None:
    principal = Keys(RECORDS).authenticate(headers)
    assert (principal.key_id, principal.team, principal.admin) == ("app", "blue", False)
    assert principal.may_use("small")
    assert not principal.may_use("other")


def test_the_first_key_may_do_everything() -> None:
    principal = Keys(RECORDS).authenticate([(b"x-api-key", b"pk-first")])
    assert principal.admin
    assert principal.may_use("anything")


@pytest.mark.parametrize("headers", [[], [(b"authorization", b"Bearer ")], [(b"authorization", b"pk-app")]])
def test_a_missing_key_says_how_to_send_one(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(AuthenticationFailed, match="Authorization: Bearer"):
        Keys(RECORDS).authenticate(headers)


@pytest.mark.parametrize("key", [b"pk-ap", b"pk-app ".upper(), b"\xff\xfe", digest("pk-app").encode()])
def test_a_wrong_key_is_another_message(key: bytes) -> None:
    with pytest.raises(AuthenticationFailed, match="not known") as caught:
        Keys(RECORDS).authenticate([(b"x-api-key", key)])
    assert key.decode(errors="replace") not in caught.value.message


def test_a_team_has_the_share_that_its_key_says() -> None:
    text = f'[{{"name": "ci", "team": "red", "sha256": "{digest("pk-ci")}", "weight": 2.5}}]'
    keys = Keys((*RECORDS, *read_records(text)))
    weights = [keys.authenticate([(b"x-api-key", key)]).weight for key in (b"pk-ci", b"pk-app", b"pk-first")]
    assert weights == [2.5, 1.0, 1.0]


def test_replaced_keys_are_gone() -> None:
    keys = Keys(RECORDS)
    keys.replace([first_record("pk-other")])
    with pytest.raises(AuthenticationFailed):
        keys.authenticate([(b"x-api-key", b"pk-first")])


def test_records_from_the_settings() -> None:
    sha256 = digest("k")
    text = f'[{{"name": "ci", "team": "red", "sha256": "{sha256}", "aliases": ["m"], "admin": true}}]'
    assert read_records(text) == (AccessRecord(name="ci", team="red", sha256=sha256, aliases=("m",), admin=True),)
    assert read_records(" ") == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "api_keys"),
        ('[{"name": "a"}]', "sha256"),
        ('[{"name": "a", "sha256": "00"}]', "sha256"),
        ('[{"name": "a", "sha256": "%s", "tem": 1}]' % ("0" * 64), "tem"),
        ('[{"name": "a", "sha256": "%s", "weight": 0}]' % ("0" * 64), "weight"),
        ('[{"name": "a", "sha256": "%s", "weight": 1e9}]' % ("0" * 64), "weight"),
        ('[{"name": "first", "sha256": "%s"}]' % ("0" * 64), "is taken"),
        ('[{"name": "session-ann", "sha256": "%s"}]' % ("0" * 64), "session-ann' is reserved: .*choose another one"),
        ("[" + ", ".join('{"name": "a", "sha256": "%s"}' % (digit * 64) for digit in "01") + "]", "is taken"),
    ],
)
def test_unusable_records_say_where(text: str, words: str) -> None:
    with pytest.raises(KeysInvalid, match=words):
        read_records(text)


def test_what_a_key_may_ask_for_is_bounded() -> None:
    record = AccessRecord(name="a", sha256="0" * 64)
    assert Directory().principal(record).bounds == CallBounds(min_priority=0, max_tokens=None, answer_timeout_s=None)
    assert Directory().principal(replace(record, admin=True)).bounds.min_priority == -100
    text = '[{"name": "a", "sha256": "%s", "min_priority": -3, "max_tokens": 7, "answer_timeout_s": 2}]' % ("0" * 64)
    assert Directory().principal(read_records(text)[0]).bounds == CallBounds(-3, 7, 2.0)
    for wrong in ('"min_priority": -101', '"max_tokens": 0', '"answer_timeout_s": 0'):
        with pytest.raises(KeysInvalid):
            read_records(f'[{{"name": "a", "sha256": "{"0" * 64}", {wrong}}}]')


def test_who_wants_to_know_is_told_of_valid_keys_only() -> None:
    told: list[bytes] = []
    keys = Keys(RECORDS, told.append)
    keys.authenticate([(b"x-api-key", b" pk-first ")])
    with pytest.raises(AuthenticationFailed):
        keys.authenticate([(b"x-api-key", b"pk-unknown")])
    assert told == [b"pk-first"]


def test_finding_a_key_takes_no_longer_with_many_of_them() -> None:
    """Whoever sends a key that is none has all of them searched."""
    keys = Keys(AccessRecord(name=f"key{number}", sha256=digest(f"pk-{number}")) for number in range(10_000))
    begun = time.thread_time()
    for _ in range(100):
        with pytest.raises(AuthenticationFailed):
            keys.authenticate([(b"x-api-key", b"pk-none")])
    assert time.thread_time() - begun < 0.02
    assert keys.authenticate([(b"x-api-key", b"pk-9999")]).key_id == "key9999"
