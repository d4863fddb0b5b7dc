"""Predicts the memory that a worker of each model takes, beside everything else: a prediction takes about a second."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from workers.footprint.devices import HOST, DeviceState
from workers.footprint.footprint import Footprint, Share
from workers.footprint.learned import Learned, Reading, key_of, stamp_of
from workers.footprint.predict import Bounds, predict
from workers.footprint.prediction import Unpredictable, build_of, dry_run
from workers.footprint.rehearsal import DryRun
from workers.models.spec import ModelSpec
from workers.planner.messages import ToldMemory
from workers.protocol.residency import Detail, Why
from workers.residency.picture import Need
from workers.settings import SupervisorSettings
from workers.supervisor.child import Backoff
from workers.supervisor.loading.history import without_folders
from workers.supervisor.plan import is_served_alike

EXPECTED = 2
"""Number of models that share a machine's memory and cores, as far as settings depend on it, where the catalog's
`models_max` does not say one."""
AGAIN_S, AGAIN_LATEST_S = 5.0, 300.0
"""Seconds after which a prediction that failed is made again, and the most of them; each further time twice as many."""
MOST_RUNS = 64
"""Maximum number of dry runs that are kept; the one that was used longest ago is forgotten."""
ROOMY = 1 << 50
"""Bytes of an imagined GPU that any model fits: a prediction for it tells what the model takes undivided."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The memory that a worker of a model takes, and the settings with which it takes no more."""

    wanted: ModelSpec
    """The model's spec as the catalog has it."""
    spec: ModelSpec
    """The model's spec with as many KV cells as were counted, and its share of the cores."""
    need: Need
    footprint: Footprint
    """As predicted, without what was learned."""
    key: str
    """What is learned of such workers is kept by this key."""
    stamp: str = ""
    """The state of the model's files before they were read (`stamp_of`)."""
    expected: int = EXPECTED
    """How many models are taken to share the machine: cells and threads depend on it."""
    reading: Reading | None = None
    """The most that such a worker was seen to take; None: none was read."""


