"""The fingerprint of saved KV: 32 bytes that are the same for the same model, llama.cpp and settings.

Every byte of the model's files counts: fine-tuned models share headers, sizes and, in part, tensors, so a sample of a
file could not tell them apart. Hashing reads the whole file (1.8 GB/s on one core, or what the disk gives), so the hash
is remembered in the state folder, until the model file's size, times or inode change.

llama.cpp's state format checks layer count, KV types, row sizes and whether V is transposed (llama-kv-cache.cpp,
`state_read_data`). It does not tell which weights, rope or build the numbers came from, nor whether they were rotated
for quantisation (`LLAMA_ATTN_ROT_DISABLE`).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from workers.llama.gguf import GgufHeader
from workers.llama.native import build_id
from workers.models.files import FRESH_NS, FileState, open_regular, replace_file
from workers.models.spec import LlamaSettings

CHUNK_BYTES = 8 << 20
"""Bytes that are hashed between two checks whether to stop."""

NUM_SAMPLES = 64
SAMPLE_BYTES = 16 << 10
"""Bytes of each sample of a file that `system_fingerprint` reads. Few, since a starting worker waits for it."""

MOST_REMEMBERED = 64
"""Maximum number of files whose hashes are remembered; the oldest are forgotten."""

HARMLESS = frozenset(
    {
        *("n_batch", "n_ubatch", "n_threads", "n_threads_batch", "main_gpu", "tensor_split"),
        *("use_mmap", "use_mlock", "check_tensors", "no_perf", "no_host"),
        *("embeddings", "pooling", "spm_infill", "numa", "cpus"),
        *("control_vectors", "control_vector_layers"),
    }
)
"""Settings that change neither the layout of KV nor, beyond rounding, its numbers; not part of the fingerprint. Control
vectors count by their contents, not by the paths of their files."""


class ModelChanged(RuntimeError):
    """Raised if a file of the model has changed since it was loaded, or changes now; the message says which."""


def context_facts(
    header: GgufHeader, settings: LlamaSettings, *, build: str, n_ctx: int, control: str = ""
) -> dict[str, object]:
    """Return the facts that KV depends on besides the model's contents. `n_ctx`: cells of the llama.cpp context.
    `control`: the digest of the model's control vectors."""
    values = msgspec.structs.asdict(settings)
    counted = {name: value for name, value in values.items() if name not in HARMLESS}
    return {"build": build, "long_rope": _long_rope(header, n_ctx), "control": control, **counted}


def fingerprint(model: bytes, facts: dict[str, object]) -> bytes:
    """Return the fingerprint of KV: 32 bytes made from the model's hash and the facts of `context_facts`."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(b"paddock kv 1\x00" + model + text.encode()).digest()


def system_fingerprint(paths: Sequence[Path], build: str) -> str:
    """Return a text that differs between models and builds, for callers (OpenAI's `system_fingerprint`).

    A worker announces it when it starts, before a whole file could be hashed. So it is made of the files' sizes, their
    beginnings and samples at equal distances, in which fine-tunes of one model differ. Raises OSError."""
    digest = hashlib.sha256(build.encode())
    for path in paths:
        size = path.stat().st_size
        digest.update(b"%d" % size)
        with io.BufferedReader(open_regular(path)) as file:
            for number in range(NUM_SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * number // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    # llama-server's begins with a "b" and its build.
    return f"b{build.partition(' ')[0]}-{digest.hexdigest()[:16]}"


def parts_of(header: GgufHeader) -> list[Path]:
    """Return the files that a model consists of."""
    match = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\.gguf)", header.path.name)
    count = header.number("split.count") or 1
    if count < 2 or match is None:
        return [header.path]
    return [header.path.with_name(f"{match[1]}{part:05d}{match[2]}") for part in range(1, count + 1)]


class ModelHashes:
    """Computes the SHA-256 of model files and remembers it in a file of this user, which workers may share."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def digest(
        self, paths: Sequence[Path], *, loaded_at: float = float("inf"), stop: Callable[[], bool] = lambda: False
    ) -> bytes | None:
        """Return the hash of all files together; None: `stop` returned True. Only files of unknown hash are read.

        `loaded_at`: time.time() when llama.cpp began to read the files. Raises ModelChanged, OSError."""
        whole = hashlib.sha256()
        for path in paths:
            one = self._one(path.resolve(), loaded_at, stop)
            if one is None:
                return None
            whole.update(bytes.fromhex(one))
        return whole.digest()

    def _one(self, path: Path, loaded_at: float, stop: Callable[[], bool]) -> str | None:
        before = FileState.of(path)
        if before.ctime_ns > loaded_at * 1e9:
            raise ModelChanged(f"{path} changed after it was loaded; restart the worker")
        known = self._remembered().get(f"{path}")
        if known is not None and known[0] == before.text():
            return known[1]
        found = _sha256(path, before.size, stop)
        if found is None:
            return None
        if FileState.of(path) != before:
            raise ModelChanged(f"{path} changed while it was read; restart the worker when it is complete")
        if time.time_ns() - before.ctime_ns > FRESH_NS:
            self._remember(path, before, found)
        return found

    def _remembered(self) -> dict[str, tuple[str, str]]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, tuple[str, str]])
        except (OSError, ValueError):  # msgspec's own, and UnicodeDecodeError
            return {}

    def _remember(self, path: Path, state: FileState, digest: str) -> None:
        """Store a file's hash. If two workers do so at once, one hash is lost, and computed at the next start."""
        known = self._remembered()
        known.pop(f"{path}", None)
        kept = dict([*known.items()][1 - MOST_REMEMBERED :])
        kept[f"{path}"] = (state.text(), digest)
        with contextlib.suppress(OSError):  # it is only remembered for speed
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._file, msgspec.json.encode(kept))


