"""Loads the Lua scripts, and sends one gateway process's calls of these scripts in order, in batches."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import length_hint
from pathlib import Path
from typing import Any, Protocol

import redis.asyncio
from redis.exceptions import MovedError, NoScriptError, RedisError

from gateway.errors import StoreUnavailable
from gateway.store.outage import NO_ANSWER, remedy_for, unavailable
from workers.protocol import keys
from workers.redis.cluster import ClusterClient, Command
from workers.redis.link import cluster_of, long_commands_of, short_commands_of
from workers.redis.long_commands import LongCommands
from workers.redis.short_commands import ShortCommands
from workers.redis.trouble import LateTimeout

FOLDER = Path(__file__).parent / "lua"

ONE_PER_MODEL = (keys.workers, keys.queue, keys.tickets, keys.calls, keys.ledger, keys.passed, keys.swept)
"""Functions that return the names of keys that exist once per model. In scripts, `<function>_key` holds the name."""

MANY_PER_MODEL = (keys.worker, keys.worker_leases)
"""Functions that return the names of keys that exist per worker. Scripts call `<function>_key(id)`."""


@dataclass(frozen=True, slots=True)
class Script:
    """A script of `lua/`, with the code for key names in front. Its SHA-1 identifies it for EVALSHA."""

    name: str
    source: str
    sha: str


def key_names() -> str:
    """Return Lua code that builds every key name from the prefix in KEYS[1], so that names are declared only in
    `keys`."""
    prefix = keys.model_prefix("")
    lines = [f'local {name.__name__}_key = KEYS[1] .. "{name("").removeprefix(prefix)}"' for name in ONE_PER_MODEL]
    for by_id in MANY_PER_MODEL:
        before = by_id("", "").removeprefix(prefix)
        lines.append(f'local function {by_id.__name__}_key(id) return KEYS[1] .. "{before}" .. id end')
    lines.append(f'local function grants_channel(id) return "{keys.grants_channel("")}" .. id end')
    return "\n".join(lines) + "\n"


def load_script(name: str, *parts: str, at_once: bool = False) -> Script:
    """Return the script `lua/<name>.lua`, preceded by the key names, `lua/shared.lua` and the files in `parts`.

    Each part is the body of a function with the part's name. Redis runs a script's text from its beginning every time,
    and making all functions would take more of its time than what most calls do: a script makes those of a part by
    calling it, where it needs them. `at_once`: before all that comes `lua/<name>_at_once.lua`, which does what most
    calls need and returns, or changes nothing; `ledger` (shared.lua) has what it has read."""
    bodies = [f"local function {part}()\n{_source(part)}\nend\n" for part in parts]
    usual = [_source(f"{name}_at_once")] if at_once else []
    head = [key_names(), "local ledger = {}\n", *usual, _source("shared"), *bodies]
    return _made(name, "\n".join([*head, f"local function run()\n{_source(name)}\nend\n", _RUN]))


_RUN = """local done, answer = pcall(run)
if done then return answer end
ledger_save() -- what the script had written before the error stays, so what it had counted must stay, too
error(answer, 0)
"""
"""The end of an admission script. Redis takes nothing back if a command fails, as for a key of another type."""


_RUN_MESSAGE = """local done, answer = pcall(run)
if done then return answer end
ran(0) -- otherwise no later message of the process would run
return {5, type(answer) == "table" and answer.err or answer}
"""
"""The end of a script about limits whose calls are numbered messages."""


def _source(name: str) -> str:
    return (FOLDER / f"{name}.lua").read_text("utf-8")


def load_response_script(name: str) -> Script:
    """Return the script `lua/<name>.lua`, with the key names of one team's stored responses in front."""
    prefix = keys.responses("")
    after = keys.response("", "").removeprefix(prefix)
    names = (
        "local responses_key = KEYS[1]",
        f'local response_sizes_key = KEYS[1] .. "{keys.response_sizes("").removeprefix(prefix)}"',
        f'local function response_key(id) return KEYS[1] .. "{after}" .. id end',
    )
    return _script(name, "\n".join(names))


