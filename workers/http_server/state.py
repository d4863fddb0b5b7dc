"""What the connections of one server share."""

from __future__ import annotations

from uvicorn.server import ServerState as UvicornState

from workers.http_server.connections import Connections
from workers.http_server.refusals import Form


class ServerState(UvicornState):
    """uvicorn's state, which every protocol is built with, and what ours need beside it."""

    def __init__(self, form: Form, connections: Connections) -> None:
        super().__init__()
        self.form = form
        self.bounded = connections
