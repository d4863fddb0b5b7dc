"""Says which tensors of a GGUF file belong to which layer, and which of them stay in main memory. Pure.

Sources: `load_tensors` in llama-model.cpp and `llm_tensor_info` in llama-arch.cpp of llama.cpp; common/arg.cpp for the
patterns of experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from workers.footprint.rehearsal import LayerBytes
from workers.llama.gguf import BLOCKS, GgufHeader, TensorInfo
from workers.llama.model_params import EXPERTS
from workers.models.spec import LlamaSettings

_OF_LAYER = re.compile(r"blk\.(\d+)\.")
_OF_INPUT = re.compile(r"(token_embd|position_embd|token_types|token_embd_norm|per_layer_token_embd)\.")
"""Names of tensors that llama.cpp reads rows of, which it leaves to the processor."""

EMBEDDINGS, OUTPUT = "token_embd.weight", "output.weight"

HOST_BUFFER = "CPU"
"""Beginning of the names of the types of buffer that lie in main memory."""


def tensor_bytes(tensor: TensorInfo) -> int:
    """Return the bytes of a tensor; 0 for a type that is not known."""
    per_block, block_bytes = BLOCKS.get(tensor.kind, (1, 0))
    return math.prod(tensor.shape) // per_block * block_bytes


def mapped_bytes(header: GgufHeader) -> int:
    """Return the bytes of a file's tensors, which stay mapped where nothing else holds them."""
    return sum(map(tensor_bytes, header.tensors.values()))


def layers_of(
    header: GgufHeader, llama: LlamaSettings, *, cells: int, makes_logits: bool = True
) -> tuple[LayerBytes, ...]:
    """Return what lies before the layers, each layer, and what lies after them. `cells`: bytes of all cells together,
    which are spread over the layers by their KV heads; evenly, where the header does not tell these. `makes_logits`:
    False for a model that is used for vectors."""
    arch = header.text("general.architecture") or ""
    named = [int(found[1]) for name in header.tensors if (found := _OF_LAYER.match(name))]
    num_layers = max([header.number(f"{arch}.block_count") or 0, *(one + 1 for one in named)])
    weights, host = [0] * (num_layers + 2), [0] * (num_layers + 2)
    stays = _stays(llama)
    for name, tensor in header.tensors.items():
        found = _OF_LAYER.match(name)
        at = int(found[1]) + 1 if found else 0 if _OF_INPUT.match(name) else num_layers + 1
        (host if at == 0 or stays(name) else weights)[at] += tensor_bytes(tensor)
    if makes_logits and EMBEDDINGS in header.tensors and OUTPUT not in header.tensors:  # they make them as well
        weights[-1] += tensor_bytes(header.tensors[EMBEDDINGS])
    shares = _cell_shares(header, arch, num_layers)
    of_layers = [int(cells * share) for share in shares]
    return tuple(
        LayerBytes(weights=one, host=kept, cells=of_cells)
        for one, kept, of_cells in zip(weights, host, [0, *of_layers, 0], strict=True)
    )


def _cell_shares(header: GgufHeader, arch: str, num_layers: int) -> list[float]:
    heads = header.numbers(f"{arch}.attention.head_count_kv") or header.numbers(f"{arch}.attention.head_count")
    per_layer = heads if len(heads) == num_layers else [1] * num_layers
    if not all(per_layer):  # layers without KV heads have a state of their own
        per_layer = [1] * num_layers
    return [one / sum(per_layer) for one in per_layer]


def _stays(llama: LlamaSettings) -> Callable[[str], bool]:
    """Return whether a layer's tensor stays in main memory by the settings: the first pattern that fits decides."""
    of_experts = [rf"\.{EXPERTS}"] if llama.cpu_moe else [rf"blk\.{n}\.{EXPERTS}" for n in range(llama.n_cpu_moe)]
    patterns = [(one.pattern, one.buffer.startswith(HOST_BUFFER)) for one in llama.override_tensor]
    patterns += [(one, True) for one in of_experts]
    compiled = [(re.compile(pattern), is_host) for pattern, is_host in patterns]

    def stays(name: str) -> bool:
        return next((is_host for pattern, is_host in compiled if pattern.search(name)), False)

    return stays