def load_stream_script(name: str) -> Script:
    """Return the script `lua/<name>.lua`, with the key names of one team's resumable streams in front."""
    prefix = keys.streams("")
    names = (
        "local streams_key = KEYS[1]",
        f'local streams_ended_key = KEYS[1] .. "{keys.streams_ended("").removeprefix(prefix)}"',
        f'local stream_sizes_key = KEYS[1] .. "{keys.stream_sizes("").removeprefix(prefix)}"',
    )
    return _script(name, "\n".join(names))


def load_limits_script(name: str, *parts: str, numbered: bool = False) -> Script:
    """Return the script `lua/<name>.lua` about limits, preceded by their key names and `lua/limits.lua`.

    `parts`: files before it, each the body of a function with the file's name. `numbered`: whether the script's calls
    are numbered messages, which `lua/limits_gate.lua` and `lua/limits_window.lua` precede as well."""
    prefix = keys.LIMITS
    names = [
        f'local limits_{name}_key = KEYS[1] .. "{key.removeprefix(prefix)}"'
        for name, key in (("gateways", keys.LIMITS_GATEWAYS), ("round", keys.LIMITS_ROUND), ("used", keys.LIMITS_USED))
    ]
    for by_name in (keys.limits_subject, keys.limits_log, keys.limits_calls):
        start = by_name("").removeprefix(prefix)
        names.append(f'local function {by_name.__name__}_key(name) return KEYS[1] .. "{start}" .. name end')
    before = [_source(each) for each in ("limits", *(("limits_gate", "limits_window") if numbered else ()))]
    bodies = [f"local function {part}()\n{_source(part)}\nend\n" for part in parts]
    source = f"local function run()\n{_source(name)}\nend\n{_RUN_MESSAGE}" if numbered else _source(name)
    return _made(name, "\n".join([*names, *before, *bodies, source]))


def load_beat_script() -> Script:
    """Return the script `lua/beat.lua`. Its KEYS[1] is a complete key name; that of most scripts is only a prefix."""
    return _script("beat", "")


def load_news_script() -> Script:
    """Return the script `lua/news.lua`. Its KEYS[1] is a complete key name; that of most scripts is only a prefix."""
    return _script("news", "")


def load_members_script() -> Script:
    """Return the script `lua/members.lua`. Its KEYS are complete key names; those of most scripts are only a prefix."""
    return _script("members", "")


def load_usage_script() -> Script:
    """Return the script `lua/send_usage.lua`, with the key names of usage in front. Its KEYS[1] is a complete name."""
    names = (f'local batches_key = "{keys.USAGE_BATCHES}"', f'local set_aside_key = "{keys.USAGE_SET_ASIDE}"')
    return _script("send_usage", "\n".join(names))


def load_records_script() -> Script:
    """Return the script `lua/records.lua`. Its KEYS are complete key names; those of most scripts are only a prefix."""
    return _script("records", "")


def load_access_changes_script() -> Script:
    """Return the script `lua/access_changes.lua`. Its KEYS are complete key names."""
    return _script("access_changes", "")


def load_uphold_script() -> Script:
    """Return the script `lua/uphold.lua`. Its KEYS are complete key names; those of most scripts are only a prefix."""
    return _script("uphold", "")


def _script(name: str, head: str) -> Script:
    return _made(name, head + "\n" + _source(name))


def _made(name: str, source: str) -> Script:
    # SHA-1 is the name of a script in Redis, not a safeguard.
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


Call = tuple[str | int | bytes, ...]
"""The arguments of EVALSHA: the script's SHA-1, the number of keys (1), the key, the script's arguments."""

REPAIRABLE = (NoScriptError, MovedError)
"""Errors after which `repair` helps: Redis has not loaded the script, or the key has moved to another server."""


