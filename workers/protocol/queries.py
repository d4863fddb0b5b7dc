"""The wire types of questions to a worker beside its calls: texts and tokens, slots, adapters.

Questions about text need no engine. Every one answers `200`, or an error status with a `Failure`. Nothing is stored or
generated, so all may be repeated on any worker of the model. The work is bounded: see the limits below.

    POST /v1/tokenize     Tokenize    ->  Tokenized
    POST /v1/detokenize   Detokenize  ->  Detokenized
    POST /v1/render       Render      ->  Rendered
    GET  /v1/props                    ->  Props

A slot holds the conversation that last ended in it, for the team and salt that owned it; for everybody else it is
empty. It can be saved under a name, restored and erased. Names of the answers' fields: "POST /slots/{id_slot}" in
tools/server/README.md of llama.cpp.

    GET  /v1/slots                    ->  list of SlotInfo
    POST /v1/slots/{id}   SlotAction  ->  SlotSaved, SlotRestored or SlotErased

LoRA adapters are loaded and unloaded for one worker. Unloading answers the adapter's last state, once no call uses it
any more or after N seconds (default 0).

    POST   /v1/adapters               LoadAdapter  ->  AdapterInfo
    GET    /v1/adapters                            ->  list of AdapterInfo
    DELETE /v1/adapters/{name}?wait_s=N            ->  AdapterInfo
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from workers.protocol.framing import read_float
from workers.protocol.heartbeat import ModelFacts, WorkerKind
from workers.protocol.requests import AdapterUse, GenerateRequest, Name, Prompt, Sampling

TOKENIZE_PATH = "/v1/tokenize"
DETOKENIZE_PATH = "/v1/detokenize"
RENDER_PATH = "/v1/render"
PROPS_PATH = "/v1/props"

MAX_TEXT_BYTES = 8 << 20
"""Longest body of a `Tokenize` or `Detokenize`, and longest text made from tokens, bytes."""

TOKEN_BYTES = 4
MAX_PIECES = 131_072
"""Most tokens that are answered with their pieces: each is an object of its own on both sides."""


class Tokenize(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of `POST /v1/tokenize`. Defaults are those of llama-server's `/tokenize`."""

    content: Prompt
    """Tokens are taken as they are."""
    add_special: bool = False
    """Whether to add the tokens that the model begins or ends every text with."""
    parse_special: bool = True
    """Whether control tokens written out in the text become those tokens."""
    with_pieces: bool = False
    tenant: str = ""
    """The team that asks: teams are served in turn."""


