"""Starts Paddock as llama-server would be started: takes its flags, becomes `paddock up`.

The tests of llama.cpp start a server for each case, by flags. What Paddock has no place for is left out; the case then
fails, and `tests.upstream.cases` says why.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODELS_DIR = "UPSTREAM_MODELS"
"""Variable: the folder with the models."""

NO_KEY = "dummy"
"""What callers send who need none: Paddock asks everybody for a key."""

LEAST_BATCH = 32
SLOTS, CTX, UBATCH = 4, 2048, 512
"""What a llama-server has that is told nothing."""

MODELS = {
    "ggml-org/test-model-stories260K": "stories260K.gguf",
    "ggml-org/test-model-stories260K-infill": "stories260K-infill.gguf",
    "ggml-org/models/tinyllamas/stories260K.gguf": "stories260K.gguf",
    "ggml-org/models/bert-bge-small/ggml-model-f16.gguf": "bert-bge-small-random.gguf",
    "ggml-org/models/jina-reranker-v1-tiny-en/ggml-model-f16.gguf": "jina-reranker-random.gguf",
    "ggml-org/stories15M_MOE/stories15M_MOE-F16.gguf": "stories260K.gguf",
}
"""What the hub has under a name -> what is here in its place."""

ADAPTERS = {"moe_shakespeare15M.gguf": "stories260K-shakespeare-lora.gguf"}


def model_file(repo: str | None, file: str | None) -> str | None:
    """Return the name of the model here that stands for one of the hub; None: there is none."""
    return MODELS.get("/".join(part for part in (repo, file) if part))


def main(argv: Sequence[str]) -> None:
    """Become `paddock up`, with the settings that the flags stand for."""
    asked = parse(argv)
    folder = Path(tempfile.mkdtemp(prefix="upstream-"))
    catalog = folder / "catalog.json"
    catalog.write_text(json.dumps(catalog_of(asked, Path(os.environ[MODELS_DIR]))))
    environment = os.environ | settings_of(asked, folder) | {"PADDOCK_CATALOG": str(catalog)}
    os.execve(sys.executable, [sys.executable, "-m", "gateway.cli", "up"], environment)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read what is understood of llama-server's flags; the others are left alone."""
    parser = argparse.ArgumentParser(prog="llama-server", allow_abbrev=False)
    for name in ("host", "hf-repo", "hf-file", "model", "alias", "tags", "pooling", "chat-template"):
        parser.add_argument(f"--{name}")
    for name in ("chat-template-file", "slot-save-path", "api-key", "reasoning"):
        parser.add_argument(f"--{name}")
    for name in ("port", "seed", "batch-size", "ubatch-size", "ctx-size", "parallel", "cache-ram"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("embedding", "reranking", "metrics", "slots", "kv-unified"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--temp", type=float)
    parser.add_argument("--lora", action="append", default=[])
    parser.add_argument("-ctk")
    parser.add_argument("-ctv")
    parser.add_argument("-fa")
    return parser.parse_known_args(argv)[0]


def catalog_of(asked: argparse.Namespace, models: Path) -> dict[str, Any]:
    """Return the catalog: one model, which every call gets, whatever it names."""
    names = sorted(filter(None, (asked.alias or "").split(","))) or ["model"]
    file = asked.model or model_file(asked.hf_repo, asked.hf_file)
    if file is None:
        raise SystemExit(f"no model stands for {asked.hf_repo}/{asked.hf_file}")
    slots, n_ctx = asked.parallel or SLOTS, asked.ctx_size or CTX
    is_shared = asked.kv_unified or not asked.parallel
    model: dict[str, Any] = {
        "name": names[0],
        "path": str(models / file),
        "slots": slots,
        "ctx": n_ctx if is_shared else n_ctx // slots,
        "kv_tokens": n_ctx,
        "llama": _llama(asked),
        "sampling": {"temperature": asked.temp, "seed": asked.seed},
        "adapters": [{"name": Path(path).stem, "path": os.path.abspath(path), "scale": 1.0} for path in asked.lora],
        "tags": sorted(filter(None, (asked.tags or "").split(","))),
        "thinking": asked.reasoning or "auto",
        "chat_template": os.path.abspath(asked.chat_template_file)
        if asked.chat_template_file
        else (asked.chat_template or ""),
    }
    if asked.embedding or asked.reranking:
        model["kv_tokens"] = 0
    jobs = ["rerank"] if asked.reranking else ["embed"] if asked.embedding else ["chat", "infill"]
    return {
        "models": [model],
        "aliases": dict.fromkeys(names[1:], names[0]),
        "default": dict.fromkeys(jobs, names[0]),
        "unknown_model": "default",
    }


def _llama(asked: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"n_threads": 1}
    if asked.batch_size:
        # A llama-server computes no more at once than a batch has.
        found["n_batch"] = max(LEAST_BATCH, asked.batch_size)
        found["n_ubatch"] = min(found["n_batch"], max(LEAST_BATCH, asked.ubatch_size or UBATCH))
    found |= {"cache_type_k": asked.ctk} if asked.ctk else {}
    found |= {"cache_type_v": asked.ctv} if asked.ctv else {}
    found |= {"flash_attn": asked.fa} if asked.fa else {}
    if asked.reranking:
        found["pooling"] = "rank"
    elif asked.embedding:
        found |= {"embeddings": True} | ({"pooling": asked.pooling} if asked.pooling else {})
    return found


def settings_of(asked: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Return the settings, as variables."""
    key = {"name": "tests", "sha256": hashlib.sha256((asked.api_key or NO_KEY).encode()).hexdigest(), "admin": True}
    values: dict[str, object] = {
        "host": (asked.host or "127.0.0.1").split(",")[0],
        "port": asked.port,
        "state_dir": folder / "state",
        "api_keys": json.dumps([key]),
        "slots_endpoint": asked.slots,
        "metrics_endpoint": asked.metrics,
        "drain_s": 1,
        "worker_drain_s": 1,
    }
    if asked.slot_save_path:
        values["slot_save_dir"] = os.path.abspath(asked.slot_save_path)
    if asked.cache_ram is not None:
        values["cache_ram_mib"] = max(0, asked.cache_ram)
    return {f"PADDOCK_{name.upper()}": str(value) for name, value in values.items()}


if __name__ == "__main__":
    main(sys.argv[1:])
