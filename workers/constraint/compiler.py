"""Checks constraints, compiles each once, keeps the results for later calls, and makes the answers' masks."""

from __future__ import annotations

import functools
import hashlib
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from llguidance import LLTokenizer

from workers.constraint.gbnf import check
from workers.constraint.guidance import QUICK, Grammar, regex_to_lark, schema_to_lark, tokenizer
from workers.constraint.mask import BeyondLimits, Mask, Unusable, refused
from workers.constraint.moving_mask import Elsewhere, MovingGrammar
from workers.constraint.thought import Thought, ThoughtMask, Words
from workers.constraint.tool_calls import CallForms
from workers.constraint.triggers import PieceIndex, TriggeredMask, Triggers
from workers.protocol.requests import Constraint, GenerateRequest

MAX_GRAMMARS = 64
MAX_TEXT_BYTES, MAX_KEPT_BYTES = 128 << 10, 256 << 10
"""Maximum bytes of a text whose compiled grammar is kept, and of all these texts together.

A compiled grammar takes up to fifty times the memory of its text. Longer texts are compiled for each call, which takes
some tenths of a second on a thread of their own."""

IDLE_S, IDLE_LOOKS = 5.0, 10
"""Seconds without a call after which the vocabulary is read, and how often one looks in them."""

Key = tuple[str, bytes]
"""Key of a kept grammar: its kind, and the SHA-256 of its text."""

MAX_LARK_BYTES = 256 << 10
MAX_REGEX_BYTES = 16 << 10
MAX_PATTERNS = 6
"""Maximum number of a grammar's patterns that may all have to match the same text. A grammar with more is first tried
in a process of its own."""

MULTIPLE = re.compile(r'"multipleOf"\s*:\s*-?([0-9.]+)')
ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
MAX_DIGITS = 20
MAX_REMAINDERS = 2_000
"""Maximum number of remainders that divisions by a grammar's `multipleOf` values can leave. llguidance makes a state
for each, without a limit: a million took 12 s and 290 MiB, and freeing them half a second in which no other thread ran.
So a grammar with more is first tried in another process, and its masks are computed in others."""

MAX_PARTS = 200
"""Maximum number of colons and opening parentheses in a grammar, of which each rule, property and group has one. A
grammar with more, or longer than `MAX_QUICK_BYTES`, is first tried in a process of its own. llguidance calls itself for
each rule or schema within another: 750 levels overflow a thread's stack of 8 MiB, which ends the process. Its time
grows with the square of an object's properties: 18,000 took half a minute."""
MAX_QUICK_BYTES = 16 << 10

MAX_TRIGGERS = 16
MAX_TRIGGER_CHARS = 128
MAX_TRIGGER_SETS = 16
"""Maximum number of cached sets of triggers. Most requests use one set: the triggers of the model's tool calls."""


class Compiled(Protocol):
    """A compiled grammar, which makes masks. Immutable."""

    def mask(self) -> Mask:
        """Return a mask for a whole answer, from its first token on."""

    def mask_after(self, begun: bytes) -> Mask | None:
        """Return a mask for the text after `begun`; None if no answer can begin with `begun`. Must not block: the
        engine calls it."""

    def refused_of(self, beginnings: Sequence[bytes]) -> bytes | None:
        """Return the first of `beginnings` that no answer can begin with, or None. May block."""


class GbnfCompiler(Protocol):
    def compile(self, text: str) -> Compiled:
        """Return the compiled grammar of a GBNF text. Raises Unusable."""


class LarkCompiler(Protocol):
    def lark(self, text: str) -> Elsewhere:
        """Return a grammar whose masks other processes compute. `text`: Lark that llguidance is known to compile."""


class Trial(Protocol):
    def check(self, kind: Literal["gbnf", "lark"], text: str) -> None:
        """Try a grammar in another process. Raises Unusable if it fails there, CallFailed if it can't be tried."""


