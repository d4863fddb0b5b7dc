"""Pictures and sounds keep their places in what a template makes of messages."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from workers.chat.media_places import cut, marked, new_marker, with_markers
from workers.chat.prompts import Prompt, Prompts, TooManyTokens
from workers.chat.template import ChatTemplate
from workers.llama.media.parts import MediaChunk
from workers.protocol.events import CallFailed, FailureCode
from workers.protocol.requests import GenerateRequest, Medium, Message

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}<assistant>"
AS_JSON = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
LAST_ONLY = "{{ messages[-1].content }}"
TWICE = "{{ messages[0].content }}{{ messages[0].content }}"


class Codes:
    """A tokenizer whose tokens are code points, and a reader of media who puts two tokens around."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool, most: int | None = None) -> list[int]:
        return [7] * add_special + [ord(one) for one in text]

    def read(self, medium: Medium) -> Sequence[Sequence[int] | MediaChunk]:
        return [[1], [ord(medium.data[:1])], [2]]


def seeing(*messages: Message, names: str) -> GenerateRequest:
    return GenerateRequest(messages=messages, media=tuple(Medium("picture", one.encode()) for one in names))


def text_of(tokens: Sequence[int]) -> str:
    return "".join({1: "[", 2: "]", 7: "^"}.get(one) or chr(one) for one in tokens)


def prompts(template: str) -> Prompts:
    codes = Codes()
    return Prompts(ChatTemplate(template), codes, num_tokens=0x110000, media=codes)


def read(template: str, request: GenerateRequest) -> Prompt:
    one = prompts(template)
    return one.prompt(request, [one.see(medium) for medium in request.media])


def test_each_stands_where_its_caller_put_it() -> None:
    request = seeing(
        Message("system", "look"),
        Message("user", "ab", media=(0, 1, 2)),
        Message("assistant", "c"),
        Message("user", None, media=(0,)),
        names="ABCD",
    )
    made = read(CHAT, request)
    assert text_of(made.tokens) == "^<system>look\n<user>[A]a[B]b[C]\n<assistant>c\n<user>[D]\n<assistant>"
    assert made.text is not None
    assert made.text.count("<__media__>") == 4
    assert prompts(CHAT).text(request) == made.text


def test_texts_that_look_like_markers_are_texts() -> None:
    request = seeing(Message("user", "<__media__>media0", media=(11,)), names="A")
    made = read(CHAT, request)
    assert text_of(made.tokens) == "^<user><__media__>[A]media0\n<assistant>"
    assert new_marker() != new_marker()
    assert new_marker().isalnum()


def test_a_template_may_write_texts_as_json() -> None:
    made = read(AS_JSON, seeing(Message("user", 'a"b', media=(2,)), names="A"))
    assert text_of(made.tokens) == '^"a\\"[A]b"'


@pytest.mark.parametrize("template", [LAST_ONLY, TWICE])
def test_a_template_that_leaves_some_out_or_repeats_them_is_refused(template: str) -> None:
    request = seeing(Message("user", "a", media=(0,)), Message("user", "b"), names="A")
    with pytest.raises(CallFailed, match=r"chat template shows [02] of 1 pictures and sounds") as refused:
        read(template, request)
    assert refused.value.failure.code is FailureCode.INVALID_REQUEST


def test_a_prompt_without_a_template() -> None:
    request = GenerateRequest(prompt="see this", media=(Medium("sound", b"A"),), prompt_media=(4,))
    made = read(CHAT, request)
    assert (text_of(made.tokens), made.text) == ("^see [A]this", None)


def test_a_prompt_that_is_too_long_is_counted_with_its_media() -> None:
    class Strict(Codes):
        def tokenize(self, text: str, *, add_special: bool, parse_special: bool, most: int | None = None) -> list[int]:
            tokens = super().tokenize(text, add_special=add_special, parse_special=parse_special)
            if most is not None and len(tokens) > most:
                raise TooManyTokens(len(tokens), is_whole=True)
            return tokens

    codes = Strict()
    one = Prompts(ChatTemplate(CHAT), codes, num_tokens=0x110000, n_ctx=20, media=codes)
    request = GenerateRequest(prompt="0123456789abcdefgh", media=(Medium("picture", b"A"),), prompt_media=(10,))
    with pytest.raises(CallFailed, match="22 tokens"):
        one.fitting(request, [one.see(medium) for medium in request.media])


def test_as_many_places_as_media() -> None:
    for request in (seeing(Message("user", "a", media=(0, 1)), names="A"), seeing(Message("user", "a"), names="A")):
        with pytest.raises(CallFailed, match="places for 1 pictures and sounds"):
            marked(request, "m")
    assert with_markers("abc", (), "|") == "abc"
    assert cut(with_markers("abc", (0, 0, 3), "|"), "|", 3) == ["", "", "abc", ""]


def test_a_model_that_reads_text_only_says_so() -> None:
    with pytest.raises(CallFailed, match="reads text only") as refused:
        Prompts(ChatTemplate(CHAT), Codes()).see(Medium("picture", b"A"))
    assert refused.value.failure.code is FailureCode.UNSUPPORTED
