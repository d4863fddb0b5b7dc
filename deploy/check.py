"""Every check of `make test`, with the time each took. Goes on after a failure, exits with its status.

    python deploy/check.py [--long]
        [--only tools,format,lint,types,imports,house,site,sources,tests,serial,clients,upstream,attacks]

Those that run no tests come first, two at a time. pytest runs last, so that its summary is the end of the output: side
by side, then the tests marked `serial`, alone in one process. `make test-full` unpacks llama.cpp's sources before it,
since tests of well-known vocabularies and templates skip where there are none. After it `make test-full` prints the
table of clients, with versions and results, runs llama.cpp's own tests of its server, and tries the attacks, alone on
the machine: what they may take from others is promised for a quiet one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
PYTEST = [sys.executable, "-m", "pytest", "-q"]
SOME_FAILED = 1
"""pytest's exit code."""
MOST_AGAIN = 20
"""Maximum number of tests that failed side by side and are run once more, alone: on a busy machine one may miss a time
that it has alone. Where more fail, something is broken."""
IN_ORDER = ("--dist", "loadfile", "--no-loadscope-reorder")
"""Whole files, in the order of `tests/conftest.py`: those with the most tests are not those that take longest."""
LONGEST = ("types", "site")
HOUSE = ROOT.parent / "shared" / "tools" / "house.py"
UNPACK_SOURCES = "from benchmarks.reference import sdist_source; sdist_source()"


def stages(long: bool) -> dict[str, list[str]]:
    chosen = "" if long else " and not long"
    commands = {
        "tools": [sys.executable, "-m", "tests.support.go_tools", *go_tools(long)],
        "format": [str(BIN / "ruff"), "format", "--check", "--output-format", "concise", "."],
        "lint": [str(BIN / "ruff"), "check", "--output-format", "concise", "."],
        "types": [str(BIN / "mypy")],
        "imports": [str(BIN / "lint-imports")],
        "house": [sys.executable, str(HOUSE), ".", "--strict"],
        "site": [sys.executable, str(ROOT / "deploy" / "site" / "build_site.py")],
        "sources": [sys.executable, "-c", UNPACK_SOURCES],
        "tests": [*PYTEST, "-n", str(num_at_once()), *IN_ORDER, "-m", f"not serial{chosen}"],
        "serial": [*PYTEST, "-m", f"serial{chosen}", *serial_files()],
    }
    if long:
        commands["clients"] = [sys.executable, "-m", "tests.clients"]
        commands["upstream"] = [sys.executable, "-m", "tests.upstream"]
        commands["attacks"] = [sys.executable, "-m", "tests.security"]
    else:
        del commands["sources"]
    if not HOUSE.is_file():
        del commands["house"]
    return commands


def num_at_once() -> int:
    """Test files that run side by side: most of a test's time is processes that start and waits that pass."""
    return max(3, min(4, len(os.sched_getaffinity(0))))


def serial_files() -> list[str]:
    """Return the files with marked tests: collecting all of them takes longer than many of these tests."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if "pytest.mark.serial" in file.read_text()]


def go_tools(long: bool) -> list[str]:
    """What the tests need is built before them. Helm takes four minutes of two cores, the compose tool five."""
    return [] if long else ["quick", "helm"] if os.environ.get("CI") == "true" else ["quick"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="deploy/check.py", description="Every check of `make test`.")
    parser.add_argument("--long", action="store_true", help="the long tests, too")
    parser.add_argument("--only", default="", help=f"some of them: {','.join(stages(long=True))}")
    asked = parser.parse_args()
    only = asked.only.split(",") if asked.only else []
    chosen = {name: command for name, command in stages(asked.long).items() if not only or name in only}
    results = run_quietly({name: command for name, command in chosen.items() if name not in RUN})
    num_reported = 0
    for name, command in chosen.items():
        if name not in RUN:
            continue
        started = time.monotonic()
        if name in ("tests", "serial"):
            report(results[num_reported:])
            num_reported = len(results)
        code = RUN[name](command)
        results.append((name, code, time.monotonic() - started))
    if [name for name, _, _ in results][-1:] != ["serial"]:  # whose own summary ends the output
        report(results[num_reported:])
    return next((code for _, code, _ in results if code), 0)


def run_quietly(commands: dict[str, list[str]]) -> list[tuple[str, int, float]]:
    """Run checks of one core each, two at a time, the longest first, and print what failed; return all results."""

    def run(name: str) -> tuple[str, int, float]:
        started = time.monotonic()
        done = subprocess.run(commands[name], cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            print(done.stdout + done.stderr, flush=True)
        return name, done.returncode, time.monotonic() - started

    with ThreadPoolExecutor(2) as threads:
        done = list(threads.map(run, sorted(commands, key=lambda name: name not in LONGEST)))
    return sorted(done, key=lambda result: list(commands).index(result[0]))


def run_openly(command: list[str]) -> int:
    return subprocess.run(command, cwd=ROOT).returncode


def run_tests(command: list[str]) -> int:
    """Run tests side by side; where at most MOST_AGAIN fail, run these once more, alone."""
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "failed"
        code = run_openly([*command, f"--failed-to={to}"])
        failed = to.read_text().splitlines() if to.exists() else []
    if code != SOME_FAILED or not 0 < len(failed) <= MOST_AGAIN:
        return code
    print("check: these failed side by side, and are run alone:", *failed, sep="\n  ", flush=True)
    return run_openly([*PYTEST, *failed])


RUN = {"tests": run_tests, "serial": run_openly, "clients": run_openly, "upstream": run_openly, "attacks": run_openly}
"""The others say nothing unless they fail."""


def report(results: list[tuple[str, int, float]]) -> None:
    for name, code, took_s in results:
        print(f"check: {name:8} {'ok' if code == 0 else 'FAILED':6} {took_s:6.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
