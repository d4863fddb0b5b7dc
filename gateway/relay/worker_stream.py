"""Keeps the event stream of one worker process open while the process lives. All calls on that worker share it."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections import deque
from collections.abc import Callable
from time import monotonic, thread_time
from urllib.parse import urlencode

from gateway.relay.event_source import EventStreamRefused, check_step, read_events
from gateway.relay.mailbox import Mailbox
from gateway.relay.worker_client import CONNECT_TIMEOUT_S, Credentials
from workers.protocol.control import CHALLENGE_HEADER, PROOF_HEADER
from workers.protocol.events import CallEvent, Failed, Failure, FailureCode, decode_alive, decode_step
from workers.protocol.framing import (
    ALIVE_EVENT,
    EVENTS_PATH,
    KEEP_ALIVE_INTERVAL_S,
    Frame,
    FrameReader,
    parse_event_id,
)

log = logging.getLogger(__name__)

SILENCE_S = 1.25 * KEEP_ALIVE_INTERVAL_S
"""A connection is ended after one to two times this many silent seconds: workers write every KEEP_ALIVE_INTERVAL_S."""
REFUSED_FOR_S = 0.2
"""Seconds of refused connections after which a process counts as lost: a refusal shows that the network works."""
AWAY_FOR_S = 5.0
"""Seconds of failures (not refusals) until a process counts as lost. Workers keep an absent gateway's calls as long."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5
TURN_S = 0.001
"""Seconds per turn of the event loop for the steps of all workers together. Steps that are left wait for the next turn,
so that requests, pings and probes need not wait for them. Nor are readers kept from their mailboxes after a stall."""
EVENTS_BETWEEN_LOOKS = 16
"""Number of events after which a turn looks at the clock. Each event may write a chunk to a client."""
MAX_OWED_S = 0.005
"""A stream owes the others the CPU seconds that it takes, and each second of waiting pays one. If it owes more than
this, it rests until all is paid: one stream uses half a CPU at most, in many short reads as in one long."""
MAX_BACKLOG_FRAMES, MAX_BACKLOG_BYTES = 1 << 16, 64 << 20
"""Maximum frames and bytes of a worker's backlog, output of some minutes. With more, the worker counts as lost."""


class TooManySteps(ValueError):
    """The worker sends steps faster than this gateway reads them."""


UNREADABLE = (ValueError, RecursionError)
"""Errors raised for a stream that is not a proper event stream. ValueError: a frame without end, too many frames, too
many values in a frame, invalid text or JSON, or an unknown event. RecursionError: values nested too deep."""


class DispatchTurns:
    """Shares the time for handing on the workers' steps among their streams: TURN_S per turn of the event loop."""

    def __init__(self) -> None:
        self._waiting: deque[WorkerStream] = deque()
        self._used_s = 0.0
        """Seconds used up since the last turn; 0: nothing is scheduled, and nothing was used."""
        self._is_scheduled = False

    def ask(self, stream: WorkerStream) -> None:
        """Have the stream dispatch its backlog: at once if this turn has time left, otherwise in later turns."""
        if stream.waits:
            return
        if self._waiting or self._used_s >= TURN_S:
            self._add(stream)
        else:
            self._run(stream)
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _add(self, stream: WorkerStream) -> None:
        stream.waits = True
        self._waiting.append(stream)

    def _run(self, stream: WorkerStream) -> None:
        begun = monotonic()
        if stream.dispatch(begun + TURN_S - self._used_s):
            self._add(stream)
        self._used_s += monotonic() - begun

    def _turn(self) -> None:
        self._used_s = 0.0
        while self._waiting and self._used_s < TURN_S:
            stream = self._waiting.popleft()
            stream.waits = False
            self._run(stream)
        self._is_scheduled = bool(self._waiting)
        if self._is_scheduled:
            asyncio.get_running_loop().call_soon(self._turn)
        else:
            self._used_s = 0.0


