"""uvicorn's server without its signal handlers: whoever runs it decides when it is over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn

from workers.http_server.refusals import Form
from workers.http_server.state import ServerState


class HttpServer(uvicorn.Server):
    """Serves until `should_exit` is set."""

    def __init__(self, config: uvicorn.Config, form: Form) -> None:
        """`form`: how the server's own answers are written."""
        super().__init__(config)
        self.server_state = ServerState(form)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
