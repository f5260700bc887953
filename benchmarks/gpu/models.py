"""The workloads, in plain torch: GPT-2 (124M) decoding, ResNet-50 inference, a training step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

Step = Callable[[], object]


class Attention(nn.Module):
    """Causal self-attention over a static key and value cache, one new token a call."""

    def __init__(self, width: int, heads: int, batch: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        shape = (batch, heads, length, width // heads)
        self.register_buffer("keys", torch.zeros(shape), persistent=False)
        self.register_buffer("values", torch.zeros(shape), persistent=False)

    def forward(self, x, position, mask):
        batch = x.shape[0]
        q, k, v = (part.view(batch, 1, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        mixed = functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).reshape(batch, 1, -1))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, batch: int, length: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, batch, length)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x, position, mask):
        x = x + self.attention(self.norm_1(x), position, mask)
        return x + self.mlp(self.norm_2(x))


class GPT2(nn.Module):
    """GPT-2 small: 12 layers, 12 heads, width 768, vocabulary 50257."""

    def __init__(self, batch: int, length: int = 256, layers: int = 12, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50257, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, batch, length) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, token, position, mask):
        x = self.tokens(token) + self.places(position)
        for block in self.blocks:
            x = block(x, position, mask)
        return functional.linear(self.norm(x), self.tokens.weight)


def gpt2_decode(batch: int, *, graph: bool = False) -> Step:
    """Return one greedy decode step, its token read back as a server does; with ``graph`` as a replayed CUDA graph."""
    torch.manual_seed(0)
    model = GPT2(batch).cuda().half().eval()
    token = torch.randint(0, 50257, (batch, 1), device="cuda")
    position, mask = torch.tensor([100], device="cuda"), torch.ones(1, 1, 1, 256, dtype=torch.bool, device="cuda")

    @torch.inference_mode()
    def step():
        token.copy_(model(token, position, mask)[:, -1].argmax(-1, keepdim=True))

    if not graph:
        return _with_read_back(step, token)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=stream):
        step()
    run = _with_read_back(captured.replay, token)
    run.keep = (model, captured, step, position, mask)  # a graph reads from addresses, and keeps nothing alive
    return run


def _with_read_back(step: Step, token: torch.Tensor) -> Step:
    def run():
        step()
        return token[0, 0].item()

    return run


class Bottleneck(nn.Module):
    def __init__(self, inner: int, outer: int, given: int, stride: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(given, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, outer, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        same = stride == 1 and given == outer
        self.skip = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(given, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
        )

    def forward(self, x):
        return functional.relu(self.convs(x) + self.skip(x), inplace=True)


class ResNet50(nn.Module):
    """ResNet-50 (He et al. 2015): stages of 3, 4, 6 and 3 bottlenecks."""

    def __init__(self) -> None:
        super().__init__()
        layers, given = [], 64
        for stage, (count, inner) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
            for index in range(count):
                layers.append(Bottleneck(inner, 4 * inner, given, 2 if stage and not index else 1))
                given = 4 * inner
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(2048, 1000)

    def forward(self, x):
        return self.head(self.layers(self.stem(x)).mean((2, 3)))


def resnet50(batch: int = 8) -> Step:
    """Return one fp16 inference, its result awaited."""
    torch.manual_seed(0)
    model = ResNet50().cuda().half().eval().to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, 224, 224, device="cuda", dtype=torch.half).to(memory_format=torch.channels_last)

    @torch.inference_mode()
    def step():
        model(images)
        torch.cuda.synchronize()

    return step


def train_step(batch: int = 16, width: int = 1024) -> Step:
    """Return one training step of a small transformer encoder: forward, backward, fused AdamW; loss read every step."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 16, 4 * width, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).cuda()
    optimiser = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(batch, 64, width, device="cuda")

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return loss.item()

    return step


WORKLOADS: dict[str, Callable[[], Step]] = {
    "gpt2-decode-b1": lambda: gpt2_decode(1),
    "gpt2-decode-b32": lambda: gpt2_decode(32),
    "gpt2-decode-graph": lambda: gpt2_decode(1, graph=True),
    "resnet50-fp16": resnet50,
    "train-step": train_step,
}
