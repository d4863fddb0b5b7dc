"""What Redis says in place of an answer, in each of the ways in which versions say it."""

from __future__ import annotations

import pytest
from redis._parsers.base import BaseParser
from redis.exceptions import ConnectionError, ResponseError

from gateway.errors import StoreUnavailable
from gateway.store.outage import checked, code_of, is_of_one_name, reading, remedy_for

SAID = [
    ("BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.", "BUSY"),
    ("LOADING Redis is loading the dataset in memory", "LOADING"),
    ("MISCONF Redis is configured to save RDB snapshots, but it is currently not able to persist on disk.", "MISCONF"),
    ("NOREPLICAS Not enough good replicas to write.", "NOREPLICAS"),
    ("OOM command not allowed when used memory > 'maxmemory'.", "OOM"),
    ("READONLY You can't write against a read only replica.", "READONLY"),
    ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", "MASTERDOWN"),
    ("CLUSTERDOWN Hash slot not served", "CLUSTERDOWN"),
    ("TRYAGAIN Multiple keys request during rehashing of slot", "TRYAGAIN"),
    ("WRONGTYPE Operation against a key holding the wrong kind of value", "WRONGTYPE"),
    ("NOPERM this user has no permissions to run the 'evalsha' command", "NOPERM"),
    ("ERR Error running script (call to f_1): @user_script:9: -OOM command not allowed when used memory", "OOM"),
    ("ERR Error running script (call to f_1): @user_script:9: @user_script: 9: -READONLY You can't write", "READONLY"),
    ("ERR Error running script (call to f_1): @user_script:9: WRONGTYPE Operation against a key", "WRONGTYPE"),
    ("ERR user_script:9: attempt to perform arithmetic on a nil value", ""),
    ("ERR value is not an integer or out of range, said the BUSYBODY", ""),
]


@pytest.mark.parametrize(("line", "code"), SAID)
def test_codes_are_found_wherever_they_stand(line: str, code: str) -> None:
    error = BaseParser.parse_error(line)  # type: ignore[no-untyped-call]
    assert code_of(error) == code
    assert remedy_for(error)
    assert is_of_one_name(error) == (code in ("", "WRONGTYPE"))
    with pytest.raises(StoreUnavailable, match="store does not answer"):
        checked([b"fine", error])


def test_no_connection_is_of_no_one_name() -> None:
    assert not is_of_one_name(ConnectionError("gone"))
    assert "PADDOCK_REDIS_URL" in remedy_for(TimeoutError())
    assert checked([b"fine", None, 3]) == [b"fine", None, 3]


@pytest.mark.parametrize("answer", [[b"\xff"], [7], [], [None]])
def test_what_cannot_be_read_is_no_answer(answer: list[bytes]) -> None:
    with pytest.raises(StoreUnavailable), reading():
        answer[0].decode()


def test_a_plain_mistake_in_a_script_has_a_remedy() -> None:
    assert "what else uses this Redis" in remedy_for(ResponseError("attempt to index a nil value"))
