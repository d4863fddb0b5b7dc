"""`/v1/responses` over WebSocket: checks who may open a connection, and runs it."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from gateway.api.caller import identified
from gateway.api.diagnostics import answer_headers
from gateway.api.responses.connection import Connection, Rooms
from gateway.api.slo import read_begin_by
from gateway.api.sockets import SWITCHED, Socket, Sockets
from gateway.errors import Stopping


class ResponsesSocket:
    def __init__(self, rooms: Rooms, sockets: Sockets) -> None:
        self._rooms = rooms
        self._sockets = sockets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        principal, trail = await identified(self._rooms.keys, scope)
        read_begin_by(scope)
        if self._rooms.pipeline.stopping:
            raise Stopping("This gateway is stopping. Connect again.", retry_after_s=1.0)
        self._sockets.check(principal)
        socket = Socket(receive, send)
        connection = Connection(self._rooms, socket, scope, trail.request_id)
        with self._sockets.opened(connection, principal):
            trail.status = SWITCHED
            await socket.accept(answer_headers(trail))
            await connection.run()
        trail.outcome = "ok"
