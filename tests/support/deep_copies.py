"""Writes copies of a model that say the same and take longer: layers are added that change nothing."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

SILENT = ("attn_output.weight", "ffn_down.weight")
"""Matrices of zeros: what a layer adds to the text it has read."""


def write_deep_copy(source: Path, target: Path, num_layers: int) -> Path:
    """Write a copy of a llama model with `num_layers` layers more; return its path."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    count = f"llama.{gguf.Keys.LLM.BLOCK_COUNT.rpartition('.')[2]}"
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == gguf.Keys.General.ARCHITECTURE:
            continue
        value = field.contents()
        if key == count:
            num_own, value = int(value), int(value) + num_layers
        sub = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(key, value, field.types[0], sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    first = [tensor for tensor in reader.tensors if tensor.name.startswith("blk.0.")]
    for layer in range(num_own, num_own + num_layers):
        for tensor in first:
            name = tensor.name.removeprefix("blk.0.")
            data = np.zeros_like(tensor.data) if name in SILENT else tensor.data
            writer.add_tensor(f"blk.{layer}.{name}", data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
