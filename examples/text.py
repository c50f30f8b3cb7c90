"""Real text for the examples: the sources of Python's standard library, as bytes.

The sampler's position counts samples of the whole job. Which samples make up a step depends on it alone, so a run that
resumes on another number of data-parallel ranks sees the very same global batches.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CORPUS_BYTES = 4 << 20  # enough that a demo never sees a sample twice, little enough to read in no time


def load_corpus(limit: int = CORPUS_BYTES) -> NDArray[np.uint8]:
    """The first `limit` bytes of the standard library's modules, in the order of their names."""
    parts: list[bytes] = []
    left = limit
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        parts.append(path.read_bytes()[:left])
        left -= len(parts[-1])
        if left == 0:
            break
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


class TextSampler:
    """Random windows of a text; deterministic in (seed, position), whatever the number of ranks."""

    def __init__(self, text: NDArray[np.uint8], context: int, seed: int = 0) -> None:
        self.text = text
        self.context = context
        self.seed = seed
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.position = state["seed"], state["position"]

    def next_batch(self, size: int, rank: int = 0, ranks: int = 1) -> tuple[Tensor, Tensor]:
        """The part of one rank of the next `size` samples: inputs and targets, int64 (size / ranks, context) each.

        Advances the position by the whole `size`. Raises ValueError when `ranks` does not divide it.
        """
        if size % ranks:
            raise ValueError(f"a batch of {size} samples can't be shared by {ranks} ranks")
        share = size // ranks
        first = self.position + rank * share
        windows = np.stack([self._window(i) for i in range(first, first + share)])
        self.position += size
        tokens = torch.from_numpy(windows.astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _window(self, sample: int) -> NDArray[np.uint8]:
        start = int(np.random.default_rng((self.seed, sample)).integers(len(self.text) - self.context))
        return self.text[start : start + self.context + 1]