class Compiler:
    """The compiler of one model. `mask` blocks for milliseconds to seconds: call it on a thread that may wait."""

    def __init__(
        self, vocab: Words, gbnf: GbnfCompiler, trial: Trial, calls: CallForms, elsewhere: LarkCompiler | None = None
    ) -> None:
        """`elsewhere` makes Lark grammars whose masks other processes compute. It is for masks that take too long for a
        step of the engine. None: the masks of all Lark grammars are computed in this process."""
        self._vocab = vocab
        self._elsewhere = elsewhere
        self._calls = calls
        self._gbnf = gbnf
        self._trial = trial
        self._lock = threading.Lock()
        self._kept: OrderedDict[Key, tuple[Compiled | Unusable, int]] = OrderedDict()
        """Key -> the compiled grammar, or its error (finding it can take seconds), and the bytes that it counts for."""
        self._num_bytes = 0
        self._counts = {"compiled": 0, "reused": 0, "refused": 0}
        self._triggers_of = functools.lru_cache(MAX_TRIGGER_SETS)(self._new_triggers)
        self._warming: threading.Thread | None = None
        self._is_closed = threading.Event()

    @functools.cached_property
    def _words(self) -> LLTokenizer:
        return tokenizer(self._vocab)

    @functools.cached_property
    def _pieces(self) -> PieceIndex:
        return PieceIndex(self._vocab, self._calls.controls)

    @property
    def counts(self) -> dict[str, int]:
        """How many constraints of calls were `compiled`, `reused` or `refused` so far."""
        with self._lock:
            return dict(self._counts)

    def warm_up(self) -> None:
        """Read the vocabulary now. That takes a second at 150,000 tokens; for half of it no other thread runs."""
        _ = self._words, self._pieces

    def warm_up_once(self, is_idle: Callable[[], bool]) -> None:
        """Read the vocabulary on another thread once `is_idle` has been true for IDLE_S, so that neither a worker's
        start nor its first calls wait for that. The first call with a constraint reads it, if it comes earlier."""
        if self._warming is None and not self._is_closed.is_set():
            self._warming = threading.Thread(target=self._warm_up_idle, args=(is_idle,), name="warm up", daemon=True)
            self._warming.start()

    def close(self) -> None:
        """Wait for the thread that reads the vocabulary. Call it before the model is closed."""
        self._is_closed.set()
        if self._warming is not None:
            self._warming.join()

    def _warm_up_idle(self, is_idle: Callable[[], bool]) -> None:
        idle_looks = 0
        while idle_looks < IDLE_LOOKS:
            if self._is_closed.wait(IDLE_S / IDLE_LOOKS):
                return
            idle_looks = idle_looks + 1 if is_idle() else 0
        self.warm_up()

    def answer_mask(self, request: GenerateRequest, thought: Thought | None = None) -> Mask | None:
        """Return the mask for an answer: it limits the thought, and keeps the text after it to the form that the
        request demands. None if `thought` is None and no form is demanded. Raises CallFailed.

        `thought`: how, and how long, the model may think before the answer."""
        constraint = self._calls.constraint_of(request)
        begin = None if constraint is None else self._beginning(constraint)
        if thought is not None:
            return ThoughtMask(thought, self._vocab, begin)
        return None if begin is None else begin()

    def mask(self, constraint: Constraint) -> Mask:
        """Return a mask. Raises CallFailed (INVALID_REQUEST) if `constraint` is too large or can't be enforced."""
        return self._beginning(constraint)()

    def _beginning(self, constraint: Constraint) -> Callable[[], Mask]:
        """Return a function that makes a mask for an answer, from its first token on. Raises CallFailed."""
        try:
            grammar = self._grammar(constraint)
            if not constraint.triggers:
                return grammar.mask
            triggers = self._triggers(constraint.triggers)
            string = grammar.refused_of(triggers.strings)
            if string is not None:
                raise Unusable(f"the grammar does not allow its own trigger {string.decode()!r}")
        except Unusable as error:
            raise refused(str(error), constraint.param) from None
        return functools.partial(TriggeredMask, triggers, grammar.mask_after)

    def _grammar(self, constraint: Constraint) -> Compiled:
        """Return a constraint's compiled grammar. Raises Unusable, and CallFailed (BUSY, say) if it can't be tried."""
        text = constraint.text.encode()
        key = (constraint.kind, hashlib.sha256(text).digest())
        known = self._known(key)
        outcome = "reused"
        if known is None:
            outcome = "compiled"
            try:
                known = self._compile(constraint.kind, constraint.text)
                self._keep(key, known, len(text))
            except Unusable as error:
                known = Unusable(str(error))  # without the frames that it was raised in, which hold the text
                self._keep(key, known, len(str(error)))
        refused = isinstance(known, Unusable)
        with self._lock:
            self._counts["refused" if refused else outcome] += 1
        if isinstance(known, Unusable):
            raise Unusable(str(known))
        return known

    def _known(self, key: Key) -> Compiled | Unusable | None:
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def _compile(self, kind: str, text: str) -> Compiled:
        match kind:
            case "gbnf":
                check(text)
                self._trial.check("gbnf", text)
                return self._gbnf.compile(text)
            case "json_schema":
                return self._lark(schema_to_lark(self._calls.enforced(text)))
            case "regex":
                _bound("regular expression", text, MAX_REGEX_BYTES)
                return self._lark(regex_to_lark(text))
            case _:
                _bound("grammar", text, MAX_LARK_BYTES)
                return self._lark(text)

    def _triggers(self, strings: tuple[str, ...]) -> Triggers:
        if len(strings) > MAX_TRIGGERS or not all(0 < len(string) <= MAX_TRIGGER_CHARS for string in strings):
            raise Unusable(f"at most {MAX_TRIGGERS} triggers of 1 to {MAX_TRIGGER_CHARS} characters are allowed")
        return self._triggers_of(strings)

    def _new_triggers(self, strings: tuple[str, ...]) -> Triggers:
        return Triggers(strings, self._pieces)

    def _lark(self, text: str) -> Compiled:
        is_large = num_remainders(text) > MAX_REMAINDERS
        is_tried = is_large or is_heavy(text) or has_many_parts(text)
        if is_tried:
            self._trial.check("lark", text)
        if self._elsewhere is None:
            return Grammar(self._words, text)
        elsewhere = self._elsewhere.lark(text)
        if is_large:
            return elsewhere
        try:
            return MovingGrammar(Grammar(self._words, text, QUICK), elsewhere)
        except BeyondLimits:
            if not is_tried:
                self._trial.check("lark", text)
            return elsewhere

    def _keep(self, key: Key, result: Compiled | Unusable, num_bytes: int) -> None:
        if num_bytes > MAX_TEXT_BYTES:
            return
        with self._lock:
            self._num_bytes += num_bytes - self._kept.get(key, (None, 0))[1]
            self._kept[key] = result, num_bytes
            while len(self._kept) > MAX_GRAMMARS or self._num_bytes > MAX_KEPT_BYTES:
                _, (_, num_freed) = self._kept.popitem(last=False)
                self._num_bytes -= num_freed


