"""Putting stored values where they belong in a live state, in one walk beside the stored tree.

The walk runs twice: dry before anything is read, to note which tensors are needed and what is missing, then for good.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ucformat import values
from ucformat.errors import RankLocalError, UnsupportedError
from ucformat.reshard.restoring import optimizers
from ucformat.reshard.state import megatron, module, optimizer, own_methods
from ucformat.reshard.state.assign import Pending, assign, check, is_stateful, pending
from ucformat.reshard.state.leaf import is_tensor
from ucformat.reshard.state.markers import RankLocalItem
from ucformat.reshard.state.walk import Walker

_ABSENT: Any = object()


class Putter:
    """Walks the live state beside the stored tree. Dry, it only notes what would be taken; else it puts it there."""

    def __init__(self, walker: Walker, inplace: frozenset[str], read: optimizers.Read, *, dry: bool) -> None:
        self.walker, self.inplace, self.read, self.dry = walker, inplace, read, dry
        self.fresh: list[str] = []
        self.others: list[str] = []
        """Tensors of rank-local items that other ranks saved: known, whether or not anybody takes them now."""
        self.missing: list[str] = []
        self.unused: list[str] = []
        self.remarks: list[str] = []
        """What a user should know of values that were assumed or stay as they are."""
        self.tree: object = {}
        self.objects: set[tuple[str, ...]] = set()

    def put_all(self, state: MutableMapping[str, object], tree: object) -> None:
        self.tree = tree
        nodes = tree if isinstance(tree, dict) else {}
        for key in list(state):
            new = self.put(state[key], nodes.get(key, _ABSENT), (str(key),))
            if new is not state[key]:
                state[key] = new
        self._note_unused(nodes, state, ())

    def put(self, x: Any, node: Any, at: tuple[str, ...]) -> Any:
        """What has to stand where `x` does, given what was stored there."""
        if id(x) in self.walker.found:
            self._module(self.walker.found[id(x)], node, at)
        elif id(x) in self.walker.named:
            self._optimizers(self.walker.named[id(x)], node, at)
        elif isinstance(x, RankLocalItem):
            self._rank_local(x, node, at)
        elif megatron.kind_of(x) is not None:
            self._megatron(x, node, at)
        elif is_tensor(x) or isinstance(x, np.ndarray):
            pass  # read in place
        elif is_stateful(x) or not _has_live(x):
            return self._take(x, node, at)
        elif isinstance(x, dict):
            self._dict(x, node, at)
        else:
            return self._items(x, node, at)
        return x

    def _take(self, x: Any, node: Any, at: tuple[str, ...]) -> Any:
        if node is _ABSENT:
            self.missing.append("/".join(at))
            return x
        if self.dry:
            check(x, node, "/".join(at))
            self.fresh += pending(node)
            return x
        return assign(x, node)

    def _dict(self, x: dict[Any, Any], node: Any, at: tuple[str, ...]) -> None:
        nodes = node if isinstance(node, dict) else {}
        for key, item in x.items():
            new = self.put(item, nodes.get(key, _ABSENT), (*at, str(key)))
            if new is not item:
                x[key] = new
        self._note_unused(nodes, x, at)

    def _items(self, x: Any, node: Any, at: tuple[str, ...]) -> Any:
        nodes = node if isinstance(node, (list, tuple)) else ()
        if len(nodes) not in {0, len(x)}:
            raise UnsupportedError("/".join(at), f"{len(x)} items here, {len(nodes)} stored: the lengths must agree")
        new = [self.put(item, nodes[i] if nodes else _ABSENT, (*at, str(i))) for i, item in enumerate(x)]
        if all(a is b for a, b in zip(new, x, strict=True)):
            return x
        if isinstance(x, tuple):
            return tuple(new)
        for i, item in enumerate(new):
            x[i] = item
        return x

    def _module(self, found: module.Found, node: Any, at: tuple[str, ...]) -> None:
        nodes = node if isinstance(node, dict) else {}
        for fqn, owner in found.extra.items():
            if fqn in nodes and self.dry:
                self.fresh += pending(nodes[fqn])
            elif fqn in nodes:
                module.put_extra_state(owner, nodes[fqn])
            elif module.extra_state(owner) is not None:
                self.missing.append("/".join((*at, fqn)))
        for unit in found.units:
            if self.dry:
                self._look_at_unit(unit, nodes, at)
            else:
                module.put_unit(unit, nodes, found)
        if not self.dry:
            own_methods.after_load(found.after)
        taken = {*found.extra, *(fqn for unit in found.units for fqn in unit.keys)}
        self._note_unused({fqn: x for fqn, x in nodes.items() if not str(fqn).endswith(own_methods.VERSIONS)}, taken, at)

    def _look_at_unit(self, unit: own_methods.Unit, nodes: Mapping[Any, Any], at: tuple[str, ...]) -> None:
        for fqn, key in unit.keys.items():
            if fqn in nodes:
                self.fresh += (name for name in pending(nodes[fqn]) if name not in self.inplace)
            elif not isinstance(unit.given[key], torch.Tensor):
                self.missing.append("/".join((*at, fqn)))

    def _optimizers(self, items: list[optimizer.Named], node: Any, at: tuple[str, ...]) -> None:
        groups = node.get(optimizer.GROUPS) if isinstance(node, dict) else None
        if not isinstance(groups, list):
            self.missing.append("/".join((*at, optimizer.GROUPS)))
            return
        groups = [own_settings(group, self.walker, "/".join((*at, optimizer.GROUPS))) for group in groups]
        matched = optimizers.match(items, groups, self.read)
        if not self.dry:
            optimizers.put(matched, node)
            return
        self.missing += matched.missing
        self.remarks += matched.remarks
        self.fresh += pending(groups)
        for item in items:
            self.fresh += optimizers.fresh(item, node, self.inplace)
        taken = {optimizer.GROUPS, *(fqn for item in items for fqn in item.used)}
        self._note_unused(node, taken | ({optimizer.EXTRA} if any(item.through for item in items) else set()), at)

    def _rank_local(self, x: RankLocalItem, node: Any, at: tuple[str, ...]) -> None:
        if node is _ABSENT:
            self.missing.append("/".join(at))
            return
        stored = node if isinstance(node, values.RankLocal) else values.RankLocal("error", (None,), (node,))
        self.others += pending(node)
        chosen = choose(x, stored, self.walker, "/".join(at))
        if chosen is None:
            return
        if self.dry:
            if not chosen.gathered:
                check(x.value, chosen.item, "/".join(at))
            self.fresh += pending(chosen.item)
        else:
            x.value = chosen.item if chosen.gathered else assign(x.value, chosen.item)

    def _megatron(self, x: Any, node: Any, at: tuple[str, ...]) -> None:
        if megatron.kind_of(x) != "object":
            return
        place = megatron.object_place(at[0], x)
        self.objects.add(place[:2])
        found = find(self.tree, place)
        if found is None:
            self.missing.append("/".join(place))
        elif self.dry:
            self.fresh += pending(found)
        else:
            megatron.put_object(x, found)

    def _note_unused(self, nodes: Mapping[Any, Any], taken: Iterable[Any], at: tuple[str, ...]) -> None:
        known = set(taken)
        for key, item in nodes.items():
            if key not in known and (*at, key) not in self.objects and _has_values(item):
                self.unused.append("/".join((*at, str(key))))


def own_settings(group: Mapping[str, Any], walker: Walker, path: str) -> Mapping[str, Any]:
    """A stored param group with this rank's own of those hyper-parameters that differed between the ranks that saved it.

    Raises UnsupportedError when as many ranks as saved it are not there.
    """
    ranked = [key for key, value in group.items() if isinstance(value, values.RankLocal)]
    if not ranked:
        return group
    saved = len(group[ranked[0]].values)
    if saved != walker.group.size:
        why = f"{', '.join(ranked)} differed between the {saved} ranks that saved it"
        raise UnsupportedError(path, f"{why}: load with {saved} ranks, or make it alike first")
    chosen = {key: choose(RankLocalItem(None), group[key], walker, f"{path}/{key}") for key in ranked}
    return {**group, **{key: choice.item for key, choice in chosen.items() if choice is not None}}


@dataclass(frozen=True, slots=True)
class Choice:
    """What a rank takes of a stored rank-local item."""

    item: object
    gathered: bool
    """`item` is the list of all ranks' items."""


