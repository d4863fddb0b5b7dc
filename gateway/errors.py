"""All errors of the gateway. Every error that a client sees is one of these, written in its dialect.

PaddockError                     status  type
├── InvalidRequest               400     invalid_request_error
│   ├── ContextOverflow          400       code context_length_exceeded
│   ├── HeadTooLarge             431       code request_head_too_large
│   ├── HeadTooSlow              408       code request_head_timeout
│   ├── VersionNotSupported      505       code http_version_not_supported
│   ├── BodyTooLarge             413       code request_too_large
│   ├── TakesTooMuch             413       code request_too_large
│   ├── BodyTooSlow              408       code request_body_timeout
│   ├── PreviousNotFound         400       code previous_response_not_found
│   ├── CatalogRefused           400       code catalog_refused
│   ├── ConnectionLimit          400       code websocket_connection_limit_reached
│   ├── StreamLimit              400       code websocket_stream_limit_reached
│   └── UnsupportedParameter     400       code unsupported_parameter
├── AuthenticationFailed         401     authentication_error
│   ├── KeyMissing               401     code invalid_api_key
│   ├── KeyExpired               401     code expired_api_key
│   └── TokenNotAccepted         401     code token_not_accepted
├── PermissionDenied             403     permission_error
│   ├── KeyBlocked               403     code blocked
│   ├── NetworkNotAllowed        403     code network_not_allowed
│   ├── NotLocal                 403     code not_local
│   └── RoleNotAllowed           403     code role_not_allowed
├── NotFound                     404     not_found_error
│   ├── ModelNotFound            404       code model_not_found
│   ├── WorkerNotFound           404       code worker_not_found
│   ├── ResponseNotFound         404       code response_not_found
│   └── StreamGone               404       code stream_gone
├── MethodNotAllowed             405     invalid_request_error
├── Superseded                   409     invalid_request_error   code superseded
├── CatalogChanged               409     invalid_request_error   code catalog_changed
├── Cancelled                    499     cancelled_error         code cancelled_by_admin
├── NotSupported                 501     not_supported_error
├── QueueFull                    429     rate_limit_error
│   ├── TooManyStreams           429       code too_many_streams
│   ├── TooManySockets           429       code too_many_sockets
│   ├── TooManyFailures          429       code too_many_failed_authentications
│   └── TooManyRequests          429       code too_many_requests
├── HeldTooMuch                  429     rate_limit_error   code memory_share_taken
├── RateLimited                  429     rate_limit_error   code rate_limit_exceeded
├── BudgetSpent                  429     insufficient_quota code budget_exceeded
├── Unavailable                  503     unavailable_error
│   ├── QueueTimeout             503       code queue_timeout
│   ├── StoreUnavailable         503       code store_unavailable
│   ├── AccountsUnavailable      503       code accounts_unavailable
│   ├── ProviderUnavailable      503       code provider_unavailable
│   ├── RequestTimeout           503       code request_timeout
│   ├── NoWorker                 503       code no_worker
│   ├── ModelNotLoaded           503       code model_not_loaded
│   ├── Unsuited                 503       code unsuited
│   ├── SlotsBusy                503       code busy
│   ├── StorageFull              503       code storage_full
│   ├── OutOfMemory              503       code out_of_memory
│   ├── TooManyConnections       503       code too_many_connections
│   ├── MemoryFull               503       code memory_full
│   └── Stopping                 503       code stopping
├── WorkerLost                   502     unavailable_error
├── ClientTooSlow                503     unavailable_error   code client_too_slow
└── InternalError                500     internal_error
"""

from __future__ import annotations

from accounts.protocol.errors import MAX_MESSAGE_CHARS, ApiError, shortened


class PaddockError(ApiError):
    """An error of the gateway. `retry_after_s`: None has `gateway.back_pressure` decide when a caller may retry."""


class InternalError(PaddockError):
    code = "internal_error"

    @classmethod
    def logged(cls, request_id: str) -> InternalError:
        """Return the error that callers see in place of an unexpected exception. The exception itself is in the log."""
        return cls(f"Something broke in the gateway; its log has request {request_id}.")


