"""Who writes what: replicas are compared, then written once, by the holder with the least to write.

Whether two ranks hold the same box of the same tensor is known from names and placements; that both hold the same bytes never is:
experts that are numbered anew on each rank look like replicas, and replicas drift apart. So all of them are compared by digests
of all their bytes.

Of thousands of ranks most offer the same boxes. Such ranks are of one *structure*, and everything here is reckoned by structures;
`division` lets each travel once. Pure functions.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from ucformat import values
from ucformat.errors import ValueConflictError

CHUNK_BYTES = 32 << 20  # copied at a time of tensors that are not contiguous in host memory

ADVICE = (
    "give different tensors different names, or a mesh that covers these ranks (expert parallelism); wrap a tensor of which "
    "each rank has its own in ucformat.rank_local(...); synchronise replicas that drifted apart before saving, or pass "
    "check_replicas=False to store one of them"
)


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """A box that this rank holds and others may hold too."""

    name: str
    offset: tuple[int, ...]
    length: tuple[int, ...]
    nbytes: int
    first_rank_wins: bool = False
    """Replicas may differ: the first rank's is written."""


class Structure(msgspec.Struct, frozen=True, array_like=True):
    """What many ranks have alike."""

    offers: tuple[Offer, ...]
    aliases: dict[str, str]
    """Other name of a tensor → its name."""
    mesh: dict[str, int]

    def encode(self) -> bytes:
        """The same bytes for equal structures."""
        return msgspec.msgpack.encode(self, order="sorted")


Key = tuple[str, tuple[int, ...], tuple[int, ...]]
"""(name, offset, length) of a box."""
Holders = dict[Key, list[tuple[int, int]]]
"""Box → (structure, position among its offers) of those that hold it."""


def holders(structures: Sequence[Structure], aliases: Mapping[str, str]) -> tuple[Holders, Holders]:
    """Holders of each box, and those who have it under a name that is an alias (on other ranks, too, it is none of its own)."""
    own: Holders = {}
    tied: Holders = {}
    for number, structure in enumerate(structures):
        for at, offer in enumerate(structure.offers):
            target = aliases.get(offer.name)
            where = own if target is None else tied
            where.setdefault((target or offer.name, offer.offset, offer.length), []).append((number, at))
    return own, tied


def assign_writers(
    structures: Sequence[Structure], members: Sequence[Sequence[int]], unique_bytes: Sequence[int], aliases: Mapping[str, str]
) -> list[NDArray[np.int32]]:
    """For each structure, the rank that writes each of its offers, -1 for one under an alias.

    Larger boxes are assigned first, each to its least loaded holder. `members` are the ranks of each structure, ascending;
    `unique_bytes` is what each rank writes anyway.
    """
    load = list(unique_bytes)
    heaps = [_lightest(ranks, load, len(held.offers)) for ranks, held in zip(members, structures, strict=True)]
    own, _ = holders(structures, aliases)
    writers = [np.full(len(structure.offers), -1, dtype=np.int32) for structure in structures]
    size = {key: structures[held[0][0]].offers[held[0][1]].nbytes for key, held in own.items()}
    for key in sorted(own, key=lambda key: (-size[key], key)):
        held = own[key]
        if any(structures[number].offers[at].first_rank_wins for number, at in held):
            rank = min(members[number][0] for number, _ in held)
        else:
            rank = min(_least(heaps[number], load) for number, _ in held)[1]
        load[rank] += size[key]
        for number, at in held:
            writers[number][at] = rank
    return writers


def _lightest(ranks: Sequence[int], load: Sequence[int], count: int) -> list[tuple[int, int]]:
    """A heap of the (load, rank) of the least loaded ranks: no more than `count` of them can be chosen `count` times."""
    loads, all_ranks = np.array([load[rank] for rank in ranks], dtype=np.int64), np.array(ranks, dtype=np.int64)
    first = np.lexsort((all_ranks, loads))[:count]
    return list(zip(loads[first].tolist(), all_ranks[first].tolist(), strict=True))  # sorted, and so a heap


def _least(heap: list[tuple[int, int]], load: Sequence[int]) -> tuple[int, int]:
    """The (load, rank) of the least loaded rank of a heap, in which loads may have become larger since."""
    while heap[0][0] != load[heap[0][1]]:
        heapq.heapreplace(heap, (load[heap[0][1]], heap[0][1]))
    return heap[0]


def drifting(structures: Sequence[Structure], aliases: Mapping[str, str]) -> list[Key]:
    """Boxes that may differ between ranks, sorted."""
    own, tied = holders(structures, aliases)
    return [
        key
        for key in sorted(own)
        if any(structures[number].offers[at].first_rank_wins for number, at in (*own[key], *tied.get(key, ())))
    ]


def compare(
    structures: Sequence[Structure],
    members: Sequence[Sequence[int]],
    digests: Mapping[int, NDArray[np.int64]],
    aliases: Mapping[str, str],
) -> None:
    """`digests` are those of each rank's offers, of the ranks to be compared. Raises ValueConflictError for boxes that differ."""
    conflicts: dict[str, list[int]] = {}
    own, tied = holders(structures, aliases)
    may_differ = set(drifting(structures, aliases))
    for key in sorted(own.keys() - may_differ):
        offers = (*own[key], *tied.get(key, ()))
        known = sorted((rank, int(digests[rank][at])) for number, at in offers for rank in members[number] if rank in digests)
        odd = [rank for rank, digest in known if digest != known[0][1]]
        if odd:
            conflicts.setdefault(key[0], sorted({known[0][0], *odd}))
    if conflicts:
        name, *others = conflicts
        more = f", as for {len(others)} more tensors ({', '.join(others[:3])}…)" if others else ""
        raise ValueConflictError(name, conflicts[name], f"replicas of one tensor have different contents{more}", ADVICE)


def unite(structures: Sequence[Structure], members: Sequence[Sequence[int]]) -> dict[str, str]:
    """All aliases. Raises ValueConflictError when two ranks tie one name to different tensors."""
    return values.unite_aliases((ranks[0], s.aliases) for s, ranks in zip(structures, members, strict=True))


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
