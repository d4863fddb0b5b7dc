"""Constrained answers: what a token costs at a vocabulary of 152,000, and how many JSON Schemas are kept to the letter
beside llama.cpp's own converter.

    python -m benchmarks constrained
"""

from __future__ import annotations

from benchmarks.constrained import generating, judging, speed
from benchmarks.constrained.cases import load_cases
from benchmarks.table import Row


def measure(size: int) -> list[Row]:
    """`size`: answers that are generated under each schema."""
    cases = load_cases()
    return [*speed.measure(cases), *judging.measure(cases), *generating.measure(cases, size)]
