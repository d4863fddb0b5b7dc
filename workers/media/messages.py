"""Messages between a worker and its helper processes that decode media: lines of JSON, each followed by as many bytes
as it says. The worker imports this and none of the libraries that decode."""

from __future__ import annotations

from typing import Literal

import msgspec

from workers.media.bounds import MediaLimits

Kind = Literal["picture", "sound"]


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The first line to a process."""

    limits: MediaLimits
    sample_rate: int | None
    """The rate that sounds are wanted at; None: the model hears nothing, and no sound is asked for."""
    sees: bool
    cpu_s: int
    """Maximum seconds of processor time for one medium; then the kernel ends the process."""


class Question(msgspec.Struct, frozen=True):
    """A medium to decode; the file's `num_bytes` follow the line."""

    kind: Kind
    num_bytes: int


class Pixels(msgspec.Struct, frozen=True, tag=True):
    """A decoded picture; height x width x 3 bytes follow the line."""

    width: int
    height: int


class Samples(msgspec.Struct, frozen=True, tag=True):
    """A decoded sound; as many float32 follow the line, in this machine's byte order."""

    number: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A medium that can't be decoded; nothing follows the line."""

    message: str
    """What is wrong with the medium, and the remedy, for the caller."""


Answer = Pixels | Samples | Refused


class Undecodable(Exception):
    """A medium can't be decoded. The message is one line for the caller: what is wrong with it, the remedy."""
