"""The wire types of requests to a worker that are no calls: about texts and tokens, its slots and its adapters.

Questions about text need no engine. Each is answered with `200`, or with an error status and a `Failure`. Nothing is
stored or generated, so each can be repeated on any worker of the model. The work is bounded: see the limits below.

    POST /v1/tokenize     Tokenize    ->  Tokenized
    POST /v1/detokenize   Detokenize  ->  Detokenized
    POST /v1/render       Render      ->  Rendered
    GET  /v1/props                    ->  Props

A slot holds the conversation that last ended in it, for the team and salt that owned it; for everybody else it is
empty. It can be saved under a name, restored and erased. Names of the answers' fields: "POST /slots/{id_slot}" in
tools/server/README.md of llama.cpp.

    GET  /v1/slots                    ->  list of SlotInfo
    POST /v1/slots/{id}   SlotAction  ->  SlotSaved, SlotRestored or SlotErased

LoRA adapters are loaded and unloaded for one worker. `DELETE` answers with the adapter's state as soon as no call uses
it any more, or after N seconds (default 0).

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

from workers.protocol.heartbeat import ModelFacts, WorkerKind
from workers.protocol.pieces import PieceDecoder, in_array, to_bytes
from workers.protocol.requests import AdapterUse, GenerateRequest, Name, Prompt, Sampling

TOKENIZE_PATH = "/v1/tokenize"
DETOKENIZE_PATH = "/v1/detokenize"
RENDER_PATH = "/v1/render"
PROPS_PATH = "/v1/props"

TEAM_HEADER = "x-paddock-team"
"""Header of a question with the team that asks, URL-encoded. Without it a worker looks for the team in the body, to
know whose turn it is, and that takes 1.5 ms per MiB."""

MAX_TEXT_BYTES = 8 << 20
"""Maximum size in bytes of the body of a `Tokenize` or `Detokenize`, and of a text made from tokens."""

TOKEN_BYTES = 4
MAX_PIECES = 131_072
"""Maximum number of tokens for which `with_pieces` may ask; more are refused: each piece is an object on both sides."""


class Tokenize(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of `POST /v1/tokenize`. Defaults are those of llama-server's `/tokenize`."""

    content: Prompt
    """What to tokenise; tokens in it are kept as they are."""
    add_special: bool = False
    """Whether to add the tokens with which the model begins or ends every text."""
    parse_special: bool = True
    """Whether control tokens written out in the text become those tokens."""
    with_pieces: bool = False
    tenant: str = ""
    """The team that asks. Teams are served in turn."""


