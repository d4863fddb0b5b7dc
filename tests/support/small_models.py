"""Tiny models with random weights, one for each kind of memory that llama.cpp has for a sequence.

They say nothing sensible, yet every token that they read changes what they say next, so a wrong memory shows in the
logits. All but the one of stories share the demo model's vocabulary. Which tensors an architecture wants:
src/models/*.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import TokenType

from tests.support.vocabularies import FIRST_TEXT, LINE_END, Vocabulary, demo_vocabulary, sentencepiece
from workers.llama.memory import MemoryKind

N_EMBD, N_HEAD, N_HEAD_KV, N_FF, N_CTX = 64, 4, 2, 128, 4096
HEAD = N_EMBD // N_HEAD
WINDOW = 16
"""Tokens that a layer with a sliding window sees."""
PRE_TOKENIZER = "tokenizer.ggml.pre"
D_STATE, D_CONV, D_INNER, DT_RANK = 8, 4, 2 * N_EMBD, 4
L_CACHE = 3
INFILL_TOKENS = 20
"""The first of three that no text needs."""


WORDS = [int(token) for token in np.random.default_rng(5).integers(10, 760, 400)]
"""A text for all of them: none of its tokens ends an answer."""


class Draft:
    """One file being written: a seeded source of weights beside the writer."""

    def __init__(self, path: Path, architecture: str, seed: int) -> None:
        self.writer = gguf.GGUFWriter(path, architecture)
        self.rng = np.random.default_rng(seed)
        self.n_vocab = 0

    def matrix(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        """Deviation `gain` / sqrt(columns): outputs are about as large as inputs."""
        self.add(name, self.rng.standard_normal((rows, columns)) * (gain / np.sqrt(columns)))

    def vector(self, name: str, length: int, value: float = 1.0, spread: float = 0.1) -> None:
        self.add(name, value + spread * self.rng.standard_normal(length))

    def add(self, name: str, values: Any, dtype: type[np.floating[Any]] = np.float32) -> None:
        self.writer.add_tensor(name, np.ascontiguousarray(values, dtype=dtype))

    def finish(self) -> None:
        """Write the file."""
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()

    def shape(self, n_layer: int, *, head_count_kv: int | list[int] = N_HEAD_KV, rope: bool = True) -> None:
        writer = self.writer
        writer.add_context_length(N_CTX)
        writer.add_embedding_length(N_EMBD)
        writer.add_block_count(n_layer)
        writer.add_feed_forward_length(N_FF)
        writer.add_head_count(N_HEAD)
        writer.add_head_count_kv(head_count_kv)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_layer_norm_eps(1e-5)
        if rope:
            writer.add_rope_dimension_count(HEAD)
            writer.add_rope_freq_base(10_000.0)

    def ends(
        self, *, embedding: float = 1.0, output: float | None = 4.0, norm: str = "output_norm", loudness: Any = 1.0
    ) -> None:
        """Embeddings and what makes logits, of a deviation of about 4; `output` None: the embeddings do both.

        In that case they are small, or what is read would be said again. `loudness`: a factor for each token's logits;
        of 0, it is never the likeliest.
        """
        self.add("token_embd.weight", embedding * self.rng.standard_normal((self.n_vocab, N_EMBD)))
        self.vector(f"{norm}.weight", N_EMBD, 1.0 if output is not None else 0.5 / embedding)
        if output is not None:
            logits = self.rng.standard_normal((self.n_vocab, N_EMBD)) * (output / np.sqrt(N_EMBD))
            self.add("output.weight", logits * np.reshape(loudness, (-1, 1)))

    def attention(self, block: str, *, n_head_kv: int = N_HEAD_KV, look: float = 1.5, output: float = 3.0) -> None:
        """Queries and keys are strong (`look`), so that attention picks a few tokens and forgetting one is felt."""
        self.vector(f"{block}.attn_norm.weight", N_EMBD)
        self.matrix(f"{block}.attn_q.weight", N_EMBD, N_EMBD, look)
        self.matrix(f"{block}.attn_k.weight", n_head_kv * HEAD, N_EMBD, look)
        self.matrix(f"{block}.attn_v.weight", n_head_kv * HEAD, N_EMBD)
        self.matrix(f"{block}.attn_output.weight", N_EMBD, N_EMBD, output)

    def forward(self, block: str, *, output: float = 3.0) -> None:
        self.vector(f"{block}.ffn_norm.weight", N_EMBD)
        self.matrix(f"{block}.ffn_gate.weight", N_FF, N_EMBD)
        self.matrix(f"{block}.ffn_up.weight", N_FF, N_EMBD)
        self.matrix(f"{block}.ffn_down.weight", N_EMBD, N_FF, output)

    def state_space(self, block: str) -> None:
        """The first Mamba's layer: a state that forgets over some dozens of tokens."""
        self.vector(f"{block}.attn_norm.weight", N_EMBD)
        self.matrix(f"{block}.ssm_in.weight", 2 * D_INNER, N_EMBD, 1.5)
        self.matrix(f"{block}.ssm_conv1d.weight", D_INNER, D_CONV)
        self.vector(f"{block}.ssm_conv1d.bias", D_INNER, 0.0)
        self.matrix(f"{block}.ssm_x.weight", DT_RANK + 2 * D_STATE, D_INNER, 1.5)
        self.matrix(f"{block}.ssm_dt.weight", D_INNER, DT_RANK)
        self.vector(f"{block}.ssm_dt.bias", D_INNER, -2.5, 0.5)
        self.add(f"{block}.ssm_a", -np.tile(np.linspace(0.2, 2.0, D_STATE), (D_INNER, 1)))
        self.vector(f"{block}.ssm_d", D_INNER)
        self.matrix(f"{block}.ssm_out.weight", N_EMBD, D_INNER, 2.0)

    def state_space_shape(self) -> None:
        self.writer.add_ssm_conv_kernel(D_CONV)
        self.writer.add_ssm_inner_size(D_INNER)
        self.writer.add_ssm_state_size(D_STATE)
        self.writer.add_ssm_time_step_rank(DT_RANK)


