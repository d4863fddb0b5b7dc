"""The workers' half of the `paddock` program: `python -m workers.cli worker|supervisor`."""

from __future__ import annotations

import sys

from workers import command, lifeline
from workers.command import Command

COMMANDS = {
    "worker": Command(
        "workers.settings:WorkerSettings", "workers.worker:main", "one worker process against a given Redis", "worker"
    ),
    "supervisor": Command(
        "workers.settings:SupervisorSettings",
        "workers.supervisor.station:run",
        "this machine's workers against a given Redis",
        "worker",
    ),
}


def main() -> int:
    return command.guarded(_main)


def _main() -> int:
    lifeline.hold()
    name, *args = sys.argv[1:] or [""]
    if name not in COMMANDS:
        return command.complain([f"{name or 'nothing'}: no such command; use one of: {', '.join(COMMANDS)}"])
    return command.run(name, COMMANDS[name], args)


if __name__ == "__main__":
    sys.exit(main())
