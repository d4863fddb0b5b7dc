"""From requests to tokens, with a tokenizer that gives a character its code."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.tools import json_of, tool_of
from workers.chat.answers import Answers, family_of
from workers.chat.conversation import PRESERVED, UNSET, conversation_of, is_thinking_off, variables
from workers.chat.infill import MARGIN, InfillPrompts, InfillRoom, InfillTokens
from workers.chat.prompts import SHORT_CHARS, Prompts, TooManyTokens, is_quick, text_chars
from workers.chat.template import ChatTemplate
from workers.models.spec import ChatDefaults
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.requests import GenerateRequest, Infill, InfillFile, Message, Thinking, ToolCall

HELLO = (Message("user", "Hi"),)
BEGIN = 1
TOKENS = InfillTokens(prefix=2, suffix=3, middle=4, repository=5, file=6, begin=BEGIN)
ROOM = InfillRoom(n_ctx=4096, n_batch=2048)


class Recorder:
    """A tokenizer that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool, bool]] = []

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool, most: int | None = None) -> Sequence[int]:
        self.asked.append((text, add_special, parse_special))
        return [BEGIN] * add_special + list(map(ord, text))


def prompts(template: str | None = None, infill: InfillPrompts | None = None) -> Prompts:
    return Prompts(ChatTemplate(template), Recorder(), num_tokens=0x110000, infill=infill)


def refused(one: Prompts, **fields: Any) -> Failure:
    with pytest.raises(CallFailed) as caught:
        one.prompt(GenerateRequest(**fields))
    return caught.value.failure


def codes(text: str) -> list[int]:
    return list(map(ord, text))


@pytest.mark.parametrize(
    ("source", "bos", "adds"), [("{{ bos_token }}x", "<s>", False), ("x", "<s>", True), ("x", "", True)]
)
def test_the_begin_token_is_there_once(source: str, bos: str, adds: bool) -> None:
    tokenizer = Recorder()
    one = Prompts(ChatTemplate(source, bos_text=bos), tokenizer, bos_text=bos)
    prompt = one.prompt(GenerateRequest(messages=HELLO))
    assert prompt.text == (bos if not adds else "") + "x"
    assert tokenizer.asked == [(prompt.text, adds, True)]


def test_text_tokens_and_both_in_turn() -> None:
    one = prompts()
    assert one.fitting(GenerateRequest(prompt="ab")).tokens == [BEGIN, *codes("ab")]
    assert one.fitting(GenerateRequest(prompt=(7, 8))).tokens == [7, 8]
    assert one.fitting(GenerateRequest(prompt=("a", 7, "b", "c"))).tokens == [BEGIN, *codes("a"), 7, *codes("bc")]
    assert one.fitting(GenerateRequest(prompt=(7, "b"))).tokens == [7, *codes("b")]
    failure = refused(one, prompt=("a", 0x110000))
    assert (failure.code, failure.param) == (FailureCode.INVALID_REQUEST, "prompt")
    assert "token 1114112 at position 1" in failure.message
    assert refused(one, prompt=(-1,)).param == "prompt"


