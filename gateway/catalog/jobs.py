"""Says which models can do which jobs: to chat, to make vectors, to rank, to fill in code. Does no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from gateway.errors import NotSupported
from workers.models.catalog import Defaults, Job
from workers.protocol.heartbeat import Heartbeat, WorkerKind

KIND_OF: dict[Job, WorkerKind] = {"chat": "generate", "embed": "embed", "rerank": "rank", "infill": "generate"}
JOB_OF: dict[WorkerKind, Job] = {"generate": "chat", "embed": "embed", "rank": "rerank"}

DOES: dict[WorkerKind, str] = {"generate": "generates text", "embed": "makes embeddings", "rank": "ranks documents"}
CANNOT: dict[WorkerKind, str] = {"generate": "generate text", "embed": "make embeddings", "rank": "rank documents"}
WHERE: dict[WorkerKind, str] = {
    "generate": "POST /v1/chat/completions",
    "embed": "POST /v1/embeddings",
    "rank": "POST /v1/rerank",
}
REMEDY: dict[WorkerKind, str] = {
    "generate": "",
    "embed": " An operator can serve it for that beside, with `embeddings: true` in its `llama` settings.",
    "rank": "",
}


def check_kind(alias: str, wanted: WorkerKind, beats: Iterable[Heartbeat]) -> None:
    """Raise NotSupported if all workers of a model are of another kind. Without workers, its kind is unknown."""
    kinds = {beat.kind for beat in beats}
    if _is_kind(wanted, kinds):
        return
    kind = min(kinds)
    # A ranking model makes scores only; a model that generates text can make vectors as well.
    remedy = REMEDY[wanted] if kind == "generate" else ""
    raise NotSupported(
        f"The model `{alias}` {DOES[kind]} and can't {CANNOT[wanted]}. Ask it through {WHERE[kind]}, "
        f"or name a model that does (see GET /v1/models).{remedy}",
        param="model",
    )


def models_of_kind(
    alias: str, wanted: WorkerKind, models: Sequence[str], workers: Mapping[str, Iterable[Heartbeat]]
) -> tuple[str, ...]:
    """Return the models of an alias that may be of the wanted kind. Raises NotSupported if there are none."""
    found = tuple(model for model in models if _is_kind(wanted, {beat.kind for beat in workers.get(model, ())}))
    if not found:
        check_kind(alias, wanted, workers[models[0]])
    return found


def _is_kind(wanted: WorkerKind, kinds: Set[WorkerKind]) -> bool:
    return not kinds or wanted in kinds


Workers = Mapping[str, Iterable[Heartbeat]]
"""Model -> its workers; models without workers may be missing."""


def default_name(defaults: Defaults, job: Job) -> str:
    """Return the model name that is the catalog's default for a job; empty if there is no default."""
    return {
        "chat": defaults.chat,
        "embed": defaults.embed,
        "rerank": defaults.rerank,
        "infill": defaults.infill,
    }[job] or ""


def capable_models(job: Job, models: Iterable[str], workers: Workers) -> frozenset[str]:
    """Return the models that may be able to do a job. A model without workers counts, as its kind is not known yet."""
    return frozenset(model for model in models if _can_do(job, tuple(workers.get(model, ()))))


def only_model(models: Set[str], workers: Workers) -> str:
    """Return the model if there is only one, or if only one has workers; otherwise an empty string."""
    served = models if len(models) == 1 else {model for model in models if any(True for _ in workers.get(model, ()))}
    return next(iter(served)) if len(served) == 1 else ""


def _can_do(job: Job, beats: tuple[Heartbeat, ...]) -> bool:
    kind = KIND_OF[job]
    return not beats or any(beat.kind == kind and (job != "infill" or beat.infill) for beat in beats)
