"""Thought before a constrained answer, and its budget, on the demo model's vocabulary.

`<think>` is five tokens of it, `<tool_call>` is one.
"""

from __future__ import annotations

import pytest

from tests.unit.workers.constraint.test_masks import tokens_in
from workers.constraint.compiler import Compiler
from workers.constraint.mask import Mask
from workers.constraint.thought import Thought, ThoughtMask
from workers.llama.tokens.vocab import Vocab
from workers.protocol.requests import Constraint, GenerateRequest, Message

LONG_TAGS = ("<think>", "</think>")
SHORT_TAGS = ("<tool_call>", "</tool_call>")
NUMBER = Constraint("regex", "[0-9]{3}")
TAGS = pytest.mark.parametrize("tags", [LONG_TAGS, SHORT_TAGS], ids=["long", "short"])


class Speaker:
    """A model that wants to say a text, and says what the mask lets it."""

    def __init__(self, vocab: Vocab, mask: Mask) -> None:
        self._vocab = vocab
        self._mask = mask

    def tokens(self, text: str) -> list[int]:
        return self._vocab.tokenize(text, add_special=False, parse_special=True)

    def say(self, text: str, *, end: bool = False) -> str:
        """-> what was said, up to the token that was refused and the first one that is allowed in its place."""
        said = b""
        for token in (*self.tokens(text), *([self._vocab.eos] if end else [])):
            if self._mask.permits(token):
                self._mask.accept(token)
                said += self._vocab.special_piece(token)
                continue
            return (said + self.go_on()).decode()
        return said.decode()

    def go_on(self) -> bytes:
        """Take the only token there is, as long as there is only one."""
        said = b""
        while (bits := self._mask.allowed()) is not None and len(only := tokens_in(bits)) == 1:
            (token,) = only
            assert self._mask.permits(token)
            assert token != self._vocab.eos
            self._mask.accept(token)
            said += self._vocab.special_piece(token)
        return said

    @property
    def may_say_anything(self) -> bool:
        return self._mask.allowed() is None

    def may_say(self, text: str) -> bool:
        return self._mask.permits(self.tokens(text)[0])


def speaker(
    vocab: Vocab, compiler: Compiler, thought: Thought, constraint: Constraint | None = None
) -> tuple[Speaker, Mask]:
    asked = GenerateRequest(messages=(Message("user", "hi"),), constraint=constraint)
    mask = compiler.answer_mask(asked, thought)
    assert isinstance(mask, ThoughtMask)
    return Speaker(vocab, mask), mask


def test_without_a_thought_the_mask_is_the_constraints_own(compiler: Compiler) -> None:
    asked = GenerateRequest(messages=(Message("user", "hi"),), constraint=NUMBER)
    assert not isinstance(compiler.answer_mask(asked), ThoughtMask)
    assert compiler.answer_mask(GenerateRequest(messages=(Message("user", "hi"),))) is None


@TAGS
def test_a_constraint_begins_where_the_thought_ends(vocab: Vocab, compiler: Compiler, tags: tuple[str, str]) -> None:
    model, mask = speaker(vocab, compiler, Thought(*tags, is_open=True), NUMBER)
    thought = "Let me see: 12? <b> or 345. \n"
    assert model.say(thought) == thought
    assert not mask.is_done
    assert model.say(tags[1]) == tags[1]
    assert not model.may_say("a")
    assert model.say("345") == "345"
    assert mask.is_done


@TAGS
def test_a_thought_may_be_opened_first_or_left_out(vocab: Vocab, compiler: Compiler, tags: tuple[str, str]) -> None:
    model, mask = speaker(vocab, compiler, Thought(*tags), NUMBER)
    assert not model.may_say("a")
    assert model.say(f"{tags[0]}\nabc{tags[1]}345") == f"{tags[0]}\nabc{tags[1]}345"
    assert mask.is_done
    model, mask = speaker(vocab, compiler, Thought(*tags), NUMBER)
    assert model.say("345") == "345"
    assert mask.is_done
    model, mask = speaker(vocab, compiler, Thought(*tags), NUMBER)
    assert model.say("3") == "3"
    assert not model.may_say(tags[0]), "the answer has begun"


def test_a_tag_that_has_begun_is_all_that_may_come(vocab: Vocab, compiler: Compiler) -> None:
    model, mask = speaker(vocab, compiler, Thought(*LONG_TAGS), NUMBER)
    bits = mask.allowed()
    assert bits is not None
    assert set(model.tokens("<")) | set(model.tokens("0")) <= tokens_in(bits)
    assert model.say("<th") == "<th"
    assert not model.may_say("3")
    assert model.say("ree") == "ink>"
    assert model.may_say_anything


