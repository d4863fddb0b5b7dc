"""Runs the engine's thread, which owns a llama.cpp context. Other threads post functions for it to call."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from workers.engine.request import Intake, IntegrityError
from workers.engine.watchdog import Watchdog

log = logging.getLogger("paddock.engine")

CHECK_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Work:
    """The functions that the engine's thread calls. Other threads may call them only when that thread has ended."""

    step: Callable[[], bool]
    """Computes one step; returns whether the next step should follow at once."""
    rest: Callable[[], None]
    """Called before the thread goes to sleep, for work that can wait."""
    end_all: Callable[[], None]
    """Ends every unfinished call, and frees the slots, cells and adapters that the calls hold."""
    check: Callable[[], None]
    """Checks the engine's records. Raises IntegrityError."""


class EngineThread:
    """Calls the functions of `work` on one thread until stopped. The thread sleeps while there is nothing to do."""

    def __init__(
        self, work: Work, intake: Intake, watchdog: Watchdog, on_crash: Callable[[BaseException], None] | None
    ) -> None:
        """`on_crash` is called on the engine's thread, with the error that ended its loop."""
        self.crashed: BaseException | None = None
        """The error that ended the loop; None: the loop runs, or was stopped."""
        self._work = work
        self._intake = intake
        self._watchdog = watchdog
        self._on_crash = on_crash
        self._mail: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self.has_ended = False
        """Whether the loop has ended, so that nothing calls what is posted from now on."""
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    # Any thread may call these.

    def start(self) -> None:
        self._thread.start()

    def post(self, act: Callable[[], None]) -> None:
        """Queue `act` to be called on the engine's thread between two steps. `act` must be quick and must not raise."""
        self._mail.append(act)
        self._wake.set()

    def wake(self) -> None:
        """Have the engine's thread look again whether there is something to do."""
        self.post(_do_nothing)

    def stop(self) -> None:
        """End the engine's loop after the step that is running, and wait until its thread has ended."""
        self._intake.drain()
        self.post(self._halt)
        if self._thread.is_alive():
            self._thread.join()
        else:
            self._end_all()

    def check(self) -> None:
        """Have the engine's records checked after the step that is running. Raises IntegrityError."""
        if not self._thread.is_alive():
            self._work.check()
            return
        result: Future[None] = Future()
        self.post(lambda: _answer(result, self._work.check))
        result.result(timeout=CHECK_TIMEOUT_S)

    # The thread calls these.

    @property
    def is_wanted(self) -> bool:
        """Return whether something was posted, or the loop must end."""
        return bool(self._mail) or self._stopping

    def _main(self) -> None:
        try:
            while not self._stopping:
                if not self._step():
                    self._rest()
        except BaseException as error:
            # The loop's edge: the process must learn that its engine is dead.
            # If memory runs out in a step, no call can be blamed, and the state of llama.cpp is unknown: a new process
            # takes the place of this one.
            cause = "ran out of memory and ends" if isinstance(error, MemoryError) else "died"
            log.exception("the engine's loop %s while running %s", cause, self._watchdog.black_box.text())
            self.crashed = error
            self._intake.crash(error)
        try:
            self._end_all()
        finally:
            self._watchdog.step_ended()
            if self.crashed is not None and self._on_crash is not None:
                self._on_crash(self.crashed)

    def _step(self) -> bool:
        self._watchdog.step_began()
        self._take_mail()
        more = self._work.step()
        self._watchdog.step_ended()
        return more

    def _rest(self) -> None:
        try:
            self._work.rest()
        except MemoryError:
            # Nothing runs, and prefixes that were to be saved can be computed again: no reason to end the process.
            log.warning("out of memory: not all that may be wanted again is saved")
        while not self.is_wanted:
            self._wake.wait()
            self._wake.clear()

    def _take_mail(self) -> None:
        """Call the posted functions. Functions that these post in turn wait until after the next step."""
        for _ in range(len(self._mail)):
            self._mail.popleft()()

    def _halt(self) -> None:
        self._stopping = True

    def _end_all(self) -> None:
        self._intake.end()
        while self._mail:
            self._take_mail()
        self._work.end_all()
        self.has_ended = True


def _do_nothing() -> None:
    """Do nothing: the engine's thread wakes up for it, and looks again."""


def _answer(result: Future[None], act: Callable[[], None]) -> None:
    try:
        act()
    except IntegrityError as error:
        result.set_exception(error)
    else:
        result.set_result(None)
