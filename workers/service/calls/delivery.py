"""Puts the engine's events into each gateway's ring in the form that the gateway reads: each call under the number that
the gateway gave it, with tool calls and thoughts parsed out of the text.

Runs on the event loop. `deliver` is called once per engine step; the loop does no other work per token.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable

from msgspec.structs import replace

from workers.chat.tools import CallPiece, ContentPiece, Piece, ReasoningPiece
from workers.metrics.worker import WorkerMetrics
from workers.protocol.events import (
    CallEvent,
    Failed,
    Failure,
    FailureCode,
    Finished,
    FinishReason,
    Logprobs,
    Progress,
    PromptLogprobs,
    Reasoning,
    Started,
    Text,
    TimingsSoFar,
    Tokens,
    ToolCallDelta,
    encode_step,
)
from workers.service.calls.live_calls import Engine, LiveCall, LiveCalls
from workers.service.calls.stream import EventHub, GatewayBook, Mailbox
from workers.service.lifecycle import Shortage, is_shortage

BROKEN = Failure(
    FailureCode.INTERNAL, "the worker could not pass the answer on; its log says why. Send the request again"
)
"""The failure of a call whose answer can't be parsed or encoded."""

PASSED_ON = (Logprobs, PromptLogprobs, Tokens, TimingsSoFar, Progress)
"""Events that are passed on unchanged, except that `call` becomes the number that the gateway gave the call."""

logger = logging.getLogger(__name__)


