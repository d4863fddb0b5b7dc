"""Access control: identifies a request's caller before the route's handler runs, and limits how many requests each key
has under way.
"""

from __future__ import annotations

import hmac
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from starlette.types import Scope

from accounts.protocol.records import Role
from gateway.access.brakes import Brakes
from gateway.access.keys import Keys, credential_of, key_in
from gateway.access.local_caller import LocalCaller
from gateway.access.proxies import TrustedProxies
from gateway.access.team_starts import TeamStarts
from gateway.back_pressure import too_many_requests, too_many_requests_of_team
from gateway.call import Principal
from gateway.errors import (
    AuthenticationFailed,
    KeyBlocked,
    KeyMissing,
    PermissionDenied,
    RoleNotAllowed,
    TokenNotAccepted,
)
from gateway.telemetry.end_user import EndUser
from gateway.telemetry.request_log import RequestLog

if TYPE_CHECKING:
    from gateway.access.tokens import Tokens

COUNTED = "paddock.counted_caller"
"""Key of the ASGI scope. Its value is the id of the API key for which the request is counted as under way."""

NOBODY = Principal("", "", frozenset(), admin=False)
"""The caller of a request that needs no API key."""

MISSING = "missing"
"""The reason of a failed authentication without any key; others are the errors' codes."""
METRICS: Role = "metrics"
"""The role whose keys open the routes of metrics, and no other."""


TEAM_SHARE = 0.75
"""Share of anything that a gateway has a number of, which all keys of one team may have together: a manager can make
as many keys as it likes."""


def most_of_team(most: int, most_per_key: int) -> int:
    """Return how many of `most` a team may have: its share, but no less than one of its keys."""
    return max(int(TEAM_SHARE * most), min(most, most_per_key))


class Shares:
    """Counts what callers hold, such as open sockets, and limits it by key and by team."""

    def __init__(self, most_per_key: int, most_per_team: int) -> None:
        self.most_per_key = most_per_key
        self.most_per_team = most_per_team
        self._per_key: Counter[str] = Counter()
        self._per_team: Counter[str] = Counter()

    def is_full_for_key(self, key_id: str) -> bool:
        return self._per_key[key_id] >= self.most_per_key

    def is_full_for_team(self, team: str) -> bool:
        return self._per_team[team] >= self.most_per_team

    @property
    def num_held(self) -> int:
        return self._per_key.total()

    def take(self, key_id: str, team: str) -> None:
        self._per_key[key_id] += 1
        self._per_team[team] += 1

    def give_back(self, key_id: str, team: str) -> None:
        for counter, name in ((self._per_key, key_id), (self._per_team, team)):
            counter[name] -= 1
            if not counter[name]:
                del counter[name]


class Access(Enum):
    """The access that a route requires of its caller: nothing, an API key, or an admin's API key."""

    OPEN = "nothing"
    KEY = "an API key"
    ADMIN = "an admin's API key"


OPEN, KEY, ADMIN = Access


class RouteToken(NamedTuple):
    """A token that opens one route. The API keys of some roles open the route as well; others do not."""

    token: str
    refusal: str
    """Error message for callers whose API key has another role."""
    roles: frozenset[Role] = frozenset({"admin"})


def _ignore(reason: str) -> None:
    """Do nothing: the default for `failed`."""


