"""Looking at the same state in every step: quickly where nothing moved, in full where anything may have.

A full look at thousands of tensors takes longer than many a bubble. What modules and optimizers hold is remembered by
address, and every look verifies all of these (`survey`); everything else in the state, values above all, is taken anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ucformat.errors import UcformatError
from ucformat.group import Group
from ucformat.reshard.state import module, optimizer
from ucformat.reshard.state.walk import Collected, Walker, framing, gather, unite
from ucformat.snapshot.source.fingerprint import Loose, Path, StateLayout, Survey, UnfamiliarError, survey
from ucformat.snapshot.source.share import Boundary, Key, Lasting, Share, boundary, held, look, memory, settled

_Geometry = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset of a view in its storage."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What a full look told of modules and optimizers, without any tensor: nothing is kept alive."""

    facts: list[object]
    layout: StateLayout
    """What is known holds as long as a survey finds these facts and this layout."""
    recipes: tuple[tuple[int, _Geometry | None], ...]
    """For each piece of the share, which of the survey's tensors has it, and as which view unless whole; -1 for another's."""
    lasting: tuple[bool, ...]
    others: frozenset[Key]
    """Pieces that lie elsewhere in the state, on this rank."""
    storages: frozenset[int]
    extra: tuple[tuple[tuple[str, int], ...], ...]
    """For each model, the names of extra states and which of the survey's modules give them."""
    bare: tuple[bool, ...]
    """For each model, whether it has no tensor."""
    names: tuple[tuple[dict[int, str], ...], ...]
    """For each optimizer, or list of optimizers that are one, the parameters' names by `id`."""
    meshes: tuple[DeviceMesh, ...]


class Watch:
    """Looks at a rank's state, again and again."""

    def __init__(self, share: Share, group: Group) -> None:
        self._share, self._group = share, group
        self._known: _Known | None = None

    def look(self, state: Mapping[str, object]) -> Boundary:
        """What `sources.look` gives, and raises."""
        if self._share.together:
            return look(state, self._share, self._group)
        try:
            seen = survey(state)
        except (UnfamiliarError, RuntimeError):
            self._known = None
            return look(state, self._share, self._group)
        known = self._known
        if known is not None and known.facts == seen.facts and known.layout.holds(seen.tensors):
            found = _again(state, seen, known, self._share, self._group.rank)
            if found is not None:
                return found
        return self._in_full(state, seen)

    def _in_full(self, state: Mapping[str, object], seen: Survey) -> Boundary:
        """A full look, and what it tells for the next ones."""
        self._known = None
        alone = Group(self._group.rank)
        walker = Walker(state, alone, loading=False)
        collected = gather(walker, alone)
        lasting = Lasting.of(state)
        found = boundary(collected, lasting, self._share)
        self._known = _remember(seen, walker, collected, found, lasting.storages)
        return found


def _remember(seen: Survey, walker: Walker, collected: Collected, found: Boundary, storages: AbstractSet[int]) -> _Known:
    at: dict[tuple[int, torch.dtype], int] = {}
    for i, tensor in enumerate(seen.tensors):
        at.setdefault((memory(tensor), tensor.dtype), i)
    position = {id(item): i for i, item in enumerate(seen.modules)}
    models = [walker.found.get(id(x), module.Found("")) for _, x in seen.models]
    return _Known(
        seen.facts,
        StateLayout.of(seen.tensors),
        tuple(_recipe(view, seen, at) for view in found.views),
        tuple(memory(view) in storages for view in found.views),
        frozenset(key for key, piece in held(collected).items() if (memory(piece.view), piece.view.dtype) not in at),
        frozenset(storage for storage, _ in at),
        tuple(tuple((fqn, position[id(owner)]) for fqn, owner in model.extra.items()) for model in models),
        tuple(id(x) in walker.found and not walker.found[id(x)].leaves for _, x in seen.models),
        tuple(tuple(_names(item) for item in walker.named[id(x)]) for _, x, _ in seen.optimizers),
        tuple({id(mesh): mesh for mesh in framing({}, walker.found.values())}.values()),
    )


def _recipe(view: torch.Tensor, seen: Survey, at: Mapping[tuple[int, torch.dtype], int]) -> tuple[int, _Geometry | None]:
    i = at.get((memory(view), view.dtype), -1)
    geometry = _geometry(view)
    return i, None if i >= 0 and geometry == _geometry(seen.tensors[i]) else geometry


def _geometry(tensor: torch.Tensor) -> _Geometry:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _names(item: optimizer.Named) -> dict[int, str]:
    return {key: owned[0].fqn for key, owned in item.names.items()}  # only flat parameters, which are unfamiliar, have several


def _again(state: Mapping[str, object], seen: Survey, known: _Known, share: Share, rank: int) -> Boundary | None:
    """The state as far as it is known, and the rest as it is now; None when only a full look can tell."""
    alone = Group(rank)
    try:
        collected = gather(Walker(_rest(state, seen, known), alone, loading=False, meshes=known.meshes), alone)
    except UcformatError:
        return None  # the full look tells what is wrong
    others = held(collected)
    if others.keys() != known.others or any(memory(piece.view) in known.storages for piece in others.values()):
        return None
    views = []
    for key, (i, geometry) in zip(share.keys, known.recipes, strict=False):  # the keys end with tensors without elements
        if i < 0:
            views.append(others[key].view)
        else:
            view = seen.tensors[i].detach()
            views.append(view if geometry is None else view.as_strided(*geometry))
    return settled(views, known.lasting, collected.values, seen.wrappers)


# Stands for all tensors of a model: a dict of tensors leaves another trace in the values than an empty one.
_STUB = torch.empty(0)


def _rest(state: Mapping[str, object], seen: Survey, known: _Known) -> dict[str, object]:
    """The state without the tensors that are known."""
    rest: dict[str, object] = dict(state)
    for (at, _), extra, bare in zip(seen.models, known.extra, known.bare, strict=True):
        inside: dict[str, object] = {} if bare else {"": _STUB}
        inside.update((fqn, module.extra_state(seen.modules[i])) for fqn, i in extra)
        rest = _put(rest, at, inside)
    for (at, _, items), names in zip(seen.optimizers, known.names, strict=True):
        rest = _put(rest, at, _optimizers(items, names))
    return rest


def _put(tree: Any, at: Path, x: object) -> Any:
    """A copy of a nest of dicts with `x` in its place."""
    return type(tree)(
        (key, (x if len(at) == 1 else _put(item, at[1:], x)) if key == at[0] else item) for key, item in tree.items()
    )


def _optimizers(items: Sequence[Loose], names: Sequence[Mapping[int, str]]) -> dict[str, object]:
    """Optimizers that are one without their tensors: what a full look makes of them otherwise."""
    out: dict[str, object] = {}
    groups = []
    for item, called in zip(items, names, strict=True):
        out.update((called[key], states) for key, states in item.states)
        out.setdefault(optimizer.GROUPS, None)
        groups.append(
            [
                {
                    **{name: x for name, x in group.items() if name not in optimizer.PARAMETERS},
                    "params": [called[id(parameter)] for parameter in group["params"]],
                }
                for group in item.groups
            ]
        )
    out[optimizer.GROUPS] = unite(groups)
    return out
