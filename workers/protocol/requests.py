"""The requests of a gateway to a worker. `GenerateRequest` is also the one canonical request inside the gateway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from workers.protocol.framing import read_float
from workers.protocol.pieces import PieceDecoder

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}$"

Name = Annotated[str, Meta(pattern=NAME_PATTERN, description="letters, digits and . _ : / @ + -, at most 128")]
"""The name of a model, an alias or an adapter."""

Role = Literal["system", "developer", "user", "assistant", "tool"]


Prompt = str | Sequence[int | str]
"""A text, tokens, or a list of both. A gateway keeps a prompt of tokens alone as an `array`, 4 bytes each: Python's
integers take ten times as much, in memory that is never returned to the system."""

SamplerName = Literal[
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
    "infill",
    "adaptive_p",
]
"""llama.cpp's stages of sampling a token; the first nine are in llama.cpp's default order."""

Bias = tuple[int | str, float | None]
"""A token or a text, and the number added to the logit of the token or of each token of the text; None: never drawn."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters by llama.cpp's names; `None` means the model's default, then llama-server's.

    Source of names and defaults: tools/server/README.md of llama.cpp."""

    temperature: float | None = None
    """Softmax temperature; 0 is greedy. llama-server's default 0.8."""
    dynatemp_range: float | None = None
    """Maximum by which the temperature rises or falls with the probabilities' entropy; 0 is off. Default 0."""
    dynatemp_exponent: float | None = None
    """Exponent of the curve from entropy to temperature. Default 1."""
    top_k: int | None = None
    """Keep the k most likely tokens; 0 or below keeps all. Default 40."""
    top_p: float | None = None
    """Keep the smallest set whose probability reaches p; 1 keeps all. Default 0.95."""
    min_p: float | None = None
    """Drop tokens below this share of the most likely one's probability; 0 drops none. Default 0.05."""
    typical_p: float | None = None
    """Keep the tokens whose surprise is nearest to the entropy, up to this total probability; 1 is off. Default 1."""
    top_n_sigma: float | None = None
    """Drop logits more than n standard deviations below the best; 0 or below is off. Default -1."""
    xtc_probability: float | None = None
    """Probability with which the likeliest tokens are left out; 0 is off. Default 0."""
    xtc_threshold: float | None = None
    """The probability from which a token counts as one of the likeliest; above 0.5 is off. Default 0.1."""
    repeat_penalty: float | None = None
    """Divides the logits of recent tokens; 1 is off. Default 1."""
    repeat_last_n: int | None = None
    """How many recent tokens the penalties look at; 0 is off, -1 the whole context. Default 64."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    """Strength of the penalty on repeating a run of tokens; 0 is off. Default 0."""
    dry_base: float | None = None
    """Factor by which each further token of the run raises the penalty; below 1 stands for the default, 1.75."""
    dry_allowed_length: int | None = None
    """Runs up to this long are not penalised. Default 2."""
    dry_penalty_last_n: int | None = None
    """How many recent tokens are searched for runs; 0 is off, -1 the whole context. Default 64."""
    dry_sequence_breakers: tuple[str, ...] | None = None
    """Texts at which a repeated run ends. Default: line end, colon, quotation mark, asterisk."""
    mirostat: int | None = None
    """1 or 2: that version of Mirostat in place of all other stages but the temperature; 0 is off. Default 0."""
    mirostat_tau: float | None = None
    """Surprise that Mirostat aims at, bits. Default 5."""
    mirostat_eta: float | None = None
    """Mirostat's learning rate: how fast it moves towards `mirostat_tau`. Default 0.1."""
    adaptive_target: float | None = None
    """Probability that drawn tokens should have, for the stage `adaptive_p`; below 0 is off. Default -1."""
    adaptive_decay: float | None = None
    """How long `adaptive_p` remembers drawn tokens, 0 to 0.99; more is longer. Default 0.9."""
    min_keep: int | None = None
    """Filters keep at least this many tokens. Default 0."""
    samplers: tuple[SamplerName, ...] | None = None
    """The stages and their order."""
    logit_bias: tuple[Bias, ...] | None = None
    seed: int | None = None
    """0 to 2^32 - 1; `None` draws one at random for each call."""


# Requests of hundreds of thousands of messages are kept while they wait. Structs with `gc=False` are none of the
# objects that Python's collector looks through; being frozen and made of JSON, they can't refer to themselves.


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """One function call that the model made in an earlier turn; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class Medium(msgspec.Struct, frozen=True, gc=False):
    """A picture or a sound, as the file that the caller sent. Only a worker's helper process decodes it."""

    kind: Literal["picture", "sound"]
    data: bytes
    """Contents of the file: PNG, JPEG, WAV, MP3, ..."""
    param: str = ""
    """The caller's parameter that the medium comes from, such as `messages.0.content.1`; for error messages."""
    sha256: bytes = b""
    """SHA-256 of `data`, which stands for it in prefix hashes. Nothing that is cached is found by it."""


