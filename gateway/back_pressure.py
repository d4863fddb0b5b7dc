"""Makes the errors about load (429 and 503), with the seconds after which a caller may retry (`retry-after`).

The part that finds a shortage raises an error made here. For slots, `QueueState` predicts the seconds (admission and a
gauge use its `predicted_wait_s` as well). For other shortages the seconds are the constants below; for those without a
constant, such as a queue while Redis is away, they are LEAST_RETRY_AFTER_S.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gateway.errors import (
    AccountsUnavailable,
    BudgetSpent,
    ClientTooSlow,
    HeldTooMuch,
    MemoryFull,
    ModelNotLoaded,
    NoWorker,
    PaddockError,
    ProviderUnavailable,
    QueueFull,
    QueueTimeout,
    RateLimited,
    SlotsBusy,
    Stopping,
    StoreUnavailable,
    TooManyConnections,
    TooManyFailures,
    TooManyRequests,
    TooManySockets,
    TooManyStreams,
    Unsuited,
)

LEAST_RETRY_AFTER_S, MOST_RETRY_AFTER_S = 1.0, 60.0
FIRST_WORKER_RETRY_AFTER_S = 10.0
"""Seconds after which to retry a call whose model has no worker: the first worker takes seconds to minutes to start."""
NOT_LOADED_RETRY_AFTER_S, MOST_LOAD_RETRY_AFTER_S = 30.0, 3600.0
"""Seconds after which to retry a call whose model can't be loaded: where its supervisor does not say when it is tried
again, and the maximum where it does."""
MAX_REASON_CHARS = 400
STREAM_RETRY_AFTER_S = 5.0
SOCKET_RETRY_AFTER_S = 10.0


def retry_after(error: PaddockError) -> int | None:
    """Return the value of the header `retry-after` in whole seconds; None: the answer has no such header."""
    if error.retry_after_s is None and error.status not in (429, 503):
        return None
    return max(1, math.ceil(error.retry_after_s or LEAST_RETRY_AFTER_S))


@dataclass(frozen=True, slots=True)
class QueueState:
    """The load of one model, from which waits for a slot are predicted."""

    model: str
    num_slots: int
    """Slots of all workers that serve; while Redis is away, this gateway's share of them."""
    num_waiting: int
    """Calls that wait for a slot."""
    hold_s: float
    """Mean seconds for which a call holds its slot."""

    def predicted_wait_s(self, ahead: int) -> float:
        """Return the seconds that a call waits for a slot if `ahead` calls are before it."""
        return (ahead + 1) * self.hold_s / max(1, self.num_slots)

    @property
    def retry_after_s(self) -> float:
        """The value of `retry-after`: the predicted wait of a call that comes now, within bounds."""
        return min(MOST_RETRY_AFTER_S, max(LEAST_RETRY_AFTER_S, self.predicted_wait_s(self.num_waiting)))


def queue_full(queue: QueueState, limit: int, team: str | None = None) -> QueueFull:
    """Return the error for a call beyond the `limit` of a model's queue. `team`: the team, if the limit is a team's;
    then `queue.num_waiting` counts the team's calls."""
    if team is None:
        what, bound = f"{queue.num_waiting} calls", f"{limit} may (max_queue)"
    else:
        what = f"{queue.num_waiting} calls of team {team!r}"
        bound = f"{limit} of one team may (max_queue_per_team)"
    message = f"{what} wait for model {queue.model!r} and at most {bound}; try again later"
    return QueueFull(message, retry_after_s=queue.retry_after_s)


def degraded_queue_full(model: str, num_waiting: int, limit: int, setting: str, team: str | None = None) -> QueueFull:
    """Return the error for a call beyond `limit`, this gateway's share of the bound `setting` while Redis is away."""
    what = "calls" if team is None else f"calls of team {team!r}"
    return QueueFull(
        f"{num_waiting} {what} wait for model {model!r} at this gateway, whose part of {setting} is {limit} while "
        "Redis is away; try again later"
    )


def no_slot_in_time(queue: QueueState, waited_s: float, *, is_degraded: bool) -> QueueTimeout:
    """Return the error for a call that has waited for a slot as long as it may. `is_degraded`: Redis is away."""
    pool = f"its {queue.num_slots} slots were taken"
    if is_degraded:
        pool += ", and while Redis is away this gateway uses its share of them only"
    return QueueTimeout(
        f"no slot of model {queue.model!r} came free in {waited_s:.1f} s (queue_timeout_s): {pool}; try again later",
        retry_after_s=queue.retry_after_s,
    )