class AccessControl:
    """Identifies callers, and limits the requests under way of each key and team, WebSockets included, so that none can
    take all connections."""

    def __init__(
        self,
        keys: Keys,
        under_way: Shares | None = None,
        tokens: Mapping[str, RouteToken] | None = None,
        proxies: TrustedProxies | None = None,
        brakes: Brakes | None = None,
        failed: Callable[[str], None] = _ignore,
        people: Tokens | None = None,
        local: LocalCaller | None = None,
    ) -> None:
        """`under_way` counts the requests under way; None: as many as come. `tokens`: path -> route's token.
        `failed` is called for each request that is refused for its key, with the error's code, or `missing`.
        `people` authenticates tokens of identity providers; None: there are none. `local` knows who needs no key; None:
        everybody needs one."""
        self._keys = keys
        self._tokens = tokens or {}
        self.proxies = proxies or TrustedProxies()
        self._brakes = brakes or Brakes()
        self._failed = failed
        self._people = people
        self._local = local
        self._under_way = under_way or Shares(sys.maxsize, sys.maxsize)
        self.starts = TeamStarts()

    @property
    def is_open(self) -> bool:
        """Whether calls from this machine need no key."""
        return self._local is not None

    def authenticate(self, scope: Scope) -> Principal:
        """Return the holder of the API key, token or session cookie in the headers; without any, the local caller.

        Raises AuthenticationFailed, PermissionDenied (also if the key is for metrics only), ProviderUnavailable."""
        principal = self._known_holder(scope)
        if principal.role == METRICS:
            raise RoleNotAllowed(
                f"This API key reads metrics, and may not call {scope['method']} {scope['path']}. Use another key."
            )
        return principal

    async def identify(self, scope: Scope, request_log: RequestLog, access: Access) -> Principal:
        """Return the request's caller. If that takes an API key, note the caller in the request's log, and wait until
        the request may begin. Call `end` when the request is over, even if this raised an error.

        Raises AuthenticationFailed, PermissionDenied, ProviderUnavailable, TooManyRequests, TooManyFailures."""
        try:
            if access is not KEY:
                if (token := self._tokens.get(scope["path"])) is not None:
                    return self._holder_for(scope, token)
                if access is OPEN:
                    return NOBODY
            if self._people is not None and (key := self._credential(scope)) is not None:
                await self._people.prepare(key)
            principal = self.authenticate(scope)
        except (AuthenticationFailed, PermissionDenied) as error:
            await self._refused(scope, request_log, error)
            raise
        request_log.asked_by(principal)
        if principal.names_end_users:
            request_log.ignored.end_user = EndUser(scope["headers"])
        self._begin(scope, principal)
        await self.starts.start(principal.team)
        if access is ADMIN and not principal.admin:
            raise RoleNotAllowed(
                f"Only an admin's API key may call {scope['method']} {scope['path']}. Ask the operator."
            )
        return principal

    def end(self, scope: Scope) -> None:
        """Stop counting a request, if it was counted."""
        if (counted := scope.get(COUNTED)) is not None:
            self._under_way.give_back(*counted)

    def _begin(self, scope: Scope, principal: Principal) -> None:
        shares, counted = self._under_way, (principal.key_id, principal.team)
        if shares.is_full_for_key(principal.key_id):
            raise too_many_requests(shares.most_per_key)
        if shares.is_full_for_team(principal.team):
            raise too_many_requests_of_team(shares.most_per_team, principal.team)
        scope[COUNTED] = counted
        shares.take(*counted)

    def _known_holder(self, scope: Scope) -> Principal:
        key = self._credential(scope)
        if key is None and self._local is not None:
            principal = self._local.principal(scope)
        elif self._people is not None and key is not None and self._people.takes(key):
            principal = self._people.authenticate(key)
        else:
            principal = self._keys.holder_of(key, partial(self.proxies.address_of, scope))
        if principal.blocked:
            raise KeyBlocked(f"{principal.blocked} is blocked, and so is this caller. Ask whoever runs this gateway.")
        return principal

    def _credential(self, scope: Scope) -> bytes | None:
        """Return the key or token of a request; None: it has none. Where none is needed, cookies count for nothing: one
        of another gateway on this machine would keep its holder out. Raises KeyMissing."""
        return credential_of(scope) if self._local is None else key_in(scope["headers"])

    def _holder_for(self, scope: Scope, token: RouteToken) -> Principal:
        """Return NOBODY if the request has the route's token, else the holder of its API key, if that has one of the
        route's roles. Such requests do not count as under way."""
        if hmac.compare_digest(key_in(scope["headers"]) or b"", token.token.encode()):
            return NOBODY
        principal = self._known_holder(scope)
        if principal.role not in token.roles:
            raise RoleNotAllowed(token.refusal)
        return principal

    async def _refused(
        self, scope: Scope, request_log: RequestLog, error: AuthenticationFailed | PermissionDenied
    ) -> None:
        """Note a refusal, with the key's name if it is known; if not, slow down whoever tries keys.

        Raises TooManyFailures."""
        key = None if isinstance(error, KeyMissing) else self._credential(scope)
        if key is None:
            self._failed(MISSING)
            return
        self._failed(error.code or error.type)
        if (principal := self._keys.known(key)) is not None:
            request_log.asked_by(principal)
            return
        if isinstance(error, TokenNotAccepted | PermissionDenied):
            return  # a provider has signed the token: nobody tries keys
        address = self.proxies.address_of(scope)
        if delay_s := self._brakes.failed(address):
            request_log.closes = True  # the next try takes a connection of its own
            await self._brakes.delay(address, delay_s)
