"""Keeps what workers really took, in a file of the state folder, and corrects later predictions of the same worker.

A prediction that is too low may cost a running process, one that is too high only room. So the largest of all readings
counts, a correction may double a prediction, and lowers it by little: a worker whose conversations were short has not
touched all the memory that it may use.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from workers.footprint.footprint import Footprint, Share
from workers.models.files import parts, replace_file
from workers.models.spec import NO_PROJECTOR, ModelSpec

logger = logging.getLogger(__name__)

FILE = "footprints.json"
"""Name of the file in the state folder."""

SWAPPED_SHARE = 0.05
"""A worker with more than this share of its memory in swap tells nothing: pages of its files have left as well."""

MOST_TIMES = 4
"""A reading of more than so many times what was predicted, with all that may come later, is not believed."""

MOST_KEPT = 512
"""Maximum workers that are remembered; the one that was read longest ago is forgotten."""

MOST_BYTES = 1 << 20
"""Maximum size of the file; a larger one is damaged."""

LEAST_FACTOR, MOST_FACTOR = 0.95, 2.0
"""How far a correction may take a prediction."""

_NOT_OF_MEMORY = ("name", "path", "workers", "gpus", "tags", "price", "sampling", "tool_family", "open_objects")
"""Fields of a spec that change nothing of what a worker takes, or are in its key in another form."""


class Reading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The most that a worker was seen to take, beside what was predicted for it then."""

    host: int
    gpus: tuple[int, ...] = ()
    predicted_host: int
    predicted_gpus: tuple[int, ...] = ()


def key_of(spec: ModelSpec, build: str) -> str:
    """Return the key of a worker: a hash of its model's files and of the settings that decide what it takes. `build`:
    the versions of what runs it. Raises OSError if a file is not there."""
    plain = {name: getattr(spec, name) for name in spec.__struct_fields__ if name not in _NOT_OF_MEMORY}
    plain["adapters"] = [msgspec.structs.replace(adapter, price=None) for adapter in spec.adapters]
    digest = hashlib.sha256(msgspec.json.encode((build, plain), order="deterministic"))
    digest.update(stamp_of(spec).encode())
    return digest.hexdigest()


def stamp_of(spec: ModelSpec) -> str:
    """Return a text that is another one once a file of the model's has changed. Raises OSError if one is not there."""
    told = ((file.resolve(), file.stat()) for file in files_of(spec))
    return "".join(f"{place} {status.st_size} {status.st_mtime_ns}\n" for place, status in told)


def files_of(spec: ModelSpec) -> Iterator[Path]:
    """Yield the files that a worker of this model reads into memory."""
    yield from parts(Path(spec.path or ""))
    if spec.projector not in ("", NO_PROJECTOR):
        yield Path(spec.projector)
    if spec.speculation.draft is not None and spec.speculation.draft.path:
        yield from parts(Path(spec.speculation.draft.path))
    for adapter in spec.adapters:
        if adapter.path:
            yield Path(adapter.path).expanduser()


def believed(taken: int, swapped: int, predicted: Footprint, *, has_served: bool) -> int | None:
    """Return the bytes of main memory to learn from a reading of one worker; None: it tells nothing.

    `has_served`: whether it has had calls. Before that it has not touched all that it may, so only more than was
    predicted tells something. Later it has cached as well, which is predicted by itself (`Footprint.growth`), and is
    left out as far as it goes."""
    if swapped > SWAPPED_SHARE * taken or taken > MOST_TIMES * (predicted.host.total + predicted.growth):
        return None
    if not has_served:
        return taken if taken > predicted.host.total else None
    return taken - min(predicted.growth, max(0, taken - predicted.host.total))


class Learned:
    """The readings of one machine. A file that is missing or damaged counts as one without readings; if two processes
    write at once, one reading is lost."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def reading(self, key: str) -> Reading | None:
        """Return what is known of the workers of a key; None: none was read."""
        return self._readings().get(key)

    def corrected(self, key: str, footprint: Footprint) -> Footprint:
        """Return the footprint as the worker's readings correct it; as it is where there are none."""
        known = self._readings().get(key)
        if known is None or len(known.gpus) != len(footprint.gpus):
            return footprint
        gpus = zip(footprint.gpus, known.gpus, known.predicted_gpus, strict=True)
        return replace(
            footprint,
            host=_corrected(footprint.host, known.host - known.predicted_host),
            gpus=tuple(_corrected(share, taken - told) for share, taken, told in gpus),
        )

    def record(self, key: str, predicted: Footprint, *, host: int, gpus: Sequence[int] = ()) -> None:
        """Keep what a worker takes now, unless more is known: call it when it has worked, and again as it works.
        `predicted`: its footprint without correction. Nothing is kept on a disk that can't be written."""
        if len(gpus) != len(predicted.gpus):
            return
        readings = self._readings()
        new = Reading(
            host=host,
            gpus=tuple(gpus),
            predicted_host=predicted.host.total,
            predicted_gpus=tuple(share.total for share in predicted.gpus),
        )
        known = readings.pop(key, None)
        if known is not None and len(known.gpus) == len(new.gpus):
            new = _larger(known, new)
        kept = dict([*readings.items()][1 - MOST_KEPT :])
        kept[key] = new
        if kept != readings | ({} if known is None else {key: known}):
            self._write(kept)

    def _readings(self) -> dict[str, Reading]:
        try:
            if self._file.stat().st_size > MOST_BYTES:
                raise ValueError(f"larger than {MOST_BYTES:,} bytes")
            found = msgspec.json.decode(self._file.read_bytes(), type=dict[str, Reading])
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:  # msgspec's own, and UnicodeDecodeError
            logger.warning("%s: what workers took is not known (%s); it is learned anew", self._file, error)
            return {}
        return {key: one for key, one in found.items() if len(one.gpus) == len(one.predicted_gpus)}

    def _write(self, readings: dict[str, Reading]) -> None:
        try:
            replace_file(self._file, msgspec.json.encode(readings))
        except OSError as error:
            logger.warning("%s: what a worker took is not kept: %s", self._file, error.strerror)


def _larger(known: Reading, new: Reading) -> Reading:
    """Return the reading that is further above its prediction, for main memory and each GPU by itself."""
    is_host_new = new.host - new.predicted_host >= known.host - known.predicted_host
    host = new if is_host_new else known
    told = zip(known.gpus, known.predicted_gpus, new.gpus, new.predicted_gpus, strict=True)
    pairs = [max((old, before), (now, then), key=lambda pair: pair[0] - pair[1]) for old, before, now, then in told]
    return Reading(
        host=host.host,
        predicted_host=host.predicted_host,
        gpus=tuple(taken for taken, _ in pairs),
        predicted_gpus=tuple(predicted for _, predicted in pairs),
    )


def _corrected(share: Share, by: int) -> Share:
    """Return a share that is larger by so many bytes, within the bounds. All of them count as `other`."""
    least, most = int(share.total * LEAST_FACTOR), int(share.total * MOST_FACTOR)
    wanted = min(max(share.total + by, least), most)
    return replace(share, other=max(0, share.other + wanted - share.total))
