"""Hands an answer's events to a handler, within the turn of the event loop that received them where it need not wait.

A token then wakes no task: the relay's own turn writes its chunk, up to the server's buffer. As soon as a handler would
wait for its client, the answer's task takes over and the mailbox buffers what comes meanwhile. Both ways run the same
handler, one list of events after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any

from gateway.call import Answer, Pushed
from workers.protocol.events import CallEvent, Failed, Finished

Handler = Callable[[list[CallEvent]], Coroutine[Any, None, None] | None]
"""Handles events of one answer; its number is `Answer.choice`. Returns None if it is done with them, as it is for most
tokens; otherwise a coroutine that does the rest, for which the number may have changed."""


async def hand_on(answer: Answer, handle: Handler, on_end: Callable[[Finished | Failed, int], None]) -> None:
    """Hand all events of the answers to `handle`. Raises what `handle` and `on_end` raise.

    `on_end(end, choice)` is called with the last event of each answer, after `handle`."""
    hand = _Hand(handle)
    try:
        while not answer.ended:
            events = await answer.take(hand.push)
            if hand.stalled:
                await hand.finish()
            if events:
                rest = handle(events)
                if rest is not None:
                    await rest
                if answer.end is not None:
                    on_end(answer.end, answer.choice)
    finally:
        hand.drop()


class _Hand:
    """Runs the handler on events that are pushed, and keeps a run that stalled until the answer's task finishes it."""

    __slots__ = ("_error", "_handle", "_run", "stalled")

    def __init__(self, handle: Handler) -> None:
        self.stalled = False
        """Whether a run waits for something or has failed, so that `finish` must be called."""
        self._handle = handle
        self._run: _Suspended | None = None
        self._error: Exception | None = None
        """The error of a run that failed within a push."""

    def push(self, events: list[CallEvent]) -> Pushed:
        """Run the handler up to where it would wait. See `gateway.call.Push`."""
        try:
            run = self._handle(events)
            if run is None:
                return Pushed.WRITTEN
            awaited = run.send(None)
        except StopIteration:
            return Pushed.WRITTEN
        except Exception as error:  # noqa: BLE001 - `finish` raises it to the answer's own task
            self._error = error
        else:
            self._run = _Suspended(run, awaited)
        self.stalled = True
        return Pushed.STALLED

    async def finish(self) -> None:
        """Finish the run that stalled. Raises what the handler raises."""
        run, error = self._run, self._error
        self.stalled, self._run, self._error = False, None, None
        try:
            if error is not None:
                raise error
            if run is not None:
                await run
        finally:
            del run, error  # an error refers to this frame: together they would be a reference cycle

    def drop(self) -> None:
        """Give up a run that nobody will finish."""
        if self._run is not None:
            self._run.close()
        self._run = self._error = None


class _Suspended:
    """The rest of a coroutine whose first step was made outside any task."""

    __slots__ = ("_awaited", "_run")

    def __init__(self, run: Coroutine[Any, None, None], awaited: Any) -> None:
        """`awaited`: what the first step yielded."""
        self._run = run
        self._awaited = awaited

    def __await__(self) -> Generator[Any, None, None]:
        awaited = self._awaited
        try:
            while True:
                try:
                    yield awaited
                except GeneratorExit:
                    raise
                except BaseException as error:  # noqa: BLE001 - a cancellation, for one; the coroutine answers to it
                    awaited = self._run.throw(error)
                else:
                    awaited = self._run.send(None)
        except StopIteration:
            return
        finally:
            self._run.close()

    def close(self) -> None:
        self._run.close()
