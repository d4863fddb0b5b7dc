"""The process in which a caller's grammar may crash or hang (`workers.constraint.trial` starts it).

    python -m workers.llama.grammar_trial MODEL.gguf

Reads kind and text of a grammar as a line of JSON, compiles it, lets GBNF choose among the vocabulary's tokens for a
while, and answers a line of JSON: why it is refused, or an empty string.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import time
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import numpy as np

from workers.bounds import bound_cpu, bound_memory
from workers.constraint.failures import Unusable
from workers.constraint.guidance import Grammar, tokenizer
from workers.llama.grammar import GbnfGrammars, GbnfMask
from workers.llama.vocab_file import VocabFile
from workers.protocol.failures import CallFailed

EXERCISE_S = 0.2
WALK_STEPS = 200
STEP_S = 0.5
"""A step that takes longer here would hold up every call of the worker."""

EXTRA_BYTES = 256 << 20
"""Memory beyond what the vocabulary takes: a grammar that grows without end meets this."""

PARSE_ERROR = re.compile(r"error parsing grammar: (.{1,120})")
MAX_TOLD = 64 << 10

CPU_S = 10
"""For one grammar: the end of a trial that hangs when nobody is left to kill it."""


class Bytes:
    """A vocabulary of bytes and an end: whether Lark compiles does not depend on the model's."""

    num_tokens, eos, bos, eog = 257, 256, -1, frozenset({256})

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < self.eos else b""


def main(path: Path) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    with VocabFile.load(path) as file, TemporaryFile() as said:
        # llama.cpp writes what is wrong with a grammar to stdout or stderr.
        os.dup2(said.fileno(), sys.stdout.fileno())
        os.dup2(said.fileno(), sys.stderr.fileno())
        grammars = GbnfGrammars(file.vocab)
        bound_memory(EXTRA_BYTES)
        print(json.dumps("ready"), file=answers, flush=True)
        for line in sys.stdin.buffer:
            bound_cpu(CPU_S)
            said.seek(0)
            said.truncate()
            kind, text = json.loads(line)
            print(json.dumps(_try(grammars, kind, text, said)), file=answers, flush=True)


def _try(grammars: GbnfGrammars, kind: str, text: str, said: IO[bytes]) -> str:
    try:
        if kind == "lark":
            Grammar(tokenizer(Bytes()), text)
            return ""
        grammar = grammars.compile(text)
    except Unusable as error:
        return f"{error}{_told(said)}"
    try:
        # Which tokens are tried is of no importance; that they are the same ones each time is.
        chance = random.Random(text)  # noqa: S311
        end = time.monotonic() + EXERCISE_S
        while time.monotonic() < end:
            _walk(grammar.mask(), chance, end)
    except Unusable as error:
        return str(error)
    except CallFailed as failed:
        return failed.failure.message
    return ""


def _walk(mask: GbnfMask, chance: random.Random, end: float) -> None:
    """One answer of random tokens, as far as time allows. Raises CallFailed, Unusable."""
    for _ in range(WALK_STEPS):
        start = time.monotonic()
        bits = mask.allowed()
        tokens = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        token = int(tokens[chance.randrange(len(tokens))])
        if token in mask.eog:
            return
        mask.accept(token)
        now = time.monotonic()
        if now - start > STEP_S:
            raise Unusable(f"one token took {now - start:.1f} s; make the grammar less ambiguous")
        if now > end:
            return


def _told(said: IO[bytes]) -> str:
    """What llama.cpp's parser printed, in brackets."""
    said.seek(0)
    found = PARSE_ERROR.search(said.read(MAX_TOLD).decode("utf-8", "replace"))
    return f" ({found[1]})" if found else ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
