"""Answers of the sign-on routes: keys for programs, pages for browsers, and errors for both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from accounts.api.api import AdminRequest, answer
from accounts.database.database import AWAY
from accounts.errors import AccountsError, DatabaseAway, Forbidden, Missing, ProviderUnavailable
from accounts.oidc.people import Person
from accounts.oidc.provider_http import ProviderAway
from accounts.oidc.providers import KnownProvider, Providers
from accounts.oidc.verification import TokenRefused
from accounts.protocol.caller import Caller
from accounts.sso.members import Members, Session
from accounts.sso.oauth import ProviderRefused
from accounts.sso.pages import Link, page

log = logging.getLogger(__name__)

LOGIN_PATH = "/auth/login"
PUBLISHED_S = 0.6
"""Seconds after which every gateway knows a new key. Whoever gets one uses it at once."""

Handler = Callable[[AdminRequest], Awaitable[Response]]

FAILURES = (AccountsError, ProviderAway, ProviderRefused, TokenRefused, *AWAY)
"""Errors of these flows. `translated` makes each into one that callers may see."""


async def begin_session(members: Members, person: Person, caller: Caller) -> Session:
    """Begin a session of the person, and return it once gateways know its key. Raises Forbidden."""
    session = await run_in_threadpool(members.sign_in, person, caller)
    log.info("signed in", extra={"fields": {"user": session.user, "team": session.team, "role": session.role}})
    await asyncio.sleep(PUBLISHED_S)
    return session


def unstored(document: object) -> Response:
    """Return an answer in JSON that no cache keeps."""
    response = answer(document)
    response.headers["cache-control"] = "no-store"
    return response


def provider_named(providers: Providers, name: str) -> KnownProvider | None:
    """Return the provider of a name, or the only one; None: there are several to choose from. Raises Missing."""
    if not providers.all:
        raise Missing("There is no single sign-on here: the setting `oidc` names no identity provider.")
    if not name:
        return providers.all[0] if len(providers.all) == 1 else None
    found = next((each for each in providers.all if each.settings.shown_name == name), None)
    if found is None:
        raise Missing(f"There is no identity provider {name!r}; there are: {names_of(providers)}.", param="provider")
    return found


def provider_of(providers: Providers, issuer: str) -> KnownProvider:
    """Return the provider with which a flow was begun. Raises Missing if it is not configured any more."""
    found = next((each for each in providers.all if each.settings.issuer == issuer), None)
    if found is None:
        raise Missing("The identity provider of this sign-in is not known here any more. Begin again.")
    return found


def names_of(providers: Providers) -> str:
    return ", ".join(each.settings.shown_name for each in providers.all)


def translated(error: Exception) -> AccountsError:
    """Return the error that a caller sees for one of FAILURES."""
    match error:
        case AccountsError():
            return error
        case ProviderAway():
            log.warning("the identity provider failed: %s", error)
            return ProviderUnavailable("The identity provider does not answer as it should. Try again later.")
        case ProviderRefused():
            log.warning("the identity provider refused: %s", error)
            return Forbidden(f"The identity provider refused: {error.code}. Begin again.")
        case TokenRefused():
            return Forbidden(str(error))
        case _:
            log.warning("the database failed: %s", error)
            return DatabaseAway("The accounts database does not answer. Try again later.")


def for_programs(handler: Handler) -> Handler:
    """Return the handler with all its errors as programs read them."""

    async def serve(request: AdminRequest) -> Response:
        try:
            return await handler(request)
        except FAILURES as error:
            raise translated(error) from None

    return serve


def for_browsers(handler: Handler) -> Handler:
    """Return the handler with its errors as pages."""

    async def serve(request: AdminRequest) -> Response:
        try:
            return await handler(request)
        except FAILURES as error:
            told = translated(error)
            response = page("You are not signed in", told.message, [Link("Sign in", LOGIN_PATH)], told.status)
            if told.retry_after_s is not None:
                response.headers["retry-after"] = str(int(told.retry_after_s) + 1)
            return response

    return serve
