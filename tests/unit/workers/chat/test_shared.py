"""Which tokens of a prompt are everybody's: the demo model's vocabulary, templates in the manner of known ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date, timedelta
from pathlib import Path

import pytest

from workers.chat.prompts import OPENINGS, Prompts, SharedPrompts
from workers.chat.template import CHATML, ChatTemplate
from workers.llama.model import Model
from workers.models.spec import LlamaSettings
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.requests import GenerateRequest, Message, Tool

DEMO = Path(__file__).parents[4] / "deploy" / "demo" / "paddock-demo.gguf"

MARKED = "You are the help desk. Answer in two sentences."

LLAMA_2 = (
    "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}{{ '[INST] ' }}{% if loop.first %}{{ system }}{% endif %}"
    "{{ m.content.strip() + ' [/INST]' }}{% else %}{{ ' ' + m.content + ' ' }}{% endif %}{% endfor %}"
)
SYSTEM_LAST = (
    "{% for m in messages[1:] %}{{ '[INST] ' }}{% if loop.last %}{{ messages[0].content + '\n\n' }}{% endif %}"
    "{{ m.content + ' [/INST]' }}{% endfor %}"
)
WITH_DATE = "{{ strftime_now('%d %b %Y') }}\n" + CHATML
WITH_TIME = "{{ strftime_now('%H:%M:%S.%f') }}\n" + CHATML
USER_FIRST = "{{ messages[-1].content }}\n" + CHATML
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model.load(DEMO, LlamaSettings(n_threads=1)) as model:
        yield model


def prompts(model: Model, template: str | None, *texts: str) -> Prompts:
    return Prompts(ChatTemplate(template), model, shared=texts or (MARKED,))


def public(prompts: Prompts, *messages: Message, tools: tuple[Tool, ...] = ()) -> int:
    request = GenerateRequest(messages=messages, tools=tools)
    return prompts.num_public(request, prompts.fitting(request).tokens)


def public_text(model: Model, prompts: Prompts, *messages: Message) -> str:
    request = GenerateRequest(messages=messages)
    tokens = prompts.fitting(request).tokens
    num = prompts.num_public(request, tokens)
    return b"".join(model.vocab.special_piece(token) for token in tokens[:num]).decode()


def asked(text: str, system: str = MARKED) -> tuple[Message, Message]:
    return Message("system", system), Message("user", text)


@pytest.mark.parametrize("template", [None, LLAMA_2, WITH_DATE], ids=["ChatML", "Llama 2", "with the date"])
def test_the_marked_text_is_everybodys_and_nothing_that_follows(model: Model, template: str | None) -> None:
    one = prompts(model, template)
    text = public_text(model, one, *asked("Where is my parcel?"))
    assert MARKED in text
    assert "Where" not in text
    assert text == public_text(model, one, *asked("Hello."))


@pytest.mark.parametrize("template", [None, LLAMA_2], ids=["ChatML", "Llama 2"])
@pytest.mark.parametrize("opening", [*OPENINGS, "ab", "a a", "Q Q", "\u00e8", "   x", "\n\n\n"])
def test_a_user_who_speaks_like_the_samples_makes_nothing_public(
    model: Model, template: str | None, opening: str
) -> None:
    """What is public is one and the same run of tokens, or nothing: none of it depends on what the user says."""
    one = prompts(model, template)
    known = public(one, *asked("Where is my parcel?"))
    assert known > 0
    assert public(one, *asked(opening)) in (0, known)
    assert public(one, *asked(f"{opening} {opening} my secret")) in (0, known)


def test_longer_conversations_share_as_well(model: Model) -> None:
    one = prompts(model, None)
    short = public(one, *asked("Hi"))
    assert public(one, *asked("Hi"), Message("assistant", "Hello."), Message("user", "Where?")) == short > 0


@pytest.mark.parametrize(
    "messages",
    [
        (Message("user", MARKED),),
        asked("Hi", MARKED + " "),
        asked("Hi", MARKED + "\n"),
        asked("Hi", MARKED[:-1]),
        asked("Hi", "Something else."),
        (Message("system", "My secret."), Message("system", MARKED), Message("user", "Hi")),
        (Message("user", "My secret."), *asked("Hi")),
    ],
    ids=["as a user", "a blank", "a line break", "cut", "another", "second", "in the middle"],
)
def test_only_the_text_itself_at_the_beginning_counts(model: Model, messages: tuple[Message, ...]) -> None:
    assert public(prompts(model, None), *messages) == 0


def test_tools_are_the_callers_own_text(model: Model) -> None:
    one = prompts(model, "{{ messages[0].content }}{{ tools }}" + CHATML)
    assert public(one, *asked("Hi")) > 0
    assert public(one, *asked("Hi"), tools=(Tool("f", "my secret"),)) == 0


def test_a_prompt_without_messages_has_nothing_public(model: Model) -> None:
    one = prompts(model, None)
    request = GenerateRequest(prompt=f"<|im_start|>system\n{MARKED}<|im_end|>\n<|im_start|>user\nHi")
    assert one.num_public(request, one.fitting(request).tokens) == 0


@pytest.mark.parametrize("template", [USER_FIRST, WITH_TIME, REFUSES], ids=["user first", "time of day", "refused"])
def test_templates_that_put_other_things_first_share_at_most_what_stands_before_them(
    model: Model, template: str
) -> None:
    one = prompts(model, template)
    if template is REFUSES:
        request = GenerateRequest(messages=asked("Hi"))
        assert one.num_public(request, [1, 2, 3]) == 0
    else:
        assert MARKED not in public_text(model, one, *asked("Hi there"))


def test_a_template_that_puts_the_system_prompt_last_shares_it_in_no_later_turn(model: Model) -> None:
    one = prompts(model, SYSTEM_LAST)
    assert public(one, *asked("Hi")) > 0
    assert public(one, *asked("My secret"), Message("user", "And?")) == 0


def test_developers_and_systems_are_told_apart_where_the_template_does(model: Model) -> None:
    source = "{{ '' if '<|channel|>' else '' }}" + CHATML
    one = prompts(model, source)
    developer = public_text(model, one, Message("developer", MARKED), Message("user", "Hi"))
    system = public_text(model, one, *asked("Hi"))
    assert "developer" in developer
    assert "developer" not in system
    assert MARKED in developer
    assert MARKED in system


def test_a_date_in_the_template_is_taken_anew_each_day() -> None:
    days = [date(2026, 1, 1)]

    def tokenize(messages: Sequence[Message]) -> Sequence[int]:
        return [days[0].day, *map(ord, "".join(message.content or "" for message in messages))]

    shared = SharedPrompts([MARKED], tokenize, lambda: days[0])
    for _ in range(3):
        tokens = tokenize(asked("Where?"))
        assert shared.num_public(GenerateRequest(messages=asked("Where?")), tokens) == 1 + len(MARKED)
        days[0] += timedelta(days=1)
    assert shared.num_public(GenerateRequest(messages=asked("Where?")), tokens) == 0, "a prompt of yesterday"


class Failing:
    """A tokenizer of messages that fails once it has answered `before` times, as often as it has failures left."""

    def __init__(self, code: FailureCode, before: int, failures: int = 1) -> None:
        self.asked = 0
        self._code, self._before, self._failures = code, before, failures

    def __call__(self, messages: Sequence[Message]) -> Sequence[int]:
        self.asked += 1
        if self.asked > self._before and self._failures:
            self._failures -= 1
            raise CallFailed(Failure(self._code, "no"))
        return [*map(ord, "".join(message.content or "" for message in messages))]


@pytest.mark.parametrize("code", [FailureCode.UNAVAILABLE, FailureCode.OUT_OF_MEMORY])
def test_a_process_that_is_lost_while_the_text_is_looked_for_costs_one_call_its_share(code: FailureCode) -> None:
    for before in (0, 5):
        shared = SharedPrompts([MARKED], Failing(code, before))
        request, tokens = GenerateRequest(messages=asked("Where?")), [*map(ord, MARKED + "Where?")]
        assert [shared.num_public(request, tokens) for _ in range(3)] == [0, len(MARKED), len(MARKED)]


def test_what_a_template_refuses_is_not_rendered_for_each_call() -> None:
    tokenize = Failing(FailureCode.INVALID_REQUEST, 0, 100)
    shared = SharedPrompts([MARKED], tokenize)
    assert [shared.num_public(GenerateRequest(messages=asked("Where?")), [1, 2, 3]) for _ in range(3)] == [0] * 3
    assert tokenize.asked == 1
