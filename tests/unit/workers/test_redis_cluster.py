"""What a command is answered whose slot is moving to another node of a Redis Cluster."""

from __future__ import annotations

from typing import Any, cast

import pytest
from redis.exceptions import AskError, ConnectionError, TimeoutError

from workers.redis.cluster import ClusterClient

ASKED = AskError("42 127.0.0.1:7001")


class Node:
    """The node that the slot moves to."""

    def __init__(self, *, fails: Exception | None = None) -> None:
        self.fails = fails
        self.asked: list[tuple[Any, ...]] = []

    async def execute_pipeline(self, commands: list[Any]) -> bool:
        if self.fails is not None:
            raise self.fails
        for command in commands:
            self.asked.append(command.args)
            command.result = b"OK" if command.args == ("ASKING",) else b"value"
        return False


async def answer_of(node: Node | None) -> Any:
    client = ClusterClient([("127.0.0.1", 7000)], 1.0, 0, 8, {})
    cast(Any, client).get_node = lambda host, port: node if (host, port) == ("127.0.0.1", 7001) else None
    return await client._ask(ASKED, (("GET", "pd:x"), {}))


async def test_the_command_goes_to_the_node_that_the_slot_moves_to() -> None:
    node = Node()
    assert await answer_of(node) == b"value"
    assert node.asked == [("ASKING",), ("GET", "pd:x")]


@pytest.mark.parametrize("fails", [ConnectionError("refused"), TimeoutError("late"), OSError("no route")])
async def test_a_node_that_is_away_is_the_commands_answer(fails: Exception) -> None:
    """The error was raised, and all other commands of the pipeline had no answer."""
    assert await answer_of(Node(fails=fails)) is fails


async def test_a_node_that_the_table_lacks_leaves_the_redirection() -> None:
    assert await answer_of(None) is ASKED
