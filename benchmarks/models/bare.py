"""Loads a GGUF file by llama.cpp, and nothing else, and prints the seconds: the model, a context for it, a prompt.

python -m benchmarks.models.bare FILE CELLS TOKENS
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from pathlib import Path

import llama_cpp

from benchmarks.models.systems import CTX, SLOTS


def load_s(path: Path, num_tokens: int) -> float:
    """Return the seconds that loading and a prompt of so many tokens take in a new process, without those for the
    process and the library."""
    command = [sys.executable, "-m", "benchmarks.models.bare", str(path), str(SLOTS * CTX), str(num_tokens)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main(path: str, num_cells: int, num_tokens: int) -> None:
    llama_cpp.llama_backend_init()
    began = time.perf_counter()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx, parameters.n_seq_max, parameters.kv_unified = num_cells, SLOTS, True
    parameters.n_threads = parameters.n_threads_batch = 1
    context = llama_cpp.llama_init_from_model(model, parameters)
    tokens = (ctypes.c_int32 * num_tokens)(*[1] * num_tokens)
    if not context or llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, num_tokens)):
        raise SystemExit(f"{path} can't be loaded")
    llama_cpp.llama_get_logits(context)
    print(time.perf_counter() - began)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
