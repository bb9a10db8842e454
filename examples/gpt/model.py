"""A byte-level GPT, small enough for a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256  # a token is a byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The shape of a model: ``block`` is the longest context in bytes."""

    layers: int
    heads: int
    width: int
    block: int
    dropout: float = 0.1


SIZES = {
    "tiny": Size(layers=1, heads=2, width=32, block=32),  # 25 thousand parameters: tests
    "small": Size(layers=4, heads=4, width=96, block=64),  # 0.5 million: a step takes well under a second on one core
    "large": Size(layers=6, heads=6, width=384, block=256),  # 11 million
}


class Block(nn.Module):
    """Attention and a two-layer perceptron, each normalised before and added after."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.dropout = size.dropout
        self.norm_attention = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.norm_mlp = nn.LayerNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width),
            nn.GELU(),
            nn.Linear(4 * size.width, size.width),
            nn.Dropout(size.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` after attention and perceptron; its shape is batch, length, width."""
        batch, length, width = x.shape
        heads = self.qkv(self.norm_attention(x)).view(batch, length, 3 * self.heads, width // self.heads)
        q, k, v = heads.transpose(1, 2).chunk(3, dim=1)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """Predicts the next byte at each place. Input and output embeddings share one weight."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, size.width)
        self.place = nn.Embedding(size.block, size.width)
        self.dropout = nn.Dropout(size.dropout)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of predicting ``targets`` from ``tokens``."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embed(tokens) + self.place(places))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
