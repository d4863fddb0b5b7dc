"""Which of a repository's files is the model that was asked for."""

from __future__ import annotations

import pytest

from workers.models.hub.choice import HubError, choose, choose_projector

FILES = [
    "README.md",
    "config.json",
    "Model-Q4_K_M.gguf",
    "Model-Q4_K_S.gguf",
    "Model-Q8_0.gguf",
    "mmproj-Model-f16.gguf",
    "Model.imatrix.gguf",
]
SPLIT = ["BF16/Model-BF16-00002-of-00002.gguf", "BF16/Model-BF16-00001-of-00002.gguf", "Model-Q4_K_M.gguf"]


@pytest.mark.parametrize(
    ("files", "quant", "chosen"),
    [
        (FILES, "", ["Model-Q4_K_M.gguf"]),
        (FILES, "q8_0", ["Model-Q8_0.gguf"]),
        (FILES, "Q4_K_S", ["Model-Q4_K_S.gguf"]),
        (FILES, "Model-Q8_0.gguf", ["Model-Q8_0.gguf"]),
        (FILES[-3:], "", ["Model-Q8_0.gguf"]),
        (["b-IQ2.gguf", "a-IQ3.gguf"], "", ["a-IQ3.gguf"]),
        (SPLIT, "bf16", ["BF16/Model-BF16-00001-of-00002.gguf", "BF16/Model-BF16-00002-of-00002.gguf"]),
        (["x.Q5_K_M.gguf", "x.UD-Q5_K_XL.gguf"], "Q5_K_XL", ["x.UD-Q5_K_XL.gguf"]),
    ],
)
def test_chooses(files: list[str], quant: str, chosen: list[str]) -> None:
    assert choose("o/r", files, quant) == tuple(chosen)


@pytest.mark.parametrize(
    ("files", "quant", "said"),
    [
        (["model.safetensors"], "", "holds no GGUF file"),
        (FILES, "Q4_K", "no file for 'Q4_K'; it has: Model-Q4_K_M.gguf, Model-Q4_K_S.gguf, Model-Q8_0.gguf"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0", "fits several files: a-Q8_0.gguf, b-Q8_0.gguf"),
        (["m-Q8_0-00001-of-00003.gguf", "m-Q8_0-00003-of-00003.gguf"], "", "one of 3 parts, but only 2"),
    ],
)
def test_says_what_there_is(files: list[str], quant: str, said: str) -> None:
    with pytest.raises(HubError) as caught:
        choose("o/r", files, quant)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("files", "model", "chosen"),
    [
        (FILES, "Model-Q4_K_M.gguf", ["mmproj-Model-f16.gguf"]),
        (["m.gguf"], "m.gguf", []),
        (["m.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"], "m.gguf", ["mmproj-F16.gguf"]),
        (["m.gguf", "mmproj-F32.gguf", "mmproj-Q8_0.gguf"], "m.gguf", ["mmproj-Q8_0.gguf"]),
        (["m.gguf", "m-mmproj.gguf"], "m.gguf", ["m-mmproj.gguf"]),
        (["a/m.gguf", "a/mmproj-F32.gguf", "mmproj-F16.gguf"], "a/m.gguf", ["a/mmproj-F32.gguf"]),
        (["a/m.gguf", "b/mmproj-F16.gguf"], "a/m.gguf", []),
        (["a/m.gguf", "mmproj-F16.gguf"], "a/m.gguf", ["mmproj-F16.gguf"]),
    ],
)
def test_chooses_the_projector_beside_a_model(files: list[str], model: str, chosen: list[str]) -> None:
    assert choose_projector(files, model) == tuple(chosen)
