"""The live memory that a rank's snapshots are copied from, looked at afresh in every step.

Storages move: an optimizer replaces a state, a loader re-seats a parameter. So no pointer is trusted from step to step: every
boundary looks at the state, in full as here or by verifying what a full look told (`watch`), and its pieces must be those
that the slots were laid out for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ucformat import values
from ucformat.box import Box
from ucformat.catalog import TensorSpec
from ucformat.errors import UcformatError
from ucformat.group import Group
from ucformat.reshard.state.division import divide
from ucformat.reshard.state.walk import Collected, Piece, collect

Key = tuple[TensorSpec, Box]


class MovedError(UcformatError):
    """The state is no longer laid out as it was when the slots were made."""

    def __init__(self, moved: Iterable[Key]) -> None:
        self.moved = tuple(moved)
        names = ", ".join(sorted({spec.name for spec, _ in self.moved})[:5])
        super().__init__(f"the state has changed its layout: {names} is not there as it was, or new")


class TornError(UcformatError):
    """The state was changed before its copy was complete."""

    def __init__(self, changed: Iterable[Key]) -> None:
        self.changed = tuple(changed)
        names = ", ".join(sorted({spec.name for spec, _ in self.changed})[:5])
        super().__init__(
            f"{names} changed while it was copied, and not by a torch optimizer: this step is not kept; "
            "call `deadline()` before anything changes the state"
        )


@dataclass(frozen=True, slots=True)
class Boundary:
    """The state between two optimizer steps: tensors where they lie now, and everything else by value."""

    views: tuple[torch.Tensor, ...]
    """Live memory of each piece of the share, in the share's order."""
    stable: tuple[bool, ...]
    """Whether a piece changes in the optimizer step alone: parameters and optimizer states, on the device that computes."""
    tree: bytes
    """The value tree as JSON."""
    wrappers: tuple[DTensor, ...] = ()
    """DTensors among parameters and optimizer states: what is written through them counts there, not at their local tensors."""

    def written(self, wrappers: Iterable[DTensor]) -> set[int]:
        """Which pieces lie in the memory of these."""
        written = {memory(_local(wrapper)) for wrapper in wrappers}
        return {i for i, view in enumerate(self.views) if memory(view) in written}


@dataclass(frozen=True, slots=True)
class Share:
    """What this rank keeps of the state: agreed upon once, with all ranks."""

    keys: tuple[Key, ...]
    """The pieces, and the tensors without elements."""
    pieces: int
    """How many of the keys have elements: the first ones."""
    held: frozenset[Key]
    """All pieces of this rank's state, those that other ranks keep included."""
    aliases: Mapping[str, str]
    mesh: Mapping[str, int]
    coords: Mapping[str, int] | None
    together: bool
    """The layout can't be told on some rank without the others (uneven shards): every look at the state is an exchange."""
    nbytes: int


def agree(state: Mapping[str, object], group: Group) -> Share:
    """Divide the state over the ranks. Every rank of `group` calls it; exchanges as a save does."""
    collected = collect(state, group)
    division = divide(collected, group, check_replicas=True)
    keys = [(piece.spec, piece.box) for piece in division.pieces]
    alone = _attempt(state, group.rank)
    unknown = alone is None or not {(p.spec, p.box) for p in alone.pieces} >= set(keys)
    return Share(
        (*keys, *((spec, Box.whole(spec.shape)) for spec in division.empty)),
        len(keys),
        frozenset((piece.spec, piece.box) for piece in collected.pieces),
        division.aliases,
        division.mesh,
        collected.coords,
        together=group.any_rank(unknown),
        nbytes=sum(box.volume * spec.kind.itemsize for spec, box in keys),
    )


def _attempt(state: Mapping[str, object], rank: int) -> Collected | None:
    """The state as it looks without the other ranks, None when it can't be told."""
    try:
        return collect(state, Group(rank))
    except UcformatError:
        return None


def look(state: Mapping[str, object], share: Share, group: Group) -> Boundary:
    """The state as it is now. Raises MovedError when it is laid out in another way than the share."""
    return boundary(collect(state, group if share.together else Group(group.rank)), Lasting.of(state), share)


def boundary(collected: Collected, lasting: Lasting, share: Share) -> Boundary:
    """The share in what was collected. Raises MovedError."""
    pieces = held(collected)
    if pieces.keys() != share.held:
        raise MovedError(pieces.keys() ^ share.held)
    views = [pieces[key].view for key in share.keys[: share.pieces]]
    return settled(views, [memory(view) in lasting.storages for view in views], collected.values, lasting.wrappers)


def settled(views: Sequence[torch.Tensor], lasts: Sequence[bool], tree: object, wrappers: Iterable[DTensor]) -> Boundary:
    """`lasts` says of each view whether it is of a parameter or an optimizer state."""
    computes = {device.type for device in set(map(attrgetter("device"), views))} - {"cpu"}
    return Boundary(
        tuple(views),
        tuple(
            last and not view.is_inference() and not (computes and view.device.type == "cpu")  # such tensors count no writes
            for last, view in zip(lasts, views, strict=True)
        ),
        values.encode(tree),
        tuple(wrappers),
    )


def held(collected: Collected) -> dict[Key, Piece]:
    return {(piece.spec, piece.box): piece for piece in collected.pieces}


def memory(tensor: torch.Tensor) -> int:
    """Where its storage begins."""
    return tensor.untyped_storage().data_ptr()


@dataclass(frozen=True, slots=True)
class Lasting:
    """Parameters and optimizer states below a state."""

    storages: frozenset[int]
    wrappers: tuple[DTensor, ...]

    @classmethod
    def of(cls, state: object) -> Lasting:
        found = list(_lasting(state))
        return cls(frozenset(memory(_local(x)) for x in found), tuple(x for x in found if isinstance(x, DTensor)))


def _lasting(state: object) -> Iterator[torch.Tensor]:
    waiting: list[object] = [state]
    while waiting:
        item = waiting.pop()
        if isinstance(item, nn.Module):
            yield from item.parameters()
        elif isinstance(item, torch.optim.Optimizer):
            for states in item.state.values():
                yield from (x for x in states.values() if isinstance(x, torch.Tensor))
            for group in item.param_groups:
                yield from group["params"]
        elif isinstance(item, Mapping):
            waiting.extend(item.values())
        elif isinstance(item, (list, tuple)):
            waiting.extend(item)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank behind a DTensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()
