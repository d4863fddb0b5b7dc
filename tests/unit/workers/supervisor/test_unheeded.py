"""The warning at the start that nothing acts on a model's residency yet."""

from __future__ import annotations

from workers.models.spec import ModelSpec
from workers.residency.policy import Residency
from workers.supervisor.plan import unheeded


def test_models_whose_residency_is_not_acted_on_are_named() -> None:
    plain = ModelSpec(name="plain", path="a.gguf")
    swapped = ModelSpec(name="swapped", path="b.gguf", residency=Residency(ttl_s=60))
    assert unheeded([plain]) == ""
    told = unheeded([plain, swapped])
    assert told.startswith("`residency` of swapped is not acted on yet")
    assert "paddock models plan" in told
