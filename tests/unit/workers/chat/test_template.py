from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from workers.chat.prompts import Prompts
from workers.chat.template import MAX_RENDERED_CHARS, ChatTemplate, TemplateUnusable
from workers.protocol.failures import CallFailed, FailureCode
from workers.protocol.requests import GenerateRequest, Message, Tool, ToolCall

HELLO = (Message("system", "Be brief."), Message("user", "Hi <&>"))
DEMO = Path(__file__).parents[4] / "deploy" / "demo" / "chat_template.jinja"


def refusal(template: ChatTemplate, *messages: Message, tools: Sequence[Tool] = ()) -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        template.render(messages, tools)
    return caught.value


def test_chatml_where_the_model_has_no_template() -> None:
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <&><|im_end|>\n<|im_start|>assistant\n"
    assert ChatTemplate(None).render(HELLO) == expected
    assert ChatTemplate("").render(HELLO) == expected


def test_tools_need_a_template_that_takes_them() -> None:
    failed = refusal(ChatTemplate(None), *HELLO, tools=[Tool("f")])
    assert (failed.failure.code, failed.failure.param) == (FailureCode.UNSUPPORTED, "tools")


def test_what_a_template_may_use() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}|\n  {% endif %}\n"
        "{%- if loop.last %}{% break %}{% endif %}{% endfor %}"
        "{{ tools | tojson }}{{ add_generation_prompt }}{{ eos_token }}{{ strftime_now('%%') }}"
    )
    template = ChatTemplate(source, bos_text="<s>", eos_text="</s>")
    tool = '[{"type": "function", "function": {"name": "f", "description": "<ä>", "parameters": {"type": "object"}}}]'
    rendered = template.render([Message("user", "Hi <&>")], [Tool("f", "<ä>", {"type": "object"})])
    assert rendered == "<s>Hi <&>|\n" + tool + "True</s>%"


def test_earlier_tool_calls_have_their_arguments_as_objects() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }};{% endfor %}{% endfor %}"
    )
    calls = tuple(ToolCall("id", "f", arguments) for arguments in ('{"city": "Köln"}', "", "[1]", "not json"))
    rendered = ChatTemplate(source).render([Message("assistant", tool_calls=calls)])
    assert rendered == '{"city": "Köln"};{};"[1]";"not json";'


def test_a_template_that_knows_no_developer_reads_system() -> None:
    message = Message("developer", "x")
    assert ChatTemplate("{{ messages[0].role }}").render([message]) == "system"
    assert ChatTemplate("{# developer #}{{ messages[0].role }}").render([message]) == "developer"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content + 'x' }}", "messages"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages[0].content + 3 }}", "str"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "append"),
    ],
)
def test_what_goes_wrong_in_a_template_is_the_callers_error(source: str, says: str) -> None:
    failed = refusal(ChatTemplate(source), *HELLO)
    assert failed.failure.code is FailureCode.INVALID_REQUEST
    assert says in failed.failure.message


def test_the_prompt_is_bounded() -> None:
    source = "{% for i in range(10000) %}{{ messages[0].content }}{% endfor %}"
    failed = refusal(ChatTemplate(source), Message("user", "x" * (MAX_RENDERED_CHARS // 1000)))
    assert str(MAX_RENDERED_CHARS) in failed.failure.message


def test_a_template_that_does_not_compile() -> None:
    with pytest.raises(TemplateUnusable, match="chat template"):
        ChatTemplate("{% for %}")


def test_the_demo_models_template_renders_tools_and_calls() -> None:
    template = ChatTemplate(DEMO.read_text(encoding="utf-8"))
    messages = (
        Message("user", "Weather?"),
        Message("assistant", tool_calls=(ToolCall("id", "get_weather", '{"city": "Rome"}'),)),
    )
    rendered = template.render(messages, [Tool("get_weather", None, {"properties": {"city": {"type": "string"}}})])
    assert "get_weather(city)" in rendered
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>' in rendered
    assert rendered.endswith("<|im_start|>assistant\n")


def test_a_template_that_asks_for_all_memory_fails_its_call_only() -> None:
    template = ChatTemplate("{{ 'x' * (messages | length * 4000000000000000000) }}")
    with pytest.raises(CallFailed, match="cannot render these messages: MemoryError"):
        template.render(HELLO)


class Recorder:
    """A tokenizer that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool, bool]] = []

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Sequence[int]:
        self.asked.append((text, add_special, parse_special))
        return [1]


@pytest.mark.parametrize(
    ("source", "bos", "adds"), [("{{ bos_token }}x", "<s>", False), ("x", "<s>", True), ("x", "", True)]
)
def test_the_begin_token_is_there_once(source: str, bos: str, adds: bool) -> None:
    tokenizer = Recorder()
    prompts = Prompts(ChatTemplate(source, bos_text=bos), tokenizer, bos_text=bos)
    assert prompts.tokens(GenerateRequest(messages=HELLO)) == [1]
    assert tokenizer.asked == [((bos if not adds else "") + "x", adds, True)]