class Careful(Recorder):
    """Knows that a text is too long without work."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool, most: int | None = None) -> Sequence[int]:
        if most is not None and len(text) > most:
            raise TooManyTokens(len(text))
        return super().tokenize(text, add_special=add_special, parse_special=parse_special)


def test_a_prompt_that_is_too_long_is_refused_before_it_is_tokenised() -> None:
    tokenizer = Careful()
    one = Prompts(ChatTemplate("{{ messages[0].content }}"), tokenizer, num_tokens=100, n_ctx=100)
    for request in (GenerateRequest(prompt="x" * 150), GenerateRequest(messages=(Message("user", "x" * 150),))):
        with pytest.raises(CallFailed) as caught:
            one.fitting(request)
        failure = caught.value.failure
        assert (failure.code, failure.num_prompt_tokens, failure.n_ctx) == (FailureCode.CONTEXT_OVERFLOW, 150, 100)
        assert failure.message.startswith("the prompt has 150 tokens, the context 100, answer included; ")
        assert failure.remedy.startswith("counting stopped at that number; shorten it")
        assert len(one.prompt(request).tokens) >= 150, "who only counts is told the whole number"
    tokenizer.asked.clear()
    with pytest.raises(CallFailed) as caught:
        one.fitting(GenerateRequest(prompt=(*[7] * 60, "x" * 60, "y")))
    assert (caught.value.failure.num_prompt_tokens, tokenizer.asked) == (120, [])


def test_tokenising_of_parts_stops_when_there_are_too_many() -> None:
    tokenizer = Recorder()
    one = Prompts(None, tokenizer, num_tokens=100, n_ctx=100)
    with pytest.raises(CallFailed) as caught:
        one.fitting(GenerateRequest(prompt=tuple(["x" * 30] * 50)))
    assert caught.value.failure.num_prompt_tokens == 121
    assert len(tokenizer.asked) == 4


def test_a_million_tokens_are_gone_through_run_by_run() -> None:
    """Not in one call, in which no other thread runs; what is told of them is the same."""
    one = prompts()
    tokens = [number % 1000 for number in range(1_100_000)]
    assert list(one.fitting(GenerateRequest(prompt=tuple(tokens))).tokens) == tokens
    tokens[1_050_000] = -1
    assert "token -1 at position 1050000;" in refused(one, prompt=tuple(tokens)).message
    tokens[1_050_000], tokens[40_000] = 7, "b"  # type: ignore[call-overload]
    assert list(one.fitting(GenerateRequest(prompt=tuple(tokens))).tokens) == [
        *tokens[:40_000],
        ord("b"),
        *tokens[40_001:],
    ]


def test_a_request_without_a_prompt() -> None:
    assert "send at least one message" in refused(prompts()).message


def test_a_model_that_does_not_chat() -> None:
    one = Prompts(None, Recorder())
    assert refused(one, messages=HELLO).code is FailureCode.UNSUPPORTED
    assert one.fitting(GenerateRequest(prompt="a")).tokens == [BEGIN, *codes("a")]


NAMES = ("reasoning_effort", "reasoning_strength", "thinking_effort")


def told(defaults: ChatDefaults = UNSET, values: dict[str, Any] | None = None, **thinking: Any) -> dict[str, Any]:
    """Return what a template is told of thinking."""
    request = GenerateRequest(
        messages=HELLO, thinking=Thinking(**thinking), template_values=json_of(values) if values else ""
    )
    given = variables(conversation_of(request, defaults).read().values)
    return {name: value for name, value in given.items() if name not in PRESERVED}


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        ({}, {"enable_thinking": True}),
        ({"enabled": True}, {"enable_thinking": True, "thinking": True}),
        ({"enabled": False}, {"enable_thinking": False, "thinking": False}),
        ({"budget": 0}, {"enable_thinking": False, "thinking": False}),
        ({"budget": 0, "message": "Enough."}, {"enable_thinking": True}),
        ({"budget": 0, "enabled": True}, {"enable_thinking": True, "thinking": True}),
        ({"effort": "none"}, {"enable_thinking": False, "thinking": False}),
        ({"effort": "low"}, {"enable_thinking": True, **dict.fromkeys(NAMES, "low")}),
    ],
)
def test_how_much_a_model_thinks_by_every_name(thinking: dict[str, Any], expected: dict[str, Any]) -> None:
    assert told(**thinking) == expected


ON, OFF = ({"enable_thinking": value, "thinking": value} for value in (True, False))


@pytest.mark.parametrize(
    ("defaults", "thinking", "values", "expected"),
    [
        (ChatDefaults(thinking="off"), {}, {}, OFF),
        (ChatDefaults(thinking="on"), {}, {}, ON),
        (ChatDefaults(thinking="off"), {"enabled": True}, {}, ON),
        (ChatDefaults(thinking="on"), {"effort": "none"}, {}, OFF),
        (ChatDefaults(thinking="on", chat_template_kwargs={"enable_thinking": False}), {}, {}, OFF),
        (ChatDefaults(chat_template_kwargs={"thinking": False}), {}, {}, OFF),
        (ChatDefaults(chat_template_kwargs={"thinking": False}), {"enabled": True}, {}, ON),
        (ChatDefaults(chat_template_kwargs={"reasoning_effort": "none"}), {}, {}, OFF),
        (
            ChatDefaults(chat_template_kwargs={"reasoning_effort": "low", "colour": "red"}),
            {},
            {"colour": "blue"},
            {"enable_thinking": True, "colour": "blue", **dict.fromkeys(NAMES, "low")},
        ),
        (
            ChatDefaults(chat_template_kwargs={"reasoning_effort": "low"}),
            {"effort": "high"},
            {},
            {"enable_thinking": True, **dict.fromkeys(NAMES, "high")},
        ),
    ],
)
def test_a_request_goes_before_the_catalog_and_that_before_the_defaults(
    defaults: ChatDefaults, thinking: dict[str, Any], values: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert told(defaults, values, **thinking) == expected
    request = GenerateRequest(messages=HELLO, thinking=Thinking(**thinking), template_values=json_of(values))
    assert is_thinking_off(request, defaults) is (expected["enable_thinking"] is False)


def test_what_a_caller_sets_comes_before_what_is_derived() -> None:
    assert told(values={"enable_thinking": False, "colour": "red"}, enabled=True) == OFF | {"colour": "red"}


@pytest.mark.parametrize("name", ["messages", "tools", "raise_exception"])
def test_variables_that_are_not_a_callers(name: str) -> None:
    assert name in refused(prompts(), messages=HELLO, template_values=json_of({name: []})).message


def test_what_only_a_template_reads_is_not_decoded_in_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding 3 MB of it takes 90 ms, in which no other thread of the process runs; skipping it takes 4."""
    values = {"documents": [{"text": "a", "score": 0.5}], "enable_thinking": False, "continue_final_message": False}
    messages = (*HELLO, Message("assistant", reasoning="Well,"))
    request = GenerateRequest(messages=messages, template_values=json_of(values))
    whole = conversation_of(request).read()
    assert whole.values == {"documents": [{"text": "a", "score": 0.5}], "enable_thinking": False}
    assert whole.given == ""

    def refuse(text: str) -> dict[str, Any]:
        raise AssertionError("it was decoded")

    monkeypatch.setattr("workers.chat.conversation.decode_object", refuse)
    monkeypatch.setattr("workers.protocol.requests.decode_object", refuse)
    assert is_thinking_off(request)
    assert not conversation_of(request).continued
    assert not Answers(family_of("", "qwen3-coder")).is_thinking(request, ())
    with pytest.raises(AssertionError, match="decoded"):
        conversation_of(request).read()