def _sha256(path: Path, size: int, stop: Callable[[], bool]) -> str | None:
    digest, left = hashlib.sha256(), size
    with open_regular(path) as file:
        # A file that grows is not read for ever; the caller finds out afterwards that it has grown.
        while left and (chunk := file.read(min(CHUNK_BYTES, left))):
            if stop():
                return None
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()


def _long_rope(header: GgufHeader, n_ctx: int) -> bool:
    """Return whether llama.cpp uses the rope factors for long contexts (`llama_model::get_rope_factors`)."""
    if not any("rope_factors_long" in name for name in header.tensors):
        return False
    arch = header.text("general.architecture") or ""
    trained = header.number(f"{arch}.context_length") or 0
    return n_ctx > (header.number(f"{arch}.rope.scaling.original_context_length") or trained)


class KvIdentity:
    """The fingerprint of one context's KV, computed when it is first asked for. Any thread may ask."""

    def __init__(
        self,
        header: GgufHeader,
        settings: LlamaSettings,
        hashes: ModelHashes,
        *,
        n_ctx: int,
        loaded_at: float,
        control: str = "",
        projector: Path | None = None,
        image_tokens: tuple[int, int] = (0, 0),
    ) -> None:
        """`n_ctx`: cells of the llama.cpp context. `loaded_at`: time.time() just before the model was loaded.
        `control`: the digest of the model's control vectors. `projector`: the projector's file; None: there is none.
        `image_tokens`: its settings `image_min_tokens` and `image_max_tokens`."""
        self._header = header
        self._settings = settings
        self._hashes = hashes
        self._n_ctx = n_ctx
        self._control = control
        self._projector = projector
        self._image_tokens = image_tokens
        self._loaded_at = loaded_at
        self._lock = threading.Lock()
        self._found: bytes | None = None

    def fingerprint(self, stop: Callable[[], bool] = lambda: False) -> bytes | None:
        """Return the fingerprint; None: `stop` returned True. May read all the model. Raises ModelChanged, OSError."""
        with self._lock:
            if self._found is None:
                files = [*parts_of(self._header), *([self._projector] if self._projector else [])]
                model = self._hashes.digest(files, loaded_at=self._loaded_at, stop=stop)
                if model is not None:
                    facts = context_facts(
                        self._header, self._settings, build=build_id(), n_ctx=self._n_ctx, control=self._control
                    )
                    eyes = {} if self._projector is None else {"image_tokens": self._image_tokens}
                    self._found = fingerprint(model, facts | eyes)
            return self._found
