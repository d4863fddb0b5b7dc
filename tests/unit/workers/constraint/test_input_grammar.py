"""The grammar of a custom tool's input, enforced inside the JSON string that models write it as."""

from __future__ import annotations

import json
import random
import re
import string
import time
from typing import Literal

import pytest
from llguidance import LLTokenizer

from tests.unit.workers.chat.reading import parser_of, read
from tests.unit.workers.constraint.test_call_forms import BY_NAME, compiler_of, drawn, mask_of
from workers.chat.tools.family import Ask
from workers.constraint.guidance import Grammar, tokenizer
from workers.constraint.languages.input_grammar import input_rules
from workers.constraint.languages.regex_rules import NotTranslatable, regex_rule
from workers.constraint.mask import Unusable
from workers.llama.tokens.vocab import Vocab
from workers.protocol.events import CallFailed
from workers.protocol.requests import Constraint, GenerateRequest, Tool

APPLY_PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""The grammar that Codex sends with its tool `apply_patch`."""
PATCH = """*** Begin Patch
*** Add File: a "b".py
+x = "1\\n" + 'ü'
+
*** Update File: c.py
*** Move to: d.py
@@ def f():
-old
+new\t{}
*** Delete File: z
*** End Patch
"""


@pytest.fixture(scope="module")
def words(vocab: Vocab) -> LLTokenizer:
    return tokenizer(vocab)


def accepts(words: LLTokenizer, rules: str, text: str, rule: str = "it") -> bool:
    """Return whether the text, as JSON writes it, follows the rule as a whole."""
    grammar = Grammar(words, f'start: {rule} "\\""\n{rules}')
    written = json.dumps(text, ensure_ascii=False)[1:-1]
    mask = grammar.mask()
    return mask.feed(grammar.tokens(f'{written}"'.encode()))


def test_the_grammar_of_codex(words: LLTokenizer) -> None:
    rules = input_rules(APPLY_PATCH, "it")
    assert accepts(words, rules, PATCH)
    assert accepts(words, rules, PATCH.removesuffix("\n"))
    for wrong in (
        PATCH.replace("*** Begin", "** Begin"),
        PATCH.replace("+new", "new"),
        PATCH.replace("*** End Patch\n", ""),
        PATCH + "more",
        "*** Begin Patch\n*** End Patch",
    ):
        assert not accepts(words, rules, wrong)


PATTERNS = [
    r"(.*)", r"[a-c]+", r"[^\n]+", r"[a-z]+=\"[^\"\n]*\"", r"a|bc|(?:d(e)?)*", r"\\+\t?", r"[\n\t\x1f]{2}",
    r"x{1,3}y{2,}",
    r"\w+@\w{2,4}", r"[\]\-a]+", r"[^a\s]*?", r"\S\s\S", r"a\/b", r"(?s:.)+", r"(?i:ab)c", r"\D\d", r"[+-]?\d+", r".",
    r"é+", r"[ü-ÿ]", r"(a(b(c)))?",
]  # fmt: skip
ALPHABET = 'abcdexy=@"\\\n\t/-+] 1é{}'


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_what_it_matched(words: LLTokenizer, pattern: str) -> None:
    rules = f"it: {regex_rule(pattern)}\n"
    draw = random.Random(pattern)
    texts = {"", "a", "abc", 'a=""', "ab@cd", "xyy", "\\\\\t", "ABc", "a/b", "-12", "ü", "dede", "a b"}
    texts |= {"".join(draw.choices(ALPHABET, k=draw.randrange(5))) for _ in range(60)}
    if r"\x1f" in pattern:
        texts.add("\n\x1f")  # where it is not named it is left out
    for text in texts:
        assert accepts(words, rules, text) is bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize(
    ("lark", "good", "bad"),
    [
        ('start: A ~ 2..3\nA: "x"i | "a".."c"', ["Xb", "abc"], ["x", "abca", "dd"]),
        ('start: e\n?e: t ("+" t)*\nt: INT | "(" e ")"\n%import common.INT', ["(12+3)+4"], ["(1", "1+"]),
        ('start: A | [B] C  // which\nA.2: /a/i\nB.3: "\\t"\nC: "\\"c\\""', ["A", '\t"c"', '"c"'], ["\t", "c"]),
        ('start: W (",\\n" W)*\n%import common.WORD -> W\n', ["a,\nbc"], ["a,", "a\n"]),
        ('start: A B\n%import common (DIGIT, LF)\nA: DIGIT\nB: LF | "" ', ["1\n", "1"], ["11", "\n"]),
    ],
)
def test_what_lark_has(words: LLTokenizer, lark: str, good: list[str], bad: list[str]) -> None:
    rules = input_rules(lark, "it")
    assert [text for text in good if not accepts(words, rules, text)] == []
    assert [text for text in bad if accepts(words, rules, text)] == []


@pytest.mark.parametrize(
    "lark",
    [
        "start: A\nA: /a/ & /b/", "start: A\nA: ~/a/", "start: /a/\n%ignore / /", "start: %json {}", "start: <[5]>",
        "start: /(?=a)b/", "start: /^a$/", "start: /a\\b/", "start: /[a&&b]/", "start: /[a[b]]/", "start: /\\p{L}/",
        "start: /(/", "start: /a{x}/", "start: ESCAPED_STRING\n%import common.ESCAPED_STRING", "start: x{a}\n",
        'start: "\\d"', "start: /a/x", 'start: "ab".."c"', "start: /[a/", "start: /(?P<n>a)(?P=n)/",
    ],
)  # fmt: skip
def test_what_has_no_translation_is_known(lark: str) -> None:
    with pytest.raises(NotTranslatable):
        input_rules(lark, "it")


@pytest.mark.parametrize(
    "lark", ["", "begin: /a/", "start: other", "start: /a/\nstart: /b/", "/a/", "start: " + "x" * 40_000]
)
def test_what_is_wrong_is_told(lark: str) -> None:
    with pytest.raises(Unusable):
        input_rules(lark, "it")


def test_anything_is_translated_or_refused() -> None:
    draw = random.Random(7)
    for _ in range(3000):
        lark = "start: " + "".join(draw.choices(string.printable + '()[]|*+?"/\\', k=draw.randrange(30)))
        try:
            input_rules(lark, "it")
        except (NotTranslatable, Unusable):
            continue


def tool(kind: Literal["lark", "regex"], text: str) -> Tool:
    schema = (
        '{"type":"object","properties":{"input":{"type":"string"}},"required":["input"],"additionalProperties":false}'
    )
    return Tool("run", None, schema, strict=True, grammar=Constraint(kind, text))


GRAMMARS: list[tuple[Literal["lark", "regex"], str, str]] = [
    ("lark", 'start: ("say \\"" /[a-c\\n]{1,4}/ "\\"" LF)+\n%import common.LF', r'(say "[a-c\n]{1,4}"\n)+'),
    ("regex", r'^(?:say "[a-c\n]{1,4}")$', r'say "[a-c\n]{1,4}"'),
]


@pytest.mark.parametrize(("kind", "text", "pattern"), GRAMMARS)
@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3", "deepseek", "harmony", "json"])
def test_a_forced_call_has_an_input_of_the_grammar(
    vocab: Vocab, name: str, kind: Literal["lark", "regex"], text: str, pattern: str
) -> None:
    family, run = BY_NAME[name], tool(kind, text)
    compiler = compiler_of(vocab, family)
    for seed in range(6):
        request = GenerateRequest(tools=(run,), forced_tools=("run",), parallel_tool_calls=False)
        outcome = read(parser_of(family, Ask((run,))), drawn(vocab, mask_of(compiler, request), seed))
        [(called, arguments)] = outcome.calls
        assert called == "run"
        assert re.fullmatch(pattern, json.loads(arguments)["input"]), arguments


@pytest.mark.parametrize(("kind", "text", "pattern"), GRAMMARS)
def test_where_parameters_are_plain_text_it_is_told_and_not_enforced(
    vocab: Vocab, kind: Literal["lark", "regex"], text: str, pattern: str
) -> None:
    compiler = compiler_of(vocab, BY_NAME["qwen3-coder"])
    mask_of(compiler, GenerateRequest(tools=(tool(kind, text),), forced_tools=("run",)))


def test_a_grammar_without_a_translation_leaves_the_input_free(vocab: Vocab) -> None:
    compiler = compiler_of(vocab, BY_NAME["hermes"])
    request = GenerateRequest(tools=(tool("lark", "start: /a/\n%ignore / /"),), forced_tools=("run",))
    assert mask_of(compiler, request).allowed() is not None


@pytest.mark.parametrize(("kind", "text"), [("lark", "start: other"), ("regex", "(")])
def test_a_grammar_that_is_wrong_is_refused(vocab: Vocab, kind: Literal["lark", "regex"], text: str) -> None:
    compiler = compiler_of(vocab, BY_NAME["hermes"])
    with pytest.raises(CallFailed) as failed:
        mask_of(compiler, GenerateRequest(tools=(tool(kind, text),), forced_tools=("run",)))
    assert (failed.value.failure.param or "").startswith("tools")


@pytest.mark.parametrize(
    "text",
    [
        "%import common.A" + " " * 32_000 + "z",
        "%import common.A ->" + " " * 32_000 + "/",
        "%import common.A -> b" + " " * 32_000 + "z",
        "%import" + " " * 32_000 + "z",
        "%import common." + "a" * 32_000 + "-",
        "%import common" + " " * 32_000 + "z",
        "%import common (" + "a, " * 10_000 + "-",
        "/" + "\\a" * 16_000,
        '"' + "\\a" * 16_000,
        "!" * 32_000,
        "_" * 32_000,
        "start: " + "a" * 32_000 + "$",
    ],
    ids=lambda text: text[:20],
)
def test_no_text_takes_long_to_be_read(text: str) -> None:
    """`re` keeps the interpreter's lock: with runs that compete for blanks it took half a minute."""
    began = time.process_time()
    with pytest.raises((Unusable, NotTranslatable)):
        input_rules(text, "input")
    assert time.process_time() - began < 1
