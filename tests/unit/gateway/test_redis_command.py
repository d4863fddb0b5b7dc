"""`paddock redis acl`: lines that a Redis takes as they are."""

from __future__ import annotations

import pytest
import redis

from gateway.commands import redis_acl
from tests.support.redis_server import RedisServer

ENVIRONMENT = {
    "REDIS_GATEWAY_PASSWORD": "of-gateways",
    "REDIS_SUPERVISOR_PASSWORD": "of-supervisors",
    "REDIS_WORKER_PASSWORD": "of-workers",
}


def test_what_it_prints_makes_the_users(capsys: pytest.CaptureFixture[str]) -> None:
    assert redis_acl.main(["acl"]) == 0
    lines = capsys.readouterr().out.replace("WORKER_PASSWORD", "mine").splitlines()
    assert len(lines) == 3
    with RedisServer() as server, redis.Redis(unix_socket_path=str(server.socket)) as client:
        for line in lines:
            assert client.execute_command(*line.split()) == b"OK"
        with redis.Redis(unix_socket_path=str(server.socket), username="paddock-worker", password="mine") as worker:
            assert worker.sadd("pd:models", "m") == 1
            with pytest.raises(redis.exceptions.NoPermissionError):
                worker.hgetall("pd:keys")


def test_lines_for_a_file_hold_hashes_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert redis_acl.main(["acl", "--format", "config"], ENVIRONMENT) == 0
    text = capsys.readouterr().out
    assert [line.split()[:3] for line in text.splitlines()] == [
        ["user", "paddock-gateway", "on"],
        ["user", "paddock-supervisor", "on"],
        ["user", "paddock-worker", "on"],
    ]
    assert not [password for password in ENVIRONMENT.values() if password in text]


@pytest.mark.parametrize(
    ("args", "words"),
    [([], "paddock redis acl"), (["flush"], "paddock redis acl"), (["acl", "--format", "config"], "is unset")],
)
def test_a_word_that_is_wrong_is_one_line(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert redis_acl.main(args, {}) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert words in lines[0]
