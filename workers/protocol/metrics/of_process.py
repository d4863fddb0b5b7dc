"""The metrics of any process, by the names of Prometheus' clients; those that begin with `process_` need Linux."""

from __future__ import annotations

from workers.protocol.metrics.metric import Group, Kind, Metric, When

VIRTUAL_MEMORY = Metric("process_virtual_memory_bytes", Kind.GAUGE, "virtual memory")
RESIDENT_MEMORY = Metric("process_resident_memory_bytes", Kind.GAUGE, "resident memory")
START_TIME = Metric("process_start_time_seconds", Kind.GAUGE, "unix time at which it started")
CPU = Metric("process_cpu_seconds_total", Kind.COUNTER, "CPU time, user's and system's")
OPEN_FDS = Metric("process_open_fds", Kind.GAUGE, "open file descriptors")
MAX_FDS = Metric("process_max_fds", Kind.GAUGE, "most that it may open")
TASKS = Metric("paddock_event_loop_tasks", Kind.GAUGE, "tasks of its event loop, those that wait included")
PYTHON_INFO = Metric(
    "python_info",
    Kind.GAUGE,
    "1; which Python it is",
    ("version", "implementation", "major", "minor", "patchlevel"),
    When.START,
)

GROUP = Group(
    "Every process",
    (VIRTUAL_MEMORY, RESIDENT_MEMORY, START_TIME, CPU, OPEN_FDS, MAX_FDS, TASKS, PYTHON_INFO),
)