class Runner(Protocol):
    """Runs batches of script calls on the server that has their keys. Methods raise redis.RedisError and OSError."""

    def queue(self, prefix: str) -> str:
        """Return the name of the queue for a key prefix; calls of one queue may share a batch."""
        ...

    async def run(self, calls: Sequence[Call], long_s: float | None = None) -> list[Any]:
        """Run the calls of one queue. Return one answer or exception for each. `long_s`: seconds that they may take,
        as they have long arguments; None: they are short."""
        ...

    async def repair(self, call: Call, answer: Any) -> None:
        """Remove the cause for which Redis did not run `call`. `answer`: the error that it gave, one of REPAIRABLE."""
        ...


def runner_for(redis: redis.asyncio.Redis, scripts: Sequence[Script]) -> Runner:
    cluster = cluster_of(redis)
    if cluster is not None:
        return ClusterRunner(cluster, scripts)
    return ServerRunner(short_commands_of(redis), long_commands_of(redis), scripts)


class ServerRunner:
    """Runs calls on a single server, which has all keys: short ones over the connection that everybody shares, long
    ones over another, as those of others would wait behind them."""

    def __init__(self, commands: ShortCommands, long_commands: LongCommands, scripts: Sequence[Script]) -> None:
        self._commands = commands
        self._long_commands = long_commands
        self._scripts = scripts
        self._loaded = False

    def queue(self, prefix: str) -> str:
        return ""

    async def run(self, calls: Sequence[Call], long_s: float | None = None) -> list[Any]:
        if not self._loaded:
            await self._load()
        commands = [("EVALSHA", *call) for call in calls]
        if long_s is not None:
            return await self._long_commands.ask(*commands, timeout_s=long_s)
        return await self._commands.ask(*commands)

    async def repair(self, call: Call, answer: Any) -> None:
        await self._load()

    async def _load(self) -> None:
        answers = await self._commands.ask(*[("SCRIPT", "LOAD", script.source) for script in self._scripts])
        if (refusal := next((answer for answer in answers if isinstance(answer, RedisError)), None)) is not None:
            raise refusal
        self._loaded = True


class ClusterRunner:
    """Runs calls on a Redis Cluster. Each key prefix has a hash tag of its own, so all keys with the same prefix are on
    one node."""

    def __init__(self, cluster: ClusterClient, scripts: Sequence[Script]) -> None:
        self._cluster = cluster
        self._scripts = scripts

    def queue(self, prefix: str) -> str:
        return prefix

    async def run(self, calls: Sequence[Call], long_s: float | None = None) -> list[Any]:
        # Not redirected: while a hash slot migrates to another server, no script sees all of its keys.
        commands: list[Command] = [(("EVALSHA", *call), {}) for call in calls]
        return await self._cluster.send(commands, redirect=False, timeout_s=long_s)

    async def repair(self, call: Call, answer: Any) -> None:
        if isinstance(answer, MovedError):
            await self._cluster.has_moved(answer)
            return
        node = self._cluster.get_node_from_key(str(call[2]))
        for script in self._scripts:
            await self._cluster.execute_command("SCRIPT LOAD", script.source, target_nodes=node)


log = logging.getLogger(__name__)

MAX_BATCH = 256
BATCH_BYTES = 256 << 10
"""Bytes of arguments after which a batch takes no more calls."""

LONG_BYTES = 64 << 10
"""Bytes of a call's keys and arguments above which the call is long. At 20 MB/s to Redis that many take 3 ms."""
LONG_AT_ONCE = 2
"""Maximum number of a sender's long calls that are sent at the same time."""
LONG_WAIT_S = 10.0
"""Maximum seconds that a long call waits for its turn; then it fails."""
LEAST_BYTES_PER_S = 1 << 20
"""Rate to Redis that the time limit of a long call allows for."""

MAX_REPAIRS = 3
"""Maximum times that a batch is sent again, from the first call that Redis did not run; a `repair` precedes each."""

LOG_EVERY_S = 10.0
"""Minimum seconds between two log lines that say why a script was not run."""


