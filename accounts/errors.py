"""The errors of the accounts service, as callers of its API see them.

AccountsError              status  type
├── Invalid                400     invalid_request_error
├── NotSignedIn            401     authentication_error
├── Forbidden              403     permission_error
├── Missing                404     not_found_error
├── Conflict               409     invalid_request_error   code conflict
├── TooManySignIns         429     rate_limit_error        code too_many_sign_ins
├── TooManyChanges         429     rate_limit_error        code too_many_changes
├── ProviderUnavailable    503     unavailable_error       code provider_unavailable
└── DatabaseAway           503     unavailable_error       code database_unavailable
"""

from __future__ import annotations

from accounts.protocol.errors import ApiError


class AccountsError(ApiError):
    """An error of the accounts service. `retry_after_s`: None is an error that comes again with the same request."""


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


class TooManyChanges(AccountsError):
    """A team's managers change so much that the audit would grow without bound."""

    status = 429
    type = "rate_limit_error"
    code = "too_many_changes"
    retry_after_s = 60.0


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
