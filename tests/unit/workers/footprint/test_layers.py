"""Which bytes of a GGUF file belong to which layer."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.support.small_models import SMALL_MODELS, write_small_model, write_wide_model
from tests.support.stack import DEMO_MODEL
from workers.footprint.layers import layers_of, mapped_bytes, tensor_bytes
from workers.llama.gguf import GgufHeader, TensorInfo, Value, read_header
from workers.models.spec import LlamaSettings


def header_of(**shapes: tuple[int, int]) -> GgufHeader:
    tensors = {name.replace("__", "."): TensorInfo((*shape, 1, 1), 0, 0) for name, shape in shapes.items()}
    metadata: dict[str, Value] = {"general.architecture": "llama", "llama.block_count": 2}
    return GgufHeader(Path("m.gguf"), 3, metadata, len(tensors), 0, tensors, {}, 0)


EXPERTS = header_of(
    token_embd__weight=(4, 100),
    blk__0__attn_q__weight=(4, 10),
    blk__0__ffn_up_exps__weight=(4, 50),
    blk__1__attn_q__weight=(4, 10),
    blk__1__ffn_up_exps__weight=(4, 50),
    output__weight=(4, 100),
)


def of(header: GgufHeader, **llama: object) -> list[tuple[int, int, int]]:
    settings = msgspec.convert(llama, LlamaSettings)
    return [(one.weights // 16, one.host // 16, one.cells) for one in layers_of(header, settings, cells=100)]


@pytest.mark.parametrize(
    ("kind", "shape", "size"),
    [(0, (32, 2), 256), (1, (32, 2), 128), (8, (32, 2), 68), (2, (64, 3), 108), (12, (256, 1), 144), (999, (32, 1), 0)],
)
def test_tensors_take_what_their_blocks_take(kind: int, shape: tuple[int, int], size: int) -> None:
    assert tensor_bytes(TensorInfo((*shape, 1, 1), kind, 0)) == size


def test_what_is_read_by_rows_stays_in_main_memory() -> None:
    assert of(EXPERTS) == [(0, 100, 0), (60, 0, 50), (60, 0, 50), (100, 0, 0)]


@pytest.mark.parametrize(
    ("llama", "layers"),
    [
        ({"cpu_moe": True}, [(10, 50), (10, 50)]),
        ({"n_cpu_moe": 1}, [(10, 50), (60, 0)]),
        ({"override_tensor": [{"pattern": "blk\\.1\\.", "buffer": "CPU"}]}, [(60, 0), (0, 60)]),
        ({"override_tensor": [{"pattern": "exps", "buffer": "CUDA0"}], "cpu_moe": True}, [(60, 0), (60, 0)]),
    ],
)
def test_settings_keep_tensors_in_main_memory(llama: dict[str, object], layers: list[tuple[int, int]]) -> None:
    assert [(weights, host) for weights, host, _ in of(EXPERTS, **llama)[1:-1]] == layers


def test_embeddings_that_make_the_logits_are_there_twice(tmp_path: Path) -> None:
    write_wide_model(path := tmp_path / "wide.gguf", 100)
    header = read_header(path)
    embeddings = tensor_bytes(header.tensors["token_embd.weight"])
    with_logits = layers_of(header, LlamaSettings(), cells=0)
    for_vectors = layers_of(header, LlamaSettings(), cells=0, makes_logits=False)
    assert with_logits[0].host == embeddings
    assert with_logits[-1].weights - for_vectors[-1].weights == embeddings


@pytest.mark.parametrize("name", sorted(SMALL_MODELS))
def test_every_tensor_is_counted(tmp_path: Path, name: str) -> None:
    header = read_header(write_small_model(tmp_path, name))
    layers = layers_of(header, LlamaSettings(), cells=0, makes_logits=False)
    assert len(layers) == 4
    assert sum(one.weights + one.host for one in layers) == mapped_bytes(header) == header.tensor_bytes


def test_the_demo_model() -> None:
    layers = layers_of(read_header(DEMO_MODEL), LlamaSettings(), cells=1000)
    assert [one.cells for one in layers] == [0, 200, 200, 200, 200, 200, 0]
    assert len({one.weights for one in layers[1:-1]}) == 1
