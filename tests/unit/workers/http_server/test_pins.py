"""What our protocols use of uvicorn's and websockets' classes is there, and a new version has to be let in by hand."""

from __future__ import annotations

import ast
import asyncio
import inspect
import textwrap
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from gateway.api.http.websocket_protocol import WebSocketProtocol
from workers.http_server.connection import BoundedConnection
from workers.http_server.connections import ConnectionBounds
from workers.http_server.protocol import HttpProtocol
from workers.http_server.server import HttpServer, ServerDiffers, check_parts

ROOT = Path(__file__).resolve().parents[4]
PINNED = ("uvicorn", "websockets", "httptools")


async def app(scope: object, receive: object, send: object) -> None:
    raise NotImplementedError


def chains(ours: type, prefix: str) -> Iterator[str]:
    """Names behind `prefix.` or `super().` in a class."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(ours)))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in (prefix, "super()"):
            yield node.attr


@pytest.mark.parametrize(
    ("ours", "theirs"), [(HttpProtocol, HttpToolsProtocol), (WebSocketProtocol, WebSocketsSansIOProtocol)]
)
async def test_what_the_protocols_use_is_there(ours: Any, theirs: type) -> None:
    classes = (ours, BoundedConnection)
    own = {name for each in classes for name in vars(each) if name not in vars(theirs)}
    config = uvicorn.Config(app, lifespan="off", log_config=None)
    instance = theirs(config, ServerState(), {}, asyncio.get_running_loop())
    if isinstance(instance, HttpToolsProtocol):
        instance.on_message_begin()
    there = set(dir(instance))
    made = {
        target.attr
        for each in classes
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(each))))
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self" and target.attr.startswith("_")
    }
    used = {name for each in classes for name in chains(each, "self")} - own - made
    assert used
    assert used <= there, f"{theirs.__name__} has lost {sorted(used - there)}"
    assert used - {"__init__"} == set(ours.UVICORN_PARTS), "what is looked for at start"
    check_parts(ours)


def test_a_server_that_lacks_a_part_is_told_at_start() -> None:
    class Newer(HttpProtocol):
        UVICORN_PARTS: ClassVar = (*HttpProtocol.UVICORN_PARTS, "on_something_new")

    with pytest.raises(ServerDiffers, match=f"uvicorn {uvicorn.__version__} has no `on_something_new`"):
        HttpServer(uvicorn.Config(app, http=Newer, log_config=None), lambda refusal: b"", ConnectionBounds.of(1024))


async def test_what_is_used_of_their_parts_is_there() -> None:
    config = uvicorn.Config(app, lifespan="off", log_config=None)
    loop = asyncio.get_running_loop()
    http = HttpToolsProtocol(config, ServerState(), {}, loop)
    assert hasattr(http.pipeline, "appendleft")
    cycle = inspect.signature(RequestResponseCycle.__init__).parameters
    assert {"flow", "keep_alive", "on_response"} <= cycle.keys()
    parts = (
        "scope",
        "body",
        "disconnected",
        "message_event",
        "more_body",
        "response_started",
        "waiting_for_100_continue",
    )
    assert all(f"self.{name} = " in inspect.getsource(RequestResponseCycle) for name in parts)
    assert "response_complete" in inspect.getsource(RequestResponseCycle)
    assert {"pause_reading", "resume_reading"} <= vars(FlowControl).keys()
    assert "self.read_paused = False" in inspect.getsource(FlowControl.__init__)
    socket = WebSocketsSansIOProtocol(config, ServerState(), {}, loop)
    assert hasattr(socket.conn, "handshake_exc")
    assert callable(socket.conn.fail)
    assert isinstance(socket.conn.reader.buffer, bytearray)
    assert callable(socket.conn.reader.discard)
    assert "capture_signals" in vars(uvicorn.Server)
    assert "server_state" in vars(uvicorn.Server(config))


@pytest.mark.parametrize("name", PINNED)
def test_newer_versions_are_let_in_by_hand(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["gateway"]]
    (bound,) = [each.partition("<")[2] for each in wanted if each.startswith(name)]
    assert bound, f"{name} has no upper bound in pyproject.toml"
    installed = [int(part) for part in version(name).split(".")[:2]]
    assert installed < [int(part) for part in bound.split(".")]
