"""Tiny models with random weights for pooled work, and one that reads and writes in two halves.

Which tensors an architecture wants: src/models/*.cpp of llama.cpp.
"""

from __future__ import annotations

from pathlib import Path

from gguf import PoolingType

from tests.support.small_models import HEAD, N_CTX, N_EMBD, N_FF, N_HEAD, Draft, write_model
from tests.support.vocabularies import wordpiece

BERT_CTX = 512
N_BUCKETS = 8
"""Distances that T5's attention tells apart."""


def write_bert(path: Path) -> None:
    """Write an encoder that reads up to 512 tokens and pools by the first."""
    write_model(path, "bert", _bert, vocabulary=wordpiece())


def write_reranker(path: Path) -> None:
    """Write the same with a head that ranks a pair of texts."""
    write_model(path, "bert", _reranker, vocabulary=wordpiece())


def write_two_way_llama(path: Path) -> None:
    """A decoder's tensors, and attention both ways: llama.cpp still keeps a cache for it."""
    write_model(path, "llama", _two_way_llama)


def write_t5_encoder(path: Path) -> None:
    write_model(path, "t5encoder", _t5_encoder)


def write_t5(path: Path) -> None:
    """Encoder and decoder."""
    write_model(path, "t5", _t5)


RANK_TEMPLATE = "<|im_start|>user\n{query} ? {document}<|im_end|>\n<|im_start|>assistant\n"


def write_rank_decoder(path: Path) -> None:
    """A decoder that ranks: it reads query and document in a template, and says yes or no."""
    write_model(path, "qwen3", _rank_decoder)


def _bert(draft: Draft, pooling: PoolingType = PoolingType.CLS) -> None:
    writer = draft.writer
    writer.add_context_length(BERT_CTX)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(2)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(pooling)
    for name, rows in {"token_embd": draft.n_vocab, "token_types": 2, "position_embd": BERT_CTX}.items():
        draft.add(f"{name}.weight", draft.rng.standard_normal((rows, N_EMBD)))
    _norm(draft, "token_embd_norm")
    for layer in range(2):
        block = f"blk.{layer}"
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            _linear(draft, f"{block}.{name}", N_EMBD, N_EMBD)
        _norm(draft, f"{block}.attn_output_norm")
        _linear(draft, f"{block}.ffn_up", N_FF, N_EMBD)
        _linear(draft, f"{block}.ffn_down", N_EMBD, N_FF)
        _norm(draft, f"{block}.layer_output_norm")


def _reranker(draft: Draft) -> None:
    _bert(draft, PoolingType.RANK)
    draft.writer.add_classifier_output_labels(["LABEL_0"])
    _linear(draft, "cls", N_EMBD, N_EMBD)
    _linear(draft, "cls.output", 1, N_EMBD)


def _linear(draft: Draft, name: str, rows: int, columns: int) -> None:
    draft.matrix(f"{name}.weight", rows, columns)
    draft.vector(f"{name}.bias", rows, 0.0)


def _norm(draft: Draft, name: str) -> None:
    draft.vector(f"{name}.weight", N_EMBD)
    draft.vector(f"{name}.bias", N_EMBD, 0.0)


def _rank_decoder(draft: Draft) -> None:
    draft.shape(2)
    draft.writer.add_pooling_type(PoolingType.RANK)
    draft.writer.add_classifier_output_labels(["yes", "no"])
    draft.writer.add_chat_template([{"name": "rerank", "template": RANK_TEMPLATE}])
    draft.ends()
    draft.matrix("cls.output.weight", 2, N_EMBD)
    for layer in range(2):
        block = f"blk.{layer}"
        draft.attention(block)
        draft.vector(f"{block}.attn_q_norm.weight", HEAD)
        draft.vector(f"{block}.attn_k_norm.weight", HEAD)
        draft.forward(block)


def _two_way_llama(draft: Draft) -> None:
    draft.shape(2)
    draft.writer.add_causal_attention(False)
    draft.ends()
    for layer in range(2):
        draft.attention(f"blk.{layer}")
        draft.forward(f"blk.{layer}")


def _t5_encoder(draft: Draft) -> None:
    writer = draft.writer
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(2)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_relative_attn_buckets_count(N_BUCKETS)
    draft.add("token_embd.weight", draft.rng.standard_normal((draft.n_vocab, N_EMBD)))
    draft.vector("enc.output_norm.weight", N_EMBD)
    for layer in range(2):
        _half(draft, f"enc.blk.{layer}")


def _t5(draft: Draft) -> None:
    _t5_encoder(draft)
    draft.writer.add_decoder_start_token_id(0)
    draft.vector("dec.output_norm.weight", N_EMBD)
    for layer in range(2):
        block = f"dec.blk.{layer}"
        _half(draft, block)
        draft.vector(f"{block}.cross_attn_norm.weight", N_EMBD)
        for name in ("q", "k", "v", "o"):
            draft.matrix(f"{block}.cross_attn_{name}.weight", N_EMBD, N_EMBD)


def _half(draft: Draft, block: str) -> None:
    draft.vector(f"{block}.attn_norm.weight", N_EMBD)
    draft.matrix(f"{block}.attn_rel_b.weight", N_BUCKETS, N_HEAD)
    for name in ("q", "k", "v", "o"):
        draft.matrix(f"{block}.attn_{name}.weight", N_EMBD, N_EMBD)
    draft.vector(f"{block}.ffn_norm.weight", N_EMBD)
    draft.matrix(f"{block}.ffn_up.weight", N_FF, N_EMBD)
    draft.matrix(f"{block}.ffn_down.weight", N_EMBD, N_FF)
