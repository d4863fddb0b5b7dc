"""Runs chat templates in a helper process (`workers.chat.renderer` starts it).

    python -m workers.chat.render_process

The process reads a `Setup` and then `Conversation`s as lines of JSON. It answers the `Setup` with the templates'
abilities, or with the reason why a template is unusable, and each `Conversation` with the prompt or a `Failure`. A
prompt is a list of texts, each short enough for the worker to decode in a millisecond.
"""

from __future__ import annotations

import contextlib
import sys
import time

import msgspec

from workers.chat.abilities import Abilities
from workers.chat.conversation import Conversation
from workers.chat.template import ChatTemplate, TemplateSet, TemplateUnusable
from workers.process.limits import bound_cpu, bound_memory, shut_off
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.framing import PART_CHARS, read_float
from workers.protocol.requests import Message

EXTRA_BYTES = 768 << 20
"""Maximum bytes of memory beyond those that the process has at its start: room for several copies of the longest
prompt, as text and as JSON."""

CPU_S = 30
"""Maximum seconds of processor time for rendering one conversation; then the kernel ends the process."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    sources: dict[str, str]
    bos_text: str
    eos_text: str
    abilities: dict[str, Abilities] | None = None
    """The templates' abilities, if another process has already found them."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    abilities: dict[str, Abilities]


class Unusable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    reason: str


Answer = str | Failure

decode_setup = msgspec.json.Decoder(Setup).decode
decode_conversation = msgspec.json.Decoder(Conversation, float_hook=read_float).decode
encode = msgspec.json.Encoder().encode


def main() -> None:
    setup = decode_setup(sys.stdin.buffer.readline())
    _warm_up()
    bound_memory(EXTRA_BYTES)
    shut_off()
    bound_cpu(CPU_S)
    try:
        templates = TemplateSet(
            setup.sources, bos_text=setup.bos_text, eos_text=setup.eos_text, abilities=setup.abilities
        )
    except TemplateUnusable as error:
        _tell(Unusable(reason=str(error)))
        return
    _tell(Ready(abilities=templates.abilities))
    for line in sys.stdin.buffer:
        bound_cpu(CPU_S)
        _tell(_answer(templates, line))


def _answer(templates: TemplateSet, line: bytes) -> Answer:
    try:
        return templates.render(decode_conversation(line))
    except CallFailed as failed:
        return failed.failure
    except MemoryError:
        message = "these messages take more memory than one request may; send shorter ones"
        return Failure(FailureCode.INVALID_REQUEST, message, "messages")


def _warm_up() -> None:
    """Use what Python and libc load from files on first use (a refusal's traceback, the time zone), while this
    process can still open files."""
    time.localtime()
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}{{ messages[0].content | tojson(indent=1) }}")
    template.render(Conversation(messages=(Message("user", "hello"),)))
    with contextlib.suppress(CallFailed):
        ChatTemplate("{{ raise_exception('warm') }}").render(Conversation(messages=(Message("user", "hello"),)))


def _line(answer: Ready | Unusable | Answer) -> bytes:
    """Return an answer as a line of JSON. Half a surrogate pair, which UTF-8 can't express, is written as an escape.
    The caller sent it as an escape, too: in JSON within a message (arguments of an earlier call, a tool's result)."""
    try:
        return encode(_cut(answer) if isinstance(answer, str) else answer)
    except UnicodeEncodeError:
        if isinstance(answer, Failure):
            return encode(msgspec.structs.replace(answer, message=_with_escapes(answer.message)))
        if isinstance(answer, Unusable):
            return encode(Unusable(reason=_with_escapes(answer.reason)))
        if isinstance(answer, Ready):
            raise
        return encode(_cut(_with_escapes(answer)))


def _cut(text: str) -> list[str]:
    return [text[start : start + PART_CHARS] for start in range(0, len(text), PART_CHARS)]


def _with_escapes(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _tell(answer: Ready | Unusable | Answer) -> None:
    sys.stdout.buffer.write(_line(answer) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