class WorkerStream:
    """Reads the events of one worker process's steps, and puts each into the mailbox of its call.

    Reconnects with `Last-Event-ID`, so a short network failure loses nothing. When the process is gone, every call on
    it gets a `Failed` (worker_lost). The stream never waits for the readers of mailboxes."""

    def __init__(
        self,
        gateway_id: str,
        credentials: Credentials,
        cancel: Callable[[list[int]], None],
        lost: set[str],
        turns: DispatchTurns,
    ) -> None:
        """`cancel` is called with the calls to cancel on the worker; with an empty list, to retry cancellations that
        failed before. `lost`: boot ids of processes that are gone. A gateway's streams share `lost` and `turns`."""
        self.at = at = credentials.at
        self.connected = asyncio.Event()
        """Set while the stream is open; calls are submitted only then."""
        self._heard_at = -math.inf
        """time.monotonic() when the worker last sent anything."""
        self._lost = lost
        self._url = f"{at.url}{EVENTS_PATH}?{urlencode({'gateway': gateway_id})}"
        self._headers = {"Accept": "text/event-stream", **credentials.headers}
        self._credentials = credentials
        self._cancel = cancel
        self._turns = turns
        self.waits = False
        """Whether the stream waits for a turn to dispatch its backlog."""
        self._reader = FrameReader()
        self._backlog: deque[Frame] = deque()
        """Frames with events that are not in their mailboxes yet."""
        self._events: list[CallEvent] | None = None
        """Events of the backlog's first frame, without those of calls that are not here; None: it is not decoded yet.
        Those before `_next` are in their mailboxes, or being put there."""
        self._next = 0
        self._event_bytes = 0
        self._is_new = False
        """Whether nothing has come over the present connection yet."""
        self._broken: Exception | None = None
        """The error for which the connection will be given up at the next data; None: no error."""
        self._backlog_bytes = 0
        """Bytes of data of the frames in `_backlog`."""
        self._lost_why = ""
        """Why the worker counts as lost, while its calls are not ended yet; otherwise empty."""
        self._owed_s = 0.0
        """CPU seconds owed to the others at `_owed_at`."""
        self._owed_at = monotonic()
        self._mailboxes: dict[int, Mailbox] = {}
        self._newest_call = 0
        self._newest_at_lists: deque[int] = deque()
        """For each list of living calls in the backlog: the newest call when it came. No list names later ones."""
        self._last_id = ""
        self._departed = False
        self._attempts = 0
        """Number of connections that failed or broke off since one was last opened."""
        self._troubled_at = 0.0
        self._changed = asyncio.Event()

    def attach(self, call: int, mailbox: Mailbox) -> None:
        """Have the call's events put into its mailbox. The numbers of calls only grow."""
        self._mailboxes[call] = mailbox
        self._newest_call = call

    def detach(self, call: int) -> None:
        self._mailboxes.pop(call, None)

    @property
    def lost(self) -> bool:
        """Whether the process counts as gone; calls to it fail at once until its stream is open again."""
        return self.at.boot in self._lost

    @property
    def is_heard(self) -> bool:
        """Whether the stream is open and the worker has sent something within SILENCE_S, as a living one does."""
        return self.connected.is_set() and monotonic() - self._heard_at < SILENCE_S

    def note_departure(self) -> None:
        """Remember that the worker has left the fleet. Its calls end once its stream fails, or now if it is down."""
        self._departed = True
        if not self.connected.is_set():
            self.lose("is gone from the fleet")

    def note_return(self) -> None:
        """Remember that the fleet lists the worker again."""
        self._departed = False

    def lose(self, why: str) -> None:
        """Count the worker process as lost, and end all its calls with an error that says `why`. Calls that end in the
        backlog are left to end there: a worker that stops says its last words just before it is gone."""
        self._lost.add(self.at.boot)
        self._changed.set()
        self._lost_why = why
        if not self._backlog:
            self._end_calls()

    def _end_calls(self) -> None:
        why, self._lost_why = self._lost_why, ""
        if self._mailboxes:
            log.warning("worker lost", extra={"fields": {"worker": self.at.worker, "boot": self.at.boot, "why": why}})
        calls = list(self._mailboxes)
        # If the worker is alive after all, it must stop computing these calls.
        self._cancel(calls)
        for call in calls:
            message = f"The worker {self.at.worker} {why}. Send the request again."
            self._fail(call, Failure(FailureCode.WORKER_LOST, message))

    async def wait_open(self, timeout_s: float) -> bool:
        """Wait until the stream is open or the worker counts as lost. Return whether the stream is open."""
        if self.connected.is_set():
            return True
        try:
            async with asyncio.timeout(timeout_s):
                while not self.connected.is_set() and not self.lost:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return self.connected.is_set()

    async def run(self) -> None:
        """Keep the stream open until cancelled, or until the process is lost and its record has left the fleet."""
        pause_s = FIRST_PAUSE_S
        while not (self.lost and self._departed):
            try:
                await self._read_connection()
            except ConnectionRefusedError:
                self._note_trouble("cannot be reached", REFUSED_FOR_S)
            except EventStreamRefused as error:
                log.error("event stream refused", extra={"fields": {"worker": self.at.worker, "why": str(error)}})
                self.lose(f"refused its event stream ({error})")
            except (OSError, TimeoutError) as error:
                self._note_trouble(f"broke off its event stream ({error or type(error).__name__})")
            except UNREADABLE as error:
                if error is not self._broken:  # which ended the calls already
                    self._lose_unreadable()
            finally:
                self.connected.clear()
            pause_s = FIRST_PAUSE_S if self._attempts == 1 else min(pause_s * 2, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    def _lose_unreadable(self) -> None:
        """Log why the worker's events can't be read (the current exception), and end all its calls."""
        log.exception("worker speaks another protocol", extra={"fields": {"worker": self.at.worker}})
        self.lose("sent events that this gateway cannot read")

    def _note_trouble(self, why: str, patience_s: float = AWAY_FOR_S) -> None:
        """Count a failed connection. After `patience_s` of failures, or if the fleet lost the worker, end its calls."""
        now = monotonic()
        self._attempts += 1
        if self._attempts == 1:
            self._troubled_at = now
        if self._departed or now - self._troubled_at >= patience_s:
            self.lose(why)

    async def _read_connection(self) -> None:
        """Open one connection and read it until it ends. Never returns, since every end raises an exception."""
        while self._backlog:  # noqa: ASYNC110 - `DispatchTurns` empties it, a part per turn
            await asyncio.sleep(0)
        self._broken = None
        resume = {"Last-Event-ID": self._last_id} if self._last_id else {}
        challenge = secrets.token_hex(16)
        self._reader = FrameReader()
        await read_events(
            self._url,
            self._headers | resume | {CHALLENGE_HEADER: challenge},
            # Asked for before any call is sent: by now another server can have the worker's address.
            expected=(PROOF_HEADER, self._credentials.proof(challenge)),
            on_open=self._on_open,
            on_data=self._on_data,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            silence_s=SILENCE_S,
        )

    def _on_open(self) -> None:
        self._lost.discard(self.at.boot)
        self._is_new = True
        self._attempts = 0
        self.connected.set()
        self._changed.set()
        self._cancel([])

    def _on_data(self, data: bytes) -> float:
        """Handle received data. Return the seconds to stop reading: the CPU seconds owed if over MAX_OWED_S, else 0."""
        if self._broken is not None:
            raise self._broken
        self._heard_at = monotonic()
        begun = thread_time()
        frames = self._reader.feed(data)
        self._owe(thread_time() - begun)
        if frames and self._is_new:
            self._is_new = False
            if frames[0].event == ALIVE_EVENT:
                # Read later, it would not list calls that were submitted meanwhile.
                self._set_resume_point(frames[0])
                check_step(frames[0].data, len(self._mailboxes))
                alive = set(decode_alive(frames.pop(0).data))
                self._fail_missing(alive, self._newest_call, FailureCode.WORKER_LOST)
        self._newest_at_lists += [self._newest_call for frame in frames if frame.event == ALIVE_EVENT]
        self._backlog.extend(frames)
        self._backlog_bytes += sum([len(frame.data) for frame in frames])
        if len(self._backlog) > MAX_BACKLOG_FRAMES or self._backlog_bytes > MAX_BACKLOG_BYTES:
            self._drop_backlog()
            raise TooManySteps("its steps come faster than they are read")
        self._turns.ask(self)
        if self._broken is not None:
            raise self._broken
        return self._owed_s if self._owed_s > MAX_OWED_S else 0.0

    def _owe(self, took_s: float) -> None:
        """Count CPU seconds that were just taken, after what was paid before them."""
        now = monotonic()
        paid_s = max(0.0, now - self._owed_at - took_s)
        self._owed_s = max(0.0, self._owed_s - paid_s) + took_s
        self._owed_at = now

    def dispatch(self, until: float) -> bool:
        """Put events of the backlog into their mailboxes until time.monotonic() is `until`, a few at least. Return
        whether any are left.

        Raises nothing, since a turn is for all workers' streams: whatever goes wrong ends this worker's calls, and its
        connection at the next data."""
        begun = thread_time()
        try:
            while self._backlog:
                if self._events is None:
                    self._events, self._event_bytes = self._open_frame(self._backlog[0])
                    self._next = 0
                self._put_some(self._events)
                if self._next >= len(self._events):
                    self._close_frame()
                if monotonic() >= until:
                    break
            if self._lost_why and not self._backlog:
                self._end_calls()
        except Exception as error:  # noqa: BLE001 - see above
            self._give_up_backlog(error)
        self._owe(thread_time() - begun)
        return bool(self._backlog)

    def _give_up_backlog(self, error: Exception) -> None:
        self._broken = error
        if self._backlog:
            self._set_resume_point(self._backlog[0])  # otherwise each new connection would bring the frame again
        self._drop_backlog()
        try:
            self._lose_unreadable()
        except Exception:
            log.exception("calls of a lost worker could not be ended", extra={"fields": {"worker": self.at.worker}})

    def _open_frame(self, frame: Frame) -> tuple[list[CallEvent], int]:
        """Return a frame's events for calls of this gateway, and the average bytes of an event. A list of living calls
        is dealt with at once."""
        mailboxes = self._mailboxes
        check_step(frame.data, len(mailboxes))
        if frame.event == ALIVE_EVENT:  # in the middle of a stream: this gateway fell behind, which no worker can help
            self._fail_missing(set(decode_alive(frame.data)), self._newest_at_lists.popleft(), FailureCode.OVERRUN)
        events = [] if frame.event else decode_step(frame.data)
        known: list[CallEvent] = [event for event in events if event.call in mailboxes]
        return known, len(frame.data) // max(1, len(events))

    def _put_some(self, events: list[CallEvent]) -> None:
        """Put the next events into their mailboxes, together those of a call that follow each other."""
        first, self._next = self._next, self._next + EVENTS_BETWEEN_LOOKS
        call, together = -1, list[CallEvent]()
        for event in events[first : self._next]:
            if event.call == call:
                together.append(event)
                continue
            self._put(call, together)
            call, together = event.call, [event]
        self._put(call, together)

    def _put(self, call: int, events: list[CallEvent]) -> None:
        mailbox = self._mailboxes.get(call)
        if mailbox is not None:
            mailbox.put_all(events, self._event_bytes * len(events))

    def _close_frame(self) -> None:
        frame = self._backlog.popleft()
        self._backlog_bytes -= len(frame.data)
        self._events = None
        self._set_resume_point(frame)

    def _drop_backlog(self) -> None:
        self._backlog.clear()
        self._newest_at_lists.clear()
        self._backlog_bytes = 0
        self._events = None

    def _set_resume_point(self, frame: Frame) -> None:
        """Make the next connection resume after this frame."""
        parsed = parse_event_id(frame.id)
        if parsed is not None and parsed[0] == self.at.boot:
            self._last_id = frame.id

    def _fail_missing(self, alive: set[int], newest: int, code: FailureCode) -> None:
        """Fail the calls of which the worker has dropped events, as failures of type `code`. `alive`: the other calls,
        as listed by an event `ALIVE_EVENT`; `newest`: the newest call when that came."""
        why = "while the connection was down" if code is FailureCode.WORKER_LOST else "that were read too late"
        message = f"The worker {self.at.worker} dropped events of the call {why}. Send the request again."
        missing = [call for call in self._mailboxes if call <= newest and call not in alive]
        for call in missing:
            self._fail(call, Failure(code, message))
        # Missing calls can be on the worker (submitted while it made the list), and unknown calls hold slots there.
        strangers = missing + [call for call in alive if call not in self._mailboxes]
        if strangers:
            self._cancel(strangers)

    def _fail(self, call: int, failure: Failure) -> None:
        self._mailboxes.pop(call).put(Failed(call, failure))
