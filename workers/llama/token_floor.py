"""A lower bound on the tokens of a text, found by counting its characters: a text that is far too long for a context is
refused before anything is tokenised.

A token stands for the characters of its own text and no others, so a text with a thousand letters has at least
1000 / n tokens where no token has more than n. That holds for characters which no tokenizer drops or rewrites:

- Sentencepiece (`llama`) and byte pairs of bytes (`gpt2`) keep every visible ASCII character. They may drop whitespace
  beside control tokens, and bytes beyond ASCII that a vocabulary lacks: neither is counted.
- Wordpiece and unigram vocabularies rewrite the text first, and others are not known well enough: no bound.

Source: `llama_vocab::impl::tokenize` and the sessions of src/llama-vocab.cpp of llama.cpp.
"""

from __future__ import annotations

import string
from collections.abc import Iterable

from llama_cpp import llama_cpp as c

from workers.llama.vocab_file import VocabFile

SENTENCEPIECE, BYTE_PAIRS = 1, 2

OF_CHARACTERS = frozenset({"whitespace", "gemma4", "granite-embed-multi-311m", "sarvam-moe"})
"""Pre-tokenizers of byte pairs that work on characters, not on bytes."""

COUNTED = (
    bytes(range(0x21, 0x7F)),
    string.ascii_letters.encode(),
    string.digits.encode(),
)
"""Characters that are counted together. Few tokens have many letters; some consist of a hundred signs."""

EVERY_BYTE = bytes(range(256))


class TokenFloor:
    """The lower bound for one vocabulary."""

    def __init__(self, texts: Iterable[bytes]) -> None:
        """`texts`: texts of all tokens, as the vocabulary writes them; without any there is no bound."""
        longest_first = sorted(texts, key=len, reverse=True)
        known = {text for text in longest_first if len(text) == 1}
        self._most: list[tuple[bytes, int]] = []
        """For each kind: the characters that are not counted, and the most of the others in one token."""
        for characters in COUNTED:
            kept = {character for character in characters if bytes((character,)) in known}
            others = bytes(set(EVERY_BYTE) - kept)
            most = 0
            for text in longest_first:
                if len(text) <= most:
                    break
                most = max(most, len(text.translate(None, others)))
            if most:
                self._most.append((others, most))

    @classmethod
    def of(cls, file: VocabFile) -> TokenFloor:
        """Return the bound for a file's vocabulary; takes some tenths of a second for 150,000 tokens."""
        pointer, kind, model = file.vocab.pointer, file.vocab.kind, file.text_of("tokenizer.ggml.model")
        of_bytes = kind == BYTE_PAIRS and model == "gpt2" and file.text_of("tokenizer.ggml.pre") not in OF_CHARACTERS
        if not of_bytes and (kind, model) != (SENTENCEPIECE, "llama"):
            return cls(())
        return cls(c.llama_vocab_get_text(pointer, token) for token in range(file.vocab.num_tokens))

    def of_text(self, data: bytes) -> int:
        """Return the fewest tokens that UTF-8 text can have; takes some milliseconds per MiB."""
        return max((-(-len(data.translate(None, others)) // most) for others, most in self._most), default=0)
