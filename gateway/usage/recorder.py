"""Makes the usage record of each call that was placed for work, once, when its request ends."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from accounts.protocol.usage import UsageRecord, encode_record
from gateway.call import Call
from gateway.telemetry.answer_log import AnswerLog
from gateway.telemetry.request_log import Meter, RequestLog
from gateway.usage.journal import OwnJournal
from gateway.usage.recovery import Price
from gateway.usage.running_calls import RunningCall
from workers.protocol.events import NO_USAGE, Usage

LEFT = frozenset({"client_gone", "cancelled"})
"""Outcomes of calls that their callers left. What came of these counts, though nobody has read it."""


class MeteredCall:
    """The meter of one request (`gateway.telemetry.request_log.Meter`)."""

    __slots__ = ("_recorder", "_running", "note_written")

    def __init__(self, recorder: UsageRecorder, running: RunningCall) -> None:
        self._recorder = recorder
        self._running = running
        self.note_written: Callable[[int], None] = running.set_completion

    def note_begun(self, prompts: Usage, answer: AnswerLog) -> None:
        self._running.set_prompt(prompts.prompt_tokens, prompts.cached_tokens, prompts.media_tokens)
        if (attempt := answer.last_attempt) is not None:
            submitted_at = time.time() - (time.monotonic() - attempt.submitted_at)
            self._running.set_submitted(round(answer.queue_s * 1000), round(submitted_at * 1000))

    def finish(self, request_log: RequestLog) -> None:
        self._recorder.finish(request_log, self._running)


class UsageRecorder:
    """Records the usage of all calls of this gateway process."""

    def __init__(self, journal: OwnJournal, price: Price) -> None:
        self._journal = journal
        self._price = price

    def begin(self, call: Call, request_log: RequestLog) -> Meter:
        """Return the meter of a call that begins. It has a place in the table of running calls until its end."""
        principal = call.principal
        about = UsageRecord(
            number=0,
            request_id=call.request_id,
            started_at=_unix(call.received_at),
            ended_at=0.0,
            route=request_log.path,
            outcome="",
            organisation=principal.organisation,
            team=principal.team,
            key=principal.key_id,
            user=principal.user,
            end_user=request_log.end_user,
            alias=call.alias,
            model=call.model,
            adapter=request_log.adapter,
            trace_id=request_log.trace.trace_id,
        )
        return MeteredCall(self, self._journal.calls.open(encode_record(about)))

    def finish(self, request_log: RequestLog, running: RunningCall) -> None:
        """Record a call that has ended, unless it was never placed for work."""
        if any(answer.attempts or answer.queue_position.filed for answer in request_log.answers):
            record = self._record(request_log)
            cost_nano = self._price(record)
            if cost_nano:
                record = msgspec.structs.replace(record, cost_nano=cost_nano)
            self._journal.add(encode_record(record), running.serial)
        running.close()  # last: until then a successor finds the call

    def _record(self, request_log: RequestLog) -> UsageRecord:
        usage = request_log.usage or NO_USAGE
        is_refused = request_log.status >= 400 and request_log.outcome not in LEFT
        return UsageRecord(
            number=self._journal.last + 1,
            request_id=request_log.request_id,
            started_at=_unix(request_log.received_at),
            ended_at=time.time(),
            route=request_log.route or request_log.path,
            outcome=request_log.outcome,
            status=request_log.status,
            organisation=request_log.organisation,
            team=request_log.team,
            key=request_log.key_id,
            user=request_log.user,
            end_user=request_log.end_user,
            alias=request_log.alias,
            model=request_log.model,
            adapter=request_log.adapter,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            # An error came in place of the answer, whose tokens nobody got.
            completion_tokens=0 if is_refused else usage.completion_tokens,
            media_tokens=usage.media_tokens,
            queue_ms=round(request_log.answer.queue_s * 1000),
            compute_ms=round(request_log.compute_s * 1000),
            trace_id=request_log.trace.trace_id,
        )


def _unix(monotonic: float) -> float:
    """Return the unix time of a time.monotonic()."""
    return time.time() - time.monotonic() + monotonic
