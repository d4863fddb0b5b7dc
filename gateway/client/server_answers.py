"""Declares and decodes a server's answers about itself: health, models, slots, adapters, properties.

Source: llama-server's routes of these names (tools/server/README.md of llama.cpp); OpenAI's API reference, "Model
object".
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct, field

from gateway.client.errors import refusal


class HealthStatus(Struct, frozen=True):
    status: str
    """`ok`, or another word if the server is not ready yet or not ready any more."""
    message: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ok"


class ModelMeta(Struct, frozen=True):
    """The sizes of a model, in tokens, parameters and bytes."""

    n_ctx: int | None = None
    n_ctx_train: int | None = None
    n_embd: int | None = None
    n_params: int | None = None
    n_vocab: int | None = None
    size: int | None = None


class ModelStatus(Struct, frozen=True):
    value: str = ""
    """`unloaded`, `loading`, `loaded`, `sleeping` or `downloading`."""
    progress: Any = None
    failed: bool = False
    exit_code: int | None = None
    reason: str | None = None
    """Why the model is not loaded, or for whom it is loaded."""
    retry_at: int | None = None
    """Unix time at which a model that could not be loaded is tried again."""


class Architecture(Struct, frozen=True):
    input_modalities: tuple[str, ...] = ()
    output_modalities: tuple[str, ...] = ()


class Model(Struct, frozen=True):
    id: str
    created: int = 0
    owned_by: str = ""
    root: str | None = None
    """The model behind an alias or adapter."""
    parent: str | None = None
    """The base model of an adapter."""
    aliases: tuple[str, ...] = ()
    workers: int | None = None
    meta: ModelMeta | None = None
    status: ModelStatus | None = None
    architecture: Architecture | None = None


class NextToken(Struct, frozen=True):
    has_next_token: bool = False
    has_new_line: bool = False
    n_remain: int = 0
    n_decoded: int = 0


class SlotInfo(Struct, frozen=True):
    id: int
    n_ctx: int = 0
    """Context size of the slot, in tokens."""
    is_processing: bool = False
    speculative: bool = False
    id_task: int | str | None = None
    n_prompt_tokens: int | None = None
    n_prompt_tokens_processed: int | None = None
    n_prompt_tokens_cache: int | None = None
    params: dict[str, Any] = field(default_factory=dict)
    next_token: tuple[NextToken, ...] | NextToken | None = None
    """How far the answer has got. Newer servers send a list with one NextToken, older servers the NextToken itself."""
    model: str | None = None
    worker: str | None = None
    """The worker that has the slot, if several workers serve the model."""


class SlotSaved(Struct, frozen=True):
    id_slot: int
    filename: str = ""
    n_saved: int = 0
    """Tokens that were saved."""
    n_written: int = 0
    """Bytes of the file that was written."""
    timings: dict[str, float] = field(default_factory=dict)


class SlotRestored(Struct, frozen=True):
    id_slot: int
    filename: str = ""
    n_restored: int = 0
    """Tokens that were restored."""
    n_read: int = 0
    """Bytes that were read."""
    timings: dict[str, float] = field(default_factory=dict)


class SlotErased(Struct, frozen=True):
    id_slot: int
    n_erased: int = 0
    """Tokens that were erased from the slot."""
    n_freed: int = 0
    """Bytes of the file that was deleted."""


class LoraAdapter(Struct, frozen=True):
    id: int | str
    path: str = ""
    scale: float = 0.0
    name: str | None = None
    task_name: str = ""
    prompt_prefix: str = ""


class LoraScale(Struct, frozen=True):
    """An adapter and its scale: one entry of the list that `lora.set_scales` and the parameter `lora` take."""

    id: int | str
    scale: float


class Props(Struct, frozen=True):
    """The properties of a server, or of one of its models."""

    default_generation_settings: dict[str, Any] = field(default_factory=dict)
    total_slots: int = 0
    model_alias: str | None = None
    model_path: str | None = None
    modalities: dict[str, bool] = field(default_factory=dict)
    chat_template: str | None = None
    chat_template_caps: dict[str, Any] = field(default_factory=dict)
    bos_token: str | None = None
    eos_token: str | None = None
    build_info: str | None = None
    is_sleeping: bool = False


class _ModelList(Struct, frozen=True):
    data: tuple[Model, ...]


_health = msgspec.json.Decoder(HealthStatus).decode
_models = msgspec.json.Decoder(_ModelList).decode

read_model = msgspec.json.Decoder(Model).decode
read_slots = msgspec.json.Decoder(tuple[SlotInfo, ...]).decode
read_slot_saved = msgspec.json.Decoder(SlotSaved).decode
read_slot_restored = msgspec.json.Decoder(SlotRestored).decode
read_slot_erased = msgspec.json.Decoder(SlotErased).decode
read_adapters = msgspec.json.Decoder(tuple[LoraAdapter, ...]).decode
read_props = msgspec.json.Decoder(Props).decode


def read_models(body: bytes) -> tuple[Model, ...]:
    """Return the models in a body. Raises msgspec.MsgspecError."""
    return _models(body).data


def read_health(body: bytes) -> HealthStatus:
    """Return the health in the body of a 200, or of a loading server's 503. Raises msgspec.MsgspecError."""
    if b'"error"' in body:
        return HealthStatus("unavailable", refusal(503, {}, body).message)
    return _health(body)


def read_text(body: bytes) -> str:
    return body.decode("utf-8", "replace")


def read_nothing(body: bytes) -> None:
    """Ignore the body of an answer whose HTTP status says everything."""
