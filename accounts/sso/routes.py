"""The routes of single sign-on, and what is done in the background for them."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from accounts.access.changes import Changes
from accounts.api.api import EVERYBODY, AdminRequest, RouteRow, answer
from accounts.database.database import AWAY
from accounts.oidc.providers import Providers
from accounts.protocol.records import Role
from accounts.sso import cookies
from accounts.sso.answers import LOGIN_PATH, for_browsers, for_programs
from accounts.sso.browser import CALLBACK_PATH, Browsers, CodeBody, LoginQuery
from accounts.sso.device import BeginBody, DeviceCodes, DeviceFlows, PollBody
from accounts.sso.members import Members, Session
from accounts.sso.pace import Pace
from accounts.sso.pending import Pending

log = logging.getLogger(__name__)

SWEEP_S = 60.0
BEGINS_PER_ADDRESS, BEGINS_IN_ALL = 120, 1200
"""Maximum requests per minute that begin or end a sign-in."""
POLLS_PER_ADDRESS, POLLS_IN_ALL = 600, 6000
"""Maximum requests per minute that ask whether a device flow is over: some every few seconds per flow."""
ANYBODY: frozenset[Role] = frozenset({"admin", "manager", "user", "metrics"})


class SignedOut(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a sign-out."""

    signed_out: bool
    """Whether the caller's key was a session, which is over now."""


@dataclass(frozen=True, slots=True)
class SignOnPart:
    """Single sign-on as a part of the service: its routes, and what `run` does meanwhile."""

    rows: tuple[RouteRow, ...]
    providers: Providers
    pending: Pending
    members: Members

    async def run(self) -> None:
        """Fetch the providers' keys, and forget what has expired, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.providers.run())
            tasks.create_task(self._sweep())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await run_in_threadpool(self.pending.sweep)
                await run_in_threadpool(self.members.sweep)
            except AWAY as error:
                log.warning("expired sessions stay, since the database failed: %s", error)


def sign_on_part(providers: Providers, changes: Changes) -> SignOnPart:
    """Return the part for these providers; without any, its routes say that there is no single sign-on."""
    pending, members = Pending(changes.database), Members(changes, providers.sign_on)
    begins, polls = Pace(BEGINS_PER_ADDRESS, BEGINS_IN_ALL), Pace(POLLS_PER_ADDRESS, POLLS_IN_ALL)
    browsers = Browsers(providers, pending, members, begins)
    devices = DeviceFlows(providers, pending, members, begins, polls)

    login, fetch_key = for_browsers(browsers.login), for_programs(browsers.fetch_key)
    begin, poll = for_programs(devices.begin), for_programs(devices.poll)

    def log_out(request: AdminRequest) -> Response:
        """End the session of the caller, and have its browser forget the cookie."""
        response = answer(SignedOut(signed_out=members.sign_out(request.caller)))
        for is_secure in (True, False):
            cookies.drop_session(response, is_secure)
        return response

    rows = (
        RouteRow("GET", LOGIN_PATH, EVERYBODY, login, "send the browser to sign in", query=LoginQuery, status=303),
        RouteRow("GET", CALLBACK_PATH, EVERYBODY, for_browsers(browsers.callback), "where it comes back"),
        RouteRow("POST", "/auth/token", EVERYBODY, fetch_key, "a program's key, for its code", CodeBody, Session),
        RouteRow("POST", "/auth/device", EVERYBODY, begin, "begin a device flow", BeginBody, DeviceCodes),
        RouteRow("POST", "/auth/device/token", EVERYBODY, poll, "the key, once it is over", PollBody, Session),
        RouteRow("POST", "/auth/logout", ANYBODY, log_out, "end the caller's session", None, SignedOut),
    )
    return SignOnPart(rows, providers, pending, members)
