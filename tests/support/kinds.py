"""A Paddock with one worker of each kind of work: a chat model that was trained for tools, vectors, ranking, gaps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.pooled_models import write_reranker
from tests.support.projectors import write_pair
from tests.support.small_models import write_infill_model
from tests.support.stack import DEMO_MODEL, Stack

DEMO_ALIAS = "paddock-demo"
EMBEDDER, RERANKER, INFILLER, LISTENER = "embedder", "reranker", "infiller", "listener"


@contextmanager
def stack_of_all_kinds(*, default_chat: str = "", **chat: object) -> Iterator[Stack]:
    """Yield the running stack.

    `default_chat`: the model for those who name none; "": they are told the names. `chat`: settings of the chat model's
    worker.
    """
    with Stack() as stack:
        stack.worker(DEMO_MODEL, DEMO_ALIAS, wait=False, **{"slots": 8, **chat})  # type: ignore[arg-type]
        vectors = json.dumps({"n_threads": 1, "embeddings": True})
        stack.worker(DEMO_MODEL, EMBEDDER, slots=2, ctx=512, llama=vectors, wait=False)
        for name, write in ((RERANKER, write_reranker), (INFILLER, write_infill_model)):
            write(stack.folder / f"{name}.gguf")
            stack.worker(stack.folder / f"{name}.gguf", name, slots=2, wait=False)
        pair = write_pair(stack.folder, "ultravox")
        stack.worker(pair.model, LISTENER, slots=2, ctx=512, projector=pair.projector, wait=False)
        names = (DEMO_ALIAS, EMBEDDER, RERANKER, INFILLER, LISTENER)
        for number, (name, process) in enumerate(zip(names, stack.workers, strict=True)):
            stack.wait_for_worker(name, f"worker-{number}", process)
        if default_chat:
            models = [{"name": name, "path": f"{name}.gguf"} for name in names]
            catalog = stack.folder / "catalog.yaml"
            catalog.write_text(json.dumps({"models": models, "default": {"chat": default_chat}}))
            stack.gateway(catalog=catalog)
        else:
            stack.gateway()
        yield stack
