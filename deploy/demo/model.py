"""The demo model: a small llama, with an optional low-rank adapter on its projections.

Shapes: B rows, T tokens, C channels (WIDTH), H heads of D channels each.
"""

from __future__ import annotations

import torch
from tokenizer import VOCABULARY
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 192
LAYERS = 5
HEADS = 6
HIDDEN = 512
CONTEXT = 1024
ROPE_BASE = 10000.0
EPSILON = 1e-5

RANK = 8
ALPHA = 16.0
ADAPTED = ("q", "v", "o", "down")


def rotation() -> tuple[Tensor, Tensor]:
    """Cosines and sines, (CONTEXT, D/2), of each position's turn of each channel pair."""
    size = WIDTH // HEADS
    speed = ROPE_BASE ** (-torch.arange(0, size, 2).float() / size)
    angle = torch.arange(CONTEXT).float()[:, None] * speed[None, :]
    return angle.cos(), angle.sin()


def rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn neighbouring channels (0,1), (2,3), ... as llama.cpp does: heads is (B, H, T, D)."""
    even, odd = heads[..., 0::2], heads[..., 1::2]
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1).flatten(-2)


class Norm(nn.Module):
    """Root-mean-square norm over the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * self.weight


class Projection(nn.Module):
    """A linear map without bias, (out, in); `adapt` adds B @ A * ALPHA / RANK and freezes the rest."""

    def __init__(self, inward: int, outward: int, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outward, inward) * scale * inward**-0.5)
        self.a: nn.Parameter | None = None
        self.b: nn.Parameter | None = None

    def adapt(self) -> None:
        outward, inward = self.weight.shape
        self.a = nn.Parameter(torch.randn(RANK, inward) * inward**-0.5)
        self.b = nn.Parameter(torch.zeros(outward, RANK))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self.weight)
        if self.a is None or self.b is None:
            return y
        return y + functional.linear(functional.linear(x, self.a), self.b) * (ALPHA / RANK)


class Block(nn.Module):
    """Attention and gated feed-forward, each behind a norm and added back."""

    def __init__(self) -> None:
        super().__init__()
        # What writes to the residual stream starts small, so that depth does not swell it.
        small = 0.5 / LAYERS**0.5
        self.attention_norm, self.forward_norm = Norm(), Norm()
        self.q, self.k, self.v = (Projection(WIDTH, WIDTH, 0.7) for _ in range(3))
        self.o = Projection(WIDTH, WIDTH, small)
        self.gate, self.up = Projection(WIDTH, HIDDEN, 0.7), Projection(WIDTH, HIDDEN, 0.7)
        self.down = Projection(HIDDEN, WIDTH, small)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor | None) -> Tensor:
        rows, length, _ = x.shape
        y = self.attention_norm(x)
        q, k, v = (f(y).view(rows, length, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotated(q, cosine, sine).to(v.dtype), rotated(k, cosine, sine).to(v.dtype)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.o(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        y = self.forward_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Tokens to logits; the embedding serves as the output matrix too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.05)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm()
        cosine, sine = rotation()
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def forward(self, tokens: Tensor, mask: Tensor | None, wanted: Tensor) -> Tensor:
        """Logits, (wanted places, VOCABULARY): tokens (B, T), mask (B, 1, T, T), wanted (B, T) bool."""
        length = tokens.shape[1]
        x = self.embedding[tokens]
        for block in self.blocks:
            x = block(x, self.cosine[:length], self.sine[:length], mask)
        return functional.linear(self.norm(x[wanted]), self.embedding)

    def adapt(self) -> list[nn.Parameter]:
        """Freeze everything, add the adapter, return the adapter's parameters."""
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        for block in self.blocks:
            for name in ADAPTED:
                getattr(block, name).adapt()
        return [parameter for parameter in self.parameters() if parameter.requires_grad]
