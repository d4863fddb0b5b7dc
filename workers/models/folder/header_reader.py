"""Reads the headers of GGUF files in a process of its own: one answer per line for the paths on standard input.

A file that is made shorter while it is read ends this process, and not the one that asks. Source of the keys:
docs/gguf.md of ggml; gguf-py/gguf/constants.py and tools/{export-lora,cvector-generator,imatrix} of llama.cpp.
"""

from __future__ import annotations

import sys
from pathlib import Path

from workers.llama.gguf import GgufHeader, read_header
from workers.llama.native import ModelError
from workers.models.folder.contents import HeaderFacts, Kind, encode_facts
from workers.process import parent_death


def facts_of(path: Path) -> HeaderFacts:
    """Return what a file is."""
    try:
        return HeaderFacts(kind=_kind(read_header(path)))
    except ModelError as error:
        return HeaderFacts(fault=str(error).removeprefix(f"{path}: "))


def _kind(header: GgufHeader) -> Kind:
    architecture, kind = header.text("general.architecture"), header.text("general.type")
    if architecture == "clip" or kind == "mmproj":
        return "projector"
    if kind == "adapter":
        return "adapter"
    if architecture == "controlvector":
        return "control vector"
    if kind == "imatrix":
        return "importance matrix"
    return "model" if header.tensors else "vocabulary"


def main() -> int:
    parent_death.hold()
    for line in sys.stdin:
        sys.stdout.buffer.write(encode_facts(facts_of(Path(line.removesuffix("\n")))) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