def test_what_both_allow_is_a_thought_once_the_tag_is_whole(vocab: Vocab, compiler: Compiler) -> None:
    model, _ = speaker(vocab, compiler, Thought(*LONG_TAGS), Constraint("regex", "<[a-z]+>[0-9]"))
    assert model.say("<this>") == "<this>"
    assert not model.may_say("a")
    model, mask = speaker(vocab, compiler, Thought(*LONG_TAGS), Constraint("regex", "<[a-z]+>[0-9]"))
    assert model.say("<think>") == "<think>"
    assert model.may_say_anything
    assert model.say("hm</think>") == "hm</think>"
    assert model.say("5") == "<", "what became the tag was not said to the answer's form"
    assert model.say("b>5") == "b>5"
    assert mask.is_done


@TAGS
def test_the_end_within_a_thought_closes_it_first(vocab: Vocab, compiler: Compiler, tags: tuple[str, str]) -> None:
    model, mask = speaker(vocab, compiler, Thought(*tags, is_open=True), NUMBER)
    assert model.say("hm", end=True) == "hm" + tags[1]
    assert model.say("345") == "345"
    assert mask.is_done
    free, _ = speaker(vocab, compiler, Thought(*tags, is_open=True, budget=50))
    assert free.say("hm", end=True) == "hm<|im_end|>", "nothing has to follow it"


def test_an_answer_that_would_escape_behind_the_tag_does_not(vocab: Vocab) -> None:
    """The vocabulary has a token that ends one word and begins the next: `in` closes, and what follows counts."""

    class Always:
        is_done = False

        def forced(self) -> tuple[int, ...]:
            return ()

        def permits(self, token: int) -> bool:
            return True

        def allowed(self) -> None:
            return None

        def accept(self, token: int) -> None:
            seen.append(token)

    seen: list[int] = []
    mask = ThoughtMask(Thought("<t>", "</th", is_open=True), vocab, Always)
    model = Speaker(vocab, mask)
    (th,), (slash, *_) = model.tokens("th"), model.tokens("</")
    (the,) = model.tokens("the")
    mask.accept(slash)
    assert not mask.permits(the)
    assert model.go_on() == b"th"
    mask.accept(th)
    assert seen == [th]


@TAGS
@pytest.mark.parametrize("constrained", [True, False])
def test_a_budget_closes_the_thought(
    vocab: Vocab, compiler: Compiler, tags: tuple[str, str], constrained: bool
) -> None:
    constraint = NUMBER if constrained else None
    model, _ = speaker(vocab, compiler, Thought(*tags, is_open=True, budget=4), constraint)
    assert model.say("1 2 3 4 5 6") == "1 2 " + tags[1]
    assert model.may_say("a") is not constrained
    assert model.say("345") == "345"
    none, _ = speaker(vocab, compiler, Thought(*tags, is_open=True, budget=0), constraint)
    assert none.go_on().decode() == tags[1]
    assert none.may_say("a") is not constrained


