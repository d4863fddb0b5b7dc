"""Writes coarser copies of GGUF models, by llama.cpp's own quantisation."""

from __future__ import annotations

import os
from pathlib import Path

from llama_cpp import llama_cpp as c

Q4_0, Q8_0 = 2, 7
"""Numbers of `llama_ftype`."""


def write_quantised(source: Path, target: Path, ftype: int) -> Path:
    """Write a copy of a model with its weights in this type; return its path."""
    params = c.llama_model_quantize_default_params()
    params.ftype, params.nthread = ftype, 1
    if c.llama_model_quantize(os.fsencode(source), os.fsencode(target), params):
        raise RuntimeError(f"{source} could not be quantised")
    return target
