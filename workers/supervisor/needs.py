"""Predicts the memory that a worker of each model takes, beside everything else: a prediction takes about a second."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from workers.footprint.devices import HOST, DeviceState
from workers.footprint.footprint import Footprint, Share
from workers.footprint.learned import Learned, key_of
from workers.footprint.predict import Bounds, predict
from workers.footprint.prediction import Unpredictable, build_of, dry_run
from workers.models.spec import ModelSpec
from workers.residency.picture import Need
from workers.settings import SupervisorSettings
from workers.supervisor.plan import is_served_alike

EXPECTED = 2
"""Number of models that share a machine's memory and cores, as far as settings depend on it, where the catalog's
`models_max` does not say one."""
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


@dataclass(slots=True)
class Needs:
    """The predictions of one machine's models. Its method `run` makes them, those that are wanted first."""

    learned: Learned
    bounds: Bounds
    devices: Sequence[DeviceState]
    """The machine's memories before any worker ran."""
    cores: int
    models_max: int = 0
    found: dict[str, Prediction] = field(default_factory=dict)
    outdated: dict[str, Prediction] = field(default_factory=dict)
    """Model -> the prediction for the settings that it had before. Its workers of then run on until the model can be
    loaded with its new settings."""
    refused: dict[str, str] = field(default_factory=dict)
    """Model -> why its memory can't be predicted. It is not loaded."""
    _specs: dict[str, ModelSpec] = field(default_factory=dict)
    _first: list[str] = field(default_factory=list)
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_gpu(self) -> bool:
        return any(device.kind == "gpu" for device in self.devices)

    def serve(self, models: Sequence[ModelSpec]) -> None:
        """Predict for these models from now on. What was predicted for a spec that is as it was is kept; for others it
        is `outdated`."""
        specs = {model.name: model for model in models}
        for name in [
            name for name, spec in self._specs.items() if name not in specs or not is_served_alike(specs[name], spec)
        ]:
            if (prediction := self.found.pop(name, None)) is not None:
                self.outdated[name] = prediction
            self.refused.pop(name, None)
        self.outdated = {name: prediction for name, prediction in self.outdated.items() if name in specs}
        self._specs = specs
        self._more.set()

    def want(self, models: Collection[str]) -> None:
        """Predict for these models before others."""
        self._first = [name for name in models if name not in self.found]

    async def run(self, changed: asyncio.Event) -> None:
        """Predict until cancelled, and set `changed` after each prediction."""
        while True:
            self._more.clear()
            while (name := self._next()) is not None:
                spec = self._specs[name]
                try:
                    prediction = await asyncio.to_thread(self._predicted, spec)
                except (Unpredictable, OSError) as error:
                    if self._specs.get(name) is spec:
                        self.refused[name] = str(error)
                else:
                    if self._specs.get(name) is spec:
                        self.found[name] = prediction
                        self.outdated.pop(name, None)
                changed.set()
            await self._more.wait()

    def _next(self) -> str | None:
        left = [name for name in self._specs if name not in self.found and name not in self.refused]
        return next((name for name in self._first if name in left), left[0] if left else None)

    def _predicted(self, spec: ModelSpec) -> Prediction:
        """Return the prediction for a model. Blocks for about a second. Raises Unpredictable, OSError."""
        expected, wanted = self.models_max or EXPECTED, spec
        llama = replace(spec.llama, n_threads=spec.llama.n_threads or max(1, self.cores // expected))
        spec = replace(spec, llama=llama)
        uses_gpu = self.has_gpu and spec.llama.uses_devices
        host = next((device.free for device in self.devices if device.id == HOST), None)
        run = dry_run(spec, free_bytes=None if uses_gpu else host, workers=expected)
        footprint = predict(run, spec, bounds=self.bounds, gpus=[ROOMY] * spec.gpus if uses_gpu else ())
        if footprint.num_cells and not spec.kv_tokens and not uses_gpu:
            spec = replace(spec, kv_tokens=footprint.num_cells)
        footprint = self.learned.corrected(key_of(spec, build_of()), footprint)
        return Prediction(wanted, spec, need_of(footprint, spec))


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
    if not footprint.gpus:
        return Need(cpu_bytes=host, num_gpus=spec.gpus)
    total = sum((share.weights + share.cells for share in footprint.gpus), start=0)
    return Need(
        gpu_bytes=total,
        bytes_per_gpu=max(_buffers(share) for share in footprint.gpus) + _layer(footprint, spec),
        host_bytes=host,
        num_gpus=spec.gpus,
        can_split=spec.llama.split_mode != "none",
        split=tuple(spec.llama.tensor_split),
    )


def _buffers(share: Share) -> int:
    return share.compute + share.other


def _layer(footprint: Footprint, spec: ModelSpec) -> int:
    """Return by how much one GPU's part may be larger than an even one: layers are not divided."""
    return 0 if spec.gpus == 1 else sum(share.weights + share.cells for share in footprint.gpus) // 32
