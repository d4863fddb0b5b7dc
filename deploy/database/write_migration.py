"""Writes the migration that takes the accounts database from its last migration to `accounts/database/schema.py`.

    python deploy/database/write_migration.py NUMBER TITLE          such as: 0002 "Add the region of a team"
    python deploy/database/write_migration.py --first               writes the first one anew; only before a release

Read what it wrote: a renamed column is one dropped and one added to it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from pathlib import Path

from alembic import command

from accounts.database.database import open_database
from accounts.database.upgrade import FOLDER, configuration

FIRST = ("0001", "Make all tables.")


def main(args: list[str]) -> int:
    """Write the migration and return the exit code."""
    versions = FOLDER / "versions"
    number, title = FIRST if args == ["--first"] else args
    if args == ["--first"]:
        for file in versions.glob("step_*.py"):
            file.unlink()
    with tempfile.TemporaryDirectory() as folder:
        database = open_database("", Path(folder))
        with database.transaction() as connection:
            config = configuration(connection)
            config.set_main_option("file_template", "step_%%(rev)s")
            command.upgrade(config, "head")
            command.revision(config, title, autogenerate=True, rev_id=number)
        database.close()
    file = versions / f"step_{number}.py"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(by_tables("".join(line for line in lines if "# ###" not in line)))
    subprocess.run([sys.executable, "-m", "ruff", "format", "-q", str(file)], check=True)
    subprocess.run([sys.executable, "-m", "ruff", "check", "-q", "--fix", str(file)], check=True)
    print(f"wrote {file}")
    return 0


def by_tables(source: str) -> str:
    """Return a migration whose `upgrade` calls one function per table, and one for its indexes, if it changes several
    tables."""
    upgrade = next(one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef) and one.name == "upgrade")
    lines = source.splitlines(keepends=True)
    steps: dict[str, list[str]] = {}
    for statement in upgrade.body[1:]:
        table = _table_of(statement)
        if table is None:
            return source
        steps.setdefault(table, []).extend(lines[statement.lineno - 1 : statement.end_lineno])
    if len(steps) < 2:
        return source
    first, last = upgrade.body[1].lineno - 1, upgrade.body[-1].end_lineno
    calls = [f"    _upgrade_{table}()\n" for table in steps]
    functions = [f"\n\ndef _upgrade_{table}() -> None:\n{''.join(step)}" for table, step in steps.items()]
    return "".join([*lines[:first], *calls, *lines[last:], *functions])


def _table_of(statement: ast.stmt) -> str | None:
    """Return the table that a statement `op.create_table("users", ...)` changes, `users_indexes` for its indexes; None:
    the statement is of another form."""
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(attr="create_index" | "drop_index"), [_, ast.Constant(str(table)), *_])):
            return f"{table}_indexes"
        case ast.Expr(ast.Call(ast.Attribute(), [ast.Constant(str(table)), *_])):
            return table
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
