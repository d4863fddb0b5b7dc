"""Calls the admin API of a gateway by the project's own client."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, BinaryIO
from urllib.parse import quote

import msgspec

from gateway.client import AnswerError
from gateway.client.client import Connection
from gateway.client.request import Request
from gateway.client.transport import Server

_LIST_ROUTE = re.compile(r"`GET /admin/(keys|teams|users|organisations|aliases|budgets|prices)`")
_PARAMETER = re.compile(r"`\?(\w+)=true`")


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the API."""

    raw: bytes
    document: Any
    """The same, decoded."""


def read_answer(body: bytes) -> Answer:
    """Return an answer. Raises msgspec.DecodeError."""
    return Answer(body, msgspec.json.decode(body))


class AdminApi:
    """The admin API of one gateway. Every call may raise ClientError."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._connection = Connection(server)

    @property
    def url(self) -> str:
        """The address of the gateway, without `/v1`."""
        return self._server.root

    def with_key(self, key: str) -> AdminApi:
        """Return the same API for the holder of another key, to be closed by itself. An empty key stands for nobody."""
        return AdminApi(replace(self._server, api_key=key))

    def __enter__(self) -> AdminApi:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def get(self, path: str, **query: Any) -> Answer:
        """Get a document. Parameters that are None or empty are left out."""
        return self._send("GET", path, query)

    def post(self, path: str, body: object = None, *, request: str = "", **query: Any) -> Answer:
        """Send a document. `request`: an idempotency key, with which the call may be repeated."""
        return self._send("POST", path, query, body, {"idempotency-key": request} if request else {})

    def upload(self, path: str, content: bytes, **query: Any) -> Answer:
        """Send a file's contents as they are."""
        request = Request("POST", path, read_answer, _query(query), content, "application/yaml")
        return self._connection.send(request)

    def put(self, path: str, body: object) -> Answer:
        return self._send("PUT", path, {}, body)

    def patch(self, path: str, body: object) -> Answer:
        return self._send("PATCH", path, {}, body)

    def delete(self, path: str, **query: Any) -> Answer:
        return self._send("DELETE", path, query)

    def save(self, path: str, file: BinaryIO, **query: Any) -> int:
        """Write an answer into a file; return the number of bytes. Raises OSError as well."""
        return self._connection.save(Request("GET", path, read_answer, _query(query)), file)

    def send(self, request: Request[Any]) -> Any:
        """Send a call of another kind, and return its answer."""
        return self._connection.send(request)

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        content = None if body is None else msgspec.json.encode(body)
        request = Request(method, path, read_answer, _query(query), content, headers=headers or {})
        return self._connection.send(request)


def path_of(*parts: str) -> str:
    """Return the path of a record's route: `path_of("teams", "red")` is `/admin/teams/red`."""
    return "/".join(("/admin", *(quote(part, safe="") for part in parts)))


def told(error: AnswerError) -> str:
    """Return an error's message in one line, in the words of these commands in place of the API's."""
    message = _LIST_ROUTE.sub(r"`paddock \1 list`", " ".join(error.message.split()))
    return _PARAMETER.sub(lambda found: f"`--{found[1].replace('_', '-')}`", message)


def _query(given: Mapping[str, Any]) -> dict[str, str]:
    return {name.rstrip("_"): _text(value) for name, value in given.items() if value not in (None, "", False)}


def _text(value: Any) -> str:
    return "true" if value is True else str(value)
