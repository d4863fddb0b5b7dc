"""Attacks by work that one call gives a worker: forms, samplers, probabilities, biases."""

from __future__ import annotations

import asyncio
import contextlib
import random
from functools import partial

from tests.security.attack import Attack, Fleet, Target

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


async def _unended_repetition(target: Target) -> None:
    grammar = 'root ::= "a"{' + "1" * random.randrange(60_000, 65_000)
    await _ask(target, "/completion", _complete(target, grammar=grammar))


async def _listed_values(target: Target) -> None:
    listed = ",".join(map(str, [0] * random.randrange(55_000, 60_000) + [1, 2, 3, 4]))
    arrays = ",".join(['{"type":"array","uniqueItems":true,"items":{"$ref":"#/$defs/e"}}'] * 1500)
    schema = f'{{"$defs":{{"e":{{"enum":[{listed}]}}}},"type":"array","prefixItems":[{arrays}]}}'
    await _ask(target, "/completion", _complete(target, guided_json=schema, n_predict=20))


async def _begun_stops(target: Target) -> None:
    """What is said is a beginning of every stop string, and of none more than that."""
    stops = ["a" * 60 + chr(97 + n % 26) + chr(97 + n // 26) + "!" for n in range(126)]
    body = _complete(target, stop=stops, logit_bias=[["a", 100]], temperature=0, n_cmpl=4, n_predict=400)
    await _ask(target, "/completion", body)


async def _fresh_stops(target: Target) -> None:
    stops = ["".join(random.choices("abcdefgh", k=64)) for _ in range(128)]
    await _ask(target, "/completion", _complete(target, stop=stops, n_predict=1))


async def _many_expressions(target: Target) -> None:
    """Each may be what has been said so far, for as long as lower case letters are said."""
    texts = [f"T{n}: /[a-z]{{{n},{n + 300}}}{''.join(random.choices('abcdefgh', k=3))}/" for n in range(400)]
    start = " | ".join(f"T{n}" for n in range(400))
    grammar = "\n".join(("%llguidance {}", f"start: ({start})*", *texts, ""))
    await _ask(target, "/completion", _complete(target, grammar=grammar, n_predict=20))


async def _many_remainders(target: Target) -> None:
    schema = {"type": "integer", "multipleOf": random.randrange(90_001, 10_000_000, 2)}
    await _ask(target, "/completion", _complete(target, json_schema=schema, n_predict=20))


async def _blank_answers(target: Target) -> None:
    """Whitespace and nothing else, where a call may follow it."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {
        "model": target.model,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [tool],
        "logit_bias": [[" ", 100], ["\n", 100]],
        "ignore_eos": True,
        "temperature": 0,
        "n": 4,
    }
    await _ask(target, "/v1/chat/completions", body)


async def _held_values(target: Target) -> None:
    """A member that calls may have too, whose value has no end: as long as it may become a call it is held back."""
    kind = {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {
        "model": target.model,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [tool],
        "response_format": {"type": "json_schema", "json_schema": {"name": "kind", "schema": kind}},
        "logit_bias": [["{", 50], *(["-" * length, 100] for length in (112, 64, 16, 1))],
        "ignore_eos": True,
        "temperature": 0,
        "n": 4,
        "max_tokens": 2000,
    }
    await _ask(target, "/v1/chat/completions", body)


async def _told_prompts(target: Target) -> None:
    """Send copies of one prompt: what costs is telling its text with each answer, not reading it."""
    prompts = [[300 + place * 7 % 400 for place in range(450)]] * 8
    await _ask(target, "/completion", _complete(target, prompt=prompts, n_cmpl=16, n_predict=1))


async def _fresh_prompts(target: Target) -> None:
    """Prompts that nobody has asked before, three at a time."""
    prompts = [[random.randrange(300, 700) for _ in range(450)] for _ in range(3)]
    await _ask(target, "/completion", _complete(target, prompt=prompts, n_predict=1))


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


_wide = partial(Attack, fleet=Fleet.WIDE)

ATTACKS = (
    _wide(
        name="long-triggers",
        about="A lazy grammar has 16 triggers of 128 characters, and its caller leaves at once; eight took 89 s.",
        strike=_long_triggers,
        at_once=8,
    ),
    _wide(
        name="ambiguous-gbnf",
        about="A GBNF grammar takes twice as long with each token; others got none for 321 s.",
        strike=_ambiguous_gbnf,
        at_once=3,
        short_s=2.5,
    ),
    _wide(
        name="ambiguous-lark",
        about="A Lark grammar takes longer with each token; others had gaps of 5.4 s.",
        strike=_ambiguous_lark,
        at_once=3,
        short_s=2.5,
    ),
    _wide(
        name="unclosed-brackets",
        about="A grammar is 65,000 brackets that nothing closes; looking for ends held the interpreter for minutes.",
        strike=_unclosed_brackets,
        at_once=2,
    ),
    Attack(
        name="unended-repetitions",
        about="A grammar repeats 65,000 digits of times, without an end: half a minute in one regular expression.",
        strike=_unended_repetition,
        at_once=2,
    ),
    Attack(
        name="listed-values",
        about="A schema refers to a list of 60,000 values 1,500 times; each was read anew, for ten minutes.",
        strike=_listed_values,
        at_once=2,
    ),
    Attack(
        name="begun-stops",
        about="All that is said is the beginning of 126 stop strings; each token was compared with all, for 16 ms.",
        strike=_begun_stops,
        at_once=2,
    ),
    Attack(
        name="fresh-stops",
        about="128 stop strings of 64 characters, new ones each time: their tree took 9 ms of a worker's event loop.",
        strike=_fresh_stops,
        at_once=8,
    ),
    _wide(
        name="many-expressions",
        about="A grammar of 400 expressions that all match what is said: steps of 0.1 s, three for each call.",
        strike=_many_expressions,
        at_once=8,
    ),
    Attack(
        name="many-remainders",
        about="An integer has to be a multiple of a large number: gigabytes and minutes for 60 bytes of schema.",
        strike=_many_remainders,
        at_once=3,
    ),
    Attack(
        name="blank-answers",
        about="Answers of whitespace, where a call may begin: all of it was looked at with each token.",
        strike=_blank_answers,
        at_once=2,
    ),
    Attack(
        name="held-values",
        about="Answers are one value that may belong to a call; 29 MB of it left at once, and ended all calls.",
        strike=_held_values,
        at_once=2,
    ),
    Attack(
        name="told-prompts",
        about="128 answers tell their prompts' texts, which went to all streams of a gateway at once.",
        strike=_told_prompts,
        at_once=2,
    ),
    Attack(
        name="fresh-prompts",
        about="Prompts of 450 tokens are read beside others' streams, which waited 0.23 s for each.",
        strike=_fresh_prompts,
        pause_s=1.0,
    ),
    _wide(
        name="repeated-sampler",
        about="A sampler that sorts the vocabulary is named 32 times; seven callers made gaps of 3 s.",
        strike=_repeated_sampler,
        at_once=3,
    ),
    _wide(
        name="sorting-samplers",
        about="Every sampler that sorts the vocabulary is asked for by as many callers as there are slots.",
        strike=_sorting_samplers,
        at_once=3,
    ),
    _wide(
        name="many-probabilities",
        about="A hundred probabilities after sampling are asked for with each token; seven callers made gaps of 3 s.",
        strike=_many_probabilities,
        at_once=3,
    ),
    _wide(
        name="long-biases",
        about="1,024 texts of 512 characters are biased, by 16 callers at once; they were tokenised on the event loop.",
        strike=_long_biases,
        at_once=16,
    ),
)
