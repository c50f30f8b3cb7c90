"""The order that `round_robin_gradients` gives the parameters of a group in ZeRO-1's and 2's buffers, there and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def round_robin(zero: Mapping[Any, Any]) -> bool:
    """Whether a run's `zero_optimization` settings shuffle parameters."""
    return zero.get("round_robin_gradients") is True and zero.get("stage") in (1, 2)


def _order(count: int, ranks: int) -> list[int]:
    return [i for first in range(min(ranks, count)) for i in range(first, count, ranks)]


def shuffled(names: Sequence[str], ranks: int) -> list[str]:
    """Dealt out to so many ranks in turn, then rank after rank."""
    return [names[i] for i in _order(len(names), ranks)]


def unshuffled(names: Sequence[str], ranks: int) -> list[str]:
    """The order before `shuffled`."""
    found = [""] * len(names)
    for name, i in zip(names, _order(len(names), ranks), strict=True):
        found[i] = name
    return found