def llama(draft: Draft) -> None:
    draft.shape(2)
    draft.ends()
    for layer in range(2):
        draft.attention(f"blk.{layer}")
        draft.forward(f"blk.{layer}")


def _scaled(draft: Draft) -> None:
    """Rotary embedding that also scales the keys, as long-context variants of some models do."""
    draft.writer.add_rope_scaling_attn_factors(1.25)
    llama(draft)


def _gemma2(draft: Draft, window: int = WINDOW) -> None:
    """Every other layer sees a window."""
    draft.shape(2)
    draft.writer.add_sliding_window(window)
    draft.writer.add_key_length(HEAD)
    draft.writer.add_value_length(HEAD)
    draft.ends(embedding=0.05, output=None)
    for layer in range(2):
        block = f"blk.{layer}"
        draft.attention(block)
        draft.forward(block)
        draft.vector(f"{block}.post_attention_norm.weight", N_EMBD, 2.0)
        draft.vector(f"{block}.post_ffw_norm.weight", N_EMBD, 2.0)


def gemma3(draft: Draft) -> None:
    """Norms of queries and keys, and after each half of a layer; every layer sees everything."""
    draft.shape(2)
    draft.writer.add_key_length(HEAD)
    draft.writer.add_value_length(HEAD)
    draft.ends(embedding=0.125)
    for layer in range(2):
        block = f"blk.{layer}"
        draft.attention(block)
        draft.forward(block)
        draft.vector(f"{block}.attn_q_norm.weight", HEAD, 1.5)
        draft.vector(f"{block}.attn_k_norm.weight", HEAD, 1.5)
        draft.vector(f"{block}.post_attention_norm.weight", N_EMBD)
        draft.vector(f"{block}.post_ffw_norm.weight", N_EMBD)


