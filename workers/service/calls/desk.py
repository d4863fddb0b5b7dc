"""The desk: takes calls, hands them to the engine, and puts the engine's events into each gateway's ring.

Runs on the event loop. `deliver` is called once per engine step and does the only work that is done per token.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from msgspec.structs import asdict, replace

from workers.chat.answers import Answers
from workers.chat.prompts import Prompts, is_quick, text_chars
from workers.chat.tools import CallPiece, ContentPiece, Parser, Piece, ReasoningPiece
from workers.constraint.thought import Thought, thought_before
from workers.engine.cache.prompt import Prompt
from workers.engine.request import EngineRequest, TokenMask
from workers.llama.sampling.stages import MAX_SEED, settled
from workers.metrics.worker import WorkerMetrics
from workers.protocol.events import (
    CallEvent,
    CallFailed,
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
from workers.protocol.prefixes import Chain, chain_of
from workers.protocol.requests import UNBOUNDED, Cancel, GenerateRequest, Sampling, Submit
from workers.service.calls.call_record import Stories, Story
from workers.service.calls.lanes import FairLane, form_lane
from workers.service.calls.stream import EventHub, GatewayBook, Listing, Mailbox
from workers.service.lifecycle import Lifecycle, is_shortage
from workers.service.registration.heartbeat import Rates
from workers.service.registration.prefix_adverts import CallHeads, HeadBook

TOOL_BYTES = 4 << 10
"""Assumed size of a tool's schema, bytes; measuring all of them would hold up the event loop."""

MAX_EARLY_CANCELS = 1024

QUICK_LAST_N = 1024
"""Most recent tokens that penalties read in a fraction of a millisecond."""

QUICK_STOP_CHARS = 256
"""Most characters of stop strings whose tree (`workers.engine.step.answer_text`) is made so quickly."""

BROKEN = Failure(
    FailureCode.INTERNAL, "the worker could not pass the answer on; its log says why. Send the request again"
)
"""The end of a call whose answer can't be parsed or encoded."""

Result = TypeVar("Result")

PASSED_ON = (Logprobs, PromptLogprobs, Tokens, TimingsSoFar, Progress)
"""Events that are passed on unchanged, but for the call's number."""

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """The engine, as the desk needs it. Its events come to `CallDesk.deliver`, with `call` = the key given here."""

    @property
    def n_ctx(self) -> int:
        """Longest single conversation, tokens."""

    def submit(self, request: EngineRequest) -> None:
        """Take the call, without waiting for a slot. Raises CallFailed."""

    def cancel(self, key: int) -> None:
        """End the call within one step; unknown keys are ignored."""

    def end(self, key: int, num_tokens: int) -> None:
        """End the answer after its first `num_tokens` tokens, as Finished (STOP); unknown keys are ignored."""


class Constraints(Protocol):
    """Compiles the forms (schemas, grammars) that answers are kept to."""

    @property
    def counts(self) -> dict[str, int]:
        """Number of forms asked for so far, by outcome (`workers.metrics.readings.FORM_OUTCOMES`)."""

    def answer_mask(self, request: GenerateRequest, thought: Thought | None = None) -> TokenMask | None:
        """Return the mask for the answer's form and for the bound of the `thought` before it; None: neither is needed.

        May block for seconds. Raises CallFailed.
        """


