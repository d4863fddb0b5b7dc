"""Processor cores as the setting `cpus` names them (`0-3,8`), and each worker's share of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

CORES_PATTERN = r"^([0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*)?$"
"""Pattern of the setting: cores and ranges of cores, with commas between; empty: none."""


def cores_of(text: str) -> tuple[int, ...]:
    """Return the cores that a text of the form of `CORES_PATTERN` names, in order. Raises ValueError for a range that
    ends before it begins, and for a core that is named twice."""
    cores: set[int] = set()
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers:
            raise ValueError(f"`cpus`: {part} ends before it begins; write the lower core first")
        if twice := cores.intersection(numbers):
            raise ValueError(f"`cpus` names core {min(twice)} twice; name each core once")
        cores.update(numbers)
    return tuple(sorted(cores))


def text_of(cores: Iterable[int]) -> str:
    """Return the text that names these cores: the inverse of `cores_of`."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def shares_of(cores: Sequence[int], workers: int) -> list[Sequence[int]]:
    """Return each worker's cores: neighbouring ones, since those share caches and a NUMA node. The shares differ by one
    core at most. Raises ValueError if there are fewer cores than workers."""
    if len(cores) < workers:
        raise ValueError(
            f"`cpus` names {len(cores)} cores for {workers} workers, each of which needs one; name more cores, or "
            "lower `workers`"
        )
    bounds = [len(cores) * number // workers for number in range(workers + 1)]
    return [cores[start:end] for start, end in pairwise(bounds)]
