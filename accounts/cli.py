"""The accounts service's program: `python -m accounts.cli`, as `paddock accounts`."""

from __future__ import annotations

import sys

from workers.commands import command
from workers.commands.command import Command
from workers.process import parent_death

ACCOUNTS = Command(
    "accounts.settings:AccountsSettings",
    "accounts.lifecycle:run",
    "the service with the database: teams, keys, budgets, usage",
    "accounts",
)


def main() -> int:
    """Run the service and return its exit code."""
    return command.guarded(_main)


def _main() -> int:
    parent_death.hold()
    return command.run("accounts", ACCOUNTS, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