def _mamba(draft: Draft) -> None:
    draft.shape(2, head_count_kv=0, rope=False)
    draft.state_space_shape()
    draft.ends()
    for layer in range(2):
        draft.state_space(f"blk.{layer}")


def _jamba(draft: Draft) -> None:
    """A recurrent layer, then one of attention without positions."""
    draft.shape(2, head_count_kv=[0, N_HEAD_KV], rope=False)
    draft.state_space_shape()
    draft.ends()
    draft.state_space("blk.0")
    draft.vector("blk.0.ssm_dt_norm.weight", DT_RANK)
    draft.vector("blk.0.ssm_b_norm.weight", D_STATE)
    draft.vector("blk.0.ssm_c_norm.weight", D_STATE)
    draft.attention("blk.1")
    for layer in range(2):
        draft.forward(f"blk.{layer}")


def _lfm2(draft: Draft) -> None:
    """A short convolution, then attention."""
    draft.shape(2, head_count_kv=[0, N_HEAD_KV])
    draft.writer.add_shortconv_l_cache(L_CACHE)
    draft.ends(norm="token_embd_norm")
    draft.vector("blk.0.attn_norm.weight", N_EMBD)
    draft.matrix("blk.0.shortconv.conv.weight", N_EMBD, L_CACHE, 1.5)
    draft.matrix("blk.0.shortconv.in_proj.weight", 3 * N_EMBD, N_EMBD, 1.5)
    draft.matrix("blk.0.shortconv.out_proj.weight", N_EMBD, N_EMBD, 2.0)
    draft.attention("blk.1")
    draft.vector("blk.1.attn_q_norm.weight", HEAD)
    draft.vector("blk.1.attn_k_norm.weight", HEAD)
    for layer in range(2):
        draft.forward(f"blk.{layer}")


def _lfm2_window(draft: Draft) -> None:
    """The same with a window."""
    draft.writer.add_sliding_window(WINDOW)
    _lfm2(draft)


def _deepseek2(draft: Draft) -> None:
    """Latent attention: keys and values are one compressed row per token."""
    latent, nope, rope, value = 32, 16, 8, 16
    draft.shape(2, head_count_kv=1, rope=False)
    writer = draft.writer
    writer.add_rope_dimension_count(rope)
    writer.add_q_lora_rank(0)
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rope)
    writer.add_value_length(latent)
    writer.add_key_length_mla(nope + rope)
    writer.add_value_length_mla(value)
    writer.add_leading_dense_block_count(2)
    writer.add_expert_feed_forward_length(N_FF)
    writer.add_expert_shared_count(0)
    draft.ends()
    for layer in range(2):
        block = f"blk.{layer}"
        draft.vector(f"{block}.attn_norm.weight", N_EMBD)
        draft.vector(f"{block}.attn_kv_a_norm.weight", latent)
        draft.matrix(f"{block}.attn_q.weight", N_HEAD * (nope + rope), N_EMBD, 1.5)
        draft.matrix(f"{block}.attn_kv_a_mqa.weight", latent + rope, N_EMBD, 1.5)
        draft.add(f"{block}.attn_k_b.weight", draft.rng.standard_normal((N_HEAD, latent, nope)) / 4)
        draft.add(f"{block}.attn_v_b.weight", draft.rng.standard_normal((N_HEAD, value, latent)) / 6)
        draft.matrix(f"{block}.attn_output.weight", N_EMBD, N_HEAD * value, 3.0)
        draft.forward(block)


def qwen2vl(draft: Draft) -> None:
    """Rotary positions in four parts, as models that see images have them."""
    draft.writer.add_rope_dimension_sections([2, 3, 3, 0])
    llama(draft)