def test_a_variable_that_the_worker_reads_is_short() -> None:
    values = json_of({"enable_thinking": [1.5] * 2000})
    assert "enable_thinking" in refused(prompts(), messages=HELLO, template_values=values).message


def test_the_schema_of_the_answer_is_not_a_callers_variable() -> None:
    request = GenerateRequest(messages=HELLO, template_values=json_of({"answer_schema": 5, "a": 1}))
    assert conversation_of(request).read().values == {"a": 1}


def test_all_that_a_prompt_is_made_of_counts_while_it_waits() -> None:
    call = ToolCall("1", "f", "x" * 100)
    message = Message("assistant", "x" * 10, "x" * 1000, tool_calls=(call,))
    tools = (tool_of("f", "x" * 10_000, {"title": "x" * 100_000}),)
    request = GenerateRequest(messages=(message,), tools=tools, template_values=json_of({"a": "x" * 1_000_000}))
    assert 1_111_110 <= text_chars(request) < 1_112_000
    files = (InfillFile("a", "x" * 1000),)
    assert text_chars(GenerateRequest(infill=Infill("x" * 10, "x" * 100, files=files))) == 1110


def test_the_name_of_a_template() -> None:
    assert (
        conversation_of(GenerateRequest(messages=HELLO, template_values=json_of({"chat_template": "rag"}))).template
        == "rag"
    )
    assert "name" in refused(prompts(), messages=HELLO, template_values=json_of({"chat_template": 1})).message


