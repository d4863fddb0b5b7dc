"""A 0.5 B-parameter model with a real vocabulary and random weights: right for speed, useless for meaning.

    python -m benchmarks.synthetic_model OUT.gguf

Shape: llama architecture, 24 layers, width 896, 14 heads (2 for keys and values), feed-forward 4,864, the Qwen2
vocabulary of llama.cpp's vocab-only file (151,936 tokens), tied embeddings, all matrices Q8_0. The file is the same
for the same seed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

from benchmarks.reference import bench_dir, sdist_source

N_LAYER, N_EMBD, N_HEAD, N_HEAD_KV, N_FF, N_CTX = 24, 896, 14, 2, 4864, 32768
BLOCK = 32
"""Values of one Q8_0 block: one f16 scale and 32 signed bytes."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def q8_0(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Random Q8_0 matrix as raw bytes, shape (rows, columns / 32 * 34).

    Its values have a deviation of 1 / sqrt(columns), so that activations stay finite through any number of layers.
    """
    blocks = rows * columns // BLOCK
    raw = np.empty((blocks, 2 + BLOCK), dtype=np.uint8)
    scale = np.float16(1.0 / (73.0 * np.sqrt(columns)))  # uniform bytes have a deviation of 73
    raw[:, :2] = np.frombuffer(scale.tobytes(), dtype=np.uint8)
    raw[:, 2:] = rng.integers(-127, 128, size=(blocks, BLOCK), dtype=np.int8).view(np.uint8)
    return raw.reshape(rows, columns // BLOCK * (2 + BLOCK))


def copy_vocabulary(writer: gguf.GGUFWriter, vocabulary: Path) -> int:
    """Copies every `tokenizer.*` field; returns the number of tokens."""
    reader = gguf.GGUFReader(vocabulary)
    for name, field in reader.fields.items():
        if name.startswith("tokenizer.") and name != "tokenizer.chat_template":
            kind = field.types[0]
            sub = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub)
    tokens: list[str] = reader.fields["tokenizer.ggml.tokens"].contents()
    return len(tokens)


def write(out: Path, *, n_layer: int = N_LAYER, seed: int = 20260901) -> Path:
    """Writes the model; `n_layer` 2 makes the toy on which everything but arithmetic is felt."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_name(f"paddock synthetic, {n_layer} layers")
    n_vocab = copy_vocabulary(writer, sdist_source() / "vendor/llama.cpp/models/ggml-vocab-qwen2.gguf")
    writer.add_chat_template(CHAT_TEMPLATE)
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_rope_dimension_count(N_EMBD // N_HEAD)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(n_vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)

    def matrix(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(f"{name}.weight", q8_0(rng, rows, columns), raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(N_EMBD, dtype=np.float32))

    kv = N_EMBD // N_HEAD * N_HEAD_KV
    matrix("token_embd", n_vocab, N_EMBD)
    norm("output_norm")
    for layer in range(n_layer):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm")
        norm(f"{block}.ffn_norm")
        matrix(f"{block}.attn_q", N_EMBD, N_EMBD)
        matrix(f"{block}.attn_k", kv, N_EMBD)
        matrix(f"{block}.attn_v", kv, N_EMBD)
        matrix(f"{block}.attn_output", N_EMBD, N_EMBD)
        matrix(f"{block}.ffn_gate", N_FF, N_EMBD)
        matrix(f"{block}.ffn_up", N_FF, N_EMBD)
        matrix(f"{block}.ffn_down", N_EMBD, N_FF)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def synthetic_model() -> Path:
    """The 0.5 B model in the benchmark folder, written on first use."""
    path = bench_dir() / "synthetic-0.5b-q8_0.gguf"
    if not path.exists():
        partial = path.with_suffix(".partial")
        write(partial)
        partial.rename(path)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=N_LAYER)
    parser.add_argument("--seed", type=int, default=20260901)
    arguments = parser.parse_args()
    print(write(arguments.out, n_layer=arguments.layers, seed=arguments.seed))