def no_worker_in_time(model: str, waited_s: float, why: str = "") -> QueueTimeout:
    """Return the error for a call that has waited for its model's first worker as long as it may. `why`: why the model
    is not loaded yet, in a sentence; empty: nobody says so."""
    rest = f": {_sentence(why)}; try again later" if why else "; start one, or try again later"
    return QueueTimeout(
        f"no worker of model {model!r} came in {waited_s:.1f} s (start_timeout_s){rest}",
        retry_after_s=FIRST_WORKER_RETRY_AFTER_S,
    )


def model_not_loaded(model: str, why: str, wait_s: float) -> ModelNotLoaded:
    """Return the error for a call that waits for a model which no machine can load now. `why`: the reason, in a
    sentence; `wait_s`: seconds until it is tried again; 0: it is not tried by itself."""
    reason = _sentence(why) or "no machine says why"
    if wait_s > 0:
        wait_s = min(MOST_LOAD_RETRY_AFTER_S, max(LEAST_RETRY_AFTER_S, math.ceil(wait_s)))
        remedy = f"It is tried again in {wait_s:.0f} s; send the request again then, or have an operator look at it."
    else:
        remedy = "Waiting alone does not change that: an operator can (GET /admin/explain). Try again later."
    return ModelNotLoaded(
        f"Model {model!r} can't be loaded now: {reason}. {remedy}", retry_after_s=wait_s or NOT_LOADED_RETRY_AFTER_S
    )


def unloaded_by_admin(model: str) -> ModelNotLoaded:
    """Return the error for a call for a model that an admin has unloaded, and that calls don't load again."""
    return ModelNotLoaded(
        f"Model {model!r} is not loaded: an admin has unloaded it. Have an admin load it (POST /models/load).",
        retry_after_s=NOT_LOADED_RETRY_AFTER_S,
    )


def not_loaded_unasked(model: str) -> ModelNotLoaded:
    """Return the error for a call that asks not to have its model loaded."""
    return ModelNotLoaded(
        f"Model {model!r} is not loaded, and the request asks not to load it (autoload=false). Send it without that, "
        "or have an admin load the model (POST /models/load).",
        retry_after_s=NOT_LOADED_RETRY_AFTER_S,
    )


def _sentence(why: str) -> str:
    """Return a reason without the dot at its end, shortened."""
    return why[:MAX_REASON_CHARS].strip().rstrip(".")


def no_worker(model: str) -> NoWorker:
    """Return the error for a request about a model without workers, if the request does not wait for one to start.

    `model`: the name that the caller used."""
    return NoWorker(f"No worker serves `{model}` at the moment. Start one, or send the request again later.")


def slots_busy(model: str) -> SlotsBusy:
    """Return the error for a caller who asked not to wait for a slot."""
    return SlotsBusy(f"No slot of `{model}` is free. Send the request again later.")


def fallback_unsuited(meant_for: str, fallback: str, why: str) -> Unsuited:
    """Return the error for a call whose model has no slot and whose fallback can't take it."""
    return Unsuited(
        f"The model `{meant_for}` has no place now, and `{fallback}`, which stands in for it, can't take this "
        f"request: {why} Send it again later."
    )


def store_unavailable(why: str = "") -> StoreUnavailable:
    """Return the error for a request that needs Redis while Redis is away. `why`: the reason why it needs Redis."""
    return StoreUnavailable(f"This gateway's store does not answer{why and f', and {why}'}. Send the request again.")


def accounts_unavailable() -> AccountsUnavailable:
    """Return the error for a request that only the accounts service can answer, while that is away."""
    return AccountsUnavailable(
        "The accounts service does not answer; calls of models go on without it. Send the request again later."
    )


def provider_unavailable(name: str) -> ProviderUnavailable:
    """Return the error for a token whose provider's keys could not be fetched yet. `name`: the provider's."""
    return ProviderUnavailable(
        f"The keys of the identity provider {name} can't be fetched yet; calls with API keys go on. Send the request "
        "again."
    )


