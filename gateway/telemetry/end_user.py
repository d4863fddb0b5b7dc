"""The end user of a request: the person behind a chat platform, named by a key that is trusted to name them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MAX_CHARS = 256
HEADERS = (b"x-litellm-end-user-id", b"x-openwebui-user-email", b"x-openwebui-user-id")
"""Headers that name the end user, in order of precedence. They beat the body: platforms set them, while bodies come
from programs of their users."""
PARAMETERS = ("safety_identifier", "user", "metadata")
"""Parameters of bodies that name the end user, in order of precedence; of the last one its field `user_id` does."""


class EndUser:
    """Reads the end user from a request's headers and body."""

    __slots__ = ("_by_body", "_by_headers")

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        found = {name: value for name, value in headers if name in HEADERS}
        named = next((value for name in HEADERS if (value := found.get(name, b"").strip())), b"")
        self._by_headers = _bounded(named.decode("utf-8", "replace"))
        self._by_body = ""

    @property
    def name(self) -> str:
        """The name; empty: the request names none."""
        return self._by_headers or self._by_body

    def another(self) -> EndUser:
        """Return the end user of another request on the same WebSocket, whose body is still to be read."""
        return EndUser(((HEADERS[0], self._by_headers.encode()),))

    def read(self, document: Mapping[str, object]) -> frozenset[str]:
        """Take the name in a body, and return the parameters that may name the end user there."""
        named = {parameter: _name_in(document.get(parameter)) for parameter in PARAMETERS}
        self._by_body = next((name for name in named.values() if name), "")
        return frozenset(parameter for parameter, name in named.items() if name)


def _name_in(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("user_id")
    return _bounded(value) if isinstance(value, str) else ""


def _bounded(name: str) -> str:
    """Return the name without control characters and blanks around it, and no longer than it may be."""
    return "".join(char for char in name.strip()[:MAX_CHARS] if char.isprintable()).strip()
