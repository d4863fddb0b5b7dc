"""Writes the users of `workers/protocol/keys.py` into compose and the chart; --check says what is out of date.

python deploy/write_redis_users.py [--check]
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from workers.protocol.keys import Role, rules_of, user_of  # noqa: E402 - found beside this folder

FILES: dict[Path, tuple[Role, ...]] = {
    ROOT / "docker-compose.yml": ("gateway", "worker", "supervisor"),
    # The chart has no supervisors: each worker is a container of its own.
    ROOT / "helm" / "templates" / "redis" / "redis.yaml": ("gateway", "worker"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="write_redis_users.py", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file is out of date")
    check = parser.parse_args().check
    stale = [file for file, roles in FILES.items() if file.read_text() != _with_users(file.read_text(), roles)]
    for file in stale:
        print(f"{file.name} {'is out of date' if check else 'written'}")
        if not check:
            file.write_text(_with_users(file.read_text(), FILES[file]))
    return 1 if check and stale else 0


def _with_users(text: str, roles: tuple[Role, ...]) -> str:
    for role in roles:
        line = rf"^( *user {user_of(role)} on >\$+REDIS_{role.upper()}_PASSWORD) .*$"
        rules = rules_of(role).replace("\\", r"\\")
        text, found = re.subn(line, rf"\1 {rules}", text, flags=re.MULTILINE)
        if found != 1:
            raise SystemExit(f"the line of the user {user_of(role)} is not there once")
    return text


if __name__ == "__main__":
    sys.exit(main())
