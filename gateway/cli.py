"""The `paddock` program. It imports a command's modules only when this command runs."""

from __future__ import annotations

import sys

from accounts.cli import ACCOUNTS
from gateway import __version__
from workers import cli as workers_cli
from workers.commands import command
from workers.commands.command import Command, loaded
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
COMPLETION = "prints what makes a shell complete these commands: completion bash|zsh|fish"
REDIS = "users for a Redis of your own, each with no more rights than it needs: redis acl"
IMPORT = "makes a catalog of a configuration file of llama-swap or LiteLLM"
PULL = "fetches models, as `paddock models pull` does"
RUN = "talks to a model, which is loaded for it: run MODEL [PROMPT]"
CONFIG = "shows the settings and where each comes from: config show|schema|docs|compatibility|metrics"

ADMIN = {
    "status": "gateways, models and workers on one screen; --json for scripts",
    "ps": "the models that are loaded or load now",
    "top": "the same as status, live, with the calls that run",
    "stop": "unloads a model, when its calls have ended",
    "restart": "has a worker finish its calls, and start anew; --dry-run says first what that means",
    "keys": "API keys: list, show, create, update, rotate, block, delete; make one for the settings",
    "teams": "teams: list, show, create, update, block, delete",
    "users": "users: the same",
    "organisations": "organisations, which teams belong to: the same",
    "aliases": "limits of all calls of a model name together",
    "limits": "limits of a team, key, user, organisation or model name: list, show, set, clear",
    "budgets": "budgets of the same, with what is spent of them: list, set, delete",
    "usage": "sums up calls, tokens and costs; lists single calls and exports them",
    "prices": "what models cost: list, set, delete, currency",
    "audit": "who changed what; verify checks that no entry was altered",
    "apply": "makes teams, keys, limits and budgets as a file declares them",
    "login": "signs in, by browser or by a code, and keeps the key for later commands",
    "logout": "ends that, and removes the key",
}
"""Commands over the admin API of a gateway -> what each does."""

OF_OTHERS = {
    **dict.fromkeys(("serve", "start", "server", "launch"), "up"),
    **dict.fromkeys(("list", "ls"), "models list"),
    **dict.fromkeys(("load", "generate"), "run"),
    **dict.fromkeys(("unload", "kill", "shutdown"), "stop"),
    **dict.fromkeys(("download", "fetch"), "pull"),
    **dict.fromkeys(("rm", "remove"), "models rm"),
    "show": "models show",
    "benchmark": "bench",
    **dict.fromkeys(("version", "-v"), "--version"),
}
"""Command of other programs -> our command for the same."""


def main() -> int:
    """Run the command that the arguments name, and return the process's exit code (`workers.protocol.exits`)."""
    return command.guarded(_main)


def _main() -> int:
    parent_death.hold()
    name, *args = sys.argv[1:] or ["--help"]
    if name == "help" and args:  # as `paddock COMMAND --help`
        name, args = args[0], ["--help"]
    if name in ("-h", "--help", "help"):
        print(overview())
        return 0
    if name in ("-V", "--version"):
        print(f"paddock {__version__}")
        return 0
    if name == "pull":  # as `paddock models pull`
        name, args = "models", ["pull", *args]
    if name == "config":
        return int(loaded("gateway.commands.config").main(args))
    if name == "models":
        known = loaded("gateway.settings").known_settings()
        return int(loaded(workers_cli.MODELS_MODULE).main(args, known))
    if name == "cache":
        known = loaded("gateway.settings").known_settings()
        return int(loaded(workers_cli.CACHE_MODULE).main(args, known))
    if name == "drain":
        settings, drain = loaded("gateway.settings"), loaded(workers_cli.DRAIN_MODULE)
        parts = {"gateway": settings.GatewaySettings, **drain.PARTS}
        return int(drain.main(args, settings.known_settings(), parts))
    if name in ADMIN:
        known = loaded("gateway.settings").known_settings()
        return int(loaded("gateway.commands.accounts.command").main(name, args, known, ADMIN))
    if name == "completion":
        return int(loaded("gateway.commands.completion").main(args, dict(rows())))
    if name == "import":
        return int(loaded("gateway.commands.imports.command").main(args))
    if name == "redis":
        return int(loaded("gateway.commands.redis_acl").main(args))
    if name == "bench":
        known = loaded("gateway.settings").known_settings()
        return int(loaded("gateway.bench.command").main(args, known))
    if name == "logs":
        known = loaded("gateway.settings").known_settings()
        return int(loaded(workers_cli.LOGS_MODULE).main(args, known))
    if name == "run":
        known = loaded("gateway.settings").known_settings()
        return int(loaded("gateway.commands.chat").run(args, known))
    if name == "chat":
        known = loaded("gateway.settings").known_settings()
        return int(loaded("gateway.commands.chat").main(args, known))
    if name not in COMMANDS:
        nearest = loaded("workers.sources").nearest
        meant = f" (did you mean {OF_OTHERS[name]}?)" if name in OF_OTHERS else nearest(name, dict(rows()))
        return command.complain([f"{name}: no such command{meant}; `paddock --help` lists them"])
    known = loaded("gateway.settings").known_settings()
    return command.run(name, COMMANDS[name], args, known)


def rows() -> list[tuple[str, str]]:
    """Return every command, and what it does."""
    return [
        *((name, entry.summary) for name, entry in COMMANDS.items()),
        ("bench", BENCH),
        ("cache", workers_cli.CACHE),
        ("chat", CHAT),
        ("completion", COMPLETION),
        ("config", CONFIG),
        ("drain", workers_cli.DRAIN),
        ("import", IMPORT),
        ("logs", workers_cli.LOGS),
        ("models", workers_cli.MODELS),
        ("pull", PULL),
        ("redis", REDIS),
        ("run", RUN),
        *ADMIN.items(),
    ]


def overview() -> str:
    told = [f"  {name.ljust(14)}{summary}" for name, summary in rows()]
    processes, admin = told[: -len(ADMIN)], told[-len(ADMIN) :]
    return "\n".join(
        [
            "usage: paddock COMMAND [flags]",
            "",
            *processes,
            "",
            "over the admin API of a gateway, which may be anywhere:",
            *admin,
            "",
            "`paddock COMMAND --help` lists the flags of a command; `paddock --version` tells the version.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
