"""The usage record of one call, and how records travel through the Redis stream `keys.USAGE`.

An entry of the stream has two fields: `batch`, a `UsageBatch` in MessagePack, and `name`, the batch's name. A record is
counted once, however often it is sent: by its process and number.
"""

from __future__ import annotations

import msgspec

NANO = 1_000_000_000
"""Parts of the currency's unit in which costs are counted."""


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The usage of one call that ended: finished, failed, cancelled or cut."""

    number: int
    """Number of the record in its gateway process, from 1. Numbers are given in the order in which calls end."""
    request_id: str
    started_at: float
    ended_at: float
    """Unix times. `ended_at` of a call that was cut by its gateway's death is when that process was last seen alive."""
    route: str
    """The route's path, such as `/v1/chat/completions`."""
    outcome: str
    """`ok`, `client_gone`, `cancelled`, `cut` (its gateway died) or an error's code."""
    status: int = 0
    organisation: str = ""
    team: str = ""
    key: str = ""
    user: str = ""
    end_user: str = ""
    """The person that a trusted key named; empty: none."""
    alias: str = ""
    model: str = ""
    adapter: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that were cached; they are among `prompt_tokens`, as those of media are."""
    completion_tokens: int = 0
    media_tokens: int = 0
    queue_ms: int = 0
    compute_ms: int = 0
    """Milliseconds from each answer's last submission to a worker to its end, added up over all answers."""
    cost_nano: int = 0
    """Billionths of the currency's unit, by the price list at the call's end."""
    trace_id: str = ""


class UsageBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Records of one gateway process, with numbers in a row."""

    process: str
    """Id of the gateway process, a new one at each start."""
    records: tuple[UsageRecord, ...]


class EncodedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A `UsageBatch` whose records are encoded already, as they lie in a gateway's journal."""

    process: str
    records: tuple[msgspec.Raw, ...]


OK, CUT = "ok", "cut"
"""Outcomes: that of a call that succeeded, and that of one whose gateway died."""
LEFT = frozenset({"client_gone", "cancelled", "superseded"})
"""Outcomes that do not count as failures: nobody wanted the answer any more."""
BATCH_FIELD, NAME_FIELD = b"batch", b"name"

encode_record = msgspec.msgpack.Encoder().encode
decode_record = msgspec.msgpack.Decoder(UsageRecord).decode
encode_batch = msgspec.msgpack.Encoder().encode
decode_batch = msgspec.msgpack.Decoder(UsageBatch).decode


def batch_name(process: str, first: int, last: int) -> str:
    """Return the name of the batch with these records, by which gateways learn what became of it."""
    return f"{process}:{first}:{last}"


def is_failed(outcome: str) -> bool:
    """Return whether a call with this outcome counts as failed."""
    return outcome != OK and outcome not in LEFT
