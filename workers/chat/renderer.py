"""Renders chat templates in a process that can be stopped.

A template comes with a model file. Jinja's sandbox keeps it from files and from Python, but not from a loop that never
ends or an expression that asks for all memory. In the worker's own process, either would end every call. So templates
run in a helper process, which is killed at a deadline and replaced, has a bound on its memory, can open nothing and has
no secret in memory. Trusted templates run there too: the cost is small beside the rest of a request
(docs/chat-templates.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import msgspec

from workers.chat.abilities import Abilities
from workers.chat.conversation import Conversation
from workers.chat.render_process import Ready, Setup, Unusable
from workers.chat.template import CHATML, DEFAULT, TemplateUnusable
from workers.process.helper_pool import HelperPool
from workers.process.helper_process import Launch, NotStarted, ProcessEnded, TookTooLong, launched
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.framing import json_parts

START_S = 30.0
RENDER_S = 5.0
"""Maximum seconds for rendering one conversation; then the call fails and the process is restarted. A hundred tools and
two hundred messages took at most 0.04 s (docs/chat-templates.md)."""

NUM_PROCESSES = 2
"""Default number of helper processes: while one renders a team's conversation, the other serves other teams."""

_encode = msgspec.json.Encoder().encode
_decode_text = msgspec.json.Decoder(str).decode
_decode_start: Callable[[bytes], Ready | Unusable] = msgspec.json.Decoder(Ready | Unusable).decode
_decode_answer: Callable[[bytes], list[msgspec.Raw] | Failure] = msgspec.json.Decoder(
    list[msgspec.Raw] | Failure
).decode


class Renderer:
    """Renders with a model's templates, one conversation per process at a time. Safe to use from several threads."""

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        bos_text: str = "",
        eos_text: str = "",
        render_s: float = RENDER_S,
        start_s: float = START_S,
        number: int = NUM_PROCESSES,
        launch: Launch = launched,
    ) -> None:
        """`sources`: Jinja templates by name; without one named `default`, ChatML is the default. `number`: how many
        processes; the second starts some seconds after the first, others when they are first needed.

        Starts the first process, which tries the templates; that takes some tenths of a second. Raises
        TemplateUnusable."""
        self.sources = {DEFAULT: CHATML, **sources}
        self._render_s = render_s
        self._pool = HelperPool("workers.chat.render_process", number=number, start_s=start_s, launch=launch)
        self._setup = Setup(sources=self.sources, bos_text=bos_text, eos_text=eos_text)
        self.abilities: Mapping[str, Abilities] = self._started().abilities
        known = _encode(msgspec.structs.replace(self._setup, abilities=dict(self.abilities)))
        self._pool.tell_successors(known)
        self._pool.start_spare()

    @property
    def pid(self) -> int | None:
        """Id of the helper process that is used first."""
        return self._pool.pid

    def render(self, conversation: Conversation) -> str:
        """Return the prompt's text. Blocks until a process is free, then for `render_s` at most. Raises CallFailed."""
        question = b"".join(json_parts(conversation))
        try:
            with self._pool.lent() as process:
                answer = _decode_answer(process.ask(question, self._render_s))
        except TookTooLong as late:
            if late.starved:
                message = (
                    f"the process that renders chat templates had no processor for {self._render_s:g} s; send it again"
                )
                raise CallFailed(Failure(FailureCode.UNAVAILABLE, message)) from None
            message = f"the model's chat template took longer than {self._render_s:g} s; send fewer or shorter messages"
            raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message, "messages")) from None
        except NotStarted as error:
            message = f"chat templates can't be rendered on this worker: the process for it did not start ({error}); "
            message += "send it again"
            raise CallFailed(Failure(FailureCode.UNAVAILABLE, message)) from None
        except ProcessEnded as ended:
            if ended.killed:
                message = "the process that renders chat templates was killed, for want of memory perhaps; send again"
                raise CallFailed(Failure(FailureCode.OUT_OF_MEMORY, message)) from None
            message = f"the model's chat template broke down over these messages ({ended}); send fewer or shorter ones"
            raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message, "messages")) from None
        if isinstance(answer, Failure):
            raise CallFailed(answer)
        return "".join(map(_decode_text, answer))

    def close(self) -> None:
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _started(self) -> Ready:
        """Start the first process; return what it found out about the templates. Raises TemplateUnusable."""
        try:
            ready = _decode_start(self._pool.start(_encode(self._setup)))
        except NotStarted as error:
            raise TemplateUnusable(f"the chat template can't render the shortest conversations ({error})") from None
        if isinstance(ready, Unusable):
            self.close()
            raise TemplateUnusable(ready.reason)
        return ready
