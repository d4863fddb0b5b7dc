"""Asks llama.cpp and libmtmd for the bytes that they take, or would take, by type of buffer or by device.

Both answer with a C++ `std::map`, whose layout is that of libstdc++: a red-black tree whose nodes hold four pointers'
worth of links before key and value. The functions have no C form (llama-ext.h, mtmd.h), so a build that names or lays
them out otherwise is refused here, and a test reads known sizes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as c
from llama_cpp import mtmd_cpp as m

from workers.llama.native import ModelError

_OF_CONTEXT = "_Z26llama_get_memory_breakdownPK13llama_context"
_OF_PROJECTOR = "_Z21mtmd_get_memory_usagePKc19mtmd_context_params"

_Word = ctypes.c_size_t


class _Map(ctypes.Structure):
    """`std::map` of libstdc++: an object to compare with, the tree's header, and the number of nodes."""

    _fields_ = (
        ("compare", _Word),
        ("color", _Word),
        ("root", _Word),
        ("left", _Word),
        ("right", _Word),
        ("count", _Word),
    )


@dataclass(frozen=True, slots=True)
class BufferBytes:
    """Bytes of one type of buffer."""

    weights: int
    cells: int
    compute: int


def context_bytes(context: int) -> Mapping[str, BufferBytes]:
    """Return what a `llama_context *` and its model take, by the name of the type of buffer. Exact for a model that was
    loaded without memory, too. Raises ModelError where this build of llama.cpp can't be asked."""
    name_of = c._lib.ggml_backend_buft_name
    name_of.restype, name_of.argtypes = ctypes.c_char_p, (ctypes.c_void_p,)
    ask = _function(c._lib, _OF_CONTEXT, ctypes.c_void_p)
    return {
        name_of(key).decode("utf-8", "replace"): BufferBytes(*sizes) for key, *sizes in _entries(ask(context), width=3)
    }


def projector_bytes(path: Path, params: Any) -> int:
    """Return what the projector of a file takes with `mtmd_context_params`, on all devices together, without loading
    it. Raises ModelError where this build of libmtmd can't be asked, or can't read the file."""
    ask = _function(m._libmtmd, _OF_PROJECTOR, ctypes.c_char_p, m.mtmd_context_params)
    return sum(size for _, size in _entries(ask(os.fsencode(path), params), width=1))


def _function(library: Any, name: str, *arguments: Any) -> Callable[..., _Map]:
    try:
        function = getattr(library, name)
    except AttributeError:
        raise ModelError(
            f"this build of llama.cpp has no {name}, so the memory of a worker can't be predicted; install the version "
            "that pyproject.toml names"
        ) from None
    # A structure of this size is returned as a map is: in memory whose address the caller passes.
    function.restype, function.argtypes = _Map, arguments
    return function  # type: ignore[no-any-return]


def _entries(found: _Map, *, width: int) -> Iterator[list[int]]:
    """Yield key and `width` values of each node. The nodes are not freed: a helper process asks once or twice."""
    links, waiting, count = 4, [found.root], 0
    while waiting:
        if not (address := waiting.pop()):
            continue
        count += 1
        if count > found.count:
            break
        words = (_Word * (links + 1 + width)).from_address(address)
        waiting += (words[2], words[3])
        yield list(words[links:])
    if count != found.count:
        raise ModelError(
            "this build of llama.cpp lays its tables of memory out in another way, so the memory of a worker can't be "
            "predicted; install the version that pyproject.toml names"
        )
