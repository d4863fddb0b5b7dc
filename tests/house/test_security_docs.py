"""The threat model names, for every threat, a test in the file where it is; and every attack of the program."""

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
NAME = re.compile(r"`(?:(?P<file>tests/[\w/]+\.py)|(?P<test>test_\w+))`")


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


def named(proof: str) -> list[tuple[str, str]]:
    """Return each test of a cell with the file that is named last before it, and each file with no test."""
    found: list[tuple[str, str]] = []
    file = ""
    for name in NAME.finditer(proof):
        file = name["file"] or file
        found.append((file, name["test"] or ""))
    return found


@functools.cache
def functions_of(file: str) -> frozenset[str]:
    """Return the names of all functions of a file below the root; none where there is no such file."""
    path = ROOT / file
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize(("threat", "proof"), threats(), ids=[threat[:60] for threat, _ in threats()])
def test_every_threat_names_tests_that_are_there(threat: str, proof: str) -> None:
    names = named(proof)
    assert names, f"nothing proves the bound of: {threat}"
    assert "the same" not in proof, "a file is named outright: another row may come between"
    assert [(file, test) for file, test in names if not functions_of(file)] == [], (
        "no such file, or none is named before"
    )
    assert [(file, test) for file, test in names if test and test not in functions_of(file)] == []


def test_a_test_is_looked_for_in_the_file_before_it() -> None:
    here = f"tests/house/{Path(__file__).name}"
    proof = f"`test_first`; `{here}`: `test_every_attack_is_named`, `test_none`; attack `x`; `tests/conftest.py`"
    assert named(proof) == [
        ("", "test_first"),
        (here, ""),
        (here, "test_every_attack_is_named"),
        (here, "test_none"),
        ("tests/conftest.py", ""),
    ]
    assert functions_of("") == functions_of("tests/house/missing.py") == frozenset()
    assert "test_every_attack_is_named" in functions_of(here)


@pytest.mark.parametrize("name", [attack.name for attack in all_attacks()])
def test_every_attack_is_named(name: str) -> None:
    told = re.findall(r"`([a-z*-]+)`", PAGE.read_text())
    assert any(fnmatch.fnmatchcase(name, pattern) for pattern in told)
