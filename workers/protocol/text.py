"""The wire types for text without the engine: tokens of a text, text of tokens, a request's prompt, what is served.

Every request answers `200`, or an error status with a `Failure`. Nothing is stored or generated, so all may be repeated
on any worker of the model. The work is bounded: see the limits below.

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
from workers.protocol.json_floats import read_float
from workers.protocol.requests import GenerateRequest, Sampling

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

    content: str | tuple[int | str, ...]
    """Text, or texts and tokens in turn; tokens are taken as they are."""
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
