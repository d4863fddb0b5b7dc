"""The form that errors have for callers of gateways and of the accounts service, which answer at one address."""

from __future__ import annotations

MAX_MESSAGE_CHARS = 4096
MAX_PARAM_CHARS = 512
"""Maximum characters of an error's `param`; MAX_MESSAGE_CHARS is that of its message. Longer texts are cut, since they
repeat what a caller sent, perhaps megabytes."""


class ApiError(Exception):
    """An error that a caller sees. `message` names problem, limit and remedy; `param` names the field at fault."""

    status = 500
    type = "internal_error"
    code: str | None = None
    retry_after_s: float | None = None
    """Seconds after which the request may be sent again; None: the error does not say."""

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        message = shortened(message, MAX_MESSAGE_CHARS)
        super().__init__(message)
        self.message = message
        self.param = None if param is None else shortened(param, MAX_PARAM_CHARS)
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