class Message(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One chat message. `content` is plain text, in which pictures and sounds have their places."""

    role: Role
    content: str | None = None
    reasoning: str | None = None
    """The reasoning of an earlier turn's answer; the template decides whether the model sees it again."""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    media: tuple[int, ...] = ()
    """Places in `content` where the request's next media (`GenerateRequest.media`) stand: numbers of the characters
    that follow them, ascending. All messages' places together are as many as the request's media."""


class Tool(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One function that the model may call."""

    name: str
    description: str | None = None
    parameters: str | None = None
    """The JSON Schema of the arguments, as JSON text: a schema of 15 KiB can have 5,000 objects, and a call that waits
    for a slot would keep them all."""
    strict: bool = False
    """Whether calls must follow the schema exactly; the request is refused if the worker can't ensure that."""
    grammar: Constraint | None = None
    """For a custom tool, whose one parameter `input` is a text: the form of this text, as Lark or a regular expression.
    It is enforced where the worker can do so; the description tells the model of it in any case."""

    def schema(self) -> dict[str, Any]:
        """Return the decoded JSON Schema of the arguments; empty if there is none. Decodes it at each call."""
        return decode_object(self.parameters) if self.parameters is not None else {}


class AdapterUse(msgspec.Struct, frozen=True, gc=False):
    """A LoRA adapter, by the name it was loaded under, and its scale; 0 is off."""

    name: str
    scale: float = 1.0


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form that the answer's text must follow: from its first token on, or from the first of `triggers` on."""

    kind: Literal["gbnf", "json_schema", "regex", "lark"]
    text: str
    """The grammar; for `json_schema` the schema as JSON text."""
    triggers: tuple[str, ...] = ()
    """Strings that switch the constraint on, and are part of the constrained text; empty: it is on from the start."""
    param: str = "response_format"
    """The caller's parameter that the constraint comes from; for error messages."""


UNBOUNDED = -1
"""The `Thinking.budget` of a caller who sets no bound."""
MAX_THINKING_BUDGET = 2**31 - 1
MAX_BUDGET_MESSAGE_CHARS = 4096


class Thinking(msgspec.Struct, frozen=True, omit_defaults=True):
    """The caller's settings for models that can think before they answer. Other models ignore them."""

    enabled: bool | None = None
    """Whether the model thinks; None: as the model's catalog entry says."""
    effort: str | None = None
    """The template variable `reasoning_effort`: low, medium, high, ..."""
    budget: int = UNBOUNDED
    """Maximum number of tokens of thought; when they are used up, the worker closes the thought. -1: as the model's
    catalog entry says in chats, and no maximum elsewhere; 0: the model begins with the answer."""
    message: str = ""
    """Text that the model is made to write before its thought is closed; empty: as the catalog entry says."""
    split: bool = True
    """Whether thought is sent as `Reasoning`; False: as `Text`, with its tags, as the model writes it."""


class Speculation(msgspec.Struct, frozen=True, omit_defaults=True):
    """The caller's settings for drafts: guesses at an answer's next tokens, which make it quicker and never change it.
    The numbers are llama-server's `speculative.*`."""

    enabled: bool = True
    """Whether the answer may be drafted where that is quicker."""
    n_max: int = -1
    """Maximum number of tokens of a draft; -1: as many as pay; 0: no drafts."""
    n_min: int = 0
    """Shorter drafts are not used."""
    p_min: float = 0.0
    """Tokens that are less likely to be drawn than this, together with those before them, are not drafted."""
    prediction: str = ""
    """Text that the caller expects the answer to have (OpenAI's `prediction`)."""


class InfillFile(msgspec.Struct, frozen=True, gc=False):
    """Another file of the project, for the model to know."""

    name: str
    text: str


class Infill(msgspec.Struct, frozen=True, omit_defaults=True):
    """Code to be completed between `prefix` and `suffix`; for models with fill-in-the-middle tokens."""

    prefix: str
    suffix: str
    prompt: str = ""
    """Text that is being typed now; it follows the prefix."""
    files: tuple[InfillFile, ...] = ()


Notice = Literal["progress", "timings", "tokens", "settings", "prompt"]
"""What a call is told only on request. The first three: the events `Progress`, `TimingsSoFar`, `Tokens`. "settings":
prompt text and sampling, in `Accepted`. "settings" and "prompt": also refuse a text longer than `max_prompt_chars`."""

MAX_PROMPT_CHARS = 4 << 20
"""Maximum characters of prompt text that one client's request gets back (`Accepted.prompt`), over all its answers."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request for an answer, in the same form whatever the client's dialect."""

    messages: tuple[Message, ...] = ()
    prompt: Prompt | None = None
    """Prompt to be continued without a chat template, in place of `messages`."""
    infill: Infill | None = None
    """Code to complete, in place of `messages` and `prompt`."""
    media: tuple[Medium, ...] = ()
    """Pictures and sounds, in the order in which they stand in the messages or in the prompt."""
    prompt_media: tuple[int, ...] = ()
    """Places of the media in a `prompt` that is a text, as in `Message.media`."""
    tools: tuple[Tool, ...] = ()
    parallel_tool_calls: bool = True
    """False: the answer ends after one tool call."""
    thinking: Thinking = Thinking()
    template_values: str = ""
    """Further variables for the chat template (`documents`, and the caller's `chat_template_kwargs`): a JSON object, as
    text for the reason given at `Tool.parameters`; empty: none."""
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    """Maximum number of tokens to generate; `None`: until the model ends or the conversation is `n_ctx` tokens long; 0:
    only prefill."""
    max_predict_ms: int = 0
    """Milliseconds from the first token after which the answer ends at the next line end; 0: off. From llama-server."""
    n_indent: int = 0
    """End the answer before a line (not its first) with fewer leading blanks than this; 0: off. From llama-server."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; they are not part of it."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end the answer as its end token does; their text is not part of it (vLLM's `stop_token_ids`)."""
    min_tokens: int = 0
    """Minimum number of tokens before an end token or one of `stop_tokens`, unless the answer's form forces one."""
    ignore_eos: bool = False
    """Go on after the model's end token (llama-server's extension, for benchmarks)."""
    adapters: tuple[AdapterUse, ...] = ()
    constraint: Constraint | None = None
    forced_tools: tuple[str, ...] = ()
    """Names of tools; the answer must call one of them. Empty: the model decides."""
    n_probs: int = 0
    """Number of likeliest tokens whose log probabilities come with each token; -1: only the chosen token's; 0: none."""
    prompt_probs: int = 0
    """Send the probabilities of the prompt's tokens (`PromptLogprobs`), and refuse a prompt of more tokens. 0: do not
    send them. Needs `n_probs`, and `cache_prompt` False: cached tokens are not computed again."""
    post_sampling_probs: bool = False
    """Probabilities after the sampler chain instead of log probabilities before it (llama-server's extension)."""
    special: bool = False
    """Write control tokens into the text instead of dropping them."""
    cache_salt: str = ""
    """Narrows the sharing of cached prompts to calls of the same team with the same salt."""
    cache_prompt: bool = True
    """Whether cached prefixes may be used for this prompt, and this prompt be cached."""
    slot: int = -1
    """The slot that the caller prefers; -1: any."""
    tell: tuple[Notice, ...] = ()
    max_prompt_chars: int = MAX_PROMPT_CHARS
    """Maximum number of characters of the prompt's text in `Accepted`. A longer text is cut; with "prompt" in `tell`,
    the call is refused."""
    priority: int = 0
    """Calls with a higher number go first. In clients' requests a lower one goes first: gateways change the sign."""
    speculation: Speculation = Speculation()
    context_shift: bool = False
    """At the end of the context, drop the older half of the conversation and go on, instead of ending."""
    n_keep: int = 0
    """Tokens at the beginning that `context_shift` never drops; -1: the whole prompt."""


class Submit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of `POST /v1/submit`. Sending it again (same gateway and call) while the call lives has no effect."""

    gateway: str
    """Name of the gateway process (`gateway_process`), on whose event stream the answer is sent."""
    call: int
    """Number of the call, unique within the gateway process."""
    request: GenerateRequest
    tenant: str
    """The calling team: the trust boundary of everything that is cached."""
    weight: float = 1.0
    """The team's share of the worker's slots, relative to other teams' weights."""
    request_id: str = ""
    """Id of the request, for the worker's log lines."""
    deadline: float = 0.0
    """Unix time, seconds, by which the caller wants the first token; 0: none. Orders calls of one priority."""
    traceparent: str = ""
    """The gateway's span around the call, as W3C Trace Context writes it; empty: the call is not traced."""
    tracestate: str = ""


class Accepted(msgspec.Struct, frozen=True, omit_defaults=True):
    """Body of the `202` to a `Submit`. The settings are here and not in an event: a prompt can be megabytes long, and
    an event that is too long for the stream would end the calls of others."""

    boot: str
    """Boot id of the worker process."""
    num_prompt_tokens: int
    prompt: str = ""
    """The prompt's text as the model reads it, up to the request's `max_prompt_chars`, for `tell: ["settings"]`."""
    sampling: Sampling | None = None
    """The values used, for `tell: ["settings"]`: the caller's, else the model's or llama-server's; also the seed."""


class Cancel(msgspec.Struct, frozen=True):
    """Body of `POST /v1/cancel`: end these calls within one step. Unknown numbers are ignored; answers `204`."""

    gateway: str
    calls: tuple[int, ...]


decode_submit = PieceDecoder(Submit)
decode_object: Callable[[str], dict[str, Any]] = msgspec.json.Decoder(dict[str, Any], float_hook=read_float).decode
"""Decodes a JSON object: a tool's schema, or template values. Other threads wait: 30 ms for 2 MB of names."""
