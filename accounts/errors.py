"""The errors of the accounts service, as callers of its API see them.

AccountsError              status  type
├── Invalid                400     invalid_request_error
├── NotSignedIn            401     authentication_error
├── Forbidden              403     permission_error
├── Missing                404     not_found_error
├── Conflict               409     invalid_request_error   code conflict
├── TooManySignIns         429     rate_limit_error        code too_many_sign_ins
├── ProviderUnavailable    503     unavailable_error       code provider_unavailable
└── DatabaseAway           503     unavailable_error       code database_unavailable
"""

from __future__ import annotations


class AccountsError(Exception):
    """An error that a caller sees. `message` names problem, limit and remedy; `param` names the field at fault."""

    status = 500
    type = "internal_error"
    code: str | None = None
    retry_after_s: float | None = None
    """Seconds after which the request may be sent again; None: it would get the same answer."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class Invalid(AccountsError):
    status = 400
    type = "invalid_request_error"


class NotSignedIn(AccountsError):
    status = 401
    type = "authentication_error"


class Forbidden(AccountsError):
    status = 403
    type = "permission_error"


class Missing(AccountsError):
    status = 404
    type = "not_found_error"


class Conflict(AccountsError):
    """The change would contradict what is there, such as a name that is taken."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class TooManySignIns(AccountsError):
    """An address, or all together, sends too many requests for signing in."""

    status = 429
    type = "rate_limit_error"
    code = "too_many_sign_ins"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ProviderUnavailable(AccountsError):
    """The identity provider does not answer as it should."""

    status = 503
    type = "unavailable_error"
    code = "provider_unavailable"
    retry_after_s = 10.0


class DatabaseAway(AccountsError):
    status = 503
    type = "unavailable_error"
    code = "database_unavailable"
    retry_after_s = 5.0
