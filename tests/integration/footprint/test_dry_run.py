"""llama.cpp tells without memory what it takes with it, for each of the small models; a dry run takes hardly any."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tests.support.pooled_models import write_t5
from tests.support.projectors import write_pair
from tests.support.small_models import SMALL_MODELS, write_small_model
from tests.support.stack import DEMO_MODEL
from workers.footprint import breakdown
from workers.footprint.breakdown import context_bytes
from workers.footprint.dry_run import rehearse
from workers.footprint.prediction import TooLarge, Unpredictable, dry_run, predicted
from workers.footprint.rehearsal import Question
from workers.llama.context import Context
from workers.llama.model import Model, ModelError
from workers.models.spec import LlamaSettings, ModelSpec

MIB = 1 << 20


def spec(path: Path, **fields: object) -> ModelSpec:
    llama = {"n_threads": 1, **fields.pop("llama", {})}  # type: ignore[dict-item]
    return msgspec.convert({"name": "m", "path": str(path), "llama": llama, **fields}, ModelSpec)


@pytest.mark.parametrize("name", sorted(SMALL_MODELS))
@pytest.mark.parametrize("more", [{}, {"flash_attn": "off", "n_ubatch": 96}, {"swa_full": True}], ids=str)
def test_it_tells_what_real_contexts_take(tmp_path: Path, name: str, more: dict[str, object]) -> None:
    path = write_small_model(tmp_path, name)
    told = rehearse(Question(spec=spec(path, slots=3, ctx=512, llama=more), free_bytes=None)).model
    settings = msgspec.convert({"n_threads": 1, "use_mmap": False, **more}, LlamaSettings)
    with Model.load(path, settings) as model, Context(model, settings, slots=3, kv_tokens=1536) as context:
        real = context_bytes(context.pointer).values()
        assert told.num_cells == context.kv_tokens
    assert told.weights == sum(one.weights for one in real)
    assert told.cells == sum(one.cells for one in real)
    assert told.compute == pytest.approx(sum(one.compute for one in real), rel=0.001)


def test_cells_are_as_many_as_a_worker_would_make() -> None:
    asked = spec(DEMO_MODEL, slots=8)
    assert dry_run(asked, free_bytes=None).model.num_cells == 8192
    assert dry_run(asked, free_bytes=40 * MIB).model.num_cells < 8192
    fewer = dry_run(asked, free_bytes=40 * MIB, workers=8).model.num_cells
    assert fewer < dry_run(asked, free_bytes=40 * MIB).model.num_cells


def test_large_caches_take_nothing_of_the_helper() -> None:
    """30 GiB of cells are laid out in a moment."""
    begin = time.monotonic()
    told = predicted(spec(DEMO_MODEL, kv_tokens=2**23), free_bytes=None)
    assert told.host.cells == 30 << 30
    assert time.monotonic() - begin < 60


def test_a_helper_that_would_take_too_much_itself_is_told() -> None:
    with pytest.raises(Unpredictable, match=r"lower --kv-tokens"):
        dry_run(spec(DEMO_MODEL, kv_tokens=2**31 - 1), free_bytes=None)


def test_what_is_wrong_with_a_file_is_told(tmp_path: Path) -> None:
    (bad := tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(Unpredictable, match=r"bad\.gguf: truncated"):
        dry_run(spec(bad), free_bytes=None)
    write_t5(both := tmp_path / "t5.gguf")
    with pytest.raises(Unpredictable, match="works by itself"):
        dry_run(spec(both), free_bytes=None)


def test_cells_that_fit_nowhere_are_told() -> None:
    with pytest.raises(TooLarge, match=r"kv_tokens: 65,536 KV cells take 240 MiB and 100 MiB of memory are free"):
        dry_run(spec(DEMO_MODEL, kv_tokens=65536), free_bytes=100 * MIB)


def test_a_projector_is_told_by_libmtmd(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "gemma3")
    run = dry_run(spec(pair.model, projector=str(pair.projector)), free_bytes=None)
    assert pair.projector.stat().st_size / 2 < run.projector < 64 * MIB


def test_a_build_that_cannot_be_asked_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakdown, "_OF_CONTEXT", "no_such_function")
    with pytest.raises(ModelError, match=r"has no no_such_function.*pyproject\.toml"):
        context_bytes(0)


def test_only_the_helper_loads_llama_cpp() -> None:
    """A supervisor predicts without llama.cpp in its own process."""
    code = "import sys, workers.footprint.prediction, workers.footprint.learned; sys.exit('llama_cpp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
