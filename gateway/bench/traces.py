"""Reads and replays recorded traffic: the times and lengths of calls, and the blocks that their prompts share.

It reads Mooncake's JSON lines (`timestamp` in ms, `input_length`, `output_length`, `hash_ids`: an id per 512 tokens of
the prompt) and CSV with a header, as Azure's LLM inference traces and BurstGPT have.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random

import msgspec

from gateway.bench.asks import Ask
from gateway.bench.words import Words

BLOCK_TOKENS = 512
_COLUMNS = {
    "at": ("timestamp",),
    "prompt": ("contexttokens", "request tokens", "input_length", "input_tokens"),
    "answer": ("generatedtokens", "response tokens", "output_length", "output_tokens"),
}


class TraceUnusable(ValueError):
    """The file is no trace; the message is for a person."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded call; `at_s`: seconds after the first one. Lengths are in tokens."""

    at_s: float
    prompt: int
    answer: int
    blocks: tuple[int, ...] = ()


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read(path: Path) -> list[Recorded]:
    """Return the calls of a trace file in order of time. Raises TraceUnusable."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        calls = list(_json_lines(text) if text.lstrip().startswith("{") else _csv(text.splitlines()))
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError, ValueError) as error:
        raise TraceUnusable(f"--trace: {path}: {error}") from None
    if not calls:
        raise TraceUnusable(f"--trace: {path}: there is no call in it")
    first = min(call.at_s for call in calls)
    moved = [Recorded(call.at_s - first, call.prompt, call.answer, call.blocks) for call in calls]
    return sorted(moved, key=lambda call: call.at_s)


def _json_lines(text: str) -> Iterator[Recorded]:
    for line in msgspec.json.Decoder(_Line).decode_lines(text):
        yield Recorded(line.timestamp / 1000, line.input_length, max(1, line.output_length), line.hash_ids)


def _csv(lines: Sequence[str]) -> Iterator[Recorded]:
    rows = csv.reader(lines)
    names = [name.strip().lower() for name in next(rows, [])]
    at, prompt, answer = (_column(names, wanted) for wanted in _COLUMNS.values())
    for row in rows:
        # BurstGPT has failed calls with no answer.
        if row and int(row[answer]) > 0:
            yield Recorded(_seconds(row[at]), max(1, int(row[prompt])), int(row[answer]))


def _column(names: list[str], wanted: Sequence[str]) -> int:
    found = next((names.index(name) for name in wanted if name in names), None)
    if found is None:
        raise ValueError(f"no column is called {' or '.join(wanted)}; there are {', '.join(names)}")
    return found


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text[:26]).timestamp()


class Replay:
    """The calls of a trace as a source. Equal block ids become equal texts; other prompts share nothing.

    `scale` shortens all lengths, `most_tokens` bounds prompt and answer together.
    """

    def __init__(self, calls: Sequence[Recorded], words: Words, scale: float, most_tokens: int, seed: int) -> None:
        self._calls = iter(calls)
        self._words = words
        self._scale = scale
        self._most = most_tokens
        self._seed = seed
        self._number = 0

    def next(self) -> Ask | None:
        call = next(self._calls, None)
        if call is None:
            return None
        self._number += 1
        answer = max(1, min(round(call.answer * self._scale), self._most // 2))
        prompt = max(1, min(round(call.prompt * self._scale), self._most - answer))
        return Ask([{"role": "user", "content": self._prompt(call, prompt)}], answer)

    def ended(self, ask: Ask, answer: str, *, good: bool) -> None:
        pass

    def _prompt(self, call: Recorded, tokens: int) -> str:
        if not call.blocks:
            return self._text(tokens, f"call {self._number}")
        block, parts = max(1, round(BLOCK_TOKENS * self._scale)), []
        for id in call.blocks:
            text = self._text(block, f"block {id}")
            # A partial last block begins as the full one does.
            parts.append(text if tokens >= block else text[: max(1, len(text) * tokens // block)])
            tokens -= block
            if tokens <= 0:
                break
        return " ".join(parts)

    def _text(self, tokens: int, mark: str) -> str:
        return self._words.text(tokens, Random(f"{self._seed} {mark}"), f"[{self._seed} {mark}]")
