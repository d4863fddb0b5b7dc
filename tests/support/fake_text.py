"""The text routes of the fake worker: a vocabulary of four bytes to a token, which needs no model and loses nothing."""

from __future__ import annotations

import os
import signal
from array import array
from collections.abc import Sequence

from workers.chat.infill import InfillPrompts, InfillRoom, InfillTokens
from workers.chat.prompts import Prompts, Seen
from workers.chat.template import ChatTemplate
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.heartbeat import ModelFacts
from workers.protocol.queries import Props
from workers.protocol.requests import Medium, Sampling
from workers.service.calls.lanes import media_lane, prompt_lane
from workers.service.routes.text import TextRoutes, Texts

BYTES_PER_TOKEN = 4

TEMPLATE = "{{ messages | tojson }}{{ tools | tojson }}"

PROPS_SAMPLING = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)


class FakeVocab:
    """A token is its bytes as a number, the first one lowest; 0 is the begin token and has no text.

    Four bytes that make a larger number than a token may be are two tokens, of three bytes and one."""

    num_tokens = 2**31

    def __init__(self, deadly: str = "", *, has_helpers: bool = True) -> None:
        """`deadly`: a text that has it ends the process, as llama.cpp may.

        `has_helpers` False: nothing is tokenised, as long texts are not where no process for them starts.
        """
        self._deadly = deadly
        self._has_helpers = has_helpers

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool, most: int | None = None) -> Sequence[int]:
        if self._deadly and self._deadly in text:
            os.kill(os.getpid(), signal.SIGKILL)
        if not self._has_helpers:
            raise CallFailed(Failure(FailureCode.UNAVAILABLE, "the process for it did not start; send it again"))
        data = text.encode("utf-8", "replace")
        data += bytes(-len(data) % BYTES_PER_TOKEN)
        tokens: list[int] = memoryview(data).cast("I").tolist()
        if max(tokens, default=0) >= self.num_tokens:
            split = ((token,) if token < self.num_tokens else (token & 0xFFFFFF, token >> 24) for token in tokens)
            tokens = [token for pair in split for token in pair]
        return array("I", [0] * add_special + tokens)

    def special_piece(self, token: int) -> bytes:
        return token.to_bytes(BYTES_PER_TOKEN, "little").rstrip(b"\0")

    def join(self, tokens: Sequence[int]) -> bytes:
        return b"".join(map(self.special_piece, tokens))


class Blind:
    """Reads nothing of pictures and sounds: they take no cells."""

    def read(self, medium: Medium) -> Seen:
        return ()


def fake_prompts(n_ctx: int, deadly: str = "", *, has_helpers: bool = True) -> Prompts:
    vocab = FakeVocab(deadly, has_helpers=has_helpers)
    tokens = InfillTokens(prefix=1, suffix=2, middle=3)
    infill = InfillPrompts(tokens, InfillRoom(n_ctx=n_ctx, n_batch=2048))
    return Prompts(ChatTemplate(TEMPLATE), vocab, num_tokens=vocab.num_tokens, infill=infill, media=Blind())


def fake_routes(prompts: Prompts, facts: ModelFacts, *, model: str, slots: int, n_ctx: int) -> TextRoutes:
    props = Props(
        kind="generate",
        model=model,
        slots=slots,
        n_ctx=n_ctx,
        facts=facts,
        model_file="fake.gguf",
        architecture="fake",
        ftype="all F32",
        n_embd=64,
        vocab_type=2,
        bos_token="",
        eos_token="",
        chat_templates={"default": TEMPLATE},
        chat_template_caps=ChatTemplate(TEMPLATE).abilities.caps(),
        has_infill=True,
        input_modalities=facts.inputs,
        build_info="fake",
        sampling=PROPS_SAMPLING,
    )
    return TextRoutes(Texts(FakeVocab(), prompts), props, prompt_lane(), media_lane())
