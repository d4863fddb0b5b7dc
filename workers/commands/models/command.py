"""`paddock models`: what lies in the models folder, and what the catalog names.

list [--json]                      models, projectors, drafts and adapters: size, quantisation, who uses them
pull [NAME|REFERENCE ...]          fetch what the catalog or --hf names, or only these; prints each name and its file
plan [--json]                      what the catalog's workers would take of this machine's memory, before they run
show NAME|REFERENCE|FILE [--json]  what a GGUF file says of itself
verify [NAME|REFERENCE ...]        compare files with their SHA-256 and check their structure
rm NAME|REFERENCE ... [--force]    remove files and free their space; --unfinished removes broken-off downloads

A REFERENCE is OWNER/NAME[:QUANT][@REVISION] of the Hugging Face hub, a NAME that of a model in the catalog. The flags
--catalog, --models-dir, --models-mib, --offline, --state-dir, --config and all others of `paddock supervisor` are
settings, and have variables (PADDOCK_MODELS_DIR). Exit codes: 65 a model can't be had, 3 one is not what it should be,
71 `plan` finds too little memory.
"""

from __future__ import annotations

import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Collection, Mapping, Sequence

from workers import sources
from workers.commands import command
from workers.commands.models.parser import Parser, Request, Run, Subcommand, Unusable, add_settings, given, make_parser
from workers.models.catalog import CatalogError
from workers.models.library import Library, ModelUnusable
from workers.protocol.exits import Exit
from workers.settings import SupervisorSettings

ROOM = "workers.commands.models"


def _add_names(parser: ArgumentParser, told: str) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME|REFERENCE", help=told)


def _add_json(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_for_pull(parser: ArgumentParser) -> None:
    _add_names(parser, "left out: all that the settings name")


def _add_for_show(parser: ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME|REFERENCE|FILE", help="as `paddock models list` names it, or any file")
    _add_json(parser)


def _add_for_verify(parser: ArgumentParser) -> None:
    _add_names(parser, "left out: all that `paddock models list` lists")
    _add_json(parser)


def _add_for_rm(parser: ArgumentParser) -> None:
    _add_names(parser, "as `paddock models list` names them")
    parser.add_argument("--force", action="store_true", help="also what the catalog or a running fleet uses")
    parser.add_argument("--unfinished", action="store_true", help="what has come of downloads that were broken off")


COMMANDS: Mapping[str, Subcommand] = {
    "list": Subcommand("lists what lies in the models folder and what the catalog names", _add_json, f"{ROOM}.listing"),
    "pull": Subcommand("fetches models and prints their paths", _add_for_pull, f"{ROOM}.pull"),
    "plan": Subcommand("tells what the catalog's workers would take of this machine", _add_json, f"{ROOM}.plan"),
    "show": Subcommand("tells what a GGUF file says of itself", _add_for_show, f"{ROOM}.show"),
    "verify": Subcommand(
        "compares files with their SHA-256 and checks their structure", _add_for_verify, f"{ROOM}.verification"
    ),
    "rm": Subcommand("removes files and frees their space", _add_for_rm, f"{ROOM}.removal"),
}


def main(args: Sequence[str], known: Collection[str] = ()) -> int:
    """Run the command and return the exit code. `known`: names of all settings."""
    name, *rest = args or ["--help"]
    if name in ("-h", "--help", "help"):
        print((__doc__ or "").strip())
        return int(Exit.OK)
    try:
        if name not in COMMANDS:
            hint = sources.nearest(name, COMMANDS)
            raise Unusable(f"models {name}: no such command{hint}; use one of: {', '.join(COMMANDS)}")
        return int(_run(name, rest, known))
    except sources.SettingsError as error:
        return command.complain(error.problems)
    except (Unusable, CatalogError) as error:
        return command.complain([str(error)])
    except ModelUnusable as error:
        print(f"paddock: {error}", file=sys.stderr)
        return int(error.exit)
    except OSError as error:
        return command.complain([f"models_dir: {error.filename}: {error.strerror}; name a folder with --models-dir"])


def _run(name: str, args: Sequence[str], known: Collection[str]) -> Exit:
    """Run one command and return the exit code.

    Raises SettingsError, Unusable, CatalogError, ModelUnusable, OSError."""
    subcommand = COMMANDS[name]
    parser: Parser = make_parser(name, subcommand)
    add_settings(parser)
    options, left = parser.parse_known_args(args)
    if options.help:
        parser.print_help()
        return Exit.OK
    parser.refuse_unknown(left)
    command.end_at_sigterm()
    reading = sources.read(SupervisorSettings, given(options), prog=parser.prog, known=known)
    for warning in reading.warnings:
        print(f"paddock: warning: {warning}", file=sys.stderr)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    run: Run = command.named(f"{subcommand.module}:run")
    return run(Request(options, reading.settings, Library.of(reading.settings), width))
