"""Attacks by work that one call gives a worker: forms, samplers, probabilities, biases."""

from __future__ import annotations

import asyncio
import contextlib
import random

from tests.security.attack import Attack, Target

LEAVES_AFTER_S = 0.4


async def _ask(target: Target, path: str, body: dict[str, object], *, leave_after_s: float | None = None) -> None:
    """Send one call; with `leave_after_s` its caller goes away so soon."""
    async with target.session() as session:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(leave_after_s):
                await target.post(session, path, body)


def _complete(target: Target, **fields: object) -> dict[str, object]:
    return {"model": target.model, "prompt": "Once upon a time", "n_predict": 200, "ignore_eos": True, **fields}


async def _long_triggers(target: Target) -> None:
    mark = "".join(random.choices("abcdefgh", k=8))
    words = [("a" * 127 + chr(97 + n) + mark)[-128:] for n in range(16)]
    body = _complete(
        target,
        grammar="root ::= " + " | ".join(f'"{word}"' for word in words),
        grammar_lazy=True,
        grammar_triggers=[{"type": 1, "value": word} for word in words],
    )
    await _ask(target, "/completion", body, leave_after_s=LEAVES_AFTER_S)


async def _ambiguous_gbnf(target: Target) -> None:
    """Each x in a row doubles the ways to read the answer, and nothing but x is said."""
    mark = "".join(random.choices("abcdefgh", k=8))
    grammar = f'root ::= ([^x] | p)* | "{mark}"\np ::= "x" p "y" | "x" p "z" | "x"'
    body = _complete(target, grammar=grammar, logit_bias=[["x", 100]], temperature=0)
    await _ask(target, "/completion", body, leave_after_s=random.choice([1.0, 10.0]))


async def _ambiguous_lark(target: Target) -> None:
    mark = "".join(random.choices("abcdefgh", k=8))
    grammar = f'start: e | "{mark}"\ne: e e | "x" | "x" e | e "x"\n'
    body = _complete(target, grammar="%llguidance {}\n" + grammar, logit_bias=[["x", 100]], temperature=0)
    await _ask(target, "/completion", body, leave_after_s=random.choice([1.0, 10.0]))


async def _unclosed_brackets(target: Target) -> None:
    await _ask(target, "/completion", _complete(target, grammar="root ::= " + "[" * random.randrange(60_000, 65_000)))


async def _repeated_sampler(target: Target) -> None:
    await _ask(target, "/completion", _complete(target, samplers=["typ_p"] * 32, typical_p=0.99))


async def _sorting_samplers(target: Target) -> None:
    stages = ["typ_p", "xtc", "top_p", "min_p", "temperature"]
    body = _complete(target, samplers=stages, typical_p=0.9999, xtc_probability=0.9, top_p=0.9999, dynatemp_range=0.5)
    await _ask(target, "/completion", body)


async def _many_probabilities(target: Target) -> None:
    await _ask(
        target,
        "/completion",
        _complete(
            target,
            n_probs=100,
            post_sampling_probs=True,
            n_predict=3000,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            temperature=2.0,
        ),
    )


async def _long_biases(target: Target) -> None:
    chance = random.Random()
    biases = [["".join(chance.choices("abcdefghij klmnop", k=512)), 0.5] for _ in range(1024)]
    await _ask(target, "/completion", _complete(target, logit_bias=biases))


ATTACKS = (
    Attack(
        name="long-triggers",
        about="A lazy grammar has 16 triggers of 128 characters, and its caller leaves at once; eight took 89 s.",
        strike=_long_triggers,
        at_once=8,
    ),
    Attack(
        name="ambiguous-gbnf",
        about="A GBNF grammar takes twice as long with each token; others got none for 321 s.",
        strike=_ambiguous_gbnf,
        at_once=3,
        short_s=2.5,
    ),
    Attack(
        name="ambiguous-lark",
        about="A Lark grammar takes longer with each token; others had gaps of 5.4 s.",
        strike=_ambiguous_lark,
        at_once=3,
        short_s=2.5,
    ),
    Attack(
        name="unclosed-brackets",
        about="A grammar is 65,000 brackets that nothing closes; looking for ends held the interpreter for minutes.",
        strike=_unclosed_brackets,
        at_once=2,
    ),
    Attack(
        name="repeated-sampler",
        about="A sampler that sorts the vocabulary is named 32 times; seven callers made gaps of 3 s.",
        strike=_repeated_sampler,
        at_once=3,
    ),
    Attack(
        name="sorting-samplers",
        about="Every sampler that sorts the vocabulary is asked for by as many callers as there are slots.",
        strike=_sorting_samplers,
        at_once=3,
    ),
    Attack(
        name="many-probabilities",
        about="A hundred probabilities after sampling are asked for with each token; seven callers made gaps of 3 s.",
        strike=_many_probabilities,
        at_once=3,
    ),
    Attack(
        name="long-biases",
        about="1,024 texts of 512 characters are biased, by 16 callers at once; they were tokenised on the event loop.",
        strike=_long_biases,
        at_once=16,
    ),
)