@dataclass(slots=True)
class Needs:
    """The predictions of one machine's models. Its method `run` makes them, those that are wanted first."""

    learned: Learned
    bounds: Bounds
    devices: Sequence[DeviceState]
    """The machine's memories before any worker ran."""
    cores: int
    expected: int = EXPECTED
    """How many models share the machine's memory and cores, as predictions are to take it."""
    found: dict[str, Prediction] = field(default_factory=dict)
    outdated: dict[str, Prediction] = field(default_factory=dict)
    """Model -> the prediction for the settings, or the files, that it had before. Its workers of then run on until the
    model can be loaded with its new ones."""
    refused: dict[str, Why] = field(default_factory=dict)
    """Model -> why its memory can't be predicted. It is not loaded. It is predicted again while it is wanted, since
    what was wrong may have passed: a file that was being copied, a process that could not be started."""
    retry_at: dict[str, float] = field(default_factory=dict)
    """Refused model -> the unix time from which it may be predicted again, for people."""
    _pauses: dict[str, Backoff] = field(default_factory=dict)
    """Refused model -> the pauses before it is predicted again."""
    _due_at: dict[str, float] = field(default_factory=dict)
    """Refused model -> when it may be predicted again, `time.monotonic` seconds."""
    _runs: dict[str, DryRun] = field(default_factory=dict)
    """Dry runs by all that they depend on. Models of one file may differ in names and prices only."""
    _specs: dict[str, ModelSpec] = field(default_factory=dict)
    _first: list[str] = field(default_factory=list)
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_gpu(self) -> bool:
        return any(device.kind == "gpu" for device in self.devices)

    def serve(self, models: Sequence[ModelSpec], models_max: int = 0) -> None:
        """Predict for these models from now on, of which at most so many (0: any number) are loaded at once. What was
        predicted for a spec that is as it was, beside as many others, is kept; for others it is `outdated`."""
        specs, was_expected = {model.name: model for model in models}, self.expected
        self.expected = models_max or EXPECTED
        for name in [
            name
            for name, spec in self._specs.items()
            if name not in specs or not is_served_alike(specs[name], spec) or was_expected != self.expected
        ]:
            if (prediction := self.found.pop(name, None)) is not None:
                self.outdated[name] = prediction
            self._forgive(name)
        self.outdated = {name: prediction for name, prediction in self.outdated.items() if name in specs}
        self._specs = specs
        self._more.set()

    def want(self, models: Collection[str]) -> None:
        """Predict for these models before others, and again for those of them that were refused."""
        self._first = [name for name in models if name not in self.found]
        if any(name in self.refused and self._is_due(name) for name in self._first):
            self._more.set()

    def holds(self, name: str) -> bool:
        """Return whether a model's files are those that its memory was predicted for. If they are not, forget the
        prediction, so that the model is not loaded before it is predicted anew: it may take any number of bytes now."""
        prediction = self.found.get(name)
        if prediction is None:
            return False
        try:
            is_same = stamp_of(prediction.spec) == prediction.stamp
        except OSError:  # which the next prediction tells
            is_same = False
        if not is_same:
            self.outdated[name] = self.found.pop(name)
            self._more.set()
        return is_same

    async def run(self, changed: asyncio.Event) -> None:
        """Predict until cancelled, and set `changed` after each prediction."""
        while True:
            self._more.clear()
            while (name := self._next()) is not None:
                spec = self._specs[name]
                try:
                    prediction = await asyncio.to_thread(self._predicted, spec)
                # RuntimeError: no thread could be started.
                except (Unpredictable, OSError, RuntimeError, MemoryError) as error:
                    if self._specs.get(name) is spec:
                        self._refuse(name, str(error) or "there is no memory for it")
                else:
                    if self._specs.get(name) is spec and prediction.expected == self.expected:
                        self._forgive(name)
                        self.found[name] = prediction
                        self.outdated.pop(name, None)
                changed.set()
            await self._more.wait()

    def _next(self) -> str | None:
        """Return the model to predict for next: one that is wanted, or else one that was not tried yet."""
        left = [name for name in self._specs if name not in self.found and name not in self.refused]
        again = (name for name in self._first if name in self.refused and self._is_due(name))
        wanted = next((name for name in self._first if name in left), None) or next(again, None)
        return wanted or (left[0] if left else None)

    def _is_due(self, name: str) -> bool:
        return name in self._specs and time.monotonic() >= self._due_at[name]

    def _refuse(self, name: str, error: str) -> None:
        why = Why.of("its memory can't be predicted", Detail(f": {without_folders(error)}"))
        pause_s = self._pauses.setdefault(name, Backoff(AGAIN_S, AGAIN_LATEST_S)).after(0.0)
        self.refused[name], self._due_at[name] = why, time.monotonic() + pause_s
        self.retry_at[name] = time.time() + pause_s

    def _forgive(self, name: str) -> None:
        for known in (self.refused, self.retry_at, self._pauses, self._due_at):
            known.pop(name, None)

    def _predicted(self, spec: ModelSpec) -> Prediction:
        """Return the prediction for a model. Blocks for about a second. Raises Unpredictable, OSError."""
        stamp, expected, wanted = stamp_of(spec), self.expected, spec
        llama = replace(spec.llama, n_threads=spec.llama.n_threads or max(1, self.cores // expected))
        spec = replace(spec, llama=llama)
        uses_gpu = self.has_gpu and spec.llama.uses_devices
        host = next((device.free for device in self.devices if device.id == HOST), None)
        run = self._dry_run(spec, None if uses_gpu else host, expected)
        footprint = predict(run, spec, bounds=self.bounds, gpus=[ROOMY] * spec.gpus if uses_gpu else ())
        if footprint.num_cells and not spec.kv_tokens and not uses_gpu:
            spec = replace(spec, kv_tokens=footprint.num_cells)
        key = key_of(spec, build_of())
        need = need_of(self.learned.corrected(key, footprint), spec)
        reading = self.learned.reading(key)
        return Prediction(wanted, spec, need, footprint, key, stamp, expected, reading)

    def _dry_run(self, spec: ModelSpec, free_bytes: int | None, workers: int) -> DryRun:
        """Return the dry run of a model: an earlier one, where that was of the same files and settings."""
        key = f"{key_of(spec, build_of())} {free_bytes} {workers}"
        run = self._runs.pop(key, None) or dry_run(spec, free_bytes=free_bytes, workers=workers)
        self._runs[key] = run
        if len(self._runs) > MOST_RUNS:
            self._runs.pop(next(iter(self._runs)))
        return run

    def correct(self, name: str) -> None:
        """Correct a model's prediction by what was learned since. Reads a small file."""
        prediction = self.found[name]
        footprint = self.learned.corrected(prediction.key, prediction.footprint)
        self.found[name] = dataclasses.replace(
            prediction, need=need_of(footprint, prediction.spec), reading=self.learned.reading(prediction.key)
        )


def bounds_of(settings: SupervisorSettings) -> Bounds:
    """Return the settings by which workers take more memory as they work."""
    return Bounds(
        cache_ram_bytes=settings.cache_ram_mib << 20,
        media_cache_bytes=settings.media_cache_mib << 20,
        max_adapters=settings.max_adapters,
        adapters_bytes=settings.adapters_mib << 20,
    )


def need_of(footprint: Footprint, spec: ModelSpec) -> Need:
    """Return a footprint in the form that residency is decided by. Memory that a worker takes only later counts."""
    host = footprint.host.total + footprint.growth
    weights = sum((share.weights for share in footprint.gpus), footprint.host.weights)
    if not footprint.gpus:
        return Need(cpu_bytes=host, num_gpus=spec.gpus, weight_bytes=weights)
    total = sum((share.weights + share.cells for share in footprint.gpus), start=0)
    return Need(
        gpu_bytes=total,
        bytes_per_gpu=max(_buffers(share) for share in footprint.gpus) + _layer(footprint, spec),
        host_bytes=host,
        num_gpus=spec.gpus,
        can_split=spec.llama.split_mode != "none",
        split=tuple(spec.llama.tensor_split),
        weight_bytes=weights,
    )


def memory_of(prediction: Prediction) -> ToldMemory:
    """Return a prediction in the form that people are told, beside what its workers were seen to take."""
    footprint, reading = prediction.footprint, prediction.reading
    parts = sum(footprint.gpus, start=footprint.host)
    return ToldMemory(
        weights=parts.weights,
        cells=parts.cells,
        compute=parts.compute,
        other=parts.other,
        host=footprint.host.total,
        gpus=tuple(share.total for share in footprint.gpus),
        growth=footprint.growth,
        taken_host=0 if reading is None else reading.host,
        taken_gpus=() if reading is None else reading.gpus,
    )


def _buffers(share: Share) -> int:
    return share.compute + share.other


def _layer(footprint: Footprint, spec: ModelSpec) -> int:
    """Return by how much one GPU's part may be larger than an even one: layers are not divided."""
    return 0 if spec.gpus == 1 else sum(share.weights + share.cells for share in footprint.gpus) // 32
