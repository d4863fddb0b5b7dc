"""Sends calls to workers, and retries them on other workers if that is safe.

`_dispatch` has the only retry loop, for answers and pooled work alike: it takes a slot and attempts the call on the
slot's worker. If the attempt fails before the answer has begun, `_recover` decides whether the loop tries again.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TypeVar

from msgspec.structs import replace as replace_struct

from gateway.adapters.choice import CallAdapters
from gateway.back_pressure import fallback_unsuited
from gateway.call import Answer, Call, Cutoff
from gateway.dispatch.call_state import CallState, Limits
from gateway.dispatch.slot_search import Admission, SlotLease, SlotSearch
from gateway.dispatch.suitable_workers import SuitableWorkers
from gateway.dispatch.team_turns import TeamTurns
from gateway.dispatch.upstream import HoldVectors, Upstream, UpstreamAnswer, error_for
from gateway.errors import PaddockError
from gateway.registry.snapshot import FleetView
from gateway.routing.placement import ANY, find_slot
from gateway.routing.retries import Reason, RetryBudget
from gateway.telemetry.answer_log import AnswerLog
from gateway.telemetry.metrics import Metrics
from workers.protocol.events import RETRYABLE, CallFailed, Failed, Failure, FailureCode, Finished, Started
from workers.protocol.heartbeat import WorkerAddress
from workers.protocol.pooled import FLOAT_BYTES, PoolRequest, PoolResult
from workers.protocol.requests import GenerateRequest

MAX_ATTEMPTS = 4
"""Maximum number of attempts at workers per call; if the last one fails, so does the call. docs/api.md says so."""
MAX_LOST = 2
"""Number of lost workers after which their call fails: the call itself may be what kills workers."""
UNPAID = frozenset({FailureCode.DRAINING, FailureCode.OUT_OF_MEMORY})
"""Failures whose retry is not charged to the retry budget: a worker that drains or has no memory refuses each call
once and at once, so a retry makes no trouble worse."""
REFUSALS = frozenset(
    {
        FailureCode.INVALID_REQUEST,
        FailureCode.CONTEXT_OVERFLOW,
        FailureCode.UNSUPPORTED,
        FailureCode.UNAUTHORIZED,
        FailureCode.BUSY,
        FailureCode.DRAINING,
        FailureCode.OUT_OF_MEMORY,
        FailureCode.UNAVAILABLE,
    }
)
"""Failures by which a worker refuses a call before it computes anything. Nobody is charged for such an attempt."""
UNSUITED = frozenset({FailureCode.CONTEXT_OVERFLOW, FailureCode.UNSUPPORTED})
"""Failures by which one model refuses a request that another model may still accept."""
PLACED_AT_ONCE = 8
"""Maximum number of a team's calls that are being placed at the same time; further calls of the team wait. A call is
placed once it has a slot or is queued.

