"""What a worker opens for a model and its draft model, and which ones it refuses."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from tests.integration.engine.listener import ONE_THREAD
from tests.support.quantised import Q8_0, write_quantised
from tests.support.small_models import write_wide_model
from tests.support.stack import DEMO_MODEL
from workers.contexts import make_contexts, open_contexts
from workers.llama.model import Model, ModelError, ModelTooLarge
from workers.models.generation import DraftSpec, SpeculationSettings
from workers.models.spec import ModelSpec


def spec(draft: Path | None, *, kv_tokens: int = 1024) -> ModelSpec:
    source = None if draft is None else DraftSpec(path=str(draft))
    return ModelSpec(
        name="m",
        slots=3,
        ctx=256,
        kv_tokens=kv_tokens,
        llama=ONE_THREAD,
        speculation=SpeculationSettings(draft=source),
    )


def test_a_draft_model_has_the_same_sequences_and_cells(demo: Model, tmp_path: Path) -> None:
    small = write_quantised(DEMO_MODEL, tmp_path / "small.gguf", Q8_0)
    with ExitStack() as opened:
        context, n_ctx, draft_model = open_contexts(opened, demo, spec(small), workers=1)
        assert draft_model is not None
        beside = draft_model._context
        assert n_ctx == 256
        assert (beside.num_sequences, beside.kv_tokens) == (context.num_sequences, context.kv_tokens)
        draft_model.check(context.memory.last_position, 0)
    with ExitStack() as opened:
        _, _, nothing = open_contexts(opened, demo, spec(None), workers=1)
        assert nothing is None


def test_its_cells_count(demo: Model) -> None:
    """A token of the demo model takes 3.75 KiB, in each of the two contexts."""
    free = 5 << 20
    (context, _), _ = make_contexts(demo, spec(None), None, free_bytes=free, workers=1)
    context.close()
    with pytest.raises(ModelTooLarge, match=r"1,024 KV cells take 7 MiB"):
        make_contexts(demo, spec(Path()), demo, free_bytes=free, workers=1)
    alone, _ = make_contexts(demo, spec(None, kv_tokens=0), None, free_bytes=free, workers=1)
    both, _ = make_contexts(demo, spec(Path(), kv_tokens=0), demo, free_bytes=free, workers=1)
    assert both[1] is not None
    assert both[0].kv_tokens == both[1].kv_tokens < alone[0].kv_tokens
    for one in (*alone, *both):
        if one is not None:
            one.close()


def test_what_cannot_be_taken_back_is_told(small_models: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    settings = SpeculationSettings(rollback=4)
    for name, most_cut in (("hybrid-convolution", 4), ("hybrid", 0), ("recurrent", 0)):
        caplog.clear()
        wanted = msgspec.structs.replace(spec(None), speculation=settings)
        with Model.load(small_models[name], ONE_THREAD) as model, ExitStack() as opened:
            context, _, _ = open_contexts(opened, model, wanted, workers=1)
            assert context.memory.most_cut == most_cut
            assert ("speculation.rollback" in caplog.text) == (most_cut == 0)


def refusal(model: Model, draft: Path) -> str:
    with ExitStack() as opened, pytest.raises(ModelError) as caught:
        open_contexts(opened, model, spec(draft), workers=1)
    return str(caught.value)


def test_a_model_that_cannot_draft_is_refused(
    demo: Model, stories: Model, small_models: dict[str, Path], tmp_path: Path
) -> None:
    assert "its vocabulary is of another kind" in refusal(demo, stories.path)
    write_wide_model(tmp_path / "wide.gguf", 400)
    said = refusal(demo, tmp_path / "wide.gguf")
    assert "its vocabulary has 1,168 tokens instead of 768: it can't draft for paddock-demo.gguf" in said
    assert "leave `speculation.draft` out" in said
    assert "(recurrent) can't drop its last tokens" in refusal(demo, small_models["recurrent"])
    with Model.load(small_models["recurrent"], ONE_THREAD) as recurrent:
        assert "recurrent.gguf: speculation.draft: a memory of" in refusal(recurrent, small_models["attention"])