def choose(x: RankLocalItem, stored: values.RankLocal, walker: Walker, path: str) -> Choice | None:
    """The item of this rank itself when as many ranks as saved are there, else what the policy says; None to keep what it has.

    The policy is that of the live item, or the stored one when the live one says "error".
    """
    saved, now = len(stored.values), walker.group.size
    if saved == now:
        same = [i for i, place in enumerate(stored.coords) if place is not None and place == walker.coords]
        return Choice(stored.values[same[0] if len(same) == 1 else walker.group.rank], gathered=False)
    policy = x.on_resize if x.on_resize != "error" else stored.policy
    if policy == "modulo" and saved:
        return Choice(stored.values[walker.group.rank % saved], gathered=False)
    if policy == "gather":
        return Choice(list(stored.values), gathered=True)
    if policy == "keep":
        return None
    raise RankLocalError(path, saved, now)


def find(tree: object, path: Sequence[str]) -> Any:
    """What stands at `path` in a tree of dicts and lists, or None."""
    for key in path:
        if isinstance(tree, (list, tuple)) and key.isdecimal() and int(key) < len(tree):
            tree = tree[int(key)]
        else:
            tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _has_live(x: object) -> bool:
    """Whether anything in `x` is read in place or takes its state back by itself."""
    if isinstance(x, dict):
        return any(map(_has_live, x.values()))
    if isinstance(x, (list, tuple, deque)):
        return any(map(_has_live, x))
    return is_tensor(x) or isinstance(x, (np.ndarray, RankLocalItem)) or is_stateful(x) or megatron.kind_of(x) is not None


def _has_values(node: object) -> bool:
    """Whether there is anything but tensors in a stored tree."""
    if isinstance(node, dict):
        return any(map(_has_values, node.values()))
    if isinstance(node, (list, tuple)):
        return any(map(_has_values, node))
    return not isinstance(node, Pending)