Placing a call takes half a millisecond of the event loop, in several steps. If hundreds of one team's calls were placed
at once, each step of another team's call would wait for a step of every one of them. Eight at once are as fast as any
number, if a round trip to Redis takes 1 ms."""

BegunT = TypeVar("BegunT", Answer, PoolResult)


class Dispatcher:
    """Finds workers for calls, sends the calls there and retries. A gateway process has one dispatcher."""

    def __init__(
        self,
        fleet: FleetView,
        admission: Admission,
        upstream: Upstream,
        metrics: Metrics,
        limits: Limits,
        adapters: CallAdapters,
    ) -> None:
        self._upstream = upstream
        self._metrics = metrics
        self._limits = limits
        self._budget = RetryBudget(limits.retry_share)
        self.workers = SuitableWorkers(fleet, upstream, metrics)
        self._slots = SlotSearch(fleet, admission, self.workers, adapters)
        self._placing = TeamTurns.of_each(PLACED_AT_ONCE)

    def answer(
        self, call: Call, request: GenerateRequest, answer_log: AnswerLog, cutoff: Cutoff
    ) -> AbstractAsyncContextManager[Answer]:
        """Return a context manager that yields the answer once it has begun; leaving its block cancels the call.

        `cutoff`: the dispatcher interrupts it if the caller reads too slowly, and sets the answer's time limit on it.
        Raises PaddockError: no slot in time, refused by the worker, failed."""

        async def attempt(state: CallState, lease: SlotLease, held: AsyncExitStack) -> Answer:
            answer = await held.enter_async_context(self._start(state, lease, cutoff))
            held.callback(lambda: lease.give_back(_num_charged(state, lease, None, answer.num_unread)))
            await _wait_for_begin(answer, state)
            self._limit_answer(call, cutoff)
            return answer

        return self._dispatch(self._state(call, request, answer_log), attempt)

    async def pool(self, call: Call, request: PoolRequest, answer_log: AnswerLog, hold: HoldVectors) -> PoolResult:
        """Return the result of pooled work. Raises PaddockError, and what `hold` raises.

        `hold` counts the memory of the vectors as they come, and all of it before the work is sent to a worker whose
        vectors' width is known: what would be too much is refused before it is done."""

        async def attempt(state: CallState, lease: SlotLease, held: AsyncExitStack) -> PoolResult:
            width = self.workers.width(lease.at)
            try:
                hold(len(request.inputs) * width * FLOAT_BYTES, width)
            except PaddockError:
                lease.give_back(0.0)  # no work was done
                raise
            result = await self._upstream.pool(
                lease.at, state.call, request, state.attempt.context, lambda num_bytes: hold(num_bytes, width)
            )
            lease.give_back(float(sum(result.num_tokens)))
            return result

        async with self._dispatch(self._state(call, request, answer_log), attempt) as result:
            return result

    def _state(self, call: Call, request: GenerateRequest | PoolRequest, answer_log: AnswerLog) -> CallState:
        return CallState(call, answer_log, request, self._metrics, self._limits, self._budget)

    @asynccontextmanager
    async def _dispatch(
        self, state: CallState, attempt: Callable[[CallState, SlotLease, AsyncExitStack], Awaitable[BegunT]]
    ) -> AsyncIterator[BegunT]:
        """Call `attempt` on one worker after the other until one succeeds, and yield what that `attempt` returned."""
        turn = await self._placing.enter(state.call.principal.team)
        state.answer_log.queue_position.on_wait = turn.leave
        try:
            await self._slots.prepare(state)
            state.enter()
            try:
                while True:
                    async with AsyncExitStack() as held:
                        lease = await self._slots.wait_for_slot(state, held)
                        turn.leave()
                        try:
                            begun = await attempt(state, lease, held)
                        except CallFailed as failed:
                            failure = failed.failure
                            if failure.code in REFUSALS:
                                lease.give_back(0.0)  # does nothing if the answer's last event did so already
                        else:
                            state.begin_answer()
                            self.workers.note_begin(lease.at)
                            try:
                                yield begun
                            finally:
                                self._note_end(state, lease.at, begun)
                            return
                    self._recover(state, lease.at, failure)
            finally:
                self._leave(state)
        finally:
            turn.leave()

    def _start(self, state: CallState, lease: SlotLease, cutoff: Cutoff) -> AbstractAsyncContextManager[UpstreamAnswer]:
        """Return a context manager that runs the call. Its slot is freed when the answer ends, read or not."""
        return self._upstream.start(
            lease.at,
            state.call,
            self._with_own_slot(state.request, lease.at),
            on_end=lambda end: lease.give_back(_num_charged(state, lease, end)),
            on_overflow=cutoff.cut,
            context=state.attempt.context,
        )

    def _with_own_slot(self, request: GenerateRequest, at: WorkerAddress) -> GenerateRequest:
        """Return the request with the worker's own number of the asked slot; ANY if that slot is on another worker."""
        if request.slot == ANY:
            return request
        found = find_slot(request.slot, self.workers.reachable(at.model))
        return replace_struct(request, slot=found[1] if found is not None and found[0].worker == at.worker else ANY)

    def _limit_answer(self, call: Call, cutoff: Cutoff) -> None:
        """Set the time limit of an answer that has begun."""
        own_s = call.principal.bounds.answer_timeout_s
        limit_s = self._limits.answer_timeout_s if own_s is None else own_s
        if limit_s < math.inf:
            cutoff.limit(limit_s, f"the limit of {limit_s:g} s for one answer (answer_timeout_s)")

    def _note_end(self, state: CallState, at: WorkerAddress, begun: Answer | PoolResult) -> None:
        if isinstance(begun, PoolResult):
            state.end_attempt(None)
            self.workers.note_complete(at)
        else:
            state.end_attempt(begun.end, "cancelled")
            self.workers.note_end(at, begun.end)

    def _leave(self, state: CallState) -> None:
        """Record that the call is over, however it ended. A worker that used up the call's time counts as failing."""
        state.leave()
        self.workers.circuits.end_trials(state)
        if (at := state.used_up_at) is not None:
            self.workers.blame(at)

    def _recover(self, state: CallState, at: WorkerAddress, failure: Failure) -> None:
        """Prepare another attempt. Raises PaddockError if another worker would not help, or no attempt is left."""
        code = failure.code
        state.fail_attempt(at, failure)
        self.workers.note_failure(at, code)
        if code is FailureCode.CONTEXT_OVERFLOW and self._fits_elsewhere(state, failure):
            state.wait_anew()
            return
        if state.call.meant_for and code in UNSUITED:
            unsuited = fallback_unsuited(state.call.meant_for, state.call.model, failure.message)
            if len(state.answer_log.attempts) >= MAX_ATTEMPTS:
                raise state.first_error or unsuited
            self._slots.fall_back(state, Reason.UNSUITED, unsuited)
            return
        if code not in RETRYABLE or len(state.answer_log.attempts) >= MAX_ATTEMPTS or len(state.lost) >= MAX_LOST:
            raise error_for(failure)
        if code not in UNPAID and not state.take_retry():
            raise error_for(failure)
        state.rest(at, code)
        state.wait_anew()  # losing a worker is not the caller's fault

    def _fits_elsewhere(self, state: CallState, failure: Failure) -> bool:
        """Return whether another worker of the model has enough context for a prompt that was too long for one worker.

        A worker that found less memory at its start has a smaller context than others. If another one has enough, from
        now on the call avoids all workers whose context is too small."""
        if not failure.num_prompt_tokens or len(state.answer_log.attempts) >= MAX_ATTEMPTS:
            return False
        beats = self.workers.reachable(state.call.model)
        small = {beat.boot for beat in beats if beat.n_ctx <= failure.num_prompt_tokens}
        if all(beat.boot in small or beat.draining for beat in beats):
            return False
        state.avoid(small)
        return True