def is_heavy(lark: str) -> bool:
    """Return whether compiling may take long: the time doubles with each pattern that has to match the same text."""
    num_patterns = lark.count('"pattern') + lark.count('"format"')
    merges = '"allOf"' in lark or '"$ref"' in lark
    return (num_patterns > MAX_PATTERNS and merges) or lark.count("&") + lark.count("~") > MAX_PATTERNS


def has_many_parts(lark: str) -> bool:
    """Return whether the grammar may have so many parts, or parts within each other, that compiling it in the worker
    could overflow the thread's stack or take seconds."""
    return len(lark) > MAX_QUICK_BYTES or sum(map(lark.count, ":(")) > MAX_PARTS


def num_remainders(lark: str) -> int:
    """Return the maximum number of remainders that a grammar's `multipleOf` values can leave: the larger of their least
    common multiple (if all limit one number) and of their sum times one plus the number of `$ref`s (if not)."""
    text = ESCAPE.sub(lambda found: chr(int(found[1], 16)), lark) if "\\u" in lark else lark
    digits = (number.replace(".", "").strip("0")[:MAX_DIGITS] for number in MULTIPLE.findall(text))
    factors = [int(each) for each in digits if each]
    num_of_one = sum(factors) * (1 + text.count('"$ref"'))
    return num_of_one if num_of_one > MAX_REMAINDERS else max(num_of_one, math.lcm(*factors))


def _bound(what: str, text: str, most: int) -> None:
    if len(text.encode()) > most:
        raise Unusable(f"the {what} has more than {most >> 10} KiB; send a shorter one")
