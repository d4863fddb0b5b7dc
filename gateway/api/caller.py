"""Who asks: what nearly every route begins with, and how much of one key may be under way."""

from __future__ import annotations

from collections import Counter

from starlette.types import Scope

from gateway.access.keys import Keys
from gateway.api.diagnostics import trail_of
from gateway.call import Principal
from gateway.errors import TooManyRequests
from gateway.telemetry.trail import Trail

KEY_REQUESTS, COUNTED = "paddock.key_requests", "paddock.counted_key"
"""Where the ASGI scope has the requests of all keys, and the key that its own is counted for."""
RETRY_S = 1.0


class KeyRequests:
    """Requests under way by key, WebSockets among them: each has a connection, and others need some as well."""

    def __init__(self, most: int) -> None:
        """`most`: of one key."""
        self._most = most
        self._under_way: Counter[str] = Counter()

    def begin(self, scope: Scope, principal: Principal) -> None:
        """Count a request until `end`, once. Raises TooManyRequests."""
        if COUNTED in scope:
            return
        if self._under_way[principal.key_id] >= self._most:
            raise TooManyRequests(
                f"This key has {self._most} requests under way here. Wait for some to end; an operator may raise "
                "PADDOCK_KEY_SHARE.",
                retry_after_s=RETRY_S,
            )
        scope[COUNTED] = principal.key_id
        self._under_way[principal.key_id] += 1

    def end(self, scope: Scope) -> None:
        """The request is answered, or was never counted."""
        key_id = scope.get(COUNTED)
        if key_id is None:
            return
        self._under_way[key_id] -= 1
        if not self._under_way[key_id]:
            del self._under_way[key_id]


def identified(keys: Keys, scope: Scope) -> tuple[Principal, Trail]:
    """The holder of the request's key, whom its trail knows from now on. Raises AuthenticationFailed,
    TooManyRequests.
    """
    trail = trail_of(scope)
    principal = keys.authenticate(scope["headers"])
    trail.asked_by(principal)
    if KEY_REQUESTS in scope:
        scope[KEY_REQUESTS].begin(scope, principal)
    return principal, trail
