"""Training states like those of a real transformer: large matrices, many small vectors, bf16 weights, fp32 Adam state."""

from __future__ import annotations

import math
from collections.abc import Iterator

WIDTH = 1024  # matrices of 2-16 MB between vectors of 2-16 KB
VOCAB = 32768
BYTES = {"model": 2, "exp_avg": 4, "exp_avg_sq": 4}  # per number of each kind of state


def parameters(layers: int, width: int = WIDTH, vocab: int = VOCAB) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes."""
    yield "embed.weight", (vocab, width)
    for i in range(layers):
        for name, out, into in (("wq", 1, 1), ("wk", 1, 1), ("wv", 1, 1), ("wo", 1, 1), ("up", 4, 1), ("down", 1, 4)):
            yield f"layers.{i}.{name}.weight", (out * width, into * width)
            yield f"layers.{i}.{name}.bias", (out * width,)
        for norm in ("norm1", "norm2"):
            yield f"layers.{i}.{norm}.weight", (width,)
            yield f"layers.{i}.{norm}.bias", (width,)
    yield "norm.weight", (width,)


def sized(nbytes: float, per_number: int) -> list[tuple[str, tuple[int, ...]]]:
    """Parameters of a model whose state, `per_number` bytes for each number, has about `nbytes` bytes."""
    width, vocab = (WIDTH, VOCAB) if nbytes >= 5e8 else (128, 512)  # small ones for tests
    fixed = sum(math.prod(shape) for _, shape in parameters(0, width, vocab))
    layer = sum(math.prod(shape) for _, shape in parameters(1, width, vocab)) - fixed
    layers = max(1, round((nbytes / per_number - fixed) / layer))
    return list(parameters(layers, width, vocab))
