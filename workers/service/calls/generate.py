"""Takes the calls for generated text: makes an `EngineRequest` of each submit, and hands it to the engine.

Runs on the event loop. What takes longer than an instant (prompts, forms, samplers) is made on threads; work for a call
that is given up before its turn is dropped. A form is a schema or a grammar that an answer must follow.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from msgspec.structs import asdict, replace

from workers.chat.answers import Answers
from workers.chat.prompts import Prompts, Seen, is_quick, length_of, text_chars
from workers.chat.tools import Parser
from workers.constraint.thought import Thought, thought_before
from workers.engine.cache.prompt import Prompt
from workers.engine.request import EngineRequest, TokenMask
from workers.llama.sampling.stages import MAX_SEED, settled
from workers.protocol.events import CallFailed, Failed, Failure, FailureCode, context_overflow
from workers.protocol.prefixes import Chain, chain_of
from workers.protocol.requests import UNBOUNDED, Cancel, GenerateRequest, Sampling, Submit
from workers.service.calls.delivery import Delivery
from workers.service.calls.lanes import FairLane, form_lane
from workers.service.calls.live_calls import Begun, Engine, LiveCall, LiveCalls
from workers.service.calls.stream import EventHub
from workers.service.lifecycle import Lifecycle
from workers.service.registration.prefix_adverts import CallAdverts, PrefixAdverts

TOOL_BYTES = 4 << 10
"""Bytes that the schema of each tool is assumed to have; measuring the schemas would hold up the event loop."""

MAX_EARLY_CANCELS = 1024

QUICK_LAST_N = 1024
"""Largest `repeat_last_n`, in tokens, for which the event loop builds the sampler: in a fraction of a millisecond."""

QUICK_TOKENS = 16_384
"""Maximum number of tokens, of the prompt and the prediction, that are made ready for drafts in two milliseconds."""

QUICK_STOP_CHARS = 256
"""Largest length of all stop strings together, in characters, for which the event loop builds their search tree."""

Result = TypeVar("Result")


class Constraints(Protocol):
    """Compiles the forms (schemas, grammars) that answers must follow."""

    @property
    def counts(self) -> dict[str, int]:
        """Number of forms asked for so far, by outcome (`workers.metrics.readings.FORM_OUTCOMES`)."""

    def answer_mask(self, request: GenerateRequest, thought: Thought | None = None) -> TokenMask | None:
        """Return the mask that makes an answer follow the form that the request demands, and that keeps the `thought`
        before the answer to the thought's budget of tokens. None: no mask is needed.

        May block for seconds. Raises CallFailed."""


class _Reading(NamedTuple):
    """Holds what is read from a request before the answer is made. It is read once, since a request's template values
    and schemas can be megabytes long."""

    prompt: Prompt
    num_public: int
    """Number of leading tokens that all teams may reuse."""
    chain: Chain
    thought: Thought | None
    """The bounds on the thought before the answer, if any."""
    parser: Parser | None
    prediction: Sequence[int]
    """Tokens that the caller expects the answer to have."""


class GenerateCalls:
    """Takes the calls for generated text until the worker drains, and cancels or ends them."""

    def __init__(
        self,
        delivery: Delivery,
        engine: Engine,
        calls: LiveCalls,
        hub: EventHub,
        prompts: Prompts,
        life: Lifecycle,
        lane: FairLane,
        media: FairLane,
        *,
        defaults: Sampling,
        constraints: Constraints,
        answers: Answers,
        adverts: PrefixAdverts,
        adapter_hashes: Callable[[], Mapping[str, str]],
    ) -> None:
        """`lane`: threads for prompts that take longer than an instant; `media`: for pictures and sounds. `defaults`:
        sampling parameters where a caller sets none. `adapter_hashes` returns adapter -> hash of its contents; any
        thread may call it."""
        self.idle, self.rates, self.end_all = calls.idle, calls.rates, delivery.end_all
        self._engine = engine
        self._calls = calls
        self._hub = hub
        self._prompts = prompts
        self._life = life
        self._lane, self._media_lane = lane, media
        self._constraints = constraints
        self._answers = answers
        self._adverts = adverts
        self._adapter_hashes = adapter_hashes
        self._forms = form_lane()
        """Threads that compile forms, and that build samplers which take longer than an instant."""
        self._defaults = {name: value for name, value in asdict(defaults).items() if value is not None}
        self._keys = itertools.count(1)
        self._early_cancels: dict[tuple[str, int], None] = {}
        """(gateway, number) of each call whose cancellation arrived before its submit, oldest first."""

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    async def submit(self, submit: Submit) -> Begun:
        """Take one call; if it is sent again while it lives, return the same result. Raises CallFailed."""
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
        """End the named calls at once, without a last event. Remember unknown ones: their submits may arrive later."""
        for number in cancel.calls:
            listing = self._hub.find(cancel.gateway, number)
            if listing is not None:
                self._hub.strike(listing)
                self._calls.give_up(listing.key)
            else:
                self._early_cancels[cancel.gateway, number] = None
                if len(self._early_cancels) > MAX_EARLY_CANCELS:
                    del self._early_cancels[next(iter(self._early_cancels))]

    async def _begin(self, submit: Submit) -> Begun | Failure:
        request = submit.request
        key = next(self._keys)
        listing = self._hub.enter(submit.gateway, submit.call, key, submit.tenant)
        call = self._calls.begin(listing, submit)
        outcome: Begun | Failure = Failure(
            FailureCode.INTERNAL, "the worker could not begin the call; its log says why"
        )
        try:
            prompt, num_public, chain, thought, parser, prediction = await self._prompt(call, submit)
            # Some megabytes, which nobody needs any more.
            request = replace(request, media=()) if request.media else request
            submit = replace(submit, request=request)
            mask = await self._mask(call, submit, thought)
            sampling, begun = self._sampling(request.sampling), Begun(len(prompt))
            if "settings" in request.tell:
                sampling = _with_seed(sampling)
                told = self._lane.run(submit.tenant, 0, self._with_settings, begun, prompt.texts(), request, sampling)
                begun = await self._prepared(call, submit, told)
            if key not in self._calls:
                raise CallFailed(_cancelled(submit.call))
            call.parser = parser
            if request.cache_prompt:
                call.adverts = CallAdverts(self._adverts, key, request, chain, len(prompt))
                if not prompt.spans:  # what stands for a picture in heads has other bytes than a text of its cells
                    self.rates.accepted(call.adverts.num_bytes, len(prompt))
            engine_request = self._engine_request(key, prompt, num_public, prediction, mask, sampling, submit)
            await self._hand_over(call, engine_request, submit)
            outcome = begun
        except CallFailed as failed:
            outcome = failed.failure
        finally:
            call.outcome.set_result(outcome)
            if isinstance(outcome, Failure) and self._calls.forget(key, Failed(submit.call, outcome)):
                self._hub.strike(listing)
        return outcome

    def _engine_request(
        self,
        key: int,
        prompt: Prompt,
        num_public: int,
        prediction: Sequence[int],
        mask: TokenMask | None,
        sampling: Sampling,
        submit: Submit,
    ) -> EngineRequest:
        return EngineRequest(
            key,
            submit.request,
            prompt,
            sampling,
            label=submit.request_id,
            tenant=submit.tenant,
            weight=submit.weight,
            num_public=num_public,
            deadline=time.monotonic() + submit.deadline - time.time() if submit.deadline else math.inf,
            written=self._answers.written(submit.request),
            mask=mask,
            prediction=prediction,
        )

    async def _hand_over(self, call: LiveCall, request: EngineRequest, submit: Submit) -> None:
        """Give the call to the engine, on a thread if what it needs takes long to make. Raises CallFailed."""
        num_stop_chars = sum(map(len, request.asked.stop))
        num_tokens = len(request.prompt) + len(request.prediction)
        is_quick = num_stop_chars <= QUICK_STOP_CHARS and num_tokens <= QUICK_TOKENS
        if is_quick and not takes_long(request.sampling):
            self._engine.submit(request)
            return
        await self._prepared(call, submit, self._forms.run(submit.tenant, 0, self._submit_aside, request))
        if request.key not in self._calls and not call.has_ended:
            self._engine.cancel(request.key)
            raise CallFailed(_cancelled(submit.call))

    def _submit_aside(self, request: EngineRequest) -> None:
        """Give a call to the engine, on a thread; cancel it there if it was given up meanwhile. Raises CallFailed."""
        self._engine.submit(request)
        if request.key not in self._calls:
            self._engine.cancel(request.key)

    async def _mask(self, call: LiveCall, submit: Submit, thought: Thought | None) -> TokenMask | None:
        request = submit.request
        is_bounded = thought is not None and thought.budget != UNBOUNDED
        has_form = request.constraint or request.forced_tools or any(tool.strict for tool in request.tools)
        if not (has_form or is_bounded):
            return None
        grammars = sum(len(tool.grammar.text) for tool in request.tools if tool.grammar is not None)
        own = len(request.constraint.text) if request.constraint else 0
        num_bytes = len(request.tools) * TOOL_BYTES + own + grammars
        made = self._forms.run(submit.tenant, num_bytes, self._constraints.answer_mask, request, thought)
        return await self._prepared(call, submit, made)

    def _with_settings(
        self, begun: Begun, prompt: Sequence[int], request: GenerateRequest, sampling: Sampling
    ) -> Begun:
        """Return `begun` with the prompt's text and the sampling parameters in effect. If the call ignores the model's
        end tokens, these appear as logit biases, as in llama-server.

        Raises CallFailed if the caller asks for the whole prompt and its text is longer than `max_prompt_chars`."""
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

    async def _prompt(self, call: LiveCall, submit: Submit) -> _Reading:
        """Return what is read of the call's request. Raises CallFailed."""
        if is_quick(submit.request):
            return self._read(submit, ())
        seen = await self._prepared(call, submit, self._seen(submit)) if submit.request.media else ()
        work = self._lane.run(submit.tenant, text_chars(submit.request), self._read, submit, seen)
        return await self._prepared(call, submit, work)

    async def _seen(self, submit: Submit) -> Sequence[Seen]:
        """Return what the model reads of the request's media. Raises CallFailed, and CallFailed (CONTEXT_OVERFLOW) as
        soon as they alone are too long: each keeps megabytes until it is encoded."""
        seen: list[Seen] = []
        num_tokens, num_bytes = 0, sum(len(one.data) for one in submit.request.media)  # all are kept while one waits
        for one in submit.request.media:
            seen.append(await self._media_lane.run(submit.tenant, num_bytes, self._prompts.see, one))
            num_tokens += length_of(seen[-1])
            if num_tokens >= self._engine.n_ctx:
                raise CallFailed(context_overflow(num_tokens, self._engine.n_ctx, is_whole=False))
        return seen

    async def _prepared(self, call: LiveCall, submit: Submit, work: Coroutine[None, None, Result]) -> Result:
        """Return the result of `work`, done by a `FairLane` for the call. Raises CallFailed if the call is given up."""
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

    def _read(self, submit: Submit, seen: Sequence[Seen]) -> _Reading:
        request = submit.request
        prompt = self._prompts.fitting(request, seen)
        tokens = prompt.tokens
        if 0 < request.prompt_probs < len(tokens):
            message = (
                f"the prompt has {len(tokens)} tokens, and `echo` with `logprobs` tells the probabilities of "
                f"{request.prompt_probs} at most for each prompt of this request; send a shorter prompt, fewer prompts "
                "or a lower `logprobs`"
            )
            raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message, "prompt"))
        num_public = self._prompts.num_public(request, tokens)
        chain = chain_of(request, submit.tenant, self._adapter_hashes())
        thought = thought_before(request, tokens, self._answers)
        prediction = self._prompts.prediction(request)
        parser = self._answers.parser(request, tokens)
        return _Reading(Prompt.placed(tokens, prompt.media), num_public, chain, thought, parser, prediction)

    def _sampling(self, asked: Sampling) -> Sampling:
        """Return the caller's parameters, and the model's defaults for unset ones; the engine fills in the rest."""
        if not self._defaults:
            return asked
        set_ = {name: value for name, value in asdict(asked).items() if value is not None}
        return Sampling(**{**self._defaults, **set_})


def takes_long(sampling: Sampling) -> bool:
    """Return whether making the sampler takes long: it walks the vocabulary, tokenises texts or reads a long prompt."""
    if sampling.dry_multiplier or any(isinstance(what, str) for what, _ in sampling.logit_bias or ()):
        return True
    return not 0 <= (sampling.repeat_last_n or 0) <= QUICK_LAST_N


def _with_seed(sampling: Sampling) -> Sampling:
    """Return the parameters with a seed. The seed is drawn here, not in the engine, so that the caller can learn it."""
    return sampling if sampling.seed is not None else replace(sampling, seed=secrets.randbelow(MAX_SEED + 1))


def _cancelled(call: int) -> Failure:
    return Failure(FailureCode.INVALID_REQUEST, f"call {call} was cancelled before it began")
