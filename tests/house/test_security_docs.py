"""The threat model names, for every threat, a test that is there; and every attack of the program."""

from __future__ import annotations

import ast
import fnmatch
import functools
import re
from pathlib import Path

import pytest

from tests.security.attacks import all_attacks

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "security.md"
PROOF = "the test that proves it"
FILE = re.compile(r"`(tests/[\w/]+\.py)`")
TEST = re.compile(r"`(test_\w+)`")


def threats() -> list[tuple[str, str]]:
    """Return each threat of the page, and the cell that names what proves its bound."""
    found: list[tuple[str, str]] = []
    in_table = False
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[-1] == PROOF:
            in_table = True
        elif not line.startswith("|"):
            in_table = False
        elif in_table and not set(line) <= set("|- "):
            found.append((cells[0], cells[-1]))
    return found


@functools.cache
def names_of_tests() -> frozenset[str]:
    """Return the names of all functions below `tests`."""
    names: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        names.update(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(names)


@pytest.mark.parametrize(("threat", "proof"), threats(), ids=[threat[:60] for threat, _ in threats()])
def test_every_threat_names_tests_that_are_there(threat: str, proof: str) -> None:
    files, tests = FILE.findall(proof), TEST.findall(proof)
    assert files or tests or "the same file" in proof, f"nothing proves the bound of: {threat}"
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert set(tests) <= names_of_tests()


@pytest.mark.parametrize("name", [attack.name for attack in all_attacks()])
def test_every_attack_is_named(name: str) -> None:
    told = re.findall(r"`([a-z*-]+)`", PAGE.read_text())
    assert any(fnmatch.fnmatchcase(name, pattern) for pattern in told)
