"""`paddock import FILE`: makes a catalog of a configuration file of llama-swap or LiteLLM.

    paddock import llama-swap.yaml -o models.yaml --access access.yaml
    paddock import litellm.yaml --source small=ggml-org/gemma-3-1b-it-GGUF:Q8_0 > models.yaml

-o, --output FILE          write the catalog there; left out: to standard output
--access FILE              write limits and keys there, for `paddock apply -f FILE`
--from llama-swap|litellm  whose file it is; left out: as its contents tell
--source NAME=SOURCE       GGUF file or OWNER/NAME[:QUANT] of the hub for a model, in place of what the file says
--force                    write over files that are there

What has no counterpart is told on standard error, with its line, and as comments in the catalog. Values of
`${env.NAME}` are those of this environment.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from gateway.commands.imports.catalog import Imported, access_text, catalog_text, checked
from gateway.commands.imports.litellm import import_litellm
from gateway.commands.imports.llama_swap import import_llama_swap
from gateway.commands.imports.source import Source, Unusable, read
from workers.commands import command
from workers.protocol.exits import Exit

LLAMA_SWAP, LITELLM = "llama-swap", "litellm"
MARKS = {"models": LLAMA_SWAP, "model_list": LITELLM}
"""Section of a file -> whose file it is."""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Unusable(f"import: {message}; `paddock import --help` tells how it is used")


def make_parser() -> ArgumentParser:
    """Return the parser of the command's flags."""
    parser = _Parser(prog="paddock import", allow_abbrev=False, add_help=False)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the catalog there")
    parser.add_argument("--access", type=Path, metavar="FILE", help="write limits and keys there")
    parser.add_argument("--from", dest="kind", choices=(LLAMA_SWAP, LITELLM), help="whose file it is")
    parser.add_argument("--source", action="append", default=[], metavar="NAME=SOURCE", help="weights of a model")
    parser.add_argument("--force", action="store_true", help="write over files that are there")
    return parser


def main(args: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    if not args or not {"-h", "--help"}.isdisjoint(args):
        print((__doc__ or "").strip())
        return int(Exit.OK)
    try:
        options = make_parser().parse_args(args)
        imported = _import(read(options.file), options)
        return _finish(imported, options)
    except Unusable as error:
        return command.complain([str(error)])
    except OSError as error:
        return command.complain([f"import: {error.filename}: {error.strerror}; name a file that you may write"])


def _finish(imported: Imported, options: Namespace) -> int:
    """Check and write the catalog, tell what it does not have, and return the exit code. Raises OSError."""
    try:
        checked(imported)
        _write(imported, options)
    except Unusable as error:
        _tell(imported, has_access_file=True)
        return command.complain([str(error)])
    _tell(imported, has_access_file=options.access is not None)
    return int(Exit.OK)


def _import(source: Source, options: Namespace) -> Imported:
    """Return the outcome of an import. Raises Unusable."""
    sources = {}
    for text in options.source:
        name, equals, weights = text.rpartition("=")
        if not equals or not name or not weights:
            raise Unusable(f"import: --source {text}: give NAME=FILE or NAME=OWNER/NAME[:QUANT]")
        sources[name] = weights
    kind = options.kind or next((kind for mark, kind in MARKS.items() if mark in source.document), "")
    if not kind:
        marks = " or ".join(f"`{mark}` ({kind})" for mark, kind in MARKS.items())
        raise Unusable(f"{source.path}: it has no {marks}; say whose file it is with --from")
    if kind == LLAMA_SWAP:
        return import_llama_swap(source, os.environ, sources)
    return import_litellm(source, sources)


def _write(imported: Imported, options: Namespace) -> None:
    """Write the catalog and the access file. Raises Unusable, OSError."""
    for path in (options.output, options.access):
        if path is not None and path.exists() and not options.force:
            raise Unusable(f"import: {path} is there already; name another file, or give --force")
    if options.access is not None and imported.access:
        options.access.write_text(access_text(imported), encoding="utf-8")
    if options.output is None:
        print(catalog_text(imported), end="")
    else:
        options.output.write_text(catalog_text(imported), encoding="utf-8")


def _tell(imported: Imported, *, has_access_file: bool) -> None:
    """Tell on standard error what the catalog does not have."""
    source = imported.source
    lines = [str(note) for note in sorted(source.notes, key=lambda note: note.line)]
    if source.unneeded:
        lines.append(f"not needed in Paddock: {', '.join(sorted(source.unneeded))}")
    if imported.access and not has_access_file:
        lines.append("limits and keys are left out; give --access FILE, and apply it with `paddock apply -f FILE`")
    for line in lines:
        print(f"paddock: {line}", file=sys.stderr)
