"""Where parameters lie in the flat buffers of Megatron's distributed optimizer: pure geometry, no files.

A buffer holds the parameters of one dtype and one model part, last registered first. Each starts at a multiple of 64 items.
A buffer is a row of buckets; what fills a bucket up behind its last parameter is not stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

ALIGNMENTS = (64, 1)  # items at multiples of which parameters start; releases before 2024 put them end to end
_TAIL = 1 << 22  # the most items that may fill up a bucket of old releases, which store them

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Local(Generic[T]):
    """One rank's part of a parameter."""

    token: T
    """What the caller knows it by."""
    shape: tuple[int, ...]
    dtype: str
    alone: bool = False
    """Whether it has a bucket for itself: an embedding that two pipeline stages share."""

    @property
    def items(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Placed(Generic[T]):
    """A local parameter, and where it starts."""

    local: Local[T]
    bucket: int
    at: int


def buffers(parts: Sequence[Sequence[Local[T]]]) -> list[tuple[str, list[Local[T]]]]:
    """The buffers of model parts whose parameters are in the order of registration: dtype, and parameters in the same order."""
    found: list[tuple[str, list[Local[T]]]] = []
    for part in parts:
        by_dtype: dict[str, list[Local[T]]] = {}
        for local in part:
            by_dtype.setdefault(local.dtype, []).append(local)
        found += by_dtype.items()
    return found


def in_buckets(params: Sequence[Local[T]], sizes: Sequence[int], *, padded: bool = False) -> Iterator[list[Placed[T]]]:
    """Ways to lay parameters into buckets that hold `sizes` items each (`padded`: with what fills them up)."""
    for alignment in ALIGNMENTS:
        placed = _fill(params, sizes, alignment, _TAIL if padded else alignment)
        if placed is not None:
            yield placed


def _fill(params: Sequence[Local[T]], sizes: Sequence[int], alignment: int, tail: int) -> list[Placed[T]] | None:
    """Parameters, last one first, each into the bucket at hand as long as it fits; None when buckets don't get full."""
    placed: list[Placed[T]] = []
    bucket, at = 0, 0
    for local in reversed(params):
        start = -(-at // alignment) * alignment
        while bucket < len(sizes) and start + local.items > sizes[bucket]:
            if sizes[bucket] - at >= max(tail, 1) or not at:
                return None
            bucket, start, at = bucket + 1, 0, 0
        if bucket == len(sizes):
            return None
        placed.append(Placed(local, bucket, start))
        at = start + local.items
    full = bucket == len(sizes) - 1 and sizes[bucket] - at < max(tail, 1)
    return placed if full else None


def coalesced(params: Sequence[Local[T]], total: int, bucket_sizes: Sequence[int]) -> Iterator[list[Placed[T]]]:
    """Ways to lay parameters into a buffer of `total` stored items whose buckets follow one another without what filled them up.

    Where buckets end is not stored: they are of at least one of `bucket_sizes`, or there is one. It matters only where a
    parameter is no multiple of 64 items.
    """
    seen: list[list[int]] = []
    for size in (0, *bucket_sizes):
        for alignment in ALIGNMENTS:
            placed, end = _walk(params, size, alignment)
            starts = [one.at for one in placed]
            if end == total and starts not in seen:
                seen.append(starts)
                yield placed


def _walk(params: Sequence[Local[T]], bucket_size: int, alignment: int) -> tuple[list[Placed[T]], int]:
    """Parameters, last one first, in buckets of at least `bucket_size` items (0: one); and how many items are stored."""
    placed: list[Placed[T]] = []
    first, at = 0, 0  # of the bucket at hand: where it begins among what is stored, items in it
    held = 0
    for local in reversed(params):
        start = -(-at // alignment) * alignment
        if local.alone and held:
            first, start, held = first + start, 0, 0
        placed.append(Placed(local, 0, first + start))
        at, held = start + local.items, held + 1
        if local.alone or (bucket_size and at >= bucket_size):
            first, at, held = first + at, 0, 0
    return placed, first + at
