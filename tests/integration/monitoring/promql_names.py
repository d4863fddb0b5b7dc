"""Which series and labels an expression of PromQL names, as far as the shipped ones need it."""

from __future__ import annotations

import re
from collections.abc import Iterator

WORDS = frozenset(
    {
        "and",
        "or",
        "unless",
        "on",
        "ignoring",
        "group_left",
        "group_right",
        "by",
        "without",
        "bool",
        "offset",
        "sum",
        "max",
        "min",
        "avg",
        "count",
        "rate",
        "increase",
        "histogram_quantile",
        "label_replace",
        "vector",
        "scalar",
        "absent",
        "changes",
        "clamp_max",
        "time",
        "max_over_time",
    }
)
STRING = re.compile(r'"[^"]*"')
SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}")
GROUPED = re.compile(r"\b(?:by|on|group_left|without|ignoring)\s*\(([^)]*)\)")
NAME = re.compile(r"(?<![\w:.$])[a-zA-Z_:][\w:]*")


def series_in(expr: str) -> set[str]:
    """Names of series, recorded ones included."""
    bare = STRING.sub("", GROUPED.sub("", expr))
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]", "", bare)
    return {name for name in NAME.findall(bare) if name not in WORDS}


def matched_labels(expr: str) -> Iterator[tuple[str, str]]:
    """Series and label of each matcher."""
    for name, inside in SELECTOR.findall(STRING.sub('""', expr)):
        yield from ((name, label) for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside))


def grouped_labels(expr: str) -> set[str]:
    """Labels that results are grouped or joined by."""
    inside = " ".join(GROUPED.findall(expr))
    return set(re.findall(r"\w+", inside))
