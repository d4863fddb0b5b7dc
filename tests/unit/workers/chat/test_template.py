"""Chat templates in this process: what they may use, what becomes of what they have no place for."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.tools import tool_of
from workers.chat.conversation import Conversation, conversation_of
from workers.chat.template import MAX_RENDERED_CHARS, ChatTemplate, TemplateSet, TemplateUnusable
from workers.protocol.events import CallFailed, FailureCode
from workers.protocol.requests import Constraint, GenerateRequest, Message, Tool, ToolCall

HELLO = (Message("system", "Be brief."), Message("user", "Hi <&>"))
DEMO = Path(__file__).parents[4] / "deploy" / "demo" / "chat_template.jinja"

WEATHER = tool_of("get_weather", "Look it up", {"type": "object", "properties": {"city": {"type": "string"}}})
CALL = ToolCall("call_abcdef012345", "get_weather", '{"city": "Köln"}')
CALLED = (Message("assistant", tool_calls=(CALL,)), Message("tool", "12 °C", tool_call_id=CALL.id))


def render(source: str | None, *messages: Message, tools: Sequence[Tool] = (), **values: Any) -> str:
    return ChatTemplate(source).render(Conversation(messages=messages, tools=tuple(tools), values=values))


def refusal(source: str | None, *messages: Message, tools: Sequence[Tool] = ()) -> CallFailed:
    template = ChatTemplate(source)
    with pytest.raises(CallFailed) as caught:
        template.render(Conversation(messages=messages, tools=tuple(tools)))
    return caught.value


def test_chatml_where_the_model_has_no_template() -> None:
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <&><|im_end|>\n<|im_start|>assistant\n"
    assert render(None, *HELLO) == expected
    assert render("", *HELLO) == expected


def test_what_a_template_may_use() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}|\n  {% endif %}\n"
        "{%- if loop.last %}{% break %}{% endif %}{% endfor %}"
        "{{ tools | tojson }}{{ add_generation_prompt }}{{ eos_token }}{{ strftime_now('%%') }}{{ documents is none }}"
    )
    template = ChatTemplate(source, bos_text="<s>", eos_text="</s>")
    tool = '[{"type": "function", "function": {"name": "f", "description": "<ä>", "parameters": {"type": "object"}}}]'
    conversation = Conversation(messages=(Message("user", "Hi <&>"),), tools=(tool_of("f", "<ä>", {"type": "object"}),))
    assert template.render(conversation) == "<s>Hi <&>|\n" + tool + "True</s>%True"


def test_json_takes_every_argument_that_the_documentation_names() -> None:
    value = "{{ {'b': 1, 'a': ['ä<']} | tojson"
    assert render(value + " }}", *HELLO) == '{"b": 1, "a": ["ä<"]}'
    assert render(value + "(ensure_ascii=true) }}", *HELLO) == '{"b": 1, "a": ["\\u00e4<"]}'
    assert render(value + "(indent=1) }}", *HELLO) == '{\n "b": 1,\n "a": [\n  "ä<"\n ]\n}'
    assert render(value + "(separators=(',', ':'), sort_keys=true) }}", *HELLO) == '{"a":["ä<"],"b":1}'
    said = (HELLO[1], Message("assistant", "x"))
    assert render("{{ messages | map(attribute='role') | tojson }}", *said) == '["user", "assistant"]'
    assert render("{{ ('{\"a\": 1}' | from_json).a }}", *HELLO) == "1"


def test_the_generation_tag_says_what_is_in_it() -> None:
    source = "{% set a = 1 %}{% generation %}{{ messages[-1].content }}{% set a = 2 %}{% endgeneration %}{{ a }}"
    assert render(source, Message("user", "said")) == "said1"


def test_nothing_becomes_html() -> None:
    source = "{{ '<' | safe + messages[-1].content + (messages[-1] | tojson) + ('<' | e) }}"
    assert render(source, Message("user", "&")) == '<&{"role": "user", "content": "&"}&lt;'


def test_lists_may_be_changed() -> None:
    assert render("{% set a = [] %}{% set _ = a.append('x') %}{{ a | join }}", *HELLO) == "x"


def test_variables_of_the_callers() -> None:
    source = "{{ enable_thinking is defined }} {{ documents[0].text }} {{ colour }}"
    assert render(source, *HELLO, documents=[{"text": "one"}], colour="red", enable_thinking=False) == "True one red"
    assert render("{{ preserve_thinking }} {{ clear_thinking }}", *HELLO) == "True False"
    assert render("{{ preserve_thinking }} {{ clear_thinking }}", *HELLO, preserve_reasoning=False) == "False True"
    assert render("{{ clear_thinking }}", *HELLO, clear_thinking="x") == "x"


def test_todays_date_by_the_names_that_families_have_for_it() -> None:
    now = datetime.now().astimezone()
    expected = f"{now:%d %b %Y}, {now:%b %d %Y}"
    assert render("{{ date_string }}, {{ datetime }}", *HELLO) == expected
    assert render("{{ date_string }}", *HELLO, date_string="1 Jan 1970") == "1 Jan 1970"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[1].tool_calls[0].function.arguments | tojson }}", '{"city": "Köln"}'),
        ("{{ messages[1].tool_calls[0].function.arguments.city }}", "Köln"),
        ("{{ '|' + messages[1].tool_calls[0].function.arguments }}", '|{"city": "Köln"}'),
    ],
)
def test_arguments_of_calls_as_the_template_wants_them(source: str, expected: str) -> None:
    loop = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name }}"
    shown = source.replace("messages[1].tool_calls[0]", "c")
    assert expected in render(f"{loop}{shown}{{% endfor %}}{{{{ m.content }}}}{{% endfor %}}", *HELLO[1:], *CALLED)


def test_arguments_that_are_no_object_pass_as_the_model_wrote_them() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name }}={{ c.function.arguments | tojson }};"
        "{% endfor %}{% endfor %}"
    )
    calls = tuple(ToolCall("id", "f", arguments) for arguments in ('{"city": "Köln"}', "", "[1]", "not json"))
    assert render(source, Message("assistant", tool_calls=calls)) == 'f={"city": "Köln"};f={};f="[1]";f="not json";'


def test_a_template_that_knows_no_developer_reads_system() -> None:
    message = Message("developer", "x")
    assert render("{{ messages[0].role }}: {{ messages[0].content }}", message) == "system: x"
    assert render("{# developer #}{{ messages[0].role }}: {{ messages[0].content }}", message) == "system: x"
    assert render("{# <|channel|> #}{{ messages[0].role }}: {{ messages[0].content }}", message) == "developer: x"


def test_results_carry_the_name_of_their_tool() -> None:
    source = "{% for m in messages %}{{ m.role }} {{ m.name }} {{ m.content }};{% endfor %}"
    assert "tool get_weather 12 °C;" in render("{{ messages | tojson }}" + source, *HELLO, *CALLED)


def test_reasoning_by_the_name_that_the_template_knows() -> None:
    said = Message("assistant", "yes", "because")
    assert render("{{ messages[1].reasoning_content }}|{{ messages[1].content }}", HELLO[1], said) == "because|yes"
    assert render("{{ messages[1].thinking }}|{{ messages[1].content }}", HELLO[1], said) == "because|yes"


def test_thoughts_as_parts_where_the_template_knows_them_so() -> None:
    source = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "<{{ p.type }} {{ p[p.type] }}>{% endfor %}{% endif %};{% endfor %}"
    )
    assert render(source, HELLO[1], Message("assistant", "yes", "because")) == "Hi <&>;<thinking because><text yes>;"


def test_results_in_the_message_of_their_calls_where_the_template_knows_them_so() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}:{% for c in m.tool_calls %}{{ c.function.name }}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% for r in m.tool_responses %}({{ r.name }} {{ r.response }})"
        "{% endfor %}{{ m.content }};{% endfor %}"
    )
    said = (Message("assistant", "Mild."), Message("user", "Thanks"))
    text = render(source, HELLO[1], *CALLED, *said)
    assert text == 'user:Hi <&>;assistant:get_weather{"city": "Köln"}(get_weather 12 °C)Mild.;user:Thanks;'


TYPED = (
    "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}{{ raise_exception('no part') }}{% endif %}{% endfor %};{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ m.role }}:{{ m.content }};{% endfor %}"
)
ALTERNATE = (
    "{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != loop.first and loop.first %}"
    "{{ raise_exception('user first') }}{% endif %}{% if not loop.first and m.role == loop.previtem.role %}"
    "{{ raise_exception('in turn') }}{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}"
)
ONE_CALL = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    "<{{ c.function.name }} {{ c.function.arguments | tojson }} {{ c.id }}>{% endfor %};{% endfor %}"
)
SHORT_IDS = ONE_CALL.replace("m.tool_calls | length > 1", "c.id | length != 9")
NULL_CONTENT = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    "<{{ c.function.name }}{{ c.function.arguments }}>{% endfor %}{% else %}{{ m.role }}:{{ m.content }}{% endif %};"
    "{% endfor %}"
)
TOOLS_ALWAYS = "{% for t in tools %}{{ t.function.name }}{% endfor %}{{ messages[-1].content }}"


def test_content_in_parts_where_the_template_wants_them() -> None:
    assert render(TYPED, *HELLO) == "system:Be brief.;user:Hi <&>;"


def test_a_system_message_joins_the_users_where_there_is_no_place_for_it() -> None:
    assert render(NO_SYSTEM, *HELLO) == "user:Be brief.\nHi <&>;"
    assert render(NO_SYSTEM, Message("system", "Alone.")) == "user:Alone.;"


def test_system_messages_in_the_middle_are_not_lost() -> None:
    source = "{{ messages[0].content }}{% for m in messages[1:] if m.role != 'system' %}{{ m.content }}|{% endfor %}"
    later = (Message("user", "A"), Message("assistant", "B"), Message("system", "C"), Message("user", "D"))
    assert render(source, *later) == "AB|C\nD|"


def test_neighbours_of_one_role_are_joined_only_where_the_template_insists() -> None:
    messages = (Message("user", "A"), Message("user", "B"), Message("assistant", "C"), Message("user", "D"))
    assert render(ALTERNATE, *messages) == "user:A\n\nB;assistant:C;user:D;"
    kept = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    assert render(kept, *messages) == "user:A;user:B;assistant:C;user:D;"


def test_what_no_joining_mends_is_refused_in_the_templates_words() -> None:
    assert "user first" in refusal(ALTERNATE, Message("assistant", "A"), Message("user", "B")).failure.message


def test_several_calls_come_one_by_one_where_the_template_takes_one() -> None:
    second = ToolCall("call_2", "get_time", "{}")
    both = Message("assistant", "Let me see.", tool_calls=(CALL, second))
    results = (Message("tool", "noon", tool_call_id="call_2"), CALLED[1])
    text = render(ONE_CALL, HELLO[1], both, *results)
    assert text.split(";") == [
        "user:Hi <&>",
        f'assistant:Let me see.<get_weather {{"city": "Köln"}} {CALL.id}>',
        "tool:12 °C",
        "assistant:<get_time {} call_2>",
        "tool:noon",
        "",
    ]


def test_ids_are_made_short_where_the_template_wants_nine_characters() -> None:
    ids = [part.rpartition(" ")[2] for part in render(SHORT_IDS, HELLO[1], *CALLED).split(">")[1:2]]
    text = render(SHORT_IDS + "{{ messages[-1].tool_call_id }}", HELLO[1], *CALLED)
    short = text.rpartition(";")[2]
    assert len(short) == 9
    assert f" {short}>" in text, ids
    kept = ToolCall("abcDEF123", "f", "{}")
    assert " abcDEF123>" in render(SHORT_IDS, HELLO[1], Message("assistant", tool_calls=(kept,)))


def test_calls_apart_from_words_where_the_template_sees_them_beside_null_only() -> None:
    said = Message("assistant", "Let me see.", tool_calls=(CALL,))
    text = render(NULL_CONTENT, HELLO[1], said, CALLED[1])
    assert text.startswith("user:Hi <&>;assistant:Let me see.;<get_weather{")
    assert text.endswith(";tool:12 °C;")


def test_a_template_that_is_for_tools_gets_a_list_without_them() -> None:
    assert render(TOOLS_ALWAYS, HELLO[1]) == "Hi <&>"


def test_tools_calls_and_results_in_words_where_there_is_no_place_for_them() -> None:
    text = render(None, *HELLO, *CALLED, tools=[WEATHER])
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
    assert '{"name": "get_weather", "description": "Look it up", "parameters": {"type": "object"' in text
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\n12 °C\n</tool_response><|im_end|>" in text


@pytest.mark.parametrize(
    ("mark", "call"),
    [
        ("List of tools: [", '<|tool_call_start|>[get_weather(city="Köln")]<|tool_call_end|>'),
        ("<start_of_turn>", '```tool_code\n[get_weather(city="Köln")]\n```'),
        ("<|tool_call|>", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Köln"}}]'),
        ("<｜tool▁sep｜>", '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Köln"}<｜tool▁call▁end｜>'),
    ],
)
def test_words_have_the_form_that_the_models_family_knows(mark: str, call: str) -> None:
    source = f"{{# {mark} #}}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"
    assert call in render(source, HELLO[1], *CALLED)


def test_an_answer_that_goes_on_from_its_beginning() -> None:
    template = ChatTemplate(None)
    said = Message("assistant", "Once upon  ")
    text = template.render(Conversation(messages=(HELLO[1], said), continued=True))
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\nOnce upon  ")


def test_a_thought_that_goes_on() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
        "{% endif %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    said = Message("assistant", None, "Well")
    text = ChatTemplate(source).render(Conversation(messages=(HELLO[1], said), continued=True))
    assert text == "user:Hi <&>;assistant:<think>Well"
    with pytest.raises(CallFailed) as failed:
        ChatTemplate(None).render(Conversation(messages=(HELLO[1], said), continued=True))
    assert failed.value.failure.code is FailureCode.UNSUPPORTED


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content + 'x' }}", "messages"),
        ("{{ 1 / (messages | length - messages | length) }}", "division"),
        ("{{ messages[0].content + 3 }}", "str"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{% include 'x' %}", "loader"),
    ],
)
def test_what_goes_wrong_in_a_template_is_the_callers_error(source: str, says: str) -> None:
    failed = refusal(source, *HELLO)
    assert failed.failure.code is FailureCode.INVALID_REQUEST
    assert says in failed.failure.message


def test_the_prompt_is_bounded() -> None:
    source = (
        "{% if messages[0].content | length > 99 %}{% for i in range(10000) %}{{ messages[0].content }}{% endfor %}"
    )
    failed = refusal(source + "{% endif %}", Message("user", "x" * (MAX_RENDERED_CHARS // 1000)))
    assert str(MAX_RENDERED_CHARS) in failed.failure.message


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "{{ 'a' * 10 ** 30 }}x"]
)
def test_a_template_that_does_not_compile(source: str) -> None:
    with pytest.raises(TemplateUnusable, match="chat template"):
        ChatTemplate("{% if 0 %}" + source)


def test_the_demo_models_template_renders_tools_and_calls() -> None:
    messages = (Message("user", "Weather?"), Message("assistant", tool_calls=(ToolCall("id", "get_weather", "{}"),)))
    tools = [tool_of("get_weather", None, {"properties": {"city": {"type": "string"}}})]
    rendered = render(DEMO.read_text(encoding="utf-8"), *messages, tools=tools)
    assert "get_weather(city)" in rendered
    assert '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>' in rendered
    assert rendered.endswith("<|im_start|>assistant\n")


def test_a_template_that_asks_for_all_memory_fails_its_call_only() -> None:
    failed = refusal("{{ 'x' * (messages | length * 4000000000000000000) }}", *HELLO)
    assert "cannot render these messages: MemoryError" in failed.failure.message


class TestNamedTemplates:
    SET = TemplateSet(
        {name: name + ":{{ messages[-1].content }}{{ tools | tojson }}" for name in ("default", "tool_use", "rag", "x")}
    )

    def which(self, **fields: Any) -> str:
        return self.SET.render(Conversation(messages=HELLO, **fields)).partition(":")[0]

    def test_the_default_unless_another_one_fits(self) -> None:
        assert self.which() == "default"
        assert self.which(tools=(WEATHER,)) == "tool_use"
        assert self.which(values={"documents": [{"text": "x"}]}) == "rag"
        assert self.which(tools=(WEATHER,), values={"documents": [{"text": "x"}]}) == "tool_use"

    def test_the_one_that_is_asked_for(self) -> None:
        assert self.which(template="x", tools=(WEATHER,)) == "x"

    def test_one_that_there_is_not(self) -> None:
        with pytest.raises(CallFailed, match="no chat template named 'y'; use one of: default, rag, tool_use, x"):
            self.which(template="y")

    def test_a_model_with_a_default_only(self) -> None:
        alone = TemplateSet({"default": "d"})
        assert alone.render(Conversation(messages=HELLO, tools=(WEATHER,))) == "d"


THINKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n"
    "{% endif %}{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ '<think>\\n' if enable_thinking else '<think></think>' }}{% endif %}"
)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_model_that_thinks_goes_on_behind_its_thought(enabled: bool) -> None:
    def gone_on(message: Message) -> str:
        messages = (Message("user", "Hi"), message)
        values = {"enable_thinking": enabled}
        return ChatTemplate(THINKS).render(Conversation(messages=messages, values=values, continued=True))

    assert gone_on(Message("assistant", "Once")) == "<user>Hi</><assistant><think>\n\n</think>\nOnce"
    assert gone_on(Message("assistant", "Once", "so")) == "<user>Hi</><assistant><think>\nso\n</think>\nOnce"
    assert gone_on(Message("assistant", None, "so")) == "<user>Hi</><assistant><think>\nso"


def test_what_was_computed_for_the_prompt_before_is_gone_on_from() -> None:
    """Here the template writes another turn's end once there is one more."""
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ '' if loop.last else '!' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = (Message("user", "Hi"), Message("assistant", "Once"))
    assert ChatTemplate(source).render(Conversation(messages=messages, continued=True)) == "<user>Hi<assistant>Once"


def test_a_template_that_writes_more_than_it_opens_a_turn_with() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ 'all:' if m.role == 'assistant' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = (Message("user", "Hi"), Message("assistant", "Once"))
    assert ChatTemplate(source).render(Conversation(messages=messages, continued=True)) == "<user>Hi<assistant>all:Once"


def test_what_is_missing_is_empty_beside_a_text() -> None:
    assert render("{{ 'a' + messages[0].nothing + 'b' }}", Message("user", "x")) == "ab"
    with pytest.raises(CallFailed, match="nothing"):
        render("{{ 1 + messages[0].nothing }}", Message("user", "x"))


def test_the_answers_schema_is_shown_to_deepseek_v4_alone() -> None:
    source = "{{ messages[0].content }}{% if response_format is defined %} {{ response_format | tojson }}{% endif %}"
    request = GenerateRequest(messages=(Message("user", "x"),), constraint=Constraint("json_schema", '{"a": 1}'))
    assert ChatTemplate(source).render(conversation_of(request)) == "x"
    assert ChatTemplate("{# dsml_token #}" + source).render(conversation_of(request)) == 'x {"a": 1}'
    assert ChatTemplate("{# dsml_token function_calls #}" + source).render(conversation_of(request)) == "x"
