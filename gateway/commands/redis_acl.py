"""`paddock redis acl`: prints the commands that create the users of gateways, supervisors and workers in your Redis.

acl                  commands for redis-cli; replace GATEWAY_PASSWORD, SUPERVISOR_PASSWORD and WORKER_PASSWORD in them
                     by your passwords
acl --format config  lines for redis.conf or an ACL file; the passwords are read from the environment variables
                     REDIS_GATEWAY_PASSWORD, REDIS_SUPERVISOR_PASSWORD and REDIS_WORKER_PASSWORD, and only their
                     SHA-256 is printed

Exit codes: 0 printed, 2 an argument is wrong or a variable is unset. See docs/redis.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from workers.commands import command
from workers.protocol.keys import ROLES, Role, rules_of, user_line, user_of


def main(args: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Run the command and return the exit code."""
    if not {"-h", "--help"}.isdisjoint(args):
        print((__doc__ or "").strip())
        return 0
    match list(args):
        case ["acl"] | ["acl", "--format", "commands"]:
            lines = [
                f"ACL SETUSER {user_of(role)} reset on >{role.upper()}_PASSWORD {rules_of(role)}" for role in ROLES
            ]
        case ["acl", "--format", "config"]:
            passwords = {role: environment.get(_variable(role), "") for role in ROLES}
            if unset := [_variable(role) for role in ROLES if not passwords[role]]:
                return command.complain([f"redis: {unset[0]} is unset; it holds the password of a user"])
            lines = [user_line(role, passwords[role]) for role in ROLES]
        case _:
            return command.complain(["redis: what is known is `paddock redis acl`; `paddock redis --help` tells more"])
    print("\n".join(lines))
    return 0


def _variable(role: Role) -> str:
    return f"REDIS_{role.upper()}_PASSWORD"
