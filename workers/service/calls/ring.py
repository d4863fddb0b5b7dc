"""The ring of one gateway: the encoded frames that its connection has not taken yet, or took in the last minute.

Most steps are one frame, which all calls of the gateway share. A call whose events are long (probabilities of many
tokens) has frames of its own, with a bound of their own: otherwise the long events of one call would push the short
events of all others out of the ring, and those calls would be lost if the gateway is a second late.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

EVENT_BYTES = 256
"""Average bytes of an event on the wire above which a call's events of a step are long. Most have less than 100."""


@dataclass(slots=True, eq=False)
class StoredFrame:
    """One frame. It keeps its place without its data if that had to be let go."""

    step: int
    data: bytes
    """The encoded frame; empty: it was let go."""
    call: int = 0
    """Number of the call whose long events the frame holds; 0: it is shared."""
    team: str = ""
    """Team of that call."""


@dataclass(slots=True, eq=False)
class Ring:
    """Frames in the order of their steps, within two bounds: one for shared frames, one for those of single calls."""

    floor: int
    """Newest step whose frame was dropped; before the first drop, the step when the ring was made."""
    max_frames: int
    """Maximum number of shared frames, and of calls in `lost`. Twice as many frames may be without data."""
    max_bytes: int
    """Maximum bytes of shared frames."""
    max_long_bytes: int
    """Maximum bytes of the frames of single calls, all together. Of those that were taken, a quarter of it is kept."""
    frames: deque[StoredFrame] = field(default_factory=deque)
    num_shared: int = 0
    num_bytes: int = 0
    """Bytes of the shared frames."""
    num_long_bytes: int = 0
    num_let_go: int = 0
    """Number of the frames that were let go and still keep their place."""
    lost: dict[int, int] = field(default_factory=dict)
    """Call -> step of its newest frame that was let go. Whoever reads on from before that step misses events of it.
    That frame keeps its place, so that the entry goes when the frame is dropped."""
    _long: deque[StoredFrame] = field(default_factory=deque)
    """The frames of single calls that still have their data, in order."""

    @property
    def newest(self) -> int:
        """Return the step of the newest frame, or `floor` if there is none."""
        return self.frames[-1].step if self.frames else self.floor

    @property
    def is_overfull(self) -> bool:
        """Return whether shared frames, or the calls that lost some, are over their bound."""
        return max(self.num_shared, len(self.lost)) > self.max_frames or self.num_bytes > self.max_bytes

    @property
    def is_heavy(self) -> bool:
        """Return whether frames of single calls have more bytes than are kept once they are taken."""
        return self.num_long_bytes > self.max_long_bytes // 4

    def add(self, frame: StoredFrame) -> None:
        self.frames.append(frame)
        if frame.call:
            self._long.append(frame)
            self.num_long_bytes += len(frame.data)
        else:
            self.num_shared += 1
            self.num_bytes += len(frame.data)

    def drop(self) -> None:
        """Drop the oldest frame."""
        frame = self.frames.popleft()
        self.floor = frame.step
        if not frame.call:
            self.num_shared -= 1
            self.num_bytes -= len(frame.data)
        elif frame.data:
            self.num_long_bytes -= len(self._long.popleft().data)
        else:
            self.num_let_go -= 1
            if self.lost.get(frame.call) == frame.step:
                del self.lost[frame.call]

    def thin(self, position: int) -> list[int]:
        """Bring the frames of single calls within their bound. Return the numbers of the calls that lose events by it.

        `position`: the step up to which the gateway's connection has taken all frames. Of taken frames the oldest go
        first: they are missed only if the connection breaks. Then the team whose frames take most loses its call whose
        frames take most."""
        given_up: list[int] = []
        while self.is_heavy:
            if self._long[0].step <= position:
                self._let_go(self._long.popleft())
                continue
            if self.num_long_bytes <= self.max_long_bytes:
                break
            call = self._heaviest()
            given_up.append(call)
            for frame in self._long:
                if frame.call == call:
                    self._let_go(frame)
            self._long = deque(frame for frame in self._long if frame.data)
        if self.num_let_go > 2 * self.max_frames:
            # Done once per `max_frames` frames that are let go, since `lost` has no more calls than that.
            self.frames = deque(frame for frame in self.frames if not self._is_needless(frame))
            self.num_let_go = len(self.lost)
        return given_up

    def missed_after(self, position: int) -> list[int]:
        """Return the calls that have a gap for who reads on after the step `position`."""
        return [call for call, step in self.lost.items() if step > position]

    def check(self) -> None:
        """Raise AssertionError if the frames and what is counted of them disagree."""
        steps = [frame.step for frame in self.frames]
        if steps != sorted(set(steps)) or (steps and steps[0] <= self.floor):
            raise AssertionError(f"ring out of order: {steps[:3]} ... over floor {self.floor}")
        shared = [len(frame.data) for frame in self.frames if not frame.call]
        if (self.num_shared, self.num_bytes) != (len(shared), sum(shared)):
            raise AssertionError(f"ring counts {self.num_bytes} bytes in {self.num_shared} shared frames wrongly")
        long = [frame for frame in self.frames if frame.call and frame.data]
        if long != list(self._long) or self.num_long_bytes != sum(len(frame.data) for frame in long):
            raise AssertionError(f"ring counts {self.num_long_bytes} bytes of single calls wrongly")
        let_go = [frame for frame in self.frames if frame.call and not frame.data]
        if self.num_let_go != len(let_go) or self.lost != {frame.call: frame.step for frame in let_go}:
            raise AssertionError(f"ring counts {self.num_let_go} frames of {len(self.lost)} calls let go wrongly")

    def _is_needless(self, frame: StoredFrame) -> bool:
        """Return whether the frame was let go, and a later one of the same call was as well."""
        return bool(frame.call) and not frame.data and self.lost[frame.call] != frame.step

    def _let_go(self, frame: StoredFrame) -> None:
        self.num_long_bytes -= len(frame.data)
        frame.data = b""
        self.num_let_go += 1
        self.lost[frame.call] = max(frame.step, self.lost.get(frame.call, 0))

    def _heaviest(self) -> int:
        teams, calls = Counter[str](), Counter[tuple[str, int]]()
        for frame in self._long:
            teams[frame.team] += len(frame.data)
            calls[frame.team, frame.call] += len(frame.data)
        [(heaviest, _)] = teams.most_common(1)
        return max((size, call) for (team, call), size in calls.items() if team == heaviest)[1]
