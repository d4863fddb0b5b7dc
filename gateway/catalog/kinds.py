"""The kinds of models: they generate text, make embeddings or rank documents. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from gateway.errors import NotSupported
from workers.models.catalog import Job
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
    """Raise NotSupported where a model's workers are all of another kind. A model without any may be of any kind."""
    kinds = {beat.kind for beat in beats}
    if _may(wanted, kinds):
        return
    kind = min(kinds)
    # A ranking model makes scores only; whatever generates text can make vectors as well.
    remedy = REMEDY[wanted] if kind == "generate" else ""
    raise NotSupported(
        f"The model `{alias}` {DOES[kind]} and can't {CANNOT[wanted]}. Ask it through {WHERE[kind]}, "
        f"or name a model that does (see GET /v1/models).{remedy}",
        param="model",
    )


def of_kind(
    alias: str, wanted: WorkerKind, models: Sequence[str], workers: Mapping[str, Iterable[Heartbeat]]
) -> tuple[str, ...]:
    """Return those of an alias's models that may be of the kind. Raises NotSupported where none is."""
    found = tuple(model for model in models if _may(wanted, {beat.kind for beat in workers.get(model, ())}))
    if not found:
        check_kind(alias, wanted, workers[models[0]])
    return found


def _may(wanted: WorkerKind, kinds: Set[WorkerKind]) -> bool:
    return not kinds or wanted in kinds
