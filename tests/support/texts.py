"""Texts that callers may send: words, code, numbers, runs of like characters, all scripts, control tokens, rubbish."""

from __future__ import annotations

import random
from collections.abc import Iterator

WORDS = (
    *("the", "of", "and", "to", "I", "it", "that", "don't", "we'll", "She's", "CamelCaseName", "snake_case_name"),
    *("3.14159", "1,000,000", "2024-11-22", "http://example.org/a?b=c&d=e", "foo@bar.baz", "x+=1;", "return;"),
    *("def f(x):", "#include <stdio.h>", "{}", "[]", "()", "...", "!?", "--", "==", "!=", "Grüße", "naïve"),
    *(
        "Привет",
        "мир",
        "שלום",
        "عالم",
        "नमस्ते",
        "สวัสดี",
        "你好世界",
        "こんにちは",
        "안녕하세요",
        "🙂👨\u200d👩\u200d👧",
        "½",
        "²",
        "Ⅷ",
        "ﬁ",
    ),
    *("a\u0301", "\u200b", "\ufeff", "\x00", "\x7f", "<|im_end|>", "<s>", "</s>", "[INST]", "<|endoftext|>", "<unk>"),
    *("[CLS]", "\u2581", "\u0120"),
)
SPACES = (" ", "  ", "\n", "\n\n", "\t", "\r\n", "   \n ", "\u00a0", "\u3000", "")
RANGES = (
    (32, 127),
    (0xA0, 0x250),
    (0x370, 0x590),
    (0x900, 0xE80),
    (0x3040, 0x3100),
    (0x4E00, 0x9FFF),
    (0x1F300, 0x1F700),
)


def fuzzed_texts(chance: random.Random, number: int, longest: int = 2000, *, shortest: int = 1) -> Iterator[str]:
    """Yield so many texts; the same ones for the same seed. Most are near `shortest` characters, few near `longest`."""
    for _ in range(number):
        length = int(shortest * (longest / shortest) ** chance.random())
        parts: list[str] = []
        size = 0
        while size < length:
            parts.append(_part(chance, length - size))
            size += len(parts[-1])
        yield "".join(parts)[:length]


def _part(chance: random.Random, room: int) -> str:
    kind = chance.random()
    if kind < 0.75:
        return chance.choice(WORDS) + chance.choice(SPACES)
    if kind < 0.85:
        return chance.choice("= -_#*a1!\n\t\u4f60\u0301") * chance.randint(1, min(room, 300))
    low, high = chance.choice(RANGES)
    return "".join(chr(chance.randrange(low, high)) for _ in range(chance.randint(1, 20)))