@pytest.mark.parametrize(
    ("values", "continued"),
    [
        ({}, True),
        ({"add_generation_prompt": True}, False),
        ({"add_generation_prompt": False}, True),
        ({"continue_final_message": True}, True),
        ({"continue_final_message": False}, False),
    ],
)
def test_a_last_message_of_the_assistants_is_continued(values: dict[str, Any], continued: bool) -> None:
    request = GenerateRequest(messages=(*HELLO, Message("assistant", "Well,")), template_values=json_of(values))
    assert conversation_of(request).continued is continued
    text = prompts().prompt(request).text
    assert text is not None
    assert text.endswith("<|im_start|>assistant\nWell,") is continued


@pytest.mark.parametrize(
    ("messages", "values"),
    [
        (HELLO, {"continue_final_message": True}),
        ((*HELLO, Message("assistant", "x")), {"continue_final_message": True, "add_generation_prompt": True}),
    ],
)
def test_nothing_to_go_on_from(messages: tuple[Message, ...], values: dict[str, Any]) -> None:
    assert "continue_final_message" in refused(prompts(), messages=messages, template_values=json_of(values)).message


def filled(infill: Infill, tokens: InfillTokens | None = TOKENS, room: InfillRoom = ROOM) -> Sequence[int]:
    return prompts(infill=InfillPrompts(tokens, room)).fitting(GenerateRequest(infill=infill)).tokens


FILES = (InfillFile("a.py", "A"), InfillFile("b.py", "B"))


def test_a_gap_in_code() -> None:
    expected = [5, *codes("myproject\n"), 6, *codes("filename\n"), BEGIN, 2, *codes("bef"), 3, *codes("aft"), 4]
    assert filled(Infill("bef", "aft")) == expected


def test_what_is_being_typed_follows_the_prefix() -> None:
    tokens = InfillTokens(prefix=2, suffix=3, middle=4)
    assert filled(Infill("bef", "aft", prompt="ty"), tokens) == [2, *codes("befty"), 3, *codes("aft"), 4]


def test_other_files_come_first() -> None:
    expected = [5, *codes("myproject\n"), 6, *codes("a.py\nA"), 6, *codes("b.py\nB"), 6, *codes("filename\n")]
    assert filled(Infill("x", "y", files=FILES))[: len(expected)] == expected
    bare = InfillTokens(prefix=2, suffix=3, middle=4)
    snippets = codes("\n\n--- snippet ---\n\nA\n\n--- snippet ---\n\nB")
    assert filled(Infill("x", "y", files=FILES), bare) == [*snippets, 2, *codes("x"), 3, *codes("y"), 4]


def test_the_suffix_first_where_the_model_wants_it() -> None:
    room = InfillRoom(n_ctx=4096, n_batch=2048, suffix_first=True)
    tokens = InfillTokens(prefix=2, suffix=3, middle=4, begin=BEGIN)
    assert filled(Infill("bef", "aft", prompt="ty"), tokens, room) == [BEGIN, 3, *codes("aft"), 2, *codes("befty"), 4]


def test_what_is_kept_of_long_code() -> None:
    tokens = InfillTokens(prefix=2, suffix=3, middle=4, repository=5, file=6, begin=BEGIN)
    room = InfillRoom(n_ctx=200, n_batch=40)
    made = filled(Infill("p" * 99 + "P" * 30, "S" * 5 + "s" * 99, prompt="ty", files=FILES * 99), tokens, room)
    start = made.index(BEGIN)
    assert start == 200 - 40 + 2
    assert made[start:] == [BEGIN, 2, *codes("P" * 30 + "ty"), 3, *codes("S" * 5 + "s"), 4]
    assert made[:start][-len("filename\n") :] == codes("filename\n")


def test_of_megabytes_of_code_no_more_is_read_than_is_kept() -> None:
    """The largest body took the vocabulary's process for half a minute, of which 4,000 tokens came."""
    recorder, before = Recorder(), "".join(map(str, range(900_000)))
    files = tuple(InfillFile(f"{number}.py", before[:100_000]) for number in range(20))
    one = Prompts(None, recorder, num_tokens=0x110000, infill=InfillPrompts(TOKENS, ROOM))
    made = one.fitting(GenerateRequest(infill=Infill(before, before, files=files))).tokens
    start = made.index(BEGIN)
    assert start == ROOM.extra
    assert made[start:] == [BEGIN, 2, *codes(before[-1536:]), 3, *codes(before[:510]), 4]
    assert made[:start] == codes(before[:100_000] + "\0filename\n".replace("\0", chr(6)))[-start:]
    assert sum(len(text) for text, *_ in recorder.asked) < 100_000


