"""Signs people in by their browser: the authorization code flow with PKCE.

    /auth/login -> the provider -> /auth/callback -> a cookie with the session key, and the page that was wanted
                                                  -> a program on the browser's machine, which fetches the key
                                                     by /auth/token

A sign-in belongs to the browser that began it (a cookie), to one answer of the provider (state and nonce, each used
once), and to this process's own code verifier, without which an intercepted code is worth nothing. Source: RFC 6749,
RFC 7636, RFC 8252, RFC 9207, RFC 9700.
"""

from __future__ import annotations

import hmac

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from accounts.api.api import AdminRequest, read_query, read_struct
from accounts.errors import Forbidden, Invalid
from accounts.oidc.people import Person
from accounts.oidc.providers import KnownProvider, Providers
from accounts.protocol.caller import Caller
from accounts.sso import answers, cookies, destinations, oauth
from accounts.sso.answers import FAILURES, LOGIN_PATH
from accounts.sso.members import Members
from accounts.sso.pace import Pace
from accounts.sso.pages import HEADERS, Link, page
from accounts.sso.pending import Handover, Login, Pending, hashed, new_secret

CALLBACK_PATH = "/auth/callback"
LOGIN_LIFE_S = 600.0
"""Seconds that a person has to sign in at the provider."""
HANDOVER_LIFE_S = 60.0
"""Seconds that a program has to fetch its key."""


class LoginQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query of a sign-in."""

    provider: str = ""
    """Name of the identity provider; it may be left out if there is one."""
    return_to: str = ""
    """Where the browser goes in the end: a path, or the loopback address at which a program waits."""
    code_challenge: str = ""
    """SHA-256 of the program's code verifier, base64url; empty: no program waits."""


class CodeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body with which a program asks for its key."""

    code: str
    """The code that the browser brought to the program."""
    code_verifier: str


class Browsers:
    """The routes that browsers use, and the one by which a program gets the key of whoever signed in by one."""

    def __init__(self, providers: Providers, pending: Pending, members: Members, pace: Pace) -> None:
        self._providers = providers
        self._pending = pending
        self._members = members
        self._pace = pace

    async def login(self, request: AdminRequest) -> Response:
        """Send the browser to the provider, or let its user choose one."""
        self._pace.take(request.caller.address)
        base = self._base(request.caller)
        asked = read_query(request, LoginQuery)
        return_to = destinations.checked_return(asked.return_to, base, asked.code_challenge)
        provider = answers.provider_named(self._providers, asked.provider)
        if provider is None:
            return self._choice(asked)
        state, cookie = new_secret(), new_secret()
        login = Login(
            browser=hashed(cookie),
            issuer=provider.settings.issuer,
            nonce=new_secret(),
            code_verifier=new_secret(),
            redirect_uri=base + CALLBACK_PATH,
            return_to=return_to,
            code_challenge=asked.code_challenge,
        )
        address = await oauth.sign_in_url(
            provider,
            state=state,
            nonce=login.nonce,
            code_verifier=login.code_verifier,
            redirect_uri=login.redirect_uri,
        )
        await run_in_threadpool(self._pending.put, login, LOGIN_LIFE_S, state)
        response = RedirectResponse(address, 303, HEADERS)
        cookies.put_login(response, state, cookie, LOGIN_LIFE_S, base.startswith("https:"))
        return response

    async def callback(self, request: AdminRequest) -> Response:
        """Take the provider's answer, and sign its person in."""
        self._pace.take(request.caller.address)
        state, is_secure = request.query.get("state", ""), self._base(request.caller).startswith("https:")
        login = await run_in_threadpool(self._pending.take, state, Login)
        if login is None:
            raise Invalid("This sign-in was used already, or took more than ten minutes. Begin again.")
        cookie = cookies.login_of(request.headers.get("cookie", ""), state, is_secure)
        if not hmac.compare_digest(hashed(cookie), login.browser):
            raise Invalid("This sign-in was begun in another browser. Begin it in this one.")
        try:
            response = await self._finished(login, request, is_secure)
        except FAILURES as error:
            if not destinations.is_program(login.return_to):
                raise
            told = answers.translated(error)
            query = {"error": told.code or told.type, "error_description": told.message}
            response = RedirectResponse(destinations.with_query(login.return_to, **query), 303, HEADERS)
        cookies.drop_login(response, state, is_secure)
        return response

    async def fetch_key(self, request: AdminRequest) -> Response:
        """Give a program the key of the person whose browser it sent to sign in."""
        self._pace.take(request.caller.address)
        asked = read_struct(request, CodeBody)
        handover = await run_in_threadpool(self._pending.take, asked.code, Handover)
        if handover is None:
            raise Invalid("This code was used already, or is older than a minute. Sign in again.", param="code")
        if not hmac.compare_digest(oauth.challenge_of(asked.code_verifier), handover.code_challenge):
            raise Invalid("The code verifier is not the one of this code. Sign in again.", param="code_verifier")
        return answers.unstored(await answers.begin_session(self._members, handover.person, request.caller))

    async def _finished(self, login: Login, request: AdminRequest, is_secure: bool) -> Response:
        """Return where the browser goes once its provider has answered."""
        provider = answers.provider_of(self._providers, login.issuer)
        person = await self._person(login, provider, request.query)
        if destinations.is_program(login.return_to):
            handover = Handover(person=person, code_challenge=login.code_challenge)
            code = await run_in_threadpool(self._pending.put, handover, HANDOVER_LIFE_S)
            return RedirectResponse(destinations.with_query(login.return_to, code=code), 303, HEADERS)
        session = await answers.begin_session(self._members, person, request.caller)
        response: Response = page("Signed in", f"You are {session.user}: {session.role} in the team {session.team}.")
        if login.return_to:
            response = RedirectResponse(login.return_to, 303, HEADERS)
        cookies.put_session(response, session.key, self._providers.sign_on.session_s, is_secure)
        return response

    async def _person(self, login: Login, provider: KnownProvider, query: dict[str, str]) -> Person:
        """Return the person that the provider's answer names."""
        endpoints = await provider.discovery.endpoints()
        unnamed = "" if endpoints.authorization_response_iss_parameter_supported else login.issuer
        if query.get("iss", unnamed) != login.issuer:
            raise Invalid("This answer is from another identity provider than the one that was asked. Begin again.")
        if "error" in query:
            raise Forbidden(f"{provider.settings.shown_name} did not sign you in: {query['error'][:64]}. Begin again.")
        return await oauth.redeem_code(
            self._providers,
            provider,
            code=query.get("code", ""),
            nonce=login.nonce,
            code_verifier=login.code_verifier,
            redirect_uri=login.redirect_uri,
        )

    def _choice(self, asked: LoginQuery) -> Response:
        """Return the page where a user chooses a provider."""
        kept = {"return_to": asked.return_to, "code_challenge": asked.code_challenge}
        names = [each.settings.shown_name for each in self._providers.all]
        links = [Link(name, destinations.with_query(LOGIN_PATH, **kept, provider=name)) for name in names]
        return page("Sign in", "Where do you have your account?", links)

    def _base(self, caller: Caller) -> str:
        """Return scheme and host under which people reach the gateways. Raises Invalid."""
        return destinations.checked_base(self._providers.sign_on.public_url or caller.url)
