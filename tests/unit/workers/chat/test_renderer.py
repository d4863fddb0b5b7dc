"""Templates in a process that can be stopped: what they can't reach, what they can't use up."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.process_limits import few_descriptors
from tests.support.waiting import wait_until
from workers.chat.conversation import Conversation
from workers.chat.renderer import Renderer
from workers.chat.template import ChatTemplate, TemplateUnusable
from workers.protocol import framing
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.requests import Message, Tool, ToolCall

HOSTILE = """
{%- set said = messages[-1].content %}
{%- if said == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{%- elif said == 'power' %}{{ (7 ** (10 ** (messages | length * 9))) % 10 }}
{%- elif said == 'eat' %}{{ 'x' * (messages | length * 9000000000) }}
{%- elif said == 'hoard' %}{% set kept = [] %}{% for a in range(99999) %}
{%- set _ = kept.append('x' * 100000 ~ a) %}{% endfor %}
{%- elif said == 'pour' %}{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}
{%- elif said == 'slow' %}{% for a in range(60) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ said }}
{%- elif said == 'refuse' %}{{ raise_exception('no, thank you') }}
{%- elif said == 'reach' %}{{ ''.__class__.__mro__ }}
{%- else %}{{ said }}{% endif %}"""

REACHES = (
    "''.__class__.__base__.__subclasses__()",
    "messages.__class__",
    "messages[0].__init__.__globals__",
    "cycler.__init__.__globals__.os.environ",
    "lipsum.__globals__['os'].environ",
    "raise_exception.__globals__",
    "strftime_now.__code__",
    "namespace.__init__.__globals__",
    "joiner.__init__.__globals__",
    "self.__init__.__globals__",
    "self._TemplateReference__context.environment",
    "(messages | map('upper')).gi_frame.f_globals",
    "messages | map(attribute='__class__') | list",
    "messages | attr('__class__')",
    "'{0.__class__.__mro__}'.format('')",
    "'{0.__class__}'.format_map({'0': ''})",
    "('%s' | format(messages)).__class__",
    "range.__self__",
    "messages.append.__self__.__class__",
    "loop.__class__",
    "dict.__bases__",
    "caller.__globals__",
)


def conversation(said: str) -> Conversation:
    return Conversation(messages=(Message("user", said),))


def refusal(renderer: Renderer, said: str) -> Failure:
    with pytest.raises(CallFailed) as caught:
        renderer.render(conversation(said))
    return caught.value.failure


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    with Renderer({"default": HOSTILE, "tool_use": "tools"}, render_s=30.0) as one:
        yield one


@pytest.fixture(scope="module")
def hasty() -> Iterator[Renderer]:
    with Renderer({"default": HOSTILE}, render_s=0.3) as one:
        yield one


@pytest.mark.parametrize("expression", REACHES)
def test_nothing_of_python_can_be_reached(expression: str) -> None:
    template = ChatTemplate("{% for m in [1] %}<{{ " + expression + " }}>{% endfor %}")
    text = "<>"
    with contextlib.suppress(CallFailed):
        text = template.render(conversation("x"))
    assert re.fullmatch(r"<(\[?(Undefined(, )?)*\]?)>", text), text


def test_it_renders_as_in_this_process(renderer: Renderer) -> None:
    assert renderer.render(conversation("Grüße 你好")) == "Grüße 你好"
    assert renderer.abilities["default"] == ChatTemplate(HOSTILE).abilities
    tooled = Conversation(messages=(Message("user", "x"),), tools=(Tool("f"),))
    assert renderer.render(tooled) == "tools"


def test_large_prompts_go_through(renderer: Renderer) -> None:
    text = "wörd " * 1_000_000
    assert renderer.render(conversation(text)) == text


def test_no_call_encodes_or_decodes_megabytes(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other thread runs meanwhile: 4 million line ends took 33 ms to encode, and 22 to decode as a prompt."""
    sizes: list[int] = []

    def measured(message: Any) -> bytes:
        made = msgspec.json.encode(message)
        sizes.append(len(made))
        return made

    def measured_text(raw: msgspec.Raw) -> str:
        sizes.append(len(memoryview(raw)))
        return msgspec.json.decode(raw, type=str)

    monkeypatch.setattr(framing, "encode", measured)
    monkeypatch.setattr("workers.chat.renderer._decode_text", measured_text)
    text = '\n"' * 500_000
    assert renderer.render(conversation(text)) == text
    assert sum(sizes) >= 4 * len(text)
    assert max(sizes) < 8 * framing.PART_CHARS


