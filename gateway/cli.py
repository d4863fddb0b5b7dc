"""The `paddock` program. It imports a command's modules only when this command runs."""

from __future__ import annotations

import sys
from importlib import import_module

from accounts.cli import ACCOUNTS
from gateway import __version__
from workers import cli as workers_cli
from workers.commands import command
from workers.commands.command import Command
from workers.process import parent_death

COMMANDS = {
    "up": Command(
        "gateway.settings:UpSettings",
        "gateway.commands.up:run",
        "everything on this machine: Redis, workers, gateway",
        "gateway,worker",
    ),
    "gateway": Command(
        "gateway.settings:GatewaySettings",
        "gateway.lifecycle:run",
        "one gateway process against a given Redis",
        "gateway",
    ),
    "accounts": ACCOUNTS,
    **workers_cli.COMMANDS,
}
BENCH = "puts the load of many users on any OpenAI-compatible address, and reports the latencies they see"
CHAT = "talks to a model in this terminal, or answers what comes in on a pipe"
KEY = "API keys: key make|add|list|remove"
REDIS = "users for a Redis of your own, each with no more rights than it needs: redis acl"
CONFIG = "shows the settings and where each comes from: config show|schema|docs|compatibility|metrics"


def main() -> int:
    """Run the command that the arguments name, and return the process's exit code (`workers.protocol.exits`)."""
    return command.guarded(_main)


def _main() -> int:
    parent_death.hold()
    name, *args = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help", "help"):
        print(overview())
        return 0
    if name in ("-V", "--version"):
        print(f"paddock {__version__}")
        return 0
    if name == "config":
        return int(import_module("gateway.commands.config").main(args))
    if name == "cache":
        known = import_module("gateway.settings").known_settings()
        return int(import_module(workers_cli.CACHE_MODULE).main(args, known))
    if name == "drain":
        settings, drain = import_module("gateway.settings"), import_module(workers_cli.DRAIN_MODULE)
        parts = {"gateway": settings.GatewaySettings, **drain.PARTS}
        return int(drain.main(args, settings.known_settings(), parts))
    if name == "key":
        known = import_module("gateway.settings").known_settings()
        return int(import_module("gateway.commands.key").main(args, known))
    if name == "redis":
        return int(import_module("gateway.commands.redis_acl").main(args))
    if name == "bench":
        known = import_module("gateway.settings").known_settings()
        return int(import_module("gateway.bench.command").main(args, known))
    if name == "chat":
        known = import_module("gateway.settings").known_settings()
        return int(import_module("gateway.commands.chat").main(args, known))
    if name not in COMMANDS:
        nearest = import_module("workers.sources").nearest(
            name, [*COMMANDS, "bench", "cache", "chat", "config", "drain", "key", "redis"]
        )
        return command.complain([f"{name}: no such command{nearest}; `paddock --help` lists them"])
    known = import_module("gateway.settings").known_settings()
    return command.run(name, COMMANDS[name], args, known)


def overview() -> str:
    rows = [
        *((name, entry.summary) for name, entry in COMMANDS.items()),
        ("bench", BENCH),
        ("cache", workers_cli.CACHE),
        ("chat", CHAT),
        ("config", CONFIG),
        ("drain", workers_cli.DRAIN),
        ("key", KEY),
        ("redis", REDIS),
    ]
    table = [f"  {name.ljust(12)}{summary}" for name, summary in rows]
    return "\n".join(
        [
            "usage: paddock COMMAND [flags]",
            "",
            *table,
            "",
            "`paddock COMMAND --help` lists the flags of a command; `paddock --version` tells the version.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
