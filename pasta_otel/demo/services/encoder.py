"""A small transformer encoder that scores an order's risk: a few milliseconds a request on one CPU core."""

# mypy: allow-subclassing-any
# torch has no types that we check against

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pasta_otel.demo.services.shape import HEADS, LAYERS, TOKENS, VOCABULARY, WIDTH


class Attention(nn.Module):
    """Multi-head self-attention over one sequence."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of ``x``, shape (batch, tokens, width)."""
        batch, tokens, width = x.shape
        split = self.project_in(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        out: Tensor = self.project_out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return out


class FeedForward(nn.Module):
    """The position-wise half of a layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform every position by itself."""
        out: Tensor = self.narrow(functional.gelu(self.widen(x)))
        return out


class EncoderLayer(nn.Module):
    """One pre-norm transformer layer.

    Attributes:
        inspect_values: The demo's ``model-sync`` fault, an old debugging aid left on: every activation value goes to a
            Python float and back, and on CUDA the device is synchronised by the copy.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_feed_forward = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width)
        self.inspect_values = False

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and feed-forward, each around a residual."""
        x = x + self.attention(self.norm_attention(x))
        if self.inspect_values:
            x = through_python_floats(x)
        x = x + self.feed_forward(self.norm_feed_forward(x))
        if self.inspect_values:
            x = through_python_floats(x)
        return x


class Encoder(nn.Module):
    """The stack of layers."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(width, heads) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Apply every layer in turn."""
        for layer in self.layers:
            x = layer(x)
        return x


class RiskModel(nn.Module):
    """Bytes of an order in, its risk (0..1) out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(TOKENS, WIDTH) / WIDTH**0.5)
        self.encoder = Encoder(WIDTH, HEADS, LAYERS)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return one risk a row of ``tokens``, shape (batch, TOKENS)."""
        encoded = self.encoder(self.embedding(tokens) + self.position)
        return torch.sigmoid(self.head(encoded.mean(dim=1))).squeeze(-1)


def build(seed: int, device: str) -> RiskModel:
    """Return the model with weights drawn from ``seed``, ready to serve on ``device``."""
    torch.manual_seed(seed)
    model = RiskModel()
    model.eval()
    model.to(device)
    return model


def tokenize(text: str) -> list[int]:
    """Return ``text`` as exactly TOKENS bytes, cut or padded with zero."""
    raw = text.encode()[:TOKENS]
    return [*raw, *([0] * (TOKENS - len(raw)))]


def through_python_floats(x: Tensor) -> Tensor:
    """Return ``x`` after each value was a Python float: slow, and it waits for the device."""
    values = x.to("cpu").flatten()
    back = torch.empty_like(values)
    for index in range(len(values)):
        back[index] = torch.tensor(values[index].item(), dtype=x.dtype)
    return back.reshape(x.shape).to(x.device)
