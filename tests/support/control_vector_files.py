"""Files of control vectors, as llama-cvector-generator writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def write_control_vector(
    path: Path,
    n_embd: int,
    layers: Sequence[int],
    *,
    seed: int = 1,
    gain: float = 1.0,
    name: str = "direction",
    dtype: Any = np.float32,
) -> Path:
    """Write random directions of length about `gain` * sqrt(`n_embd`) for these layers."""
    writer = gguf.GGUFWriter(path, "controlvector")
    writer.add_string("controlvector.model_hint", "llama")
    rng = np.random.default_rng(seed)
    for layer in layers:
        writer.add_tensor(f"{name}.{layer}", (gain * rng.standard_normal(n_embd)).astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