class InvalidRequest(PaddockError):
    status = 400
    type = "invalid_request_error"


class ContextOverflow(InvalidRequest):
    code = "context_length_exceeded"

    WORDS = (
        "This model's maximum context length is {n_ctx} tokens, answer included. However, your prompt is too long: it "
        "resulted in {n_prompt_tokens} tokens, which exceeds the context window"
    )
    """The message, close to OpenAI's: litellm recognises this error by "maximum context length", LangChain by "prompt
    is too long". Dialects with another message pass theirs to `worded`."""

    def __init__(self, remedy: str, *, param: str | None = None, num_prompt_tokens: int = 0, n_ctx: int = 0) -> None:
        """`remedy`: the end of the message, or the whole message if the numbers of tokens are not known (0)."""
        self.remedy = shortened(remedy, MAX_MESSAGE_CHARS)
        self.num_prompt_tokens = num_prompt_tokens
        self.n_ctx = n_ctx
        super().__init__(self.worded(self.WORDS), param=param)

    def worded(self, words: str) -> str:
        """Return the message in a dialect's `words`: a format string with `n_prompt_tokens` and `n_ctx`."""
        if not self.n_ctx:
            return self.remedy
        return f"{words.format(n_prompt_tokens=self.num_prompt_tokens, n_ctx=self.n_ctx)}; {self.remedy}"


class HeadTooLarge(InvalidRequest):
    status = 431
    code = "request_head_too_large"


class HeadTooSlow(InvalidRequest):
    status = 408
    code = "request_head_timeout"


class VersionNotSupported(InvalidRequest):
    status = 505
    code = "http_version_not_supported"


class BodyTooLarge(InvalidRequest):
    status = 413
    code = "request_too_large"


class TakesTooMuch(InvalidRequest):
    """The body was read, but takes more memory than one caller may ever hold."""

    status = 413
    code = "request_too_large"


class BodyTooSlow(InvalidRequest):
    status = 408
    code = "request_body_timeout"


class PreviousNotFound(InvalidRequest):
    """The response to continue does not exist. Status 400, as at OpenAI, since the request asks for a new response."""

    code = "previous_response_not_found"


class CatalogRefused(InvalidRequest):
    """The catalog's file can't be used; the one before stays in use."""

    code = "catalog_refused"


class ConnectionLimit(InvalidRequest):
    code = "websocket_connection_limit_reached"


