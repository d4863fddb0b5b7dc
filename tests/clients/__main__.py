"""Send what programs sent to a Paddock, and print the table of programs, versions and results.

    python -m tests.clients                               every recording, to a fleet of its own
    python -m tests.clients --only openai-python,llm
    python -m tests.clients --record openai-python        install it, run it, and write down what it sends

Exits with 1 when a call fails; one that is refused for a reason that docs/compatibility.md tells does not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.clients import programs
from tests.clients.recorder import recorder
from tests.clients.recording import FOLDER, Recording, recordings
from tests.clients.replay import Outcome, fleet, replay
from tests.support.stack import Stack

PLACE = Path(tempfile.gettempdir()) / "paddock-clients"
COLUMNS = "{:23} {:24} {:16} {:>5} {:>8} {:>7} {:>6}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description="What programs send, and get.")
    parser.add_argument("--only", default="", help="some recordings, by name, with commas between them")
    parser.add_argument("--record", default="", help="programs to install, run and record, by name")
    parser.add_argument("--installed", type=Path, default=PLACE, help=f"where programs are installed; {PLACE}")
    asked = parser.parse_args()
    if asked.record:
        names = [name for name in asked.record.split(",") if name]
        if unknown := [name for name in names if name not in programs.PROGRAMS]:
            raise SystemExit(f"no program {unknown[0]}; there are {', '.join(programs.PROGRAMS)}")
        for name in names:
            programs.install(name, asked.installed)
    found = recordings()
    chosen = [name for name in asked.only.split(",") if name]
    if unknown := [name for name in chosen if name not in found]:
        raise SystemExit(f"no recording {unknown[0]}; there are {', '.join(found)}")
    if asked.record:
        # Coding assistants' first prompts have thousands of tokens; what is recorded of them is shorter.
        with fleet(ctx=8192) as stack:
            for name in names:
                _record(name, asked.installed, stack)
        return 0
    with fleet() as stack:
        return print_table({name: found[name] for name in chosen or found}, stack)


def _record(name: str, installed: Path, stack: Stack) -> None:
    with recorder(stack.gateways[0].url, stack.key) as kept:
        made = programs.record(name, installed.absolute(), kept)
    made.write(FOLDER / f"{name}.json")
    print(f"{name}: {len(made.calls)} calls of {made.program} {made.version}")


def print_table(chosen: dict[str, Recording], stack: Stack) -> int:
    """Return 1 if a call failed."""
    print(COLUMNS.format("program", "version", "how", "calls", "answered", "refused", "failed"), flush=True)
    not_answered: list[tuple[str, Outcome]] = []
    ignored: dict[str, set[str]] = {}
    for recording in chosen.values():
        outcomes = list(replay(recording, stack.gateways[0].url, stack.key))
        counts = [sum(one.fate == fate for one in outcomes) for fate in ("answered", "refused", "failed")]
        print(COLUMNS.format(recording.program, recording.version, recording.how, len(outcomes), *counts), flush=True)
        not_answered += [(recording.program, one) for one in outcomes if one.fate != "answered"]
        ignored[recording.program] = {name for one in outcomes for name in one.ignored if name}
    for program, names in ignored.items():
        if names:
            print(f"ignored: {program}: {', '.join(sorted(names))}")
    for program, outcome in not_answered:
        print(f"{outcome.fate}: {program}: {outcome}")
    return 1 if any(outcome.fate == "failed" for _, outcome in not_answered) else 0


if __name__ == "__main__":
    sys.exit(main())