class Delivery:
    """Takes the events of each engine step from the mailbox and delivers them. The constructor opens the mailbox."""

    def __init__(
        self,
        mailbox: Mailbox,
        engine: Engine,
        calls: LiveCalls,
        hub: EventHub,
        metrics: WorkerMetrics,
        shortage: Shortage,
    ) -> None:
        self._mailbox = mailbox
        self._engine = engine
        self._calls = calls
        self._hub = hub
        self._metrics = metrics
        self._shortage = shortage
        mailbox.open(self.deliver)

    def deliver(self, step: int, events: list[CallEvent]) -> None:
        """Pass on the events of one engine step, or of several if the event loop was late."""
        step = self._hub.begin_step(step)
        frames: dict[GatewayBook, list[CallEvent]] = {}
        calls = self._calls
        num_tokens = 0
        for event in events:
            call = calls.get(event.call)
            if call is None:
                continue  # it was cancelled while this step was on its way
            listing = call.listing
            frame = frames.get(listing.gateway)
            if frame is None:
                frame = frames[listing.gateway] = []
            try:
                if isinstance(event, Text):
                    if call.parser is not None and call.parser.is_over:
                        continue  # nobody wants what the model wrote before the engine ended it
                    num_tokens += event.num_tokens
                    if not call.record.first_token_at:
                        self._first_token(call)
                    if call.parser is None:
                        if call.adverts is not None:
                            call.adverts.add(ContentPiece(event.text))
                        frame.append(Text(listing.number, event.text, event.num_tokens))
                    else:
                        call.held_tokens += event.num_tokens
                        call.num_read_tokens += event.num_tokens
                        _append_pieces(frame, call, call.parser.feed(event.text))
                        if call.parser.is_over:
                            self._engine.end(event.call, call.num_read_tokens)
                elif isinstance(event, PASSED_ON):
                    if call.parser is None or not call.parser.is_over:
                        frame.append(replace(event, call=listing.number))
                else:
                    self._file(event, call, step, frame)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is one call's: it must not end other calls
                self._break_off(call, step, frame, error)
        self._metrics.predicted_tokens += num_tokens
        for book, frame in frames.items():
            if frame:
                self._publish(book, step, frame)

    def end_all(self, why: Callable[[], Failure]) -> None:
        """End every call with a failure in its stream, because the engine is gone or the time to drain is up.

        The engine's last steps are delivered first. `why` returns the failure; it is called only if there are calls."""
        self._mailbox.flush()
        keys = self._calls.keys
        for key in keys:
            if (preparing := self._calls[key].preparing) is not None:
                preparing.cancel()
        if keys:
            failure = why()
            self.deliver(0, [Failed(key, failure) for key in keys])
        for key in keys:
            self._engine.cancel(key)

    def _first_token(self, call: LiveCall) -> None:
        record = call.record
        record.first_token_at = time.monotonic()
        self._metrics.time_to_first_token.observe(record.first_token_at - record.began_at)

    def _file(self, event: CallEvent, call: LiveCall, step: int, frame: list[CallEvent]) -> None:
        """Pass on an event that comes once per call: `Started`, `Finished` or `Failed`."""
        listing, record = call.listing, call.record
        match event:
            case Started():
                record.started_at, record.slot = time.monotonic(), event.slot
                listing.first_step = step
                record.num_prompt_tokens, record.num_cached_tokens = event.num_prompt_tokens, event.num_cached_tokens
                self._metrics.started(event, record.started_at - record.began_at)
                if call.adverts is not None:
                    call.adverts.started()
                frame.append(replace(event, call=listing.number))
            case Finished():
                reason, usage = event.reason, event.usage
                if call.parser is not None:
                    if call.parser.is_over:  # the engine may have gone on for a token, or to its bound
                        reason = FinishReason.STOP
                        usage = replace(usage, completion_tokens=min(usage.completion_tokens, call.num_read_tokens))
                    pieces = call.parser.finish(cut_off=reason is FinishReason.LENGTH)
                    _append_pieces(frame, call, pieces)
                    if call.parser.num_calls and reason is FinishReason.STOP:
                        reason = FinishReason.TOOL_CALLS
                end = replace(event, call=listing.number, reason=reason, usage=usage)
                self._metrics.finished(end, reason, time.monotonic() - record.began_at)
                if call.adverts is not None:
                    call.adverts.finished(usage)
                frame.append(end)
                self._end(call, step, end)
            case Failed():
                if call.parser is not None:
                    _append_pieces(frame, call, call.parser.finish(cut_off=True))
                if event.failure.code is FailureCode.OUT_OF_MEMORY:
                    self._shortage.note()
                frame.append(Failed(listing.number, event.failure))
                self._end(call, step, event)
            case _:
                raise TypeError(f"an engine does not emit {type(event).__name__}")

    def _end(self, call: LiveCall, step: int, end: Finished | Failed) -> None:
        if not call.listing.first_step:
            call.listing.first_step = step
        self._hub.end(call.listing)
        self._calls.forget(call.listing.key, end)

    def _publish(self, book: GatewayBook, step: int, frame: list[CallEvent]) -> None:
        try:
            self._hub.publish(book, frame)
        except Exception as error:  # noqa: BLE001 - most often one call's event can't be encoded
            self._hub.publish(book, self._sayable(book, step, frame, error))

    def _sayable(self, book: GatewayBook, step: int, frame: list[CallEvent], failure: Exception) -> list[CallEvent]:
        """End each call with an event that can't be encoded. Return the frame with an end event in place of its events.

        Raises `failure` if every event can be encoded: then no call is at fault."""
        broken: dict[int, Exception] = {}
        for event in frame:
            try:
                encode_step([event])
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this event's
                broken.setdefault(event.call, error)
        if not broken:
            raise failure
        sayable = [event for event in frame if event.call not in broken]
        for number, reason in broken.items():
            listing = self._hub.find(book.gateway_id, number)
            if listing is None:  # the same step ended it
                end = Failed(number, BROKEN)
                if end not in frame:
                    _log_broken(f"call {number} of {book.gateway_id}", reason)
                sayable.append(end)
            else:
                self._break_off(self._calls[listing.key], step, sayable, reason)
        return sayable

    def _break_off(self, call: LiveCall, step: int, frame: list[CallEvent], error: Exception) -> None:
        """End one call whose answer can't be passed on, because of `error`. A call that has ended gets no second end.

        Raises `error` if it means that memory is short, which is not the call's fault."""
        if is_shortage(error):
            raise error
        key = call.listing.key
        _log_broken(f"request {call.record.request_id}", error)
        self._engine.cancel(key)
        if key in self._calls:
            end = Failed(call.listing.number, BROKEN)
            frame.append(end)
            self._end(call, step, end)


def _append_pieces(frame: list[CallEvent], call: LiveCall, pieces: list[Piece]) -> None:
    """Append parsed text as events. The first one counts all tokens that the parser has read since the last event."""
    number, adverts = call.listing.number, call.adverts
    for piece in pieces:
        num_tokens, call.held_tokens = call.held_tokens, 0
        if adverts is not None:
            adverts.add(piece)
        if isinstance(piece, CallPiece):
            frame.append(ToolCallDelta(number, piece.number, piece.id, piece.name, piece.arguments, num_tokens))
        elif isinstance(piece, ReasoningPiece):
            frame.append(Reasoning(number, piece.text, num_tokens))
        else:
            frame.append(Text(number, piece.text, num_tokens))


def _log_broken(whose: str, error: Exception) -> None:
    """Log that a call (`whose`) ends, and the error's type and traceback. Not its message: it may quote the answer."""
    where = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s ends, its answer can't be passed on: %s at\n%s", whose, type(error).__name__, where)
