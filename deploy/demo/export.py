"""Write what train.py left as GGUF files for llama.cpp.

python export.py base  --build build    # paddock-demo.gguf
python export.py voice --build build    # paddock-demo-pirate-lora.gguf
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
import torch
from model import ADAPTED, ALPHA, CONTEXT, EPSILON, HEADS, HIDDEN, LAYERS, ROPE_BASE, WIDTH
from numpy.typing import NDArray
from tokenizer import CALLS, CONTROL, END_OF_TEXT, PRE, SPECIAL, TURN_END, Tokenizer

HERE = Path(__file__).parent
MODEL = HERE / "paddock-demo.gguf"
VOICE = HERE / "paddock-demo-pirate-lora.gguf"
LICENCE = "mit"

# Our name of a block's tensor, and llama.cpp's.
NAMES = {
    "attention_norm": "attn_norm",
    "forward_norm": "ffn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
TYPES = {"f16": gguf.GGMLQuantizationType.F16, "q8_0": gguf.GGMLQuantizationType.Q8_0}

Array = NDArray[np.float32]


def array(value: torch.Tensor) -> Array:
    return np.ascontiguousarray(value.float().numpy())


def write_shape(writer: gguf.GGUFWriter) -> None:
    """The hyperparameters; rotary pairs are neighbours, which is what "llama" means in llama.cpp."""
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(ROPE_BASE)


def write_vocabulary(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    """Tokens, merges and the chat template. The call marks are user-defined, so that they are shown."""
    kinds = [gguf.TokenType.CONTROL] * len(CONTROL) + [gguf.TokenType.USER_DEFINED] * len(CALLS)
    kinds += [gguf.TokenType.NORMAL] * (len(tokenizer.tokens) - len(SPECIAL))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE)
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{left} {right}" for left, right in tokenizer.merges])
    writer.add_bos_token_id(END_OF_TEXT)
    writer.add_eos_token_id(TURN_END)
    writer.add_eot_token_id(TURN_END)
    writer.add_pad_token_id(END_OF_TEXT)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_vocab_size(len(tokenizer.tokens))
    writer.add_chat_template((HERE / "chat_template.jinja").read_text())


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def export_base(build: Path, path: Path, kind: str) -> None:
    """The whole model: matrices of the given type, norms as 32-bit floats."""
    state = torch.load(build / "model.pt")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name("Paddock demo")
    writer.add_license(LICENCE)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if kind == "q8_0" else gguf.LlamaFileType.MOSTLY_F16)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    write_shape(writer)
    write_vocabulary(writer, Tokenizer.load(build / "merges.json"))

    def add(name: str, value: Array) -> None:
        matrix = value.ndim == 2
        data = gguf.quants.quantize(value, TYPES[kind]) if matrix else value
        writer.add_tensor(name, data, raw_dtype=TYPES[kind] if matrix else None)

    add("token_embd.weight", array(state["embedding"]))
    for layer in range(LAYERS):
        for ours, theirs in NAMES.items():
            add(f"blk.{layer}.{theirs}.weight", array(state[f"blocks.{layer}.{ours}.weight"]))
    add("output_norm.weight", array(state["norm.weight"]))
    finish(writer)


def export_voice(build: Path, path: Path) -> None:
    """The adapter: A is (rank, in), B is (out, rank), both 16-bit."""
    state = torch.load(build / "adapter.pt")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_name("Paddock demo pirate")
    writer.add_license(LICENCE)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, ALPHA)
    for layer in range(LAYERS):
        for ours in ADAPTED:
            for half in ("a", "b"):
                value = array(state[f"blocks.{layer}.{ours}.{half}"]).astype(np.float16)
                writer.add_tensor(f"blk.{layer}.{NAMES[ours]}.weight.lora_{half}", value)
    finish(writer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("base", "voice"))
    parser.add_argument("--build", type=Path, default=HERE / "build")
    parser.add_argument("--type", choices=sorted(TYPES), default="f16", help="of the base model's matrices")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    path: Path = given.output or (MODEL if given.what == "base" else VOICE)
    if given.what == "base":
        export_base(given.build, path, given.type)
    else:
        export_voice(given.build, path)
    print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