def _joined_attention(draft: Draft, block: str, *, bias: bool) -> None:
    kv = N_HEAD_KV * HEAD
    names = {"attn_norm": N_EMBD, "attn_qkv": N_EMBD + 2 * kv, "attn_output": N_EMBD, "ffn_norm": N_EMBD}
    draft.vector(f"{block}.attn_norm.weight", N_EMBD)
    draft.matrix(f"{block}.attn_qkv.weight", N_EMBD + 2 * kv, N_EMBD, 1.5)
    draft.matrix(f"{block}.attn_output.weight", N_EMBD, N_EMBD, 3.0)
    draft.vector(f"{block}.ffn_norm.weight", N_EMBD)
    draft.matrix(f"{block}.ffn_up.weight", N_FF, N_EMBD)
    draft.matrix(f"{block}.ffn_down.weight", N_EMBD, N_FF, 3.0)
    if bias:
        for name, length in {**names, "ffn_up": N_FF, "ffn_down": N_EMBD}.items():
            draft.vector(f"{block}.{name}.bias", length, 0.0)


def _mpt(draft: Draft) -> None:
    """Positions by a bias on attention (ALiBi): nothing in the cache depends on where a token stands."""
    draft.shape(2, rope=False)
    draft.writer.add_max_alibi_bias(8.0)
    draft.ends()
    for layer in range(2):
        _joined_attention(draft, f"blk.{layer}", bias=False)


def _gpt2(draft: Draft) -> None:
    """Learned positions, added to the embeddings: they are in every key and value and can't be moved."""
    draft.shape(2, rope=False)
    draft.add("position_embd.weight", draft.rng.standard_normal((N_CTX, N_EMBD)))
    draft.ends()
    draft.vector("output_norm.bias", N_EMBD, 0.0)
    for layer in range(2):
        _joined_attention(draft, f"blk.{layer}", bias=True)


@dataclass(frozen=True, slots=True)
class SmallModel:
    name: str
    architecture: str
    kind: MemoryKind
    write: Callable[[Draft], None]


SMALL_MODELS = {
    one.name: one
    for one in (
        SmallModel("attention", "llama", MemoryKind.ATTENTION, llama),
        SmallModel("attention-scaled", "llama", MemoryKind.ATTENTION, _scaled),
        SmallModel("attention-latent", "deepseek2", MemoryKind.ATTENTION, _deepseek2),
        SmallModel("attention-mrope", "qwen2vl", MemoryKind.ATTENTION, qwen2vl),
        SmallModel("attention-alibi", "mpt", MemoryKind.ATTENTION, _mpt),
        SmallModel("attention-learned", "gpt2", MemoryKind.ATTENTION, _gpt2),
        SmallModel("window", "gemma2", MemoryKind.WINDOW, _gemma2),
        SmallModel("recurrent", "mamba", MemoryKind.RECURRENT, _mamba),
        SmallModel("hybrid", "jamba", MemoryKind.HYBRID, _jamba),
        SmallModel("hybrid-convolution", "lfm2", MemoryKind.HYBRID, _lfm2),
        SmallModel("hybrid-window", "lfm2", MemoryKind.HYBRID, _lfm2_window),
    )
}


def write_small_model(folder: Path, name: str, *, seed: int = 1, pre: str = "") -> Path:
    """Writes `folder`/`name`.gguf: the same bytes for the same seed. `pre`: another pre-tokenizer than the demo's."""
    small = SMALL_MODELS[name]
    path = folder / f"{name}.gguf"
    write_model(path, small.architecture, small.write, seed=seed, pre=pre)
    return path


def write_window_model(path: Path, window: int) -> None:
    """Write the model "window" with another window."""
    write_model(path, "gemma2", partial(_gemma2, window=window))