@dataclass(slots=True, eq=False)  # not frozen: every script call makes one, and that would take 1 us more
class _Job:
    call: Call
    prefix: str
    answer: asyncio.Future[Any]
    script: str
    asked_at: float
    """time.perf_counter() when the call was made."""
    num_bytes: int
    """Approximate bytes of the key and the arguments: a character of a text counts as one."""
    is_long: bool
    """Whether these are more than LONG_BYTES."""


@dataclass(slots=True, eq=False)
class _Queue:
    jobs: deque[_Job] = field(default_factory=deque)
    sender: asyncio.Task[None] | None = None


class ScriptSender:
    """Runs scripts in the order in which they were called; those of other key prefixes may overtake long calls. Belongs
    to one event loop, and has tasks only while there are calls to send.

    Calls that come during a round trip are sent together in the next one: under load a script call then costs a third
    as much. Thanks to the order, giving up is safe: a withdrawal that is sent after an acquisition runs after it, even
    if no task waits for the acquisition's answer any more.

    A batch has `timeout_s`, connecting included: if Redis hangs, a caller waits for at most two batches. On a Cluster
    each key prefix has a queue of its own, so that a server that is away delays only its own models.

    Calls with long arguments (LONG_BYTES) are sent one by one, apart from all others, and have more time. Until they
    have their answers, later calls of the same key prefix wait behind them. A few are sent at once, those of different
    prefixes in turn."""

    def __init__(
        self,
        redis: redis.asyncio.Redis,
        scripts: Sequence[Script],
        timeout_s: float,
        took: Callable[[float, str], None] | None = None,
    ) -> None:
        """`took` is called after each script call, with the seconds to its reply or failure, and the script's name."""
        self._runner = runner_for(redis, scripts)
        self._timeout_s = timeout_s
        self._queues: dict[str, _Queue] = {}
        self._apart: dict[str, _Queue] = {}
        """Key prefix -> its calls, from a long one on that has no answer yet."""
        self._long_turns = asyncio.Semaphore(LONG_AT_ONCE)
        self._took = took
        self._logged_at = float("-inf")

    def send(self, script: Script, prefix: str, *arguments: str | int | bytes) -> asyncio.Future[Any]:
        """Queue a script call and return its answer as a future. The script runs even if nobody awaits the future. The
        future fails only with StoreUnavailable, since no error of a script can be the caller's fault."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        name = self._runner.queue(prefix)
        queue = self._queues.setdefault(name, _Queue())
        call = (script.sha, 1, prefix, *arguments)
        num_bytes = sum(map(length_hint, call))  # 0 for a number; half the time of looking at the types
        is_long = num_bytes > LONG_BYTES
        queue.jobs.append(_Job(call, prefix, answer, script.name, time.perf_counter(), num_bytes, is_long))
        if queue.sender is None:
            queue.sender = asyncio.create_task(self._send_all(name, queue), name="redis scripts")
        return answer

    def post(self, lost: Callable[[], None], script: Script, prefix: str, *arguments: str | int | bytes) -> None:
        """Queue a script call whose answer nobody needs; `lost` is called if it fails."""

        def done(answer: asyncio.Future[Any]) -> None:
            if not answer.cancelled() and isinstance(answer.exception(), StoreUnavailable):
                lost()

        self.send(script, prefix, *arguments).add_done_callback(done)

    async def close(self) -> None:
        """Wait until every call has run or failed."""
        while senders := {queue.sender for queue in (*self._queues.values(), *self._apart.values()) if queue.sender}:
            await asyncio.wait(senders)

    async def _send_all(self, name: str, queue: _Queue) -> None:
        try:
            while queue.jobs:
                if batch := self._take(queue):
                    await self._run(batch)
        finally:
            del self._queues[name]
            for job in queue.jobs:
                job.answer.cancel()

    def _take(self, queue: _Queue, *, is_apart: bool = False) -> list[_Job]:
        """Return the short calls to send together next; none if a long one comes first in a queue that `is_apart`. From
        another queue, long calls, and calls behind a long one of the same key prefix, are moved to such a queue."""
        batch: list[_Job] = []
        num_bytes, jobs, apart = 0, queue.jobs, self._apart
        while jobs and len(batch) < MAX_BATCH and num_bytes < BATCH_BYTES:
            job = jobs[0]
            if job.is_long and (batch or is_apart):
                break  # the batch may have calls of the same prefix, which must run before this one
            jobs.popleft()
            if not is_apart and (job.is_long or job.prefix in apart):
                self._put_apart(job)
            else:
                batch.append(job)
                num_bytes += job.num_bytes
        return batch

    def _put_apart(self, job: _Job) -> None:
        queue = self._apart.setdefault(job.prefix, _Queue())
        queue.jobs.append(job)
        if queue.sender is None:
            queue.sender = asyncio.create_task(self._send_apart(job.prefix, queue), name="long redis scripts")

    async def _send_apart(self, prefix: str, queue: _Queue) -> None:
        try:
            while queue.jobs:
                if batch := self._take(queue, is_apart=True):
                    await self._run(batch)
                else:
                    await self._run_in_turn(queue.jobs.popleft())
        finally:
            del self._apart[prefix]
            for job in queue.jobs:
                job.answer.cancel()

    async def _run_in_turn(self, job: _Job) -> None:
        """Run a long call when it is its turn. If that is not in time, the call fails, and does not run."""
        left_s = job.asked_at + LONG_WAIT_S - time.perf_counter()
        try:
            if left_s <= 0:
                raise TimeoutError
            async with asyncio.timeout(left_s):
                await self._long_turns.acquire()
        except TimeoutError:
            error = TimeoutError(f"it has waited {LONG_WAIT_S:g} s for others with as long arguments")
            self._log_why(error, job)
            _settle(job, error)
            return
        except asyncio.CancelledError:
            job.answer.cancel()
            raise
        try:
            await self._run([job], self._timeout_s + job.num_bytes / LEAST_BYTES_PER_S)
        finally:
            self._long_turns.release()

    async def _run(self, batch: list[_Job], long_s: float | None = None) -> None:
        try:
            async with LateTimeout(self._timeout_s if long_s is None else long_s):
                answers = await self._answers([job.call for job in batch], long_s)
        except NO_ANSWER as error:
            answers = [error] * len(batch)
        except asyncio.CancelledError:
            for job in batch:
                job.answer.cancel()
            raise
        except Exception as error:  # the edge of this task: whatever it is, the calls would wait for ever
            log.exception("a batch of scripts was not sent, or its answers were not understood")
            answers = [error] * len(batch)
        self._note_time(batch)
        for job, answer in zip(batch, answers, strict=True):
            if isinstance(answer, BaseException):
                self._log_why(answer, job)
            _settle(job, answer)

    def _note_time(self, batch: list[_Job]) -> None:
        if self._took is None:
            return
        now = time.perf_counter()
        for job in batch:
            self._took(now - job.asked_at, job.script)

    def _log_why(self, error: BaseException, job: _Job) -> None:
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            what = str(error) or "no answer in time"
            told = (job.script, job.prefix, type(error).__name__, what, remedy_for(error))
            log.warning("Redis does not run the script %s for %s (%s: %s): %s", *told)

    async def _answers(self, calls: list[Call], long_s: float | None) -> list[Any]:
        """Run calls in order and return their answers. If a call was not run, remove the cause, then run this call and
        all later ones again; so some calls run twice."""
        answers = await self._runner.run(calls, long_s)
        for _ in range(MAX_REPAIRS):
            failed = next((at for at, answer in enumerate(answers) if isinstance(answer, REPAIRABLE)), None)
            if failed is None:
                break
            await self._runner.repair(calls[failed], answers[failed])
            answers[failed:] = await self._runner.run(calls[failed:], long_s)
        return answers


def _settle(job: _Job, answer: Any) -> None:
    if job.answer.done():  # the caller has given up
        return
    if isinstance(answer, BaseException):
        job.answer.set_exception(unavailable(answer))
    else:
        job.answer.set_result(answer)
