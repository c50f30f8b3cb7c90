"""Who writes what: replicas are compared, then written once, by the holder with the least to write.

Whether two ranks hold the same box of the same tensor is known from names and placements; that both hold the same bytes never is:
experts that are numbered anew on each rank look like replicas, and replicas drift apart. So all of them are compared by digests
of all their bytes. Pure functions on what each rank offers; every rank computes the same answer from the same exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash

from ucformat.errors import ValueConflictError

CHUNK_BYTES = 32 << 20  # copied at a time of tensors that are not contiguous in host memory

ADVICE = (
    "give different tensors different names, or a mesh that covers these ranks (expert parallelism); wrap a tensor of which "
    "each rank has its own in ucformat.rank_local(...); synchronise replicas that drifted apart before saving, or pass "
    "check_replicas=False to store one of them"
)


@dataclass(frozen=True, slots=True)
class Offer:
    """A box that this rank holds and others may hold too."""

    name: str
    offset: tuple[int, ...]
    length: tuple[int, ...]
    nbytes: int
    digest: int | None
    """Of all its bytes; None when replicas are not compared."""
    first_rank_wins: bool = False
    """Replicas may differ: the first rank's is written."""


@dataclass(frozen=True, slots=True)
class Offers:
    """What one rank brings to the exchange."""

    unique_bytes: int
    """Bytes that only this rank holds."""
    shared: tuple[Offer, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which rank writes which shared box."""

    writes: tuple[tuple[bool, ...], ...]
    """For every rank, whether it writes each of the boxes that it offered."""
    first_of: tuple[str, ...]
    """Names of tensors that differ between ranks and are stored as the first rank has them."""


Holders = dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]]
"""(name, offset, length) of a box → (rank, position among its offers) of those who hold it."""


def assign_writers(ranks: Sequence[Offers], aliases: Mapping[str, str] | None = None) -> Assignment:
    """Assign larger boxes first, each to its least loaded holder. Tensors in `aliases` are compared with what they are tied to.

    Raises ValueConflictError when replicas that should be equal are not.
    """
    holders, tied = _holders(ranks, aliases or {})
    first_of = _compare(ranks, holders, tied)
    load = [offers.unique_bytes for offers in ranks]
    chosen = [[False] * len(offers.shared) for offers in ranks]
    size = {key: ranks[held[0][0]].shared[held[0][1]].nbytes for key, held in holders.items()}
    for key in sorted(holders, key=lambda key: (-size[key], key)):
        held = holders[key]
        first_rank_wins = any(ranks[rank].shared[at].first_rank_wins for rank, at in held)
        rank, at = min(held) if first_rank_wins else min(held, key=lambda item: (load[item[0]], item[0]))
        chosen[rank][at] = True
        load[rank] += size[key]
    return Assignment(tuple(map(tuple, chosen)), tuple(first_of))


def _holders(ranks: Sequence[Offers], aliases: Mapping[str, str]) -> tuple[Holders, Holders]:
    """Holders of each box, and those who have it under a name that is an alias (on other ranks, too, it is none of its own)."""
    holders: Holders = {}
    tied: Holders = {}
    for rank, offers in enumerate(ranks):
        for at, offer in enumerate(offers.shared):
            target = aliases.get(offer.name)
            where = holders if target is None else tied
            where.setdefault((target or offer.name, offer.offset, offer.length), []).append((rank, at))
    return holders, tied


def _compare(ranks: Sequence[Offers], holders: Holders, tied: Holders) -> list[str]:
    """Names of tensors that may differ and do. Raises ValueConflictError for those that may not."""
    first_of: dict[str, None] = {}
    conflicts: dict[str, list[int]] = {}
    for key in sorted(holders):
        offers = [(rank, ranks[rank].shared[at]) for rank, at in (*holders[key], *tied.get(key, ()))]
        known = [(rank, offer.digest) for rank, offer in offers if offer.digest is not None]
        odd = [rank for rank, digest in known if digest != known[0][1]]
        if odd and any(offer.first_rank_wins for _, offer in offers):
            first_of[key[0]] = None
        elif odd:
            conflicts.setdefault(key[0], sorted({known[0][0], *odd}))
    if conflicts:
        name, *others = conflicts
        more = f", as for {len(others)} more tensors ({', '.join(others[:3])}…)" if others else ""
        raise ValueConflictError(name, conflicts[name], f"replicas of one tensor have different contents{more}", ADVICE)
    return list(first_of)


def content_digest(tensor: torch.Tensor) -> int:
    """xxh3-64 of the elements' bytes in row-major order, whatever the strides and the device; needs little extra memory."""
    hasher = xxhash.xxh3_64()
    for part in _host_parts(tensor.detach()):
        hasher.update(memoryview(part.view(torch.uint8).numpy()))
    return int(hasher.intdigest())


def _host_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements in row-major order as 1-D tensors in host memory, the memory itself where it can be."""
    if tensor.numel() == 0:
        return
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes <= CHUNK_BYTES or (tensor.is_contiguous() and tensor.device.type == "cpu"):
        flat = tensor.contiguous().cpu().reshape(-1)
        yield flat if flat.stride() == (1,) else flat.clone(memory_format=torch.contiguous_format)  # one element, odd stride
    elif tensor.is_contiguous():
        for part in tensor.view(-1).split(CHUNK_BYTES // tensor.element_size()):
            yield part.cpu()
    else:
        rows = max(1, CHUNK_BYTES * len(tensor) // nbytes)
        for start in range(0, len(tensor), rows):
            yield from _host_parts(tensor[start : start + rows] if rows > 1 or tensor.dim() == 1 else tensor[start])