def with_pre_tokenizer(source: Path, path: Path, pre: str) -> Path:
    """Write a copy of a GGUF file whose pre-tokenizer is another one, with a name as long as the one it has."""
    data = bytearray(source.read_bytes())
    key = PRE_TOKENIZER.encode()
    begin = data.index(key) + len(key) + 4  # the key is followed by the value's type, its length and itself
    length = int.from_bytes(data[begin : begin + 8], "little")
    if len(pre) != length:
        raise ValueError(f"{pre!r} does not have {length} characters")
    data[begin + 8 : begin + 8 + length] = pre.encode()
    path.write_bytes(data)
    return path


def write_wide_model(path: Path, num_tokens: int, *, pre: str = "") -> None:
    """Writes a model of one layer with a large vocabulary: drawing takes longer than computing."""

    def fill(draft: Draft) -> None:
        draft.shape(1)
        draft.ends(embedding=0.3, output=None)
        draft.attention("blk.0")
        draft.forward("blk.0")

    write_model(path, "llama", fill, num_more=num_tokens, pre=pre)


def write_stories_model(path: Path) -> None:
    """Write a model of children's words in random order: a SentencePiece vocabulary, no chat template.

    What it says is text and has lines: tokens of other single bytes, and those that end an answer, are never the
    likeliest. Its attention is weak, so that rounding changes its logits no more than a trained model's; of 60 seeds,
    this one is chosen for answers to the prompts of tests that come to no closer tie than 0.003, in 1,800 steps.
    """

    def fill(draft: Draft) -> None:
        draft.shape(5)
        loudness = np.ones(draft.n_vocab)
        loudness[:FIRST_TEXT] = 0.0
        loudness[LINE_END] = 2.0
        draft.ends(loudness=loudness)
        for layer in range(5):
            draft.attention(f"blk.{layer}", look=3.0, output=0.06)
            draft.forward(f"blk.{layer}", output=1.0)

    write_model(path, "llama", fill, seed=5, vocabulary=sentencepiece())


def write_infill_model(path: Path) -> None:
    """Writes a model whose vocabulary says which tokens stand around the code that it is to fill in."""

    def fill(draft: Draft) -> None:
        for token, part in enumerate(("pre", "suf", "mid"), start=INFILL_TOKENS):
            draft.writer.add_uint32(f"tokenizer.ggml.fim_{part}_token_id", token)
        llama(draft)

    write_model(path, "llama", fill)


def spoil_token(path: Path, token: int) -> None:
    """From here on, whatever the model computes of this token is not a number."""
    reader = gguf.GGUFReader(path, "r+")
    (embeddings,) = [tensor.data for tensor in reader.tensors if tensor.name == "token_embd.weight"]
    embeddings[token] = np.nan
    embeddings.flush()


def write_model(
    path: Path,
    architecture: str,
    fill: Callable[[Draft], None],
    *,
    seed: int = 1,
    pre: str = "",
    num_more: int = 0,
    names: Sequence[str] = (),
    vocabulary: Vocabulary | None = None,
) -> None:
    """A model of these tensors with the demo model's vocabulary (or `vocabulary`), and `num_more` tokens that no text
    is made of. `names`: names of further tokens, which a text that is read with special tokens may hold.
    """
    more: dict[str, list[Any]] = {
        "tokenizer.ggml.tokens": [*(f"more{n}" for n in range(num_more)), *names],
        "tokenizer.ggml.scores": [-1e6] * (num_more + len(names)),
        "tokenizer.ggml.token_type": [*[int(TokenType.NORMAL)] * num_more, *[int(TokenType.USER_DEFINED)] * len(names)],
    }
    draft = Draft(path, architecture, seed)
    draft.writer.add_name(f"small {path.stem}")
    for key, known, kind, sub in vocabulary or demo_vocabulary():
        value = [*known, *more[key]] if key in more else known
        draft.writer.add_key_value(key, pre if pre and key == PRE_TOKENIZER else value, kind, sub)
        if key == "tokenizer.ggml.tokens":
            draft.n_vocab = len(value)
    draft.writer.add_vocab_size(draft.n_vocab)
    fill(draft)
    draft.finish()