class Tokenized(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    ids: bytes
    """Tokens as 32-bit numbers, little-endian. Packed, since eight MiB of text can have eight million tokens."""
    pieces: tuple[bytes, ...] | None = None
    """Each token's bytes if asked for, control tokens written out; a token may begin or end within a character."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the tokens as numbers."""
        return tuple(ints_of(self.ids))


def packed(tokens: Sequence[int]) -> bytes:
    """Return tokens in the form of `Tokenized.ids`."""
    numbers = in_array(tokens)
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return to_bytes(numbers)


def ints_of(ids: bytes) -> array[int]:
    """Return the tokens from bytes that `packed` made."""
    numbers = array("I", ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


class Detokenize(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    tokens: tuple[int, ...]
    tenant: str = ""
    """The team that asks. Teams are served in turn."""


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    content: str
    """The text, control tokens written out; bytes that are not UTF-8 become U+FFFD."""


class Render(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of `POST /v1/render`, which shows a request as the model would read it. Sampling and limits are ignored."""

    request: GenerateRequest
    text: bool = True
    """Whether the answer has the prompt's text."""
    count: bool = True
    """Whether the answer has the number of tokens. False: a chat is not even tokenised."""
    tenant: str = ""
    """The team that asks. Teams are served in turn."""


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """Decodes only the team that asks, for gateways that don't send `TEAM_HEADER`. The rest of a body, which can be
    long, is decoded at that team's turn."""

    tenant: str = ""


class Rendered(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    prompt: str | None = None
    num_tokens: int | None = None


class Props(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a worker and its model, for llama-server's `/props` and `/models`."""

    kind: WorkerKind
    model: str
    """Name of the pool that the worker serves."""
    slots: int
    n_ctx: int
    """Maximum length of one conversation, tokens."""
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
    """Text, in templates, of the token that begins a prompt; empty: none. `eos_token`: the same for the end token."""
    eos_token: str
    chat_templates: dict[str, str]
    """Name -> Jinja source. `default` is used unless another one fits (`tool_use`, `rag`, ...); empty: no chat."""
    chat_template_caps: dict[str, bool]
    """The default template's capabilities, by llama-server's names (`supports_tools`, ...)."""
    has_infill: bool
    """Whether the model has fill-in-the-middle tokens."""
    input_modalities: tuple[str, ...]
    """Kinds of input that the model takes: `text` and possibly others."""
    build_info: str
    """The build of llama.cpp."""
    sampling: Sampling
    """The default of every parameter; without `seed` if it is drawn for each call."""


decode_asker = msgspec.json.Decoder(Asker).decode
decode_tokenize = PieceDecoder(Tokenize)
decode_tokenized = PieceDecoder(Tokenized)
decode_detokenize = PieceDecoder(Detokenize)
decode_detokenized = PieceDecoder(Detokenized)
decode_render = PieceDecoder(Render)
decode_rendered = PieceDecoder(Rendered)
decode_props = msgspec.json.Decoder(Props).decode


SLOTS_PATH = "/v1/slots"


class SlotInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One slot, with its running call, or if none runs, with the conversation that it holds."""

    id: int
    n_ctx: int
    """Maximum length of one conversation, tokens."""
    is_processing: bool
    n_prompt_tokens: int
    n_decoded: int
    """Tokens of the answer so far."""
    n_remain: int = -1
    """Number of tokens that `max_tokens` still allows; -1: no bound, or unknown."""
    request_id: str
    tenant: str
    """Team that owns the call or conversation; empty: there is neither."""


class SlotAction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    action: Literal["save", "restore", "erase"]
    tenant: str
    filename: Annotated[str, Meta(max_length=1024)] = ""
    """File name in the team's own folder. `erase` with a file name removes the file and leaves the slot as it is."""
    salt: str = ""
    """The `cache_salt` of the conversation."""
    adapters: tuple[AdapterUse, ...] = ()
    """For `restore`: the adapters that the conversation was computed with."""
    max_files: Annotated[int, Meta(ge=1)] | None = None
    """For `save`: most files of the team in the folder; None: the worker's `slot_saves_per_team`."""
    max_bytes: Annotated[int, Meta(ge=1)] | None = None
    """For `save`: most bytes of the team's files; None: the worker's `slot_save_mib_per_team`."""


class SaveTimings(msgspec.Struct, frozen=True):
    save_ms: float


class RestoreTimings(msgspec.Struct, frozen=True):
    restore_ms: float


class SlotSaved(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `save`. No file is written if the slot is empty, or if no KV of its conversation is left."""

    id_slot: int
    filename: str
    n_saved: int
    """Tokens in the file."""
    n_written: int
    """Bytes of the file."""
    n_left: int = 0
    """Tokens at the end of the conversation that are not in the file, because their KV is no longer kept anywhere."""
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
    """Tokens of the conversation that was erased. KV that other conversations share, or that is on disk, stays."""
    n_freed: int = 0
    """Bytes of the file that was removed; 0: the slot was erased."""


decode_action = msgspec.json.Decoder(SlotAction).decode
decode_slot_infos = msgspec.json.Decoder(list[SlotInfo]).decode


ADAPTERS_PATH = "/v1/adapters"

MAX_WAIT_S = 600.0
"""Maximum `wait_s`, in seconds, of `DELETE /v1/adapters/{name}`; more is refused."""


class AdapterState(StrEnum):
    LOADED = "loaded"
    KNOWN = "known"
    """The adapter was checked but is not in memory; it is loaded when a call names it."""
    LEAVING = "leaving"
    """The adapter was unloaded or replaced; its memory is freed when the last call that uses it ends."""
    GONE = "gone"
    """The adapter was unloaded, and its memory is freed."""


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of `POST /v1/adapters`. A known name's contents are replaced; running calls keep the old contents."""

    name: Name
    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """GGUF file, relative to the worker's `adapters_dir`."""
    pinned: bool = False
    """Whether the adapter is loaded at once, and never evicted."""
    sha256: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    """SHA-256 that the file must have, as registered in the fleet for this name; empty: any."""
    check: bool = False
    """Only answer whether the adapter would be accepted; change nothing."""


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    sha256: str
    """SHA-256 of the file's contents; loading other contents under the same name changes it."""
    size: int
    """Bytes of the file."""
    rank: int
    state: AdapterState
    pinned: bool
    fixed: bool = False
    """Whether the worker's settings name the adapter; if so, it can't be replaced or unloaded while the worker runs."""
    calls: int
    """Number of accepted calls that use the adapter and have not ended."""
    path: str = ""
    """Path relative to the worker's `adapters_dir`; empty: the file is not in that folder."""


decode_load = msgspec.json.Decoder(LoadAdapter).decode
decode_info = msgspec.json.Decoder(AdapterInfo).decode
decode_adapter_infos = msgspec.json.Decoder(list[AdapterInfo]).decode
