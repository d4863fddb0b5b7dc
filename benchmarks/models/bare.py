"""Loads a GGUF file by llama.cpp, and nothing else, and prints the seconds: the model, a context for it, one token.

python -m benchmarks.models.bare FILE CELLS
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from pathlib import Path

import llama_cpp

from benchmarks.models.systems import CTX, SLOTS


def load_s(path: Path) -> float:
    """Return the seconds that loading takes in a new process, without those for the process and the library."""
    command = [sys.executable, "-m", "benchmarks.models.bare", str(path), str(SLOTS * CTX)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main(path: str, num_cells: int) -> None:
    llama_cpp.llama_backend_init()
    began = time.perf_counter()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx, parameters.n_seq_max, parameters.kv_unified = num_cells, SLOTS, True
    parameters.n_threads = parameters.n_threads_batch = 1
    context = llama_cpp.llama_init_from_model(model, parameters)
    token = (ctypes.c_int32 * 1)(1)
    if not context or llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(token, 1)):
        raise SystemExit(f"{path} can't be loaded")
    llama_cpp.llama_get_logits(context)
    print(time.perf_counter() - began)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