def test_a_refusal_is_told(renderer: Renderer) -> None:
    failure = refusal(renderer, "refuse")
    assert (failure.code, failure.param) == (FailureCode.INVALID_REQUEST, "messages")
    assert "no, thank you" in failure.message
    assert "unsafe" in refusal(renderer, "reach").message


@pytest.mark.parametrize("said", ["loop", "power"])
def test_a_loop_is_cut_off_and_the_next_conversation_is_rendered(hasty: Renderer, said: str) -> None:
    hasty.render(conversation("hello"))
    first = hasty.pid
    began = time.monotonic()
    failure = refusal(hasty, said)
    assert time.monotonic() - began < 2
    assert failure.code is FailureCode.INVALID_REQUEST
    assert "longer than 0.3 s" in failure.message
    assert hasty.render(conversation("hello")) == "hello"
    assert hasty.pid not in (None, first)


def test_those_who_wait_behind_a_loop_are_served(hasty: Renderer) -> None:
    said: list[str] = []
    looping = threading.Thread(target=lambda: said.append(refusal(hasty, "loop").message))
    looping.start()
    others = [threading.Thread(target=lambda: said.append(hasty.render(conversation("hello")))) for _ in range(4)]
    for thread in (*others, looping):
        if thread is not looping:
            thread.start()
    for thread in (*others, looping):
        thread.join(10)
    assert sorted(said)[:4] == ["hello"] * 4
    assert len(said) == 5


def test_nobody_gets_the_prompt_of_one_who_was_interrupted(renderer: Renderer) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    waker = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
    try:
        renderer.render(conversation("hello"))
        waker.start()
        with pytest.raises(Interrupted):
            renderer.render(conversation("slow"))
    finally:
        waker.join()
        signal.signal(signal.SIGUSR1, before)
    assert renderer.render(conversation("mine")) == "mine"


@pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded on Linux")
@pytest.mark.parametrize("said", ["eat", "hoard", "pour"])
def test_memory_is_bounded(renderer: Renderer, said: str) -> None:
    failure = refusal(renderer, said)
    assert failure.code is FailureCode.INVALID_REQUEST
    assert renderer.render(conversation("hello")) == "hello"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_process_has_no_secret_and_can_open_nothing(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDOCK_WORKER_SECRET", "hush")
    renderer.close()
    renderer.render(conversation("hello"))
    process = Path(f"/proc/{renderer.pid}")
    assert b"hush" not in (process / "environ").read_bytes()
    limits = (process / "limits").read_text()
    assert re.search(r"^Max open files +0 +0 ", limits, re.MULTILINE)
    assert re.search(r"^Max address space +\d+ ", limits, re.MULTILINE)


def test_a_process_that_somebody_killed_is_replaced(renderer: Renderer) -> None:
    assert renderer.pid is not None
    os.kill(renderer.pid, signal.SIGKILL)
    time.sleep(0.05)
    assert renderer.render(conversation("hello")) == "hello"


def test_a_process_that_can_t_start_is_the_workers_own_trouble() -> None:
    with Renderer({"default": "{{ messages[0].content }}"}, number=1) as renderer:
        renderer.close()
        with few_descriptors():
            failure = refusal(renderer, "hello")
        assert failure.code is FailureCode.UNAVAILABLE
        assert "did not start" in failure.message
        assert renderer.render(conversation("hello")) == "hello"


def test_it_ends_with_its_owner() -> None:
    with Renderer({}) as one:
        pid = one.pid
        assert one.render(conversation("hello")).startswith("<|im_start|>user\nhello")
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% for %}", "does not compile"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "not ready within 1 s"),
        ("{{ 7 ** (10 ** 9) }}", "not ready within 1 s"),
    ],
)
def test_a_template_that_can_never_be_used_is_told_at_the_start(source: str, says: str) -> None:
    with pytest.raises(TemplateUnusable, match=says):
        Renderer({"default": source}, start_s=1.0)


