"""What a gateway asks of a worker. `GenerateRequest` is also the one canonical request inside the gateway."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Role = Literal["system", "developer", "user", "assistant", "tool"]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters by llama.cpp's names; `None` means the model's default, then llama-server's.

    Source of names and defaults: tools/server/README.md of llama.cpp.
    """

    temperature: float | None = None
    """Softmax temperature; 0 is greedy. llama-server's default 0.8."""
    top_k: int | None = None
    """Keep the k most likely tokens; 0 or below keeps all. Default 40."""
    top_p: float | None = None
    """Keep the smallest set whose probability reaches p; 1 keeps all. Default 0.95."""
    min_p: float | None = None
    """Drop tokens below this share of the most likely one's probability; 0 drops none. Default 0.05."""
    repeat_penalty: float | None = None
    """Divides the logits of recent tokens; 1 is off. Default 1."""
    repeat_last_n: int | None = None
    """How many recent tokens the penalties look at; 0 is off, -1 the whole context. Default 64."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    """0 to 2^32 - 1; `None` draws one at random for each call."""


class ToolCall(msgspec.Struct, frozen=True):
    """One function call that the model made in an earlier turn; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One chat message. `content` is plain text; parts of other kinds do not get past the gateway's door."""

    role: Role
    content: str | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


class Tool(msgspec.Struct, frozen=True, omit_defaults=True):
    """One function that the model may call; `parameters` is its JSON Schema, as the caller wrote it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is asked, in no client's dialect."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    """Most tokens to generate; `None`: until the model ends or the conversation is `n_ctx` long."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; they are not part of it."""
    ignore_eos: bool = False
    """Go on after the model's end token (llama-server's extension, for benchmarks)."""


class Submit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of `POST /v1/submit`. Repeating one (same gateway and call) while the call lives changes nothing."""

    gateway: str
    """Id of the gateway process; its event stream gets the answer."""
    call: int
    """Number of the call, unique within the gateway process."""
    request: GenerateRequest
    tenant: str
    """The team that asks: the trust line for everything that is cached."""
    request_id: str = ""
    """For the worker's log lines."""


class Accepted(msgspec.Struct, frozen=True):
    """Body of the `202` to a `Submit`."""

    boot: str
    """Boot id of the worker process."""
    num_prompt_tokens: int


class Cancel(msgspec.Struct, frozen=True):
    """Body of `POST /v1/cancel`: end these calls within one step. Unknown numbers are ignored; answers `204`."""

    gateway: str
    calls: tuple[int, ...]
