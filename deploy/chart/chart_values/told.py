"""What `values.yaml` says of each value: the comment above it that begins with `# --`, or the one before `:`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml

KEY = re.compile(r"^( *)([A-Za-z0-9]+):")
COMMENT = re.compile(r"^ *# (-- )?(.*)$")


def descriptions(text: str) -> dict[str, str]:
    """Path, such as `gateway.replicas`, -> description. Values that stand for themselves have none."""
    told: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    said: list[str] = []
    for line in text.splitlines():
        comment = COMMENT.match(line)
        if comment:
            said = [comment[2]] if comment[1] else [*said, comment[2]] if said else []
            continue
        if key := KEY.match(line):
            depth = len(key[1])
            path = [(at, name) for at, name in path if at < depth] + [(depth, key[2])]
            if said:
                told[".".join(name for _, name in path)] = " ".join(said)
        said = []
    return told


def defaults(text: str) -> Iterator[tuple[str, object]]:
    """Path and default of every value that is no mapping of the chart's own."""
    yield from _leaves(yaml.safe_load(text), ())


def _leaves(values: dict[str, object], above: tuple[str, ...]) -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        path = (*above, name)
        if isinstance(value, dict) and value and ".".join(path) not in WHOLE:
            yield from _leaves(value, path)
        else:
            yield ".".join(path), value


WHOLE = frozenset({"gateway.settings", "monitoring.dashboardLabels"})
"""Mappings that are told as one value."""