def test_code_of_long_tokens_is_read_as_far_as_is_needed() -> None:
    """Of what reads as few tokens more text is taken, until there are enough or nothing is left."""

    class Wide(Recorder):
        def tokenize(
            self, text: str, *, add_special: bool, parse_special: bool, most: int | None = None
        ) -> Sequence[int]:
            self.asked.append((text, add_special, parse_special))
            return [ord(text[at]) for at in range(len(text) % 100, len(text), 100)]

    for length in (5_000, 100_000, 1_000_000):
        recorder = Wide()
        one = Prompts(None, recorder, num_tokens=0x110000, infill=InfillPrompts(TOKENS, ROOM))
        made = one.fitting(GenerateRequest(infill=Infill("p" * length, ""))).tokens
        assert made.count(ord("p")) == min(1536, length // 100)
        assert max(len(text) for text, *_ in recorder.asked) <= 4 * 100 * (1536 + MARGIN)


def test_what_is_being_typed_is_cut_nowhere_and_refused_where_it_is_too_long() -> None:
    fill = InfillPrompts(TOKENS, InfillRoom(n_ctx=100, n_batch=2048))
    one = Prompts(None, Careful(), num_tokens=100, n_ctx=100, infill=fill)
    infill = Infill("a", "b", prompt="t" * 150)
    with pytest.raises(CallFailed) as caught:
        one.fitting(GenerateRequest(infill=infill))
    failure = caught.value.failure
    assert (failure.code, failure.num_prompt_tokens) == (FailureCode.CONTEXT_OVERFLOW, 150)
    assert list(one.prompt(GenerateRequest(infill=infill)).tokens).count(ord("t")) == 150, "who counts is told all"


def test_a_short_context_leaves_room_for_the_answer() -> None:
    made = filled(Infill("p" * 9999, "s" * 9999), TOKENS, InfillRoom(n_ctx=128, n_batch=2048))
    assert len(made) < 128
    assert made.count(ord("p")) == 72
    assert made.count(ord("s")) == 22


def test_a_model_without_such_tokens() -> None:
    failure = refused(prompts(infill=InfillPrompts(None, ROOM)), infill=Infill("a", "b"))
    assert (failure.code, failure.param) == (FailureCode.UNSUPPORTED, "input_prefix")
    assert refused(prompts(), infill=Infill("a", "b")).code is FailureCode.UNSUPPORTED


def test_what_takes_no_time() -> None:
    assert is_quick(GenerateRequest(prompt="short"))
    assert is_quick(GenerateRequest(prompt=(1, "short", 2)))
    assert not is_quick(GenerateRequest(prompt="x" * (SHORT_CHARS + 1)))
    assert not is_quick(GenerateRequest(prompt=(1, "x" * SHORT_CHARS, "x")))
    assert not is_quick(GenerateRequest(messages=HELLO))
    assert not is_quick(GenerateRequest(infill=Infill("a", "b")))


def test_many_texts_have_one_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is too short for a bound of its own."""
    monkeypatch.setattr("workers.chat.prompts.TOKENISE_LEAST_S", 0.05)
    recorder = Recorder()

    class Slow(Recorder):
        def tokenize(
            self, text: str, *, add_special: bool, parse_special: bool, most: int | None = None
        ) -> Sequence[int]:
            time.sleep(0.01)
            return recorder.tokenize(text, add_special=add_special, parse_special=parse_special)

    one = Prompts(None, Slow(), num_tokens=0x110000, infill=InfillPrompts(TOKENS, ROOM))
    files = (InfillFile("c", "d"),) * 2000
    for num_chars, fields in (
        (2000, {"prompt": ("a", 7) * 2000}),
        (2012, {"infill": Infill("a", "b", "t" * 10, files)}),
    ):
        recorder.asked.clear()
        failure = refused(one, **fields)
        assert failure.code is FailureCode.INVALID_REQUEST
        assert f"a text of {num_chars} characters took longer than" in failure.message
        assert len(recorder.asked) < 100