@TAGS
def test_what_a_caller_has_said_at_the_end_is_tokenised_before_the_engine_has_the_call(
    vocab: Vocab, monkeypatch: pytest.MonkeyPatch, tags: tuple[str, str]
) -> None:
    """4,096 characters took the engine's thread 4 to 11 ms, at each end of a thought."""
    lengths: list[int] = []
    tokenize = vocab.tokenize

    def counting(text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        lengths.append(len(text))
        return tokenize(text, add_special=add_special, parse_special=parse_special)

    said = "Enough of that. " * 256
    thought = Thought(*tags, budget=2, message=said, again=True)
    expected = tokenize(said + tags[1], add_special=False, parse_special=True)
    monkeypatch.setattr(vocab, "tokenize", counting)
    mask = ThoughtMask(thought, vocab, None)
    assert sum(lengths) >= len(said)
    lengths.clear()
    for _ in range(3):
        for token in tokenize(f"{tags[0]}1 2", add_special=False, parse_special=True):
            if mask.permits(token):
                mask.accept(token)
        for token in expected:
            assert mask.permits(token)
            mask.accept(token)
        assert mask.allowed() is None
    assert max(lengths, default=0) < 32
    ThoughtMask(Thought(*tags, message=said), vocab, None)
    assert max(lengths, default=0) < 32, "of an unbounded thought it is never said"


@TAGS
def test_a_thought_within_its_budget_is_left_alone(vocab: Vocab, compiler: Compiler, tags: tuple[str, str]) -> None:
    model, _ = speaker(vocab, compiler, Thought(*tags, is_open=True, budget=20))
    said = f"1 2 3{tags[1]} and then something long that is no thought any more, is it? 1 2 3 4 5 6 7 8 9"
    assert model.say(said) == said


@TAGS
def test_each_thought_has_its_budget(vocab: Vocab, compiler: Compiler, tags: tuple[str, str]) -> None:
    model, _ = speaker(vocab, compiler, Thought(*tags, budget=2, again=True))
    start, end = tags
    assert model.say(f"Hello. {start}1{end} So. {start}1 2 3") == f"Hello. {start}1{end} So. {start}1 {end}"
    assert model.say("free " * 20) == "free " * 20
    none, _ = speaker(vocab, compiler, Thought(*tags, budget=0, again=True))
    assert none.say(f"Hi {start}1") == f"Hi {start}{end}"


@TAGS
def test_an_answer_that_speaks_of_the_tag_does_not_think(
    vocab: Vocab, compiler: Compiler, tags: tuple[str, str]
) -> None:
    start, end = tags
    for said in (f"Write {start} and then what you think", f"{start}1{end} Write {start} and then what you think"):
        model, _ = speaker(vocab, compiler, Thought(*tags, budget=2))
        assert model.say(said) == said
    model, _ = speaker(vocab, compiler, Thought(*tags, budget=2))
    assert model.say(f"\n {start}1 2 3") == f"\n {start}1 {end}"


def test_a_closing_tag_that_has_begun_is_completed(vocab: Vocab, compiler: Compiler) -> None:
    model, _ = speaker(vocab, compiler, Thought(*LONG_TAGS, is_open=True, budget=3), NUMBER)
    assert model.say("1 </the") == "1 </think>"
    assert model.say("345") == "345"


def test_thoughts_and_answers_in_channels(vocab: Vocab, compiler: Compiler) -> None:
    """The answer's form begins as the tag does, so the form must not take the tag for its own beginning."""
    form = Constraint("lark", 'start: "<s>me"? "<c>say<m>" /[0-9]{2}/')
    thought = Thought("<c>think<m>", "<e>", budget=6)
    model, mask = speaker(vocab, compiler, thought, form)
    said = "<c>think<m>ab<e><s>me<c>say<m>12"
    assert model.say(said) == said
    assert mask.is_done
    model, mask = speaker(vocab, compiler, thought, form)
    assert model.say("<c>say<m>12") == "<c>say<m>12"
    assert mask.is_done
    model, mask = speaker(vocab, compiler, thought, form)
    assert model.say("<c>think<m>", end=True) == "<c>think<m><e><", "and both ways to go on begin so"
    assert model.say("s>me<c>say<m>12") == "s>me<c>say<m>12"
    assert mask.is_done


def test_a_thought_may_be_closed_with_more_than_its_tag(vocab: Vocab, compiler: Compiler) -> None:
    """As where thoughts and answers are messages of their own, in channels."""
    thought = Thought("<a>", "<b>", "</a>\n<b>", is_open=True, budget=3)
    model, _ = speaker(vocab, compiler, thought, NUMBER)
    assert model.say("1 2 3") == "1 2</a>\n<b>"
    assert model.say("345") == "345"
    model, _ = speaker(vocab, compiler, thought, NUMBER)
    assert model.say("1<b>345") == "1<b>345"
    model, _ = speaker(vocab, compiler, thought, NUMBER)
    assert model.say("</a>2") == "</a>\n<b>", "it had begun"


@pytest.mark.parametrize("mark", ["<tool_call>", "<call>"], ids=["short", "long"])
def test_a_call_may_end_a_thought(vocab: Vocab, compiler: Compiler, mark: str) -> None:
    thought = Thought(*LONG_TAGS, ends=(mark,), is_open=True, budget=12)
    model, _ = speaker(vocab, compiler, thought)
    said = f"1 {mark}" + '{"name": "f", "arguments": {"a": 1, "b": 2, "c": 3}} and so on, with no bound'
    assert model.say(said) == said
    constrained, mask = speaker(vocab, compiler, thought, NUMBER)
    assert constrained.say(f"1 {mark}") == f"1 {mark[: 0 if mark == '<tool_call>' else -1]}</think>"
    assert constrained.say("345") == "345"
    assert mask.is_done


def test_a_character_is_not_cut_by_a_budget(vocab: Vocab, compiler: Compiler) -> None:
    model, _ = speaker(vocab, compiler, Thought(*LONG_TAGS, is_open=True, budget=2))
    assert model.say("1üü") == "1ü</think>"
    model, _ = speaker(vocab, compiler, Thought(*LONG_TAGS, is_open=True, budget=1))
    assert model.say("€") == "€"
    assert model.go_on() == b"</think>"


@TAGS
def test_calls_are_constrained_after_the_thought_only(vocab: Vocab, compiler: Compiler, tags: tuple[str, str]) -> None:
    """A trigger within the thought switches nothing on."""
    model, mask = speaker(vocab, compiler, Thought(*tags, is_open=True), Constraint("regex", "~[0-9]", triggers=("~",)))
    assert model.say(f"~a ~b{tags[1]} now ~") == f"~a ~b{tags[1]} now ~"
    assert not model.may_say("a")
    assert model.say("1") == "1"
    assert mask.is_done
