"""ZeRO-0 with a fused optimizer: master weights and state as one flat buffer per param group, without names.

A buffer holds the group's parameters one after the other, in the order of the model. Which group a parameter is in, its
values tell: the model's weights are the rounded master weights. When several ways fit, nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ucformat.formats.deepspeed.optim import FlatGroup, RankOptim, mapping, sequence
from ucformat.formats.deepspeed.records import Opened, head, state
from ucformat.formats.deepspeed.zero import OptimizerState, add_optimizer
from ucformat.pickles.unpickle import StoredTensor

_COMPARED_ITEMS = 4 << 10  # enough of a parameter to tell it from others
_MAX_PATHS = 200_000  # states of the search

Offsets = tuple[int, ...]
"""How many items of each group's buffer have a name."""


def add_fused(
    opened: Opened,
    masters: Sequence[StoredTensor],
    by_index: Mapping[Any, Any],
    raw_groups: Sequence[Mapping[Any, Any]],
    module: Mapping[str, StoredTensor],
    file: str,
) -> OptimizerState | None:
    """Add `optimizer/<parameter>/<state>`; None when it can't be told whose it is."""
    members = _members(opened, masters, module) if len(masters) == len(raw_groups) else None
    if members is None:
        return None
    groups, hyper = [], []
    for master, raw in zip(masters, raw_groups, strict=True):
        index = sequence(raw.get("params"), file, "params of a param group")[0]
        groups.append(FlatGroup(master, mapping(by_index.get(index, {}), file, "optimizer state")))
        hyper.append({key: value for key, value in raw.items() if key not in ("params", "param_names")})
    rank = RankOptim(file, sliced=False, groups=groups, counts=[], param_groups=hyper, members=[[g] for g in range(len(groups))])
    shapes = [{name: module[name].shape for name in names} for names in members]
    return add_optimizer(opened, [rank], shapes, lambda name: state(name, "fp32"))


def _members(opened: Opened, masters: Sequence[StoredTensor], module: Mapping[str, StoredTensor]) -> list[list[str]] | None:
    """The parameters in each group's buffer, when just one way fits."""
    sizes = tuple(master.shape[0] for master in masters)
    items = {name: math.prod(weight.shape) for name, weight in module.items()}
    spare = sum(items.values()) - sum(sizes)  # of parameters that are not trained
    if len(sizes) == 1 and not spare:
        return [list(module)]
    layers: list[dict[Offsets, tuple[int, int]]] = [{(0,) * len(sizes): (1, -1)}]
    passed = paths = 0
    for name, weight in module.items():
        layer: dict[Offsets, tuple[int, int]] = {}
        for at, (ways, _) in layers[-1].items():
            for g, step in _steps(opened, masters, weight, at, may_skip=passed + items[name] - sum(at) <= spare):
                layer[step] = min(2, layer.get(step, (0, g))[0] + ways), g
        passed += items[name]
        paths += len(layer)
        if paths > _MAX_PATHS:
            return None
        layers.append(layer)
    return _trace(list(module), items, layers, sizes) if layers[-1].get(sizes, (0, -1))[0] == 1 else None


def _steps(
    opened: Opened, masters: Sequence[StoredTensor], weight: StoredTensor, at: Offsets, *, may_skip: bool
) -> Iterator[tuple[int, Offsets]]:
    """(group, offsets after it) for each group whose buffer goes on with this weight; group -1: it is in none."""
    if may_skip:
        yield -1, at
    items = math.prod(weight.shape)
    for g, master in enumerate(masters):
        if at[g] + items <= master.shape[0] and _same(opened, master, at[g], weight):
            yield g, (*at[:g], at[g] + items, *at[g + 1 :])


def _same(opened: Opened, master: StoredTensor, at: int, weight: StoredTensor) -> bool:
    """Whether master weights from item `at` on, rounded to the model's dtype, are this weight, as far as its head tells."""
    if not weight.contiguous:
        return True
    found = head(opened, weight, _COMPARED_ITEMS)
    return torch.equal(head(opened, master, len(found), at).to(found.dtype), found)


def _trace(
    names: Sequence[str], items: Mapping[str, int], layers: Sequence[Mapping[Offsets, tuple[int, int]]], sizes: Offsets
) -> list[list[str]]:
    """The one way through the layers, walked backwards."""
    members: list[list[str]] = [[] for _ in sizes]
    at = sizes
    for name, layer in zip(reversed(names), reversed(layers[1:]), strict=True):
        g = layer[at][1]
        if g >= 0:
            members[g].insert(0, name)
            at = (*at[:g], at[g] - items[name], *at[g + 1 :])
    return members
