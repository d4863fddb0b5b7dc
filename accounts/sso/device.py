"""Signs people in for a program on a machine without a browser: the provider's device flow, relayed.

The program gets a secret of this service in place of the provider's `device_code`, and so needs to know nothing of the
provider. Source: RFC 8628.
"""

from __future__ import annotations

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from accounts.api.api import AdminRequest, read_struct
from accounts.errors import AccountsError, Invalid
from accounts.oidc.providers import Providers
from accounts.sso import answers, oauth
from accounts.sso.members import Members
from accounts.sso.oauth import ProviderRefused
from accounts.sso.pace import Pace
from accounts.sso.pending import Device, Pending

MAX_LIFE_S = 1800.0
"""Maximum seconds of a device flow, whatever the provider allows."""


class BeginBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body with which a program begins a device flow."""

    provider: str = ""
    """Name of the identity provider; it may be left out if there is one."""


class DeviceCodes(msgspec.Struct, frozen=True, kw_only=True):
    """The answer that a program shows its user, and by which it asks."""

    device_code: str
    user_code: str
    """The code that the user enters."""
    verification_uri: str
    """Where the user enters it."""
    verification_uri_complete: str
    """The same with the code in it; empty: the provider has no such address."""
    expires_in: int
    interval: float
    """Seconds between two requests of the program."""


class PollBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body with which a program asks whether a device flow is over."""

    device_code: str


class DeviceFlows:
    """The routes of the device flow."""

    def __init__(self, providers: Providers, pending: Pending, members: Members, begins: Pace, polls: Pace) -> None:
        """`begins`, `polls`: bound the requests of each route."""
        self._providers = providers
        self._pending = pending
        self._members = members
        self._begins = begins
        self._polls = polls

    async def begin(self, request: AdminRequest) -> Response:
        """Begin a flow: answer where its user signs in, and by which code."""
        self._begins.take(request.caller.address)
        provider = answers.provider_named(self._providers, read_struct(request, BeginBody).provider)
        if provider is None:
            raise Invalid(f"Choose an identity provider: {answers.names_of(self._providers)}.", param="provider")
        begun = await oauth.begin_device(self._providers, provider)
        life_s = min(begun.expires_in, MAX_LIFE_S)
        device = Device(issuer=provider.settings.issuer, device_code=begun.device_code)
        told = DeviceCodes(
            device_code=await run_in_threadpool(self._pending.put, device, life_s),
            user_code=begun.user_code,
            verification_uri=begun.verification_uri or begun.verification_url,
            verification_uri_complete=begun.verification_uri_complete,
            expires_in=int(life_s),
            interval=begun.interval,
        )
        return answers.unstored(told)

    async def poll(self, request: AdminRequest) -> Response:
        """Answer with the key once the user has signed in; until then with the error `authorization_pending`."""
        self._polls.take(request.caller.address)
        secret = read_struct(request, PollBody).device_code
        device = await run_in_threadpool(self._pending.find, secret, Device)
        if device is None:
            raise _refusal("expired_token")
        provider = answers.provider_of(self._providers, device.issuer)
        try:
            person = await oauth.poll_device(self._providers, provider, device.device_code)
        except ProviderRefused as error:
            if error.code not in _WAITING:
                await run_in_threadpool(self._pending.take, secret, Device)
            raise _refusal(error.code) from None
        await run_in_threadpool(self._pending.take, secret, Device)
        return answers.unstored(await answers.begin_session(self._members, person, request.caller))


_WAITING = {
    "authorization_pending": "Nobody has signed in yet. Ask again after `interval` seconds.",
    "slow_down": "You ask too often. Wait 5 seconds more from now on between two requests.",
}
_OVER = {
    "expired_token": "This device code was used already, or is too old. Begin again.",
    "access_denied": "The sign-in was refused. Begin again if that was a mistake.",
}


def _refusal(code: str) -> AccountsError:
    """Return the error for one of the provider's, under the same code."""
    told = {**_WAITING, **_OVER}
    error = Invalid(told.get(code, f"The identity provider refused: {code}. Begin again."))
    error.code = code if code in told else "access_denied"
    return error
