"""What it costs that long texts are tokenised in a process of their own.

    python -m benchmarks tokenising

Prompts of 1,000 to 100,000 tokens, made of words, become tokens in this process and through `GuardedTokenizer`, in
turn; the figures are the lowest of the rounds, which other programs disturb least. Vocabularies: Qwen2's, whose
pre-tokenizer is llama.cpp's own code, and DeepSeek's, which is run by std::regex.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable

from benchmarks.reference import sdist_source
from benchmarks.table import Row
from workers.llama.tokens.tokenizer import GuardedTokenizer, TokenProcesses
from workers.llama.tokens.vocab import Vocab, VocabFile

VOCABULARIES = ("qwen2", "deepseek-llm")
NUM_TOKENS = (1_000, 3_000, 10_000, 30_000, 100_000)
BAR = 1.2
SENTENCE = (
    "The quick brown fox jumps over 12 lazy dogs; don't you see? Then it returns a list of file names, values and "
    "errors: user_id=42, path=/var/lib, and so on.\n"
)


def measure(size: int) -> list[Row]:
    """`size`: rounds of each length."""
    return [row for name in VOCABULARIES for row in _vocabulary(name, size)]


def _vocabulary(name: str, rounds: int) -> list[Row]:
    path = sdist_source() / "vendor" / "llama.cpp" / "models" / f"ggml-vocab-{name}.gguf"
    with VocabFile.load(path) as file, contextlib.closing(TokenProcesses(path)) as processes:
        guarded = GuardedTokenizer(file.vocab, processes)
        return [_row(name, file.vocab, guarded, number, rounds) for number in NUM_TOKENS]


def _row(name: str, vocab: Vocab, guarded: GuardedTokenizer, num_tokens: int, rounds: int) -> Row:
    text = _text(vocab, num_tokens)
    plain_s: list[float] = []
    guarded_s: list[float] = []
    for _ in range(rounds):
        plain_s.append(_timed(lambda: vocab.tokenize(text, add_special=True, parse_special=True)))
        guarded_s.append(_timed(lambda: guarded.tokenize(text, add_special=True, parse_special=True)))
    plain, mine = min(plain_s), min(guarded_s)
    ratio = mine / plain
    figure = f"{mine * 1e3:.2f} ms, in one process {plain * 1e3:.2f} ms"
    return Row(f"{name}, {num_tokens:,} tokens", figure, f"{ratio:.2f} x", f"<= {BAR} x", ratio <= BAR)


def _text(vocab: Vocab, num_tokens: int) -> str:
    words = SENTENCE.split(" ")
    chance = random.Random(num_tokens)
    per_word = len(vocab.tokenize(SENTENCE, add_special=False, parse_special=True)) / len(words)
    return " ".join(chance.choice(words) for _ in range(round(num_tokens / per_word)))


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
