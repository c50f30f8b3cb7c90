"""Who writes what: replicas are written once, by the holder with the least to write, or by the first where they may differ.

Pure functions on what each rank offers; every rank computes the same answer from the same exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ucformat.containers.checksums import digest
from ucformat.errors import ValueConflictError

SAMPLE_BYTES = 64 << 10  # per replica that is compared: RNG states and counters whole, large weights by their ends


@dataclass(frozen=True, slots=True)
class Offer:
    """A box that this rank holds and others may hold too."""

    name: str
    offset: tuple[int, ...]
    length: tuple[int, ...]
    nbytes: int
    digest: int | None
    """Checksum of (a sample of) its bytes, or None when replicas need not be compared."""
    first_rank_wins: bool = False
    """Replicas may differ: the first rank's is written."""


@dataclass(frozen=True, slots=True)
class Offers:
    """What one rank brings to the exchange."""

    unique_bytes: int
    """Bytes that only this rank holds."""
    shared: tuple[Offer, ...]


def choose(ranks: Sequence[Offers]) -> list[list[bool]]:
    """For every rank, whether it writes each of its shared boxes. Larger boxes first, to the least loaded holder.

    Raises ValueConflictError when replicas that should be equal are not.
    """
    holders: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = {}
    for rank, offers in enumerate(ranks):
        for at, offer in enumerate(offers.shared):
            holders.setdefault((offer.name, offer.offset, offer.length), []).append((rank, at))
    load = [offers.unique_bytes for offers in ranks]
    chosen = [[False] * len(offers.shared) for offers in ranks]
    size = {key: ranks[held[0][0]].shared[held[0][1]].nbytes for key, held in holders.items()}
    for key in sorted(holders, key=lambda key: (-size[key], key)):
        held = holders[key]
        _compare(key[0], [(rank, ranks[rank].shared[at].digest) for rank, at in held])
        first_rank_wins = any(ranks[rank].shared[at].first_rank_wins for rank, at in held)
        rank, at = min(held) if first_rank_wins else min(held, key=lambda item: (load[item[0]], item[0]))
        chosen[rank][at] = True
        load[rank] += size[key]
    return chosen


def _compare(name: str, held: Sequence[tuple[int, int | None]]) -> None:
    known = {value for _, value in held if value is not None}
    if len(known) > 1:
        first = next(value for _, value in held if value is not None)
        odd = [rank for rank, value in held if value is not None and value != first]
        raise ValueConflictError(name, [held[0][0], *odd], "a plain tensor has different contents")


def sample(tensor: torch.Tensor) -> int:
    """A checksum that tells replicas apart: of all bytes of a small tensor, of both ends and the middle of a large one."""
    found = tensor.detach()
    if found.numel() * found.element_size() > SAMPLE_BYTES:
        found = _pick(found, SAMPLE_BYTES // 3 // found.element_size())
    data = found.contiguous().cpu().reshape(-1)
    return digest("xxh3-64", data.view(torch.uint8).numpy()) if data.numel() else 0


def _pick(tensor: torch.Tensor, items: int) -> torch.Tensor:
    """`items` from the start, the middle and the end, without copying the rest."""
    if tensor.dim() > 1 and not tensor.is_contiguous():
        return torch.cat([_pick(tensor[i], max(1, items // 3)) for i in (0, len(tensor) // 2, len(tensor) - 1)])
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor
    middle = max(0, (len(flat) - items) // 2)
    return torch.cat([flat[:items], flat[middle : middle + items], flat[-items:]])