def test_one_slow_conversation_leaves_a_process_for_others() -> None:
    with Renderer({"default": HOSTILE}, render_s=3.0) as renderer:
        failures: list[Failure] = []

        def loop() -> None:
            try:
                renderer.render(conversation("loop"))
            except CallFailed as failed:
                failures.append(failed.failure)

        slow = threading.Thread(target=loop)
        slow.start()
        assert renderer.render(conversation("hello")) == "hello"
        assert slow.is_alive(), "the other one waited for the slow one's end"
        slow.join()
        assert [failure.code for failure in failures] == [FailureCode.INVALID_REQUEST]
        pid = renderer.pid
        assert pid is not None, "the one that was killed is replaced before anybody needs it"
        assert renderer.render(conversation("again")) == "again"
        assert renderer.pid == pid


def test_a_second_process_is_kept_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.process.helper_pool.SPARE_AFTER_S", 0.01)
    before = rendering()
    with Renderer({"default": "{{ messages[0].content }}"}, number=3) as renderer:
        wait_until(lambda: len(rendering() - before) == 2, 20)
        assert renderer.pid in rendering()
    assert not rendering() - before


def rendering() -> set[int]:
    """Return the rendering processes of this one."""
    me = Path(f"/proc/self/task/{os.getpid()}/children").parent.parent
    children = [int(child) for task in me.iterdir() for child in (task / "children").read_text().split()]
    return {child for child in children if b"render_process" in Path(f"/proc/{child}/cmdline").read_bytes()}


CALLS = """
{%- for message in messages %}[{{ message.content }}]
{%- for call in message.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>
{%- for value in call.function.arguments.values() %}{{ value }}{% endfor %}
{%- endfor %}
{%- endfor %}"""


@pytest.mark.parametrize(
    ("said", "expected"), [(r"x\ud800", r"x\ud800"), (r"\udc00x", r"\udc00x"), (r"\ud83d\ude00", "\U0001f600")]
)
def test_half_a_surrogate_pair_in_an_earlier_call_is_rendered_as_it_came(said: str, expected: str) -> None:
    call = ToolCall("1", "f", '{"a": "' + said + '"}')
    asked = Conversation(messages=(Message("user", "hello"), Message("assistant", tool_calls=(call,))))
    with Renderer({"default": CALLS}) as renderer:
        pid = renderer.pid
        assert renderer.render(asked).endswith('<f {"a": "' + expected + '"}>' + expected)
        assert renderer.pid == pid, "the process died of it"


def test_a_refusal_may_quote_half_a_surrogate_pair() -> None:
    with Renderer({"default": "{{ raise_exception(messages[0].content | from_json) }}"}) as renderer:
        assert r"says \udc00" in refusal(renderer, r'"says \udc00"').message


def test_a_process_that_somebody_stopped_is_not_the_callers_fault() -> None:
    with Renderer({"default": HOSTILE}, render_s=1.0) as renderer:
        assert renderer.pid is not None
        os.kill(renderer.pid, signal.SIGSTOP)
        with pytest.raises(CallFailed, match="had no processor") as failed:
            renderer.render(conversation("hi"))
        assert failed.value.failure.code is FailureCode.UNAVAILABLE
