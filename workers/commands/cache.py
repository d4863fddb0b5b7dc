"""`paddock cache`: shows and erases the cached prompts that workers keep on disk.

show [--tenant TEAM] [--json] [flags]   files and bytes by model version and team; a team is shown by the name of its
                                        folder, a hash, unless you name it here
erase --tenant TEAM [flags]             delete a team's files of every version, and its saved slots
erase --all [flags]                     delete the files of all teams

Running workers keep what is in their memory, and may write it to disk again: stop them first, or erase again later.
These flags are settings, too: --cache-dir, --slot-save-dir, --cache-secret, --state-dir, --config.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from workers import secret_file, sources
from workers.commands import command
from workers.engine.disk.folder import CacheFolder, CacheFolderUnusable
from workers.engine.disk.sealed import CacheKeys
from workers.protocol.exits import Exit
from workers.settings import CacheSettings

FORMS = "use `cache show [--tenant TEAM] [--json]` or `cache erase --tenant TEAM|--all`"


class _Unusable(ValueError):
    """Raised if the command can't do what it was asked for; the message tells the user why."""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Unusable(f"cache: {message}; {FORMS}")


def main(args: Sequence[str], known: Collection[str] = ()) -> int:
    """Run the command and return its exit code. `known`: names of all settings."""
    name, *rest = args or ["--help"]
    if not {"-h", "--help"}.isdisjoint((name, *rest)):
        print((__doc__ or "").strip())
        return 0
    try:
        if name not in ("show", "erase"):
            raise _Unusable(f"cache {name}: no such command; {FORMS}")
        options, flags = make_parser(name).parse_known_args(rest)
        reading = sources.read(CacheSettings, flags, prog=f"paddock cache {name}", known=known)
        for warning in reading.warnings:
            print(f"paddock: warning: {warning}", file=sys.stderr)
        return _show(reading.settings, options) if name == "show" else _erase(reading.settings, options)
    except sources.SettingsError as error:
        return command.complain(error.problems)
    except (_Unusable, CacheFolderUnusable) as error:
        return command.complain([str(error)])
    except OSError as error:
        print(f"paddock: {error.filename or 'cache_dir'}: {error.strerror}", file=sys.stderr)
        return int(Exit.CRASHED)


def make_parser(name: str) -> ArgumentParser:
    """Return the parser of the flags of `show` or `erase` that are no settings."""
    parser = _Parser(prog=f"paddock cache {name}", allow_abbrev=False, add_help=False)
    if name == "show":
        parser.add_argument("--tenant")
        parser.add_argument("--json", action="store_true")
    else:
        which = parser.add_mutually_exclusive_group(required=True)
        which.add_argument("--tenant")
        which.add_argument("--all", action="store_true")
    return parser


def _show(settings: CacheSettings, options: Namespace) -> int:
    named = _keys(settings).tenant_folder(options.tenant) if options.tenant is not None else None
    rows = [row for row in _rows(settings) if named in (None, row["tenant"])]
    num_bytes, num_files = sum(int(row["bytes"]) for row in rows), sum(int(row["files"]) for row in rows)
    if options.json:
        print(json.dumps({"bytes": num_bytes, "files": num_files, "folders": rows}, indent=2))
        return 0
    for row in rows:
        what = f"version {row['version']}" if row["version"] else "saved slots".ljust(24)
        team = f"team {options.tenant}" if named else f"team {row['tenant']}"
        print(f"{what}  {team}  {row['files']:>8,} files  {_size(int(row['bytes']))}")
    print(f"{num_files:,} files, {_size(num_bytes)}; cache_disk_mib is {settings.cache_disk_mib:,}")
    return 0


def _erase(settings: CacheSettings, options: Namespace) -> int:
    _check_folders(settings)
    team = None if options.all else _keys(settings).tenant_folder(options.tenant)
    count = 0
    with _opened(settings.cache_dir) as folder:
        if folder is not None:
            count += folder.erase_all() if team is None else folder.erase(team)
    with _opened(settings.slot_save_dir) as folder:
        if folder is not None:
            count += sum(folder.erase_folder(name) for name in (folder.versions() if team is None else [team]))
    print(f"{count:,} files erased")
    return 0


def _rows(settings: CacheSettings) -> Iterator[dict[str, str | int]]:
    """Yield a row with the number of files and bytes for each version and team; saved slots have no version."""
    _check_folders(settings)
    with _opened(settings.cache_dir) as folder:
        sums: dict[tuple[str, str], list[int]] = {}
        for leaf in folder.leaves() if folder else ():
            row = sums.setdefault((leaf.version, leaf.tenant), [0, 0])
            for entry in folder.entries(leaf) if folder else ():
                row[0] += 1
                row[1] += entry.size
    for (version, tenant), (num_files, num_bytes) in sorted(sums.items()):
        yield {"version": version, "tenant": tenant, "files": num_files, "bytes": num_bytes}
    with _opened(settings.slot_save_dir) as folder:
        for tenant in folder.versions() if folder else ():
            sizes = list(folder.files(tenant).values()) if folder else []
            yield {"version": "", "tenant": tenant, "files": len(sizes), "bytes": sum(sizes)}


def _check_folders(settings: CacheSettings) -> None:
    if settings.cache_dir is None and settings.slot_save_dir is None:
        raise _Unusable("cache_dir is unset: name the folder with --cache-dir")


@contextmanager
def _opened(path: Path | None) -> Iterator[CacheFolder | None]:
    """Yield the opened folder; None if `path` is None, or missing: it is not created. Raises CacheFolderUnusable."""
    if path is None or not (path.is_dir() or path.is_symlink()):
        yield None
        return
    folder = CacheFolder(path)
    try:
        yield folder
    finally:
        folder.close()


def _keys(settings: CacheSettings) -> CacheKeys:
    """Return the keys from which teams' folder names are derived. Raises _Unusable if the cache secret is not known."""
    secret = settings.cache_secret or secret_file.read(settings.state_dir / secret_file.CACHE_SECRET)
    if not secret:
        raise _Unusable(
            "cache_secret is unset, and there is none in the state folder: a team's files can't be told without; give "
            "PADDOCK_CACHE_SECRET, or the --state-dir of the workers"
        )
    return CacheKeys(secret)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
