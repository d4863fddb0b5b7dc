"""Who asks: what nearly every route begins with."""

from __future__ import annotations

from starlette.types import Scope

from gateway.access.keys import Keys
from gateway.api.diagnostics import trail_of
from gateway.call import Principal
from gateway.telemetry.trail import Trail


def identified(keys: Keys, scope: Scope) -> tuple[Principal, Trail]:
    """The holder of the request's key, whom its trail knows from now on. Raises AuthenticationFailed."""
    trail = trail_of(scope)
    principal = keys.authenticate(scope["headers"])
    trail.asked_by(principal)
    return principal, trail