def stopping(remedy: str = " Send the request again.") -> Stopping:
    """Return the error for a request or connection that comes while this gateway drains."""
    return Stopping(f"This gateway is stopping.{remedy}")


def stopped() -> Stopping:
    """Return the error for an answer that is cut off when the time to drain is over."""
    return Stopping("This gateway stopped before the answer was complete. Send the request again.")


def unread() -> ClientTooSlow:
    """Return the error for an answer whose events were not read in time."""
    return ClientTooSlow(
        "The answer was cut off: its buffer of events is full, since they were not read in time. Read faster, or ask "
        "again."
    )


def memory_full(num_held: int, limit: int) -> MemoryFull:
    """Return the error for a request that does not fit in memory beside the others. The numbers are bytes."""
    return MemoryFull(f"Requests hold {num_held} bytes of this gateway's memory; {limit} may. Try again.")


def memory_share_taken(holder: str, num_held: int, share: int) -> HeldTooMuch:
    """Return the error for a request that would exceed its team's or key's share of memory.

    `holder`: "team" or "key". The numbers are bytes."""
    return HeldTooMuch(
        f"With this one, the requests of this {holder} that are under way would hold {num_held} bytes of the "
        f"gateway's memory; {share} are its share now. Wait for some to end."
    )


def too_many_requests(limit: int) -> TooManyRequests:
    """Return the error for a key that has `limit` requests under way."""
    return TooManyRequests(
        f"This key has {limit} requests under way here. Wait for some to end; an operator may raise PADDOCK_KEY_SHARE."
    )


def too_many_requests_of_team(limit: int, team: str) -> TooManyRequests:
    """Return the error for a key whose team has `limit` requests under way, with all of its keys."""
    return TooManyRequests(
        f"The team {team!r} has {limit} requests under way here, with all of its keys. Wait for some to end; an "
        "operator may raise PADDOCK_MAX_CONNECTIONS."
    )


def too_many_of_accounts(whose: str, limit: int) -> TooManyRequests:
    """Return the error for a request to the accounts service beyond the `limit` of those under way. `whose`: `This
    key`, or the team."""
    return TooManyRequests(
        f"{whose} has {limit} requests to the accounts service under way here, and no more may. Read their answers, or "
        "wait for some to end."
    )


def too_many_failures(retry_after_s: float) -> TooManyFailures:
    """Return the error for an API key that is not known, from an address that has sent many such."""
    return TooManyFailures(
        "Many requests from this address had API keys that are not known here. Check yours, and send the request again "
        "later; requests with a valid key are not slowed.",
        retry_after_s=retry_after_s,
    )


def too_many_sockets_of_key(limit: int) -> TooManySockets:
    """Return the error for a key that has `limit` WebSockets open."""
    return TooManySockets(
        f"This key has {limit} WebSockets open here. Close some, or send more requests over each; an operator may "
        "raise PADDOCK_MAX_SOCKETS_PER_KEY.",
        retry_after_s=SOCKET_RETRY_AFTER_S,
    )


def too_many_sockets_of_team(limit: int, team: str) -> TooManySockets:
    """Return the error for a key whose team has `limit` WebSockets open, with all of its keys."""
    return TooManySockets(
        f"The team {team!r} has {limit} WebSockets open here, with all of its keys. Close some, or send more requests "
        "over each; an operator may raise PADDOCK_MAX_SOCKETS.",
        retry_after_s=SOCKET_RETRY_AFTER_S,
    )


def too_many_sockets(limit: int) -> TooManyConnections:
    """Return the error for a WebSocket beyond the `limit` of all keys together."""
    return TooManyConnections(
        f"{limit} WebSockets are open at this gateway. Send requests without one, or try again later.",
        retry_after_s=SOCKET_RETRY_AFTER_S,
    )


def too_many_streams(limit: int, name: str) -> TooManyStreams:
    """Return the error for a team that has `limit` streams already which go on without their connections. `name`: the
    limit's name."""
    return TooManyStreams(
        f"This key's team may have {limit} streams at a time that outlive their connections, and has them ({name}). "
        "Send the request again when one has ended, or send it without `x-resume-grace` or `background`.",
        retry_after_s=STREAM_RETRY_AFTER_S,
    )


def too_many_readers(limit: int) -> TooManyRequests:
    """Return the error for a stream that `limit` connections read already."""
    return TooManyRequests(
        f"{limit} connections read this stream at this gateway, and no more may at a time. Close one of them, or read "
        "it again when one has ended.",
        retry_after_s=STREAM_RETRY_AFTER_S,
    )


