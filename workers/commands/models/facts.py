"""Tells from a GGUF file's header what a person wants to know of it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from workers.llama.gguf import GgufHeader

FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4",
    40: "Q1_0", 41: "Q2_0",
}  # fmt: skip
"""Value of `general.file_type` -> the quantisation's name. Source: `llama_ftype` in llama.h."""
TENSOR_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
"""Number of a tensor's type -> its name, for files without `general.file_type`. Source: `ggml_type` in ggml.h."""

TEMPLATE = "tokenizer.chat_template"
TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "eot": "eot_token_id", "pad": "padding_token_id"}
"""Name of a special token here -> the end of its key in the metadata."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The contents of a header that people ask for. Numbers are 0 where it does not say."""

    kind: str
    """`model`, `projector`, `adapter` or another `general.type`."""
    name: str
    architecture: str
    quant: str
    num_parameters: int
    num_layers: int
    n_ctx: int
    """Context in tokens that the model was trained for."""
    n_embd: int
    vocabulary: str
    """The tokenizer's kind."""
    num_tokens: int
    """Size of the vocabulary."""
    special_tokens: dict[str, int]
    templates: tuple[str, ...]
    """Names of the chat templates in the file; `default` is the one without a name."""
    senses: tuple[str, ...]
    """What a projector makes a model do: `vision`, `audio`."""
    lora_alpha: float


def read_facts(header: GgufHeader) -> Facts:
    """Return what the header says."""
    architecture = header.text("general.architecture") or ""
    embedding = header.tensors.get("token_embd.weight")
    tokens = {name: header.number(f"tokenizer.ggml.{key}") for name, key in TOKENS.items()}
    alpha = header.metadata.get("adapter.lora.alpha", 0.0)
    return Facts(
        kind="projector" if architecture == "clip" else header.text("general.type") or "model",
        name=header.text("general.name") or "",
        architecture=architecture,
        quant=_quant(header),
        num_parameters=sum(math.prod(tensor.shape) for tensor in header.tensors.values()),
        num_layers=header.number(f"{architecture}.block_count") or 0,
        n_ctx=header.number(f"{architecture}.context_length") or 0,
        n_embd=header.number(f"{architecture}.embedding_length") or 0,
        vocabulary=header.text("tokenizer.ggml.model") or "",
        num_tokens=header.number(f"{architecture}.vocab_size") or (embedding.shape[1] if embedding else 0),
        special_tokens={name: token for name, token in tokens.items() if token is not None},
        templates=tuple(
            key.removeprefix(TEMPLATE).removeprefix(".") or "default"
            for key in header.types
            if key == TEMPLATE or key.startswith(f"{TEMPLATE}.")
        ),
        senses=tuple(sense for sense in ("vision", "audio") if header.metadata.get(f"clip.has_{sense}_encoder")),
        lora_alpha=float(alpha) if isinstance(alpha, int | float) else 0.0,
    )


def _quant(header: GgufHeader) -> str:
    """Return the quantisation: as the file says, else the type of most of its numbers."""
    file_type = header.number("general.file_type")
    if file_type is not None and file_type in FILE_TYPES:
        return FILE_TYPES[file_type]
    numbers = Counter[int]()
    for tensor in header.tensors.values():
        numbers[tensor.kind] += math.prod(tensor.shape)
    return TENSOR_TYPES.get(numbers.most_common(1)[0][0], "") if numbers else ""
