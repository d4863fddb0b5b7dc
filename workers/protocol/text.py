"""A model's text without its engine: tokens of a text, the text of tokens, a request as its prompt, what is served.

Every request answers `200`, or an error status with a `Failure`. Nothing is remembered or generated, so all may be
repeated on any worker of the model. The work is bounded: see the limits below.

POST /v1/tokenize     Tokenize    ->  Tokenized
POST /v1/detokenize   Detokenize  ->  Detokenized
POST /v1/render       Render      ->  Rendered
GET  /v1/props                    ->  Props
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import msgspec

from workers.protocol.heartbeat import ModelFacts, WorkerKind
from workers.protocol.requests import GenerateRequest, Sampling

TOKENIZE_PATH = "/v1/tokenize"
DETOKENIZE_PATH = "/v1/detokenize"
RENDER_PATH = "/v1/render"
PROPS_PATH = "/v1/props"

MAX_TEXT_BYTES = 8 << 20
"""Longest body of a `Tokenize` or `Detokenize`, and longest text of tokens."""

TOKEN_BYTES = 4
MAX_PIECES = 131_072
"""Tokens that are told with their pieces: each is an object of its own on both sides."""


class Tokenize(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Defaults are those of llama-server's `/tokenize`."""

    content: str | tuple[int | str, ...]
    """Text, or texts and tokens in turn; tokens are taken as they are."""
    add_special: bool = False
    """With the tokens that the model begins or ends every text with."""
    parse_special: bool = True
    """Control tokens that are written out in the text become those tokens."""
    with_pieces: bool = False
    tenant: str = ""
    """The team that asks: teams are served in turn."""


class Tokenized(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    ids: bytes
    """Tokens as 32-bit numbers, little-endian: eight MiB of text have up to eight million of them."""
    pieces: tuple[bytes, ...] | None = None
    """Each token's bytes, control tokens written out, where they were asked for; a character may be cut."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return them as numbers."""
        return tuple(ints_of(self.ids))


def packed(tokens: Sequence[int]) -> bytes:
    """Return tokens as `Tokenized.ids` has them."""
    numbers = array("I", tokens)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def ints_of(ids: bytes) -> array[int]:
    """Return what was packed."""
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
    """Control tokens written out; bytes that are no text are U+FFFD."""


class Render(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The request as the model would read it. Whatever concerns the answer (sampling, limits) is ignored."""

    request: GenerateRequest
    text: bool = True
    """False: the text is not wanted."""
    count: bool = True
    """False: the number of tokens is not wanted, and nothing is tokenised that need not be."""
    tenant: str = ""
    """As in `Tokenize`."""


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a question that tells whose turn it waits for; read before the rest, which may be long."""

    tenant: str = ""


class Rendered(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    prompt: str | None = None
    num_tokens: int | None = None


class Props(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker serves and how, for llama-server's `/props` and `/models`."""

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
    """As templates write it; empty: there is none."""
    eos_token: str
    chat_templates: dict[str, str]
    """Jinja sources: `default` is used unless another one fits (`tool_use`, `rag`, ...); empty: there is no chat."""
    chat_template_caps: dict[str, bool]
    """What the default template has a place for, by llama-server's names (`supports_tools`, ...)."""
    has_infill: bool
    """Whether the model has fill-in-the-middle tokens."""
    input_modalities: tuple[str, ...]
    """`text`, and others as models take them."""
    build_info: str
    """Which llama.cpp computes."""
    sampling: Sampling
    """Every parameter with what a caller gets who does not say; `seed` is left out where it is drawn for each call."""


decode_asker = msgspec.json.Decoder(Asker).decode
decode_tokenize = msgspec.json.Decoder(Tokenize).decode
decode_tokenized = msgspec.json.Decoder(Tokenized).decode
decode_detokenize = msgspec.json.Decoder(Detokenize).decode
decode_detokenized = msgspec.json.Decoder(Detokenized).decode
decode_render = msgspec.json.Decoder(Render).decode
decode_rendered = msgspec.json.Decoder(Rendered).decode
decode_props = msgspec.json.Decoder(Props).decode