def too_many_readers_of_team(limit: int) -> TooManyRequests:
    """Return the error for a team with `limit` connections that read streams, not counting the first reader of each."""
    return TooManyRequests(
        f"{limit} connections of this key's team read streams at this gateway that others of the team's read as well, "
        "and no more may at a time. Close one of them, or read it again when one has ended.",
        retry_after_s=STREAM_RETRY_AFTER_S,
    )


def too_many_listeners_of_key(limit: int) -> TooManyRequests:
    """Return the error for a key that has `limit` connections open which listen to news of models."""
    return TooManyRequests(
        f"This key has {limit} connections open here that listen to news of models, and no more may. Close one of "
        "them, or ask `GET /models`.",
        retry_after_s=STREAM_RETRY_AFTER_S,
    )


def too_many_listeners_of_team(limit: int, team: str) -> TooManyRequests:
    """Return the error for a key whose team has `limit` listeners to news of models, with all of its keys."""
    return TooManyRequests(
        f"The team {team!r} has {limit} connections open here that listen to news of models, with all of its keys, and "
        "no more may. Close one of them, or ask `GET /models`.",
        retry_after_s=STREAM_RETRY_AFTER_S,
    )


def too_many_listeners(limit: int) -> TooManyConnections:
    """Return the error for a listener to news of models beyond the `limit` of all keys together."""
    return TooManyConnections(
        f"{limit} connections listen to news of models at this gateway, and no more may. Ask `GET /models`, or try "
        "again later.",
        retry_after_s=SOCKET_RETRY_AFTER_S,
    )


def limit_reached(whose: str, limit: str, used: int, most: int, unit: str, wait_s: float) -> RateLimited:
    """Return the error for a call beyond a limit per minute or of calls under way. `whose`: such as `team 'red'`;
    `unit`: such as `requests per minute`; `wait_s`: seconds until there is room; 0: when another call ends."""
    wait_s = math.ceil(wait_s)
    rest = f"There is room again in {wait_s} s." if wait_s else "Wait for some to end."
    return RateLimited(
        f"Rate limit reached: {whose} has used {used} of {most} {unit} ({limit}). {rest}",
        retry_after_s=wait_s or LEAST_RETRY_AFTER_S,
    )


def tokens_reached(whose: str, limit: str, used: int, most: int, wanted: int, unit: str, wait_s: float) -> RateLimited:
    """Return the error for a call that is estimated to take more tokens than a limit has left. `wanted`: the estimate;
    other arguments as in `limit_reached`."""
    wait_s = math.ceil(wait_s)
    if wanted > most:
        return RateLimited(
            f"Request too large: it is estimated to take {wanted} tokens with its answer, and {whose} may use {most} "
            f"{unit} ({limit}). Send less or lower `max_tokens`.",
            retry_after_s=wait_s,
            is_final=True,
        )
    return RateLimited(
        f"Rate limit reached: {whose} has used {used} of {most} {unit} ({limit}), and this request is estimated to "
        f"take {wanted} with its answer. There is room again in {wait_s} s.",
        retry_after_s=wait_s,
    )


def period_spent(
    whose: str, limit: str, used: int, most: int, wanted: int, unit: str, renews: str, wait_s: float
) -> RateLimited:
    """Return the error for a call beyond a limit of tokens per day or month. `renews`: when the next one begins, for
    people; other arguments as in `tokens_reached`."""
    return RateLimited(
        f"Limit reached: {whose} has used {used} of {most} {unit} ({limit}), and this request is estimated to take "
        f"{wanted}. The limit is renewed on {renews}.",
        retry_after_s=math.ceil(wait_s),
        is_final=True,
    )


def budget_spent(whose: str, spent: str, amount: str, period: str, renews: str, wait_s: float) -> BudgetSpent:
    """Return the error for a call beyond a budget. `spent` and `amount`: money with its currency, for people."""
    return BudgetSpent(
        f"Budget reached: {whose} has spent {spent} of its {amount} of this {period}, and this request is estimated "
        f"to cost more than is left. The budget is renewed on {renews}; an admin may raise it.",
        retry_after_s=math.ceil(wait_s),
        is_final=True,
    )
