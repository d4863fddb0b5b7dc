"""Run llama.cpp's tests of its server against Paddock, and print what became of them.

    python -m tests.upstream [-k WORDS] [--list] [FILE ...]

The tests are those of the llama.cpp that the locked llama-cpp-python was made with. Exits with 1 when a case fails that
`tests.upstream.cases` does not name, or one that it names does not fail.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from benchmarks.reference import sdist_source
from tests.upstream.cases import FILES, LEFT_OUT, OTHERWISE, names, reason_of
from tests.upstream.plugin import REPORT, counted
from tests.upstream.stand_in import MODELS_DIR

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT.parent / "shared" / "models"
CASE_S = 120
Outcomes = Mapping[str, tuple[str, str]]


def main() -> int:
    """Run what was asked for; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description="llama.cpp's own server tests.")
    parser.add_argument("files", nargs="*", default=FILES, metavar="FILE")
    parser.add_argument("-k", default="", metavar="WORDS", help="some cases, as pytest chooses them")
    parser.add_argument("--list", action="store_true", help="tell every case that did not pass")
    asked = parser.parse_args()
    if not MODELS.is_dir():
        print(f"upstream: skipped: there are no models in {MODELS}")
        return 0
    outcomes = run(asked.files, asked.k)
    print(table(outcomes))
    unexpected = [f"{case}: {why}" for case, why in surprises(outcomes, is_whole=not asked.k)]
    for line in sorted(unexpected):
        print(f"upstream: {line}")
    if asked.list:
        for case, (outcome, why) in sorted(outcomes.items()):
            if outcome != "passed":
                print(f"{outcome:8} {case}: {reason_of(case) or why}")
    return 1 if unexpected else 0


def run(files: list[str], words: str) -> Outcomes:
    """Run the cases -> what became of each, by its id."""
    tests = sdist_source() / "vendor" / "llama.cpp" / "tools" / "server" / "tests"
    with tempfile.TemporaryDirectory(prefix="upstream-") as folder:
        server, report = Path(folder) / "llama-server", Path(folder) / "report.json"
        server.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m tests.upstream.stand_in "$@"\n')
        server.chmod(0o755)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.upstream.plugin", "-p", "no:cacheprovider"]
        command += ["--timeout", str(CASE_S), "--tb", "short", "--no-header", "-n", "2"]
        command += ["-k", words] if words else []
        variables = {
            "LLAMA_SERVER_BIN_PATH": str(server),
            MODELS_DIR: str(MODELS),
            REPORT: str(report),
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": folder,
        }
        with (Path(folder) / "output").open("wb") as output:
            subprocess.run(
                [*command, *(f"unit/{file}" for file in files)],
                cwd=tests,
                env=os.environ | variables,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        if not report.exists():
            raise SystemExit((Path(folder) / "output").read_text()[-4000:])
        found: Outcomes = json.loads(report.read_text())
        return {case.removeprefix("unit/"): (outcome, why) for case, (outcome, why) in found.items()}


def table(outcomes: Outcomes) -> str:
    """Return a line for each file: how many cases passed, ended otherwise, failed, and could not be run."""
    files: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    for case, outcome in outcomes.items():
        files[case.partition("::")[0]][case] = outcome
    lines = [f"{'llama.cpp tests':34} {'passed':>7} {'listed':>7} {'failed':>7} {'no model':>9}"]
    for file, cases in [*sorted(files.items()), ("together", dict(outcomes))]:
        number = counted(cases)
        listed = sum(outcome == "failed" and reason_of(case) is not None for case, (outcome, _) in cases.items())
        row = (number["passed"], listed, number["failed"] - listed, number["skipped"])
        lines.append(f"{file:34} {row[0]:7} {row[1]:7} {row[2]:7} {row[3]:9}")
    lines += [f"{file:34} not run: {reason}" for file, reason in LEFT_OUT.items()]
    return "\n".join(lines)


def surprises(outcomes: Outcomes, *, is_whole: bool) -> list[tuple[str, str]]:
    """Return the cases that ended otherwise than `tests.upstream.cases` says, each with what is wrong."""
    found = [
        (case, why) for case, (outcome, why) in outcomes.items() if outcome == "failed" and reason_of(case) is None
    ]
    for start in OTHERWISE:
        cases = [outcome for case, (outcome, _) in outcomes.items() if names(start, case)]
        if cases and "failed" not in cases:
            found.append((start, "is listed and does not fail: take it off the list"))
        elif not cases and is_whole and start.partition("::")[0] in {case.partition("::")[0] for case in outcomes}:
            found.append((start, "is listed and there is no such case"))
    return found


if __name__ == "__main__":
    sys.exit(main())
