"""Keeps the weights of sleeping models in main memory, by one process for each of them.

Such memory belongs to whoever needs it: it counts as free for the planner, and its processes end before anything is
loaded into it, the one first whose model has slept longest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from workers.process import parent_death
from workers.process.helper_process import NotStarted, launched

MODULE = "workers.supervisor.loading.keeper"


@dataclass(slots=True)
class Keeper:
    """The process that holds the files of one model."""

    model: str
    process: subprocess.Popen[bytes]
    size: int
    """Bytes of the files."""
    is_shared: bool
    """Whether a worker of the model uses the same pages, in place of memory of its own."""
    locked_bytes: int | None = None
    """Bytes of them that the system does not count as available any more; None: they are being read."""

    def told(self) -> int | None:
        """Return what it has told: the bytes that it has locked; None: nothing yet."""
        line = None if self.process.stdout is None else self.process.stdout.read()
        return int(line) if line is not None and line.strip().isdigit() else None

    def close(self) -> None:
        """Close the pipes to the process, which has ended."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Keepers:
    """The keepers of one machine, those of the models that have slept longest first."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say` writes a line for operators."""
        self._say = say
        self._held: dict[str, Keeper] = {}
        self._ending: list[Keeper] = []

    @property
    def models(self) -> tuple[str, ...]:
        """The models that sleep; first the one that has slept longest."""
        return tuple(self._held)

    @property
    def is_ending(self) -> bool:
        """Whether a keeper was ended whose memory is not free yet."""
        return bool(self._ending)

    @property
    def is_reading(self) -> bool:
        """Whether a keeper has not told yet what it has locked, so that its memory may count twice."""
        return any(keeper.locked_bytes is None for keeper in self._held.values())

    @property
    def locked_bytes(self) -> int:
        """Bytes that the system counts as taken, which are free for the planner."""
        return sum(keeper.locked_bytes or 0 for keeper in (*self._held.values(), *self._ending))

    def size_of(self, model: str) -> int:
        """Return the bytes that are kept of a model; 0: it does not sleep."""
        keeper = self._held.get(model)
        return 0 if keeper is None else keeper.size

    def taken_bytes(self, used: Collection[str] = ()) -> int:
        """Return the bytes that are not free until keepers end. `used`: models whose workers use their keepers' pages,
        so that these count for the workers."""
        held = (keeper.size for keeper in self._held.values() if not (keeper.is_shared and keeper.model in used))
        return sum(held) + sum(keeper.size for keeper in self._ending)

    def start(self, model: str, files: Sequence[Path], size: int, *, is_shared: bool) -> None:
        """Keep a model's files from now on. Nothing happens if no process can be started."""
        command = [sys.executable, "-m", MODULE, *map(str, files)]
        variables = {parent_death.VARIABLE: str(os.getpid())}
        try:
            process = launched(command, variables=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except (NotStarted, OSError) as error:
            self._say(f"paddock: the weights of {model} are not kept in memory: {error}")
            return
        if process.stdout is not None:
            os.set_blocking(process.stdout.fileno(), False)
        self._held[model] = Keeper(model, process, size, is_shared)

    def look(self) -> None:
        """Take in what the keepers have told, and which have ended."""
        for model, keeper in list(self._held.items()):
            if keeper.process.poll() is not None:
                self._say(f"paddock: the weights of {model} are kept in memory no more: their keeper has ended")
                del self._held[model]
                keeper.close()
            elif keeper.locked_bytes is None:
                keeper.locked_bytes = keeper.told()
        for keeper in [keeper for keeper in self._ending if keeper.process.poll() is not None]:
            self._ending.remove(keeper)
            keeper.close()

    def end(self, model: str, why: str) -> None:
        """Keep a model's weights no more, if they are kept. Its memory is free once `is_ending` is False."""
        keeper = self._held.pop(model, None)
        if keeper is not None:
            self._say(f"paddock: the weights of {model} are kept in memory no more: {why}")
            keeper.process.kill()
            self._ending.append(keeper)

    def end_first(self, why: str, but: str = "") -> bool:
        """End the keeper of the model that has slept longest; `but` last of all. Return whether there is one."""
        found = sorted(self._held, key=lambda model: model == but)[:1]
        for model in found:
            self.end(model, why)
        return bool(found)

    def close(self) -> None:
        """End all keepers, and wait until they are gone."""
        for model in self.models:
            self.end(model, "the supervisor ends")
        for keeper in self._ending:
            keeper.process.wait()
            keeper.close()
        self._ending.clear()
