"""Vocabularies of the small models, as the fields that a GGUF file keeps them in."""

from __future__ import annotations

import string
from functools import cache
from pathlib import Path
from typing import Any

import gguf
from gguf import GGUFValueType, TokenType

DEMO = Path(__file__).parents[2] / "deploy" / "demo" / "paddock-demo.gguf"

Vocabulary = tuple[tuple[str, Any, Any, Any], ...]
"""(key, value, type, type of elements) of every tokenizer field."""

LINE_END, FIRST_TEXT = 3 + ord("\n"), 3 + 256
"""Tokens of `sentencepiece`: that byte's, and the first one after those of bytes."""
SPACE = "▁"
"""How SentencePiece and llama.cpp's WordPiece write the beginning of a word."""
LETTERS = [*string.ascii_letters, *string.digits, *string.punctuation]
PIECES = """
_t _a he _s _w _i _c re _the _p me _b on at er in ou _d an _f le or ar _n as _m ll nd _l _to it _y _wh _is ame _h _r
_and _o _g _you ed _sa en _in ce st _k _do ir ay al el _name _me ow _what _j ri _st _T ch id _th ing _re _of all ad om
_was _it _u _v ig il es _ti et _are oo ain _we ck _e _time _on ase ol son out _said _pl _O _On _S _She _dog _A _cat
_The ct is _he ur _an _te _sh _ple _please _as ag ith ve _for _up _tr ent _ab _par _with od us am oun ot _about _there
her ut ht end im ver um ind _that _day _stor _how ained _who _be _play _de _li ue ter ook act ul _fri ak _came ily
_story pe ight ey _can _friend itt _park ird ant _upon _saw _val _ne _tool _tell _named _were _ro _litt _little _big
_had
""".replace("_", SPACE).split()
"""What words are made of, each of two that stand before it or of a letter."""


@cache
def demo_vocabulary() -> Vocabulary:
    """Return the demo model's, without its chat template."""
    found = []
    for name, field in gguf.GGUFReader(DEMO).fields.items():
        if name.startswith("tokenizer.") and name != "tokenizer.chat_template":
            kind = field.types[0]
            found.append((name, field.contents(), kind, field.types[-1] if kind is GGUFValueType.ARRAY else None))
    return tuple(found)


def sentencepiece() -> Vocabulary:
    """Return one whose texts begin with a space, and in which every byte is a token."""
    texts = [*PIECES, SPACE, *LETTERS]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    scores = [*[0.0] * FIRST_TEXT, *(-float(rank) for rank in range(len(texts)))]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *texts]
    return (
        *_tokens("llama", "default", tokens, [*kinds, *[TokenType.NORMAL] * len(texts)]),
        ("tokenizer.ggml.scores", scores, GGUFValueType.ARRAY, GGUFValueType.FLOAT32),
        *_numbers(unknown=0, bos=1, eos=2),
    )


def wordpiece() -> Vocabulary:
    """Return an encoder's: in lower case, each text between [CLS] and [SEP]."""
    controls = ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    texts = [*dict.fromkeys([*(SPACE + letter for letter in LETTERS), *PIECES, *LETTERS])]
    tokens = ["[PAD]", *(f"[unused{number}]" for number in range(99)), *controls, *texts]
    kinds = [TokenType.CONTROL if token in ("[PAD]", *controls) else TokenType.NORMAL for token in tokens]
    return (
        *_tokens("bert", "bert-bge", tokens, kinds),
        ("tokenizer.ggml.token_type_count", 2, GGUFValueType.UINT32, None),
        *_numbers(padding=0, unknown=100, cls=101, seperator=102, mask=103),
    )


def _tokens(model: str, pre: str, tokens: list[str], kinds: list[TokenType]) -> Vocabulary:
    return (
        ("tokenizer.ggml.model", model, GGUFValueType.STRING, None),
        ("tokenizer.ggml.pre", pre, GGUFValueType.STRING, None),
        ("tokenizer.ggml.tokens", tokens, GGUFValueType.ARRAY, GGUFValueType.STRING),
        ("tokenizer.ggml.token_type", [int(kind) for kind in kinds], GGUFValueType.ARRAY, GGUFValueType.INT32),
    )


def _numbers(**tokens: int) -> Vocabulary:
    return tuple((f"tokenizer.ggml.{name}_token_id", one, GGUFValueType.UINT32, None) for name, one in tokens.items())
