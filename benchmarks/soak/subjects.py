"""The processes that are watched, and what each takes of the machine: memory, open files, threads, tasks, children."""

from __future__ import annotations

import contextlib
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import psutil
from prometheus_client.parser import text_string_to_metric_families

MIB = 2**20
TASKS = "paddock_event_loop_tasks"
PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment. Memory in MiB; `tasks` -1 where the process did not say."""

    at_s: float
    rss: float
    uss: float
    """Memory that would be free again if the process ended."""
    fds: int
    threads: int
    tasks: int
    children: int
    children_rss: float


@dataclass(slots=True)
class Life:
    """One process."""

    pid: int
    began_s: float
    samples: list[Sample] = field(default_factory=list)


@dataclass(slots=True)
class Subject:
    """One place in the fleet, and the processes that followed each other there."""

    name: str
    lives: list[Life] = field(default_factory=list)

    @property
    def life(self) -> Life:
        return self.lives[-1]


@dataclass(slots=True)
class Watch:
    """Samples all subjects; times are seconds since the start of the soak."""

    subjects: dict[str, Subject] = field(default_factory=dict)
    seen: dict[int, psutil.Process] = field(default_factory=dict)
    """Every process and child so far, for whoever looks for orphans."""

    def look(self, now_s: float, pids: Mapping[str, int], urls: Mapping[str, str]) -> None:
        """`pids`: who is there now, by name; `urls`: of those that tell metrics."""
        for name, pid in pids.items():
            subject = self.subjects.setdefault(name, Subject(name))
            if not subject.lives or subject.life.pid != pid:
                subject.lives.append(Life(pid, now_s))
            with contextlib.suppress(psutil.Error):
                subject.life.samples.append(self._sample(now_s, pid, urls.get(name, "")))

    def _sample(self, now_s: float, pid: int, url: str) -> Sample:
        process = psutil.Process(pid)
        children = [] if "supervisor" in " ".join(process.cmdline()) else process.children(recursive=True)
        for one in (process, *children):
            self.seen.setdefault(one.pid, one)
        memory = process.memory_full_info()
        return Sample(
            at_s=now_s,
            rss=memory.rss / MIB,
            uss=memory.uss / MIB,
            fds=process.num_fds(),
            threads=process.num_threads(),
            tasks=int(read_metrics(url).get(TASKS, -1)) if url else -1,
            children=len(children),
            children_rss=sum(_rss(child) for child in children),
        )

    def orphans(self) -> list[str]:
        """Command lines of what was seen and still runs."""
        alive = []
        for process in self.seen.values():
            with contextlib.suppress(psutil.Error):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(" ".join(process.cmdline()))
        return alive


def read_metrics(url: str) -> dict[str, float]:
    """Name -> its samples' sum; nothing where the process does not answer in time."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
    except (OSError, urllib.error.URLError):
        return {}
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def children_by_environment(pid: int, name: str) -> Iterable[tuple[str, int]]:
    """Value of that variable -> process id, of the descendants that have it and whose parent has not."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children():
            with contextlib.suppress(psutil.Error):
                if value := process.environ().get(name):
                    yield value, process.pid


def _rss(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        return float(process.memory_info().rss) / MIB
    return 0.0
