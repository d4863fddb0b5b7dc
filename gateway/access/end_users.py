"""The end users that trusted keys name: the people behind a chat platform, whose usage is counted apart."""

from __future__ import annotations

from collections.abc import Iterable

MAX_CHARS = 256
HEADERS = (b"x-litellm-end-user-id", b"x-openwebui-user-email", b"x-openwebui-user-id")
"""Headers that name the end user, in order of precedence. They beat what the body says, as platforms set them and the
bodies come from their users' programs."""
_HEADERS = frozenset(HEADERS)


def end_user_in(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the end user that the headers name; empty: none."""
    found = {name: value for name, value in headers if name in _HEADERS}
    named = next((value for name in HEADERS if (value := found.get(name, b"").strip())), b"")
    return bounded(named.decode("utf-8", "replace"))


def bounded(name: str) -> str:
    """Return the name without control characters, and no longer than it may be."""
    return "".join(char for char in name[: 2 * MAX_CHARS] if char.isprintable())[:MAX_CHARS]