async def _wait_for_begin(answer: UpstreamAnswer, state: CallState) -> None:
    """Wait until the answer begins, with its first token. Raises CallFailed if the call fails before.

    If the caller asks for the prompt's progress, the answer begins earlier, with `Started`."""
    first = await answer.peek()
    if isinstance(first, Started):
        state.attempt.slot = first.slot
        state.attempt.num_prompt_computed = first.num_prompt_tokens - first.num_cached_tokens
        state.call.permit.check_prompt(first.num_prompt_tokens)
        if "progress" not in state.request.tell:
            first = await answer.peek(past=Started)
    if isinstance(first, Failed):
        await answer.take()  # so that nothing is left to cancel
        raise CallFailed(first.failure)


def _num_charged(
    state: CallState, lease: SlotLease, end: Finished | Failed | None, num_unread: int = 0
) -> float | None:
    """Return how many tokens the call's team is charged for; None: as many as were predicted. `end`: the call's last
    event; None: the call was left or cut off before it came. `num_unread`: tokens that came and that nobody has taken.

    A call that has not finished is charged for the tokens that came, but never for less than was predicted: the worker
    may have computed more than it has told, such as text that could become a stop string. Only a call that was refused
    before any came is charged for none."""
    if isinstance(end, Finished):
        usage = end.usage
        return usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens
    came = float(state.attempt.num_prompt_computed + state.answer_log.num_generated + num_unread)
    if isinstance(end, Failed) and end.failure.code in REFUSALS and not came:
        return 0.0
    return came if came > lease.predicted else None
