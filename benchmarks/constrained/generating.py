"""Answers of the demo model, a few million parameters, at temperature 1, under each schema: all must be valid."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jsonschema

from benchmarks.constrained.cases import Case
from benchmarks.constrained.judging import compiler_for
from benchmarks.table import Row
from tests.integration.engine.listener import Bench, running
from tests.support.stack import DEMO_MODEL
from workers.constraint.mask import Bits, Mask
from workers.llama.model import Model
from workers.models.spec import LlamaSettings
from workers.protocol.events import CallFailed, Failed, FinishReason
from workers.protocol.requests import Sampling

PROMPT = "<|im_start|>user\nGive me an example as JSON.<|im_end|>\n<|im_start|>assistant\n"
MAX_TOKENS = 300
SLOTS = 4


class Counting:
    """A mask that counts how often it was asked, and how often it said no."""

    def __init__(self, mask: Mask) -> None:
        self._mask = mask
        self.num_asked = self.num_refused = 0

    @property
    def is_done(self) -> bool:
        return self._mask.is_done

    def forced(self) -> Sequence[int]:
        return self._mask.forced()

    def permits(self, token: int) -> bool:
        permitted = self._mask.permits(token)
        self.num_asked += 1
        self.num_refused += not permitted
        return permitted

    def allowed(self) -> Bits | None:
        return self._mask.allowed()

    def accept(self, token: int) -> None:
        self._mask.accept(token)


@dataclass(slots=True)
class Tally:
    valid: int = 0
    cut: int = 0
    invalid: int = 0
    failed: int = 0
    asked: int = 0
    refused: int = 0


def measure(cases: list[Case], seeds: int) -> list[Row]:
    tally = Tally()
    with Model.load(DEMO_MODEL, LlamaSettings(n_threads=1)) as model:
        compiler = compiler_for(model.vocab)
        with running(model, slots=SLOTS, n_ctx=1024, kv_tokens=SLOTS * 1024) as bench:
            for case in cases:
                try:
                    masks = [Counting(compiler.mask(case.constraint)) for _ in range(seeds)]
                except CallFailed:
                    continue
                _generate(case, masks, bench, tally)
    share = tally.refused / max(tally.asked, 1)
    counts = f"{tally.valid} valid, {tally.invalid} invalid, {tally.failed} failed"
    figure = f"{counts}, {tally.cut} cut off at {MAX_TOKENS} tokens"
    return [
        Row(
            "answers of the demo model under a schema, temperature 1",
            figure,
            "",
            "all valid",
            not (tally.invalid or tally.failed),
        ),
        Row("of its tokens, drawn freely and refused", f"{share:.0%} of {tally.asked:,}", "", "", True),
    ]


def _generate(case: Case, masks: list[Counting], bench: Bench, tally: Tally) -> None:
    keys = [
        bench.submit(replace(bench.request(PROMPT, MAX_TOKENS, sampling=Sampling(temperature=1, seed=n)), mask=mask))
        for n, mask in enumerate(masks)
    ]
    bench.wait(*keys)
    for key, mask in zip(keys, masks, strict=True):
        tally.asked += mask.num_asked
        tally.refused += mask.num_refused
        end = bench.heard.calls[key][-1]
        if isinstance(end, Failed):
            tally.failed += 1
            print(f"failed under {case.name!r}: {end.failure.message}", flush=True)
        elif bench.heard.finished(key).reason is FinishReason.LENGTH:
            tally.cut += 1
        elif _is_valid(bench.heard.text(key), case):
            tally.valid += 1
        else:
            tally.invalid += 1
            print(f"invalid under {case.name!r}: {bench.heard.text(key)!r}", flush=True)


def _is_valid(text: str, case: Case) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    checker = jsonschema.FormatChecker()
    return jsonschema.Draft202012Validator(case.schema, format_checker=checker).is_valid(value)