@dataclass(slots=True, eq=False)
class LiveCall:
    """One call between its submit and its last event."""

    listing: Listing
    story: Story
    parser: Parser | None = None
    held_tokens: int = 0
    """Tokens whose text the parser still holds back."""
    num_read_tokens: int = 0
    """Tokens whose text the parser has seen."""
    heads: CallHeads | None = None
    """The prefix hashes of the call; None: its prompt is not cached."""
    preparing: asyncio.Future[Any] | None = None
    """The work before the engine takes the call; cancelled where nobody wants the call any more."""
    has_ended: bool = False
    """Whether its last event was told. A short answer may end before the thread that submits it comes back."""
    outcome: asyncio.Future[Begun | Failure] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The result of the submit, or why it was refused."""


class Begun(NamedTuple):
    """The result of a submit, for its answer (`workers.protocol.requests.Accepted`)."""

    num_prompt_tokens: int
    prompt: str = ""
    sampling: Sampling | None = None


class CallDesk:
    """All calls of this worker, by the engine's key."""

    def __init__(
        self,
        mailbox: Mailbox,
        engine: Engine,
        hub: EventHub,
        prompts: Prompts,
        metrics: WorkerMetrics,
        life: Lifecycle,
        stories: Stories,
        lane: FairLane,
        *,
        defaults: Sampling,
        constraints: Constraints,
        answers: Answers,
        heads: HeadBook,
        adapter_hashes: Callable[[], Mapping[str, str]],
    ) -> None:
        """`mailbox` brings the steps of `engine`. `lane`: threads for prompts that take longer than an instant.

        `defaults`: sampling where a caller does not say. `adapter_hashes`: name -> hash of the adapters' contents, for
        any thread.
        """
        self.idle = asyncio.Event()
        """Set while there is no call."""
        self.idle.set()
        self._mailbox = mailbox
        self._engine = engine
        self._hub = hub
        self._prompts = prompts
        self._metrics = metrics
        self._life = life
        self._stories = stories
        self._lane = lane
        self._constraints = constraints
        self._answers = answers
        self._heads = heads
        self._adapter_hashes = adapter_hashes
        self._forms = form_lane()
        """Threads on which forms are compiled, and samplers made that take longer than an instant."""
        self.rates = Rates()
        """Averages over the calls, for predictions."""
        self._defaults = {name: value for name, value in asdict(defaults).items() if value is not None}
        self._calls: dict[int, LiveCall] = {}
        self._keys = itertools.count(1)
        self._early_cancels: dict[tuple[str, int], None] = {}
        """Cancels that overtook their submit, oldest first."""
        hub.follow(self._give_up)
        mailbox.open(self.deliver)

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    async def submit(self, submit: Submit) -> Begun:
        """Take one call. Raises CallFailed. Idempotent while the call lives."""
        listing = self._hub.find(submit.gateway, submit.call)
        if listing is not None:
            outcome = await asyncio.shield(self._calls[listing.key].outcome)
        elif self._life.draining:
            raise CallFailed(Failure(FailureCode.DRAINING, "this worker is stopping and takes no new calls"))
        elif (submit.gateway, submit.call) in self._early_cancels:
            del self._early_cancels[submit.gateway, submit.call]
            raise CallFailed(_cancelled(submit.call))
        else:
            outcome = await self._begin(submit)
        if isinstance(outcome, Failure):
            raise CallFailed(outcome)
        return outcome

    def cancel(self, cancel: Cancel) -> None:
        """End calls at once, without another event. Unknown numbers are remembered for a submit still under way."""
        for number in cancel.calls:
            listing = self._hub.find(cancel.gateway, number)
            if listing is not None:
                self._hub.strike(listing)
                self._give_up(listing.key)
            else:
                self._early_cancels[cancel.gateway, number] = None
                if len(self._early_cancels) > MAX_EARLY_CANCELS:
                    del self._early_cancels[next(iter(self._early_cancels))]

    def deliver(self, step: int, events: list[CallEvent]) -> None:
        """Pass on the events of one engine step (or of several, where the loop was behind)."""
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
                    if not call.story.first_token_at:
                        self._first_token(call)
                    if call.parser is None:
                        if call.heads is not None:
                            call.heads.add(ContentPiece(event.text))
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
        """End every call in-stream, after the engine's last steps: the engine is gone or the time to drain is up.

        `why` is asked if there is one.
        """
        self._mailbox.flush()
        keys = list(self._calls)
        for call in self._calls.values():
            if call.preparing is not None:
                call.preparing.cancel()
        if keys:
            failure = why()
            self.deliver(0, [Failed(key, failure) for key in keys])
        for key in keys:
            self._engine.cancel(key)

    async def _begin(self, submit: Submit) -> Begun | Failure:
        request = submit.request
        key = next(self._keys)
        listing = self._hub.enter(submit.gateway, submit.call, key)
        self.idle.clear()
        story = self._stories.begin("generate", submit.request_id, submit.traceparent, submit.tracestate)
        call = self._calls[key] = LiveCall(listing, story)
        outcome: Begun | Failure = Failure(
            FailureCode.INTERNAL, "the worker could not begin the call; its log says why"
        )
        try:
            tokens, num_public, chain = await self._prompt(call, submit)
            mask = await self._mask(call, submit, tokens)
            sampling, begun = self._sampling(request.sampling), Begun(len(tokens))
            if "settings" in request.tell:
                sampling = _with_seed(sampling)
                told = self._lane.run(submit.tenant, 0, self._with_settings, begun, tokens, request, sampling)
                begun = await self._prepared(call, submit, told)
            if key not in self._calls:
                raise CallFailed(_cancelled(submit.call))
            call.parser = self._answers.parser(request, tokens)
            if request.cache_prompt:
                call.heads = CallHeads(self._heads, key, request, chain, len(tokens))
                self.rates.accepted(call.heads.num_bytes, len(tokens))
            await self._hand_over(call, self._engine_request(key, tokens, num_public, mask, sampling, submit), submit)
            outcome = begun
        except CallFailed as failed:
            outcome = failed.failure
        finally:
            call.outcome.set_result(outcome)
            if isinstance(outcome, Failure) and self._forget(key, Failed(submit.call, outcome)):
                self._hub.strike(listing)
        return outcome

    def _engine_request(
        self,
        key: int,
        tokens: Sequence[int],
        num_public: int,
        mask: TokenMask | None,
        sampling: Sampling,
        submit: Submit,
    ) -> EngineRequest:
        return EngineRequest(
            key,
            submit.request,
            Prompt(tokens),
            sampling,
            label=submit.request_id,
            tenant=submit.tenant,
            weight=submit.weight,
            num_public=num_public,
            deadline=time.monotonic() + submit.deadline - time.time() if submit.deadline else math.inf,
            written=self._answers.written(submit.request),
            mask=mask,
        )

    async def _hand_over(self, call: LiveCall, request: EngineRequest, submit: Submit) -> None:
        """Submit to the engine, on a thread if the sampler or the stop strings take long. Raises CallFailed."""
        num_stop_chars = sum(map(len, request.asked.stop))
        if num_stop_chars <= QUICK_STOP_CHARS and not takes_long(request.sampling):
            self._engine.submit(request)
            return
        await self._prepared(call, submit, self._forms.run(submit.tenant, 0, self._submit_aside, request))
        if request.key not in self._calls and not call.has_ended:
            self._engine.cancel(request.key)
            raise CallFailed(_cancelled(submit.call))

    def _submit_aside(self, request: EngineRequest) -> None:
        """Submit from a thread; the call may have been given up meanwhile. Raises CallFailed."""
        self._engine.submit(request)
        if request.key not in self._calls:
            self._engine.cancel(request.key)

    async def _mask(self, call: LiveCall, submit: Submit, prompt: Sequence[int]) -> TokenMask | None:
        request = submit.request
        thought = thought_before(request, prompt, self._answers)
        is_bounded = thought is not None and thought.budget != UNBOUNDED
        has_form = request.constraint or request.forced_tools or any(tool.strict for tool in request.tools)
        if not (has_form or is_bounded):
            return None
        num_bytes = len(request.tools) * TOOL_BYTES + len(request.constraint.text if request.constraint else "")
        made = self._forms.run(submit.tenant, num_bytes, self._constraints.answer_mask, request, thought)
        return await self._prepared(call, submit, made)

    def _with_settings(
        self, begun: Begun, prompt: Sequence[int], request: GenerateRequest, sampling: Sampling
    ) -> Begun:
        """Return `begun` with the call's settings; end tokens that it ignores show as biases, as in llama-server.

        Raises CallFailed for a prompt that is too long to be told whole, where that is asked for.
        """
        ran = settled(sampling, self._engine.n_ctx)
        if request.ignore_eos:
            biases = dict(ran.logit_bias or ()) | dict.fromkeys(self._answers.ends)
            ran = replace(ran, logit_bias=tuple(biases.items()))
        text, most = self._answers.text(prompt), request.max_prompt_chars
        if len(text) > most and "prompt" in request.tell:
            message = (
                f"the prompt's text has {len(text)} characters and is told up to {most} to each of so many answers; "
            )
            raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message + "leave out `echo`, or shorten it", "echo"))
        return begun._replace(prompt=text[:most], sampling=ran)

    async def _prompt(self, call: LiveCall, submit: Submit) -> tuple[Sequence[int], int, Chain]:
        """Return the prompt's tokens, how many of them all teams share, and its prefix hashes. Raises CallFailed."""
        if is_quick(submit.request):
            return self._tokens(submit)
        work = self._lane.run(submit.tenant, text_chars(submit.request), self._tokens, submit)
        return await self._prepared(call, submit, work)

    async def _prepared(self, call: LiveCall, submit: Submit, work: Coroutine[None, None, Result]) -> Result:
        """Wait for a lane's work until nobody wants the call any more. Raises CallFailed."""
        if call.listing.key not in self._calls:  # its caller left between two jobs
            work.close()
            raise CallFailed(_cancelled(submit.call))
        task: asyncio.Future[Result] = asyncio.ensure_future(work)
        call.preparing = task
        try:
            return await task
        except asyncio.CancelledError:
            if call.listing.key in self._calls:
                raise
            raise CallFailed(_cancelled(submit.call)) from None
        finally:
            call.preparing = None
            del task  # an error refers to this frame, the task to the error: a cycle with the whole prompt

    def _tokens(self, submit: Submit) -> tuple[Sequence[int], int, Chain]:
        request = submit.request
        tokens = self._prompts.tokens(request)
        if 0 < request.prompt_probs < len(tokens):
            message = (
                f"the prompt has {len(tokens)} tokens, and `echo` with `logprobs` tells the probabilities of "
                f"{request.prompt_probs} at most for each prompt of this request; send a shorter prompt, fewer prompts "
                "or a lower `logprobs`"
            )
            raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message, "prompt"))
        num_public = self._prompts.num_public(request, tokens)
        return tokens, num_public, chain_of(request, submit.tenant, self._adapter_hashes())

    def _sampling(self, asked: Sampling) -> Sampling:
        """Return the caller's parameters over the model's defaults; those that neither sets are left to the engine."""
        if not self._defaults:
            return asked
        set_ = {name: value for name, value in asdict(asked).items() if value is not None}
        return Sampling(**{**self._defaults, **set_})

    def _first_token(self, call: LiveCall) -> None:
        story = call.story
        story.first_token_at = time.monotonic()
        self._metrics.time_to_first_token.observe(story.first_token_at - story.began_at)

    def _file(self, event: CallEvent, call: LiveCall, step: int, frame: list[CallEvent]) -> None:
        """Pass on an event that comes once per call."""
        listing, story = call.listing, call.story
        match event:
            case Started():
                story.started_at, story.slot = time.monotonic(), event.slot
                listing.first_step = step
                story.num_prompt_tokens, story.num_cached_tokens = event.num_prompt_tokens, event.num_cached_tokens
                self._metrics.started(event, story.started_at - story.began_at)
                if call.heads is not None:
                    call.heads.started()
                frame.append(Started(listing.number, event.slot, event.num_prompt_tokens, event.num_cached_tokens))
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
                self._metrics.finished(end, reason, time.monotonic() - story.began_at)
                if call.heads is not None:
                    call.heads.finished(usage)
                frame.append(end)
                self._end(call, step, end)
            case Failed():
                if call.parser is not None:
                    _append_pieces(frame, call, call.parser.finish(cut_off=True))
                if event.failure.code is FailureCode.OUT_OF_MEMORY:
                    self._life.shortage.note()
                frame.append(Failed(listing.number, event.failure))
                self._end(call, step, event)
            case _:
                raise TypeError(f"an engine does not emit {type(event).__name__}")

    def _end(self, call: LiveCall, step: int, end: Finished | Failed) -> None:
        if not call.listing.first_step:
            call.listing.first_step = step
        self._hub.end(call.listing)
        self._forget(call.listing.key, end)

    def _publish(self, book: GatewayBook, step: int, frame: list[CallEvent]) -> None:
        try:
            self._hub.publish(book, frame)
        except Exception as error:  # noqa: BLE001 - most often one call's event can't be encoded
            self._hub.publish(book, self._sayable(book, step, frame, error))

    def _sayable(self, book: GatewayBook, step: int, frame: list[CallEvent], failure: Exception) -> list[CallEvent]:
        """Return the frame without the events of calls that have one which can't be encoded; these calls end.

        Raises `failure` where every event can be encoded: then it is no call's fault.
        """
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
        """End one call whose answer can't be passed on. Raises `error` where memory is short: no call's fault.

        If the call has ended already, that end stands.
        """
        if is_shortage(error):
            raise error
        key = call.listing.key
        _log_broken(f"request {call.story.request_id}", error)
        self._engine.cancel(key)
        if key in self._calls:
            end = Failed(call.listing.number, BROKEN)
            frame.append(end)
            self._end(call, step, end)

    def _give_up(self, key: int) -> None:
        """Drop a call that nobody wants any more."""
        if self._forget(key):
            self._engine.cancel(key)

    def _forget(self, key: int, end: Finished | Failed | None = None) -> bool:
        """Forget a call; return whether it was still there. `end`: its last event; None: nobody wants it any more."""
        call = self._calls.pop(key, None)
        if not self._calls:
            self.idle.set()
        if call is not None:
            call.has_ended = end is not None
            if call.preparing is not None and end is None:
                call.preparing.cancel()
            if call.story.started_at:
                self.rates.held(call.story.started_at)
            self._stories.end(call.story, end)
        return call is not None