class Tokenized(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    ids: bytes
    """Tokens as 32-bit numbers, little-endian: eight MiB of text have up to eight million of them."""
    pieces: tuple[bytes, ...] | None = None
    """Each token's bytes, if asked for, control tokens written out; a character may be cut."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the tokens as numbers."""
        return tuple(ints_of(self.ids))


def packed(tokens: Sequence[int]) -> bytes:
    """Return tokens as `Tokenized.ids` has them."""
    numbers = array("I", tokens)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def ints_of(ids: bytes) -> array[int]:
    """Return the tokens that `packed` packed."""
    numbers = array("I", ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


class Detokenize(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    tokens: tuple[int, ...]
    tenant: str = ""
    """As in `Tokenize`."""


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    content: str
    """The text, control tokens written out; bytes that are no text are U+FFFD."""


class Render(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of `POST /v1/render`, which shows a request as the model would read it. Sampling and limits are ignored."""

    request: GenerateRequest
    text: bool = True
    """Whether the prompt's text is wanted."""
    count: bool = True
    """Whether the number of tokens is wanted; False: nothing is tokenised that need not be."""
    tenant: str = ""
    """As in `Tokenize`."""


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """The team in a request, decoded before the rest, which may be long, since teams are served in turn."""

    tenant: str = ""


class Rendered(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    prompt: str | None = None
    num_tokens: int | None = None


class Props(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a worker and its model, for llama-server's `/props` and `/models`."""

    kind: WorkerKind
    model: str
    """Name of the pool it serves."""
    slots: int
    n_ctx: int
    """Longest single conversation, tokens."""
    facts: ModelFacts
    model_file: str
    """The GGUF file's name, without its folder."""
    architecture: str
    ftype: str
    """How the weights are quantised, as llama.cpp writes it (`Q4_K - Medium`)."""
    n_embd: int
    """Width of the model's vectors."""
    vocab_type: int
    """llama.cpp's number: 1 sentencepiece, 2 byte pairs, 3 wordpiece, 4 unigram, 5 RWKV, 6 PLaMo-2."""
    bos_token: str
    """The token as templates write it; empty: there is none."""
    eos_token: str
    chat_templates: dict[str, str]
    """Jinja sources: `default` is used unless another one fits (`tool_use`, `rag`, ...); empty: there is no chat."""
    chat_template_caps: dict[str, bool]
    """The default template's capabilities, by llama-server's names (`supports_tools`, ...)."""
    has_infill: bool
    """Whether the model has fill-in-the-middle tokens."""
    input_modalities: tuple[str, ...]
    """Kinds of input that the model takes: `text`, and others."""
    build_info: str
    """The build of llama.cpp."""
    sampling: Sampling
    """The default of every parameter; `seed` is left out where it is drawn for each call."""


decode_asker = msgspec.json.Decoder(Asker).decode
decode_tokenize = msgspec.json.Decoder(Tokenize).decode
decode_tokenized = msgspec.json.Decoder(Tokenized).decode
decode_detokenize = msgspec.json.Decoder(Detokenize).decode
decode_detokenized = msgspec.json.Decoder(Detokenized).decode
decode_render = msgspec.json.Decoder(Render, float_hook=read_float).decode
decode_rendered = msgspec.json.Decoder(Rendered).decode
decode_props = msgspec.json.Decoder(Props).decode


SLOTS_PATH = "/v1/slots"


class SlotInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One slot: its running call, else the conversation that it holds."""

    id: int
    n_ctx: int
    """Longest single conversation, tokens."""
    is_processing: bool
    n_prompt_tokens: int
    n_decoded: int
    """Tokens of the answer so far."""
    n_remain: int = -1
    """Tokens that the answer may still have by its `max_tokens`; -1: no bound, or unknown."""
    request_id: str
    tenant: str
    """Team that owns the call or conversation; empty: none."""


class SlotAction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    action: Literal["save", "restore", "erase"]
    tenant: str
    filename: Annotated[str, Meta(max_length=1024)] = ""
    """File name in the team's own folder. `erase` with one removes the file and leaves the slot as it is."""
    salt: str = ""
    """The `cache_salt` of the conversation."""
    adapters: tuple[AdapterUse, ...] = ()
    """For `restore`: the adapters that the conversation was computed with."""


class SaveTimings(msgspec.Struct, frozen=True):
    save_ms: float


class RestoreTimings(msgspec.Struct, frozen=True):
    restore_ms: float


class SlotSaved(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `save`. Nothing is written for an empty slot, nor where none of its conversation is left."""

    id_slot: int
    filename: str
    n_saved: int
    """Tokens in the file."""
    n_written: int
    """Bytes of the file."""
    n_left: int = 0
    """Tokens at the end of the conversation that are not in the file, since their KV is kept nowhere any more."""
    timings: SaveTimings


class SlotRestored(msgspec.Struct, frozen=True, kw_only=True):
    id_slot: int
    filename: str
    n_restored: int
    """Tokens restored."""
    n_read: int
    """Bytes of the file."""
    timings: RestoreTimings


class SlotErased(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id_slot: int
    n_erased: int
    """Tokens that the slot held. Those that other conversations share, or that are on disk, stay."""
    n_freed: int = 0
    """Bytes of the erased file; 0: the slot was erased."""


decode_action = msgspec.json.Decoder(SlotAction).decode
decode_slot_infos = msgspec.json.Decoder(list[SlotInfo]).decode


ADAPTERS_PATH = "/v1/adapters"

MAX_WAIT_S = 600.0
"""Most seconds that an answer to `DELETE` may wait."""


class AdapterState(StrEnum):
    LOADED = "loaded"
    KNOWN = "known"
    """Checked, and not in memory: the next call that names it loads it."""
    LEAVING = "leaving"
    """Unloaded or replaced; freed when the last call that uses it ends."""
    GONE = "gone"
    """Unloaded and freed."""


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of `POST /v1/adapters`. A known name gets the new contents; running calls keep the old ones."""

    name: Name
    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """GGUF file, relative to the worker's `adapters_dir`."""
    pinned: bool = False
    """Whether it is loaded at once, and never evicted."""
    sha256: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    """SHA-256 that the file must have: of the contents that the fleet knows by this name. Empty: any."""
    check: bool = False
    """Only answer whether it would be taken; change nothing."""


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    sha256: str
    """SHA-256 of the file's contents: a name may be loaded again with others."""
    size: int
    """Bytes of the file."""
    rank: int
    state: AdapterState
    pinned: bool
    fixed: bool = False
    """Whether it comes from the worker's settings: it can't be replaced or unloaded while the worker runs."""
    calls: int
    """Accepted calls that use it and have not ended."""
    path: str = ""
    """Path relative to the worker's `adapters_dir`; empty where the file does not lie there."""


decode_load = msgspec.json.Decoder(LoadAdapter).decode
decode_info = msgspec.json.Decoder(AdapterInfo).decode
decode_adapter_infos = msgspec.json.Decoder(list[AdapterInfo]).decode
