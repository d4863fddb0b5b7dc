"""The fewest tokens of a text: never more than llama.cpp makes of it, and enough to refuse what is far too long."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.llama_source import files_of
from tests.support.texts import fuzzed_texts
from workers.llama.tokens.token_process import TokenFloor
from workers.llama.tokens.vocab import VocabFile, encoded

VOCABULARIES = files_of("models", "ggml-vocab-*.gguf")
QUICK = ("ggml-vocab-llama-spm", "ggml-vocab-starcoder")
WITHOUT = ("ggml-vocab-bert-bge", "ggml-vocab-nomic-bert-moe", "ggml-vocab-gemma-4")
"""Their texts are rewritten before they become tokens, or their merges are of characters."""

WORDS = encoded("ordinary words of a very long conversation about everything and nothing " * 54_000)


def compare(path: Path, num_texts: int) -> None:
    with VocabFile.load(path) as file:
        floor = TokenFloor.of(file)
        for text in (*fuzzed_texts(random.Random(5), num_texts), *longest_pieces(file)):
            data = encoded(text)
            for parse_special in (False, True):
                tokens = file.vocab.token_array(data, add_special=False, parse_special=parse_special)
                assert floor.of_text(data) <= len(tokens), text
        assert (floor.of_text(WORDS) > 30_000) is (path.stem not in WITHOUT)


def longest_pieces(file: VocabFile) -> list[str]:
    """Return texts that become as few tokens as any do."""
    pieces = sorted(map(file.vocab.special_piece, range(file.vocab.num_tokens)), key=len)[-300:]
    return [piece.decode("utf-8", "replace") * 4 for piece in pieces]


@pytest.mark.parametrize("path", [path for path in VOCABULARIES if path.stem in QUICK], ids=lambda path: path.stem)
def test_it_is_never_too_high(path: Path) -> None:
    compare(path, 60)


@pytest.mark.long
@pytest.mark.parametrize("path", VOCABULARIES, ids=lambda path: path.stem)
def test_it_is_never_too_high_for_any_vocabulary(path: Path) -> None:
    compare(path, 2000)


def test_whatever_may_be_dropped_is_not_counted() -> None:
    floor = TokenFloor([b"a", b"b", b"ab", b" ", b"\xc4"])
    assert floor.of_text(b"ab" * 10 + b" \n" * 50 + b"z" * 50 + b"\xc4" * 50) == 10
    assert TokenFloor([]).of_text(WORDS) == 0