def _append_pieces(frame: list[CallEvent], call: LiveCall, pieces: list[Piece]) -> None:
    """Append parsed text as events; the first one counts every token that was held back before it."""
    number, heads = call.listing.number, call.heads
    for piece in pieces:
        num_tokens, call.held_tokens = call.held_tokens, 0
        if heads is not None:
            heads.add(piece)
        if isinstance(piece, CallPiece):
            frame.append(ToolCallDelta(number, piece.number, piece.id, piece.name, piece.arguments, num_tokens))
        elif isinstance(piece, ReasoningPiece):
            frame.append(Reasoning(number, piece.text, num_tokens))
        else:
            frame.append(Text(number, piece.text, num_tokens))


def _log_broken(whose: str, error: Exception) -> None:
    """Log where an answer broke off, without the error's message, which may quote the answer."""
    where = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s ends, its answer can't be passed on: %s at\n%s", whose, type(error).__name__, where)


def takes_long(sampling: Sampling) -> bool:
    """Return whether a sampler walks the vocabulary, tokenises texts or reads a long prompt before it draws."""
    if sampling.dry_multiplier or any(isinstance(what, str) for what, _ in sampling.logit_bias or ()):
        return True
    return not 0 <= (sampling.repeat_last_n or 0) <= QUICK_LAST_N


def _with_seed(sampling: Sampling) -> Sampling:
    """Return the parameters with a seed: the caller is to be told it, so the engine does not draw it."""
    return sampling if sampling.seed is not None else replace(sampling, seed=secrets.randbelow(MAX_SEED + 1))


def _cancelled(call: int) -> Failure:
    return Failure(FailureCode.INVALID_REQUEST, f"call {call} was cancelled before it began")
