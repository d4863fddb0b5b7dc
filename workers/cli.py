"""The workers' half of the `paddock` program: `python -m workers.cli worker|supervisor|models|cache|drain|logs`."""

from __future__ import annotations

import sys

from workers.commands import command
from workers.commands.command import Command, loaded
from workers.process import parent_death

COMMANDS = {
    "worker": Command(
        "workers.settings:WorkerSettings", "workers.worker:main", "one worker process against a given Redis", "worker"
    ),
    "supervisor": Command(
        "workers.settings:SupervisorSettings",
        "workers.commands.supervisor:run",
        "this machine's workers against a given Redis",
        "worker",
    ),
}

MODELS_MODULE = "workers.commands.models.command"
CACHE_MODULE = "workers.commands.cache"
LOGS_MODULE = "workers.commands.logs"
DRAIN_MODULE = "workers.commands.drain"
DRAIN = "takes a gateway or a worker out of service and waits: drain gateway|worker"
MODELS = "models on this machine and of the hub: models list|pull|plan|show|verify|rm"
LOGS = "prints what the processes on this machine have written: logs -f worker-0"
CACHE = "cached prompts on disk: cache show|erase"


def main() -> int:
    return command.guarded(_main)


def _main() -> int:
    parent_death.hold()
    name, *args = sys.argv[1:] or [""]
    if name == "models":
        return int(loaded(MODELS_MODULE).main(args))
    if name == "cache":
        return int(loaded(CACHE_MODULE).main(args))
    if name == "logs":
        return int(loaded(LOGS_MODULE).main(args))
    if name == "drain":
        return int(loaded(DRAIN_MODULE).main(args))
    if name not in COMMANDS:
        known = ", ".join([*COMMANDS, "models", "cache", "drain", "logs"])
        return command.complain([f"{name or 'nothing'}: no such command; use one of: {known}"])
    return command.run(name, COMMANDS[name], args)


if __name__ == "__main__":
    sys.exit(main())
