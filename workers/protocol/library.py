"""Describes, in Redis, what admins order of the models folders of machines, and what becomes of it.

A gateway writes an order (`LibraryOrder`), a field of `keys.LIBRARY_ORDERS`, which the machine's supervisor removes
when it has read it. A supervisor tells the answers, and how far its downloads are, in its field of `keys.LIBRARY`
(`MachineLibrary`), again and again while it runs: what is older than `LIFE_S` counts as gone. Times are unix seconds.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

LIFE_S = 15.0
"""Seconds after which what a supervisor has told counts no more."""
LOOK_EVERY_S = 0.5
"""Seconds between two readings of the orders, and at least between two writings while something is downloaded."""
KEPT_S = 60.0
"""Seconds for which answers, and downloads that have ended, are told."""
MAX_DOWNLOADS = 64
MAX_NAME = 512

Action = Literal["fetch", "remove"]
"""`fetch`: download a model of the hub; `remove`: stop its download, or else remove its files."""
DownloadStatus = Literal["downloading", "finished", "failed", "removed"]

Reference = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]


class LibraryOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order of an admin to one machine."""

    machine: str
    action: Action
    model: Reference
    """The model's reference: `OWNER/NAME[:QUANT][@REVISION]`."""
    at: float


class LibraryAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to one order."""

    at: float
    refusal: str = ""
    """Why nothing was done, in a sentence with its remedy; empty: it is done, or has begun."""
    is_missing: bool = False
    """Whether it was refused because the machine has no such model."""


class FileProgress(msgspec.Struct, frozen=True, array_like=True):
    """How much of a file has come, in bytes."""

    done: int
    total: int


class Download(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model that is being downloaded, was a moment ago, or whose files were removed a moment ago."""

    since: float
    status: DownloadStatus = "downloading"
    files: dict[str, FileProgress] = {}
    """Address of a file -> how much of it there is."""
    reason: str = ""
    """Why it failed."""


class MachineLibrary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The message of one machine's supervisor."""

    at: float
    downloads: Annotated[dict[str, Download], Meta(max_length=2 * MAX_DOWNLOADS)] = {}
    """Reference -> its download."""
    answers: dict[str, LibraryAnswer] = {}
    """Order -> the answer."""


encode = msgspec.json.Encoder().encode
decode_order = msgspec.json.Decoder(LibraryOrder).decode
decode_library = msgspec.json.Decoder(MachineLibrary).decode
