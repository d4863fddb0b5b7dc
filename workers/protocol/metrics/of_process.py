"""The metrics of any process, as Prometheus' client for Python has them; Linux only."""

from __future__ import annotations

from workers.protocol.metrics.metric import Group, Kind, Metric, When

GROUP = Group(
    "Every process",
    (
        Metric("process_virtual_memory_bytes", Kind.GAUGE, "virtual memory"),
        Metric("process_resident_memory_bytes", Kind.GAUGE, "resident memory"),
        Metric("process_start_time_seconds", Kind.GAUGE, "unix time at which it started", set_when=When.START),
        Metric("process_cpu_seconds_total", Kind.COUNTER, "CPU time, user's and system's"),
        Metric("process_open_fds", Kind.GAUGE, "open file descriptors"),
        Metric("process_max_fds", Kind.GAUGE, "most that it may open"),
        Metric(
            "python_info",
            Kind.GAUGE,
            "1; which Python it is",
            ("version", "implementation", "major", "minor", "patchlevel"),
            When.START,
        ),
    ),
)