class StreamLimit(InvalidRequest):
    code = "websocket_stream_limit_reached"


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class AuthenticationFailed(PaddockError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class KeyMissing(AuthenticationFailed):
    """The request has no API key, or more than one in headers of the same name."""


class KeyExpired(AuthenticationFailed):
    """The API key was valid once: it has expired, or was replaced by another one."""

    code = "expired_api_key"


class TokenNotAccepted(AuthenticationFailed):
    """The token is its provider's, but has expired, is for somebody else, or names no user."""

    code = "token_not_accepted"


class PermissionDenied(PaddockError):
    status = 403
    type = "permission_error"
    code = "model_not_allowed"


class KeyBlocked(PermissionDenied):
    """The API key is blocked for now, or the user, team or organisation that it belongs to."""

    code = "blocked"


class NetworkNotAllowed(PermissionDenied):
    """The API key may not be used from the caller's address."""

    code = "network_not_allowed"


class NotLocal(PermissionDenied):
    """The request has no API key, and does not come from the gateway's own machine, which needs none."""

    code = "not_local"


class RoleNotAllowed(PermissionDenied):
    """The API key's role does not include the route."""

    code = "role_not_allowed"


class NotFound(PaddockError):
    status = 404
    type = "not_found_error"
    code = "unknown_route"


class ModelNotFound(NotFound):
    code = "model_not_found"


class WorkerNotFound(NotFound):
    code = "worker_not_found"


class ResponseNotFound(NotFound):
    code = "response_not_found"


class StreamGone(NotFound):
    code = "stream_gone"


class MethodNotAllowed(PaddockError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow
        """The methods that the route accepts, for the header `Allow`."""


class Superseded(PaddockError):
    """The caller has sent a newer request in place of this one. This one need not be sent again."""

    status = 409
    type = "invalid_request_error"
    code = "superseded"


class CatalogChanged(PaddockError):
    """The catalog's file is not the one that an admin's changes were made from."""

    status = 409
    type = "invalid_request_error"
    code = "catalog_changed"


class Cancelled(PaddockError):
    """An admin has cancelled the call. Status 499 is no standard's, but what proxies log for a request that was closed
    before its answer; clients do not send such a request again by themselves."""

    status = 499
    type = "cancelled_error"
    code = "cancelled_by_admin"


class NotSupported(PaddockError):
    """The named model, every model here, or the server is unable to do what is asked."""

    status = 501
    type = "not_supported_error"
    code = "not_supported"


class QueueFull(PaddockError):
    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class TooManyStreams(QueueFull):
    """A team has too many streams that outlive their connections."""

    code = "too_many_streams"


class TooManyRequests(QueueFull):
    """A key has too many requests under way, or too many connections read one stream or the streams of one team."""

    code = "too_many_requests"


class TooManySockets(QueueFull):
    """A key has too many open WebSockets."""

    code = "too_many_sockets"


class TooManyFailures(QueueFull):
    """An address has sent too many API keys that are none."""

    code = "too_many_failed_authentications"


class HeldTooMuch(PaddockError):
    """The requests of one team or key already hold as much of the gateway's memory as one team or key may."""

    status = 429
    type = "rate_limit_error"
    code = "memory_share_taken"


class RateLimited(PaddockError):
    """A limit on requests, tokens or calls under way is reached, over all gateways."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float | None = None, is_final: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_final = is_final
        """Whether the same request will not be admitted soon, so that clients should not repeat it by themselves."""


class BudgetSpent(RateLimited):
    """A budget is spent. The type is that of OpenAI, whose clients know it."""

    type = "insufficient_quota"
    code = "budget_exceeded"


class Unavailable(PaddockError):
    status = 503
    type = "unavailable_error"
    code = "unavailable"


class QueueTimeout(Unavailable):
    code = "queue_timeout"


class StoreUnavailable(Unavailable):
    code = "store_unavailable"


class AccountsUnavailable(Unavailable):
    code = "accounts_unavailable"


class ProviderUnavailable(Unavailable):
    """The keys of an identity provider were never fetched: its tokens can't be verified."""

    code = "provider_unavailable"


class RequestTimeout(Unavailable):
    code = "request_timeout"


class NoWorker(Unavailable):
    """The model has no worker. That is no fault in itself, but this request does not wait for a worker to start."""

    code = "no_worker"


class ModelNotLoaded(Unavailable):
    """The model is loaded on demand, and no machine can load it now."""

    code = "model_not_loaded"


class Unsuited(Unavailable):
    """The call's model has no free slot or no worker, and its fallback can't serve the request."""

    code = "unsuited"


class SlotsBusy(Unavailable):
    """Every slot is busy, and the caller asked not to wait for one."""

    code = "busy"


class StorageFull(Unavailable):
    """The request does not fit into what its team may store."""

    code = "storage_full"


class TooManyConnections(Unavailable):
    code = "too_many_connections"


class MemoryFull(Unavailable):
    """Requests of all teams hold as much of the gateway's memory as they may."""

    code = "memory_full"


class OutOfMemory(Unavailable):
    """Every worker that was asked is out of memory."""

    code = "out_of_memory"


class Stopping(Unavailable):
    code = "stopping"


class WorkerLost(PaddockError):
    status = 502
    type = "unavailable_error"
    code = "worker_lost"


class ClientTooSlow(PaddockError):
    """The answer's events were not read in time. Nearly always the client is at fault, and told in the stream; if this
    gateway had not begun to write the answer, such as while it waited for Redis, the client may ask again."""

    status = 503
    type = "unavailable_error"
    code = "client_too_slow"
