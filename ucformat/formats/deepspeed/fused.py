"""ZeRO-0 with a fused optimizer: master weights and state as one flat buffer per param group, without names.

A buffer holds the group's parameters one after the other, in the order in which the training script listed them. Which they
are, their values tell: rounded, the master weights are the model's weights. When several ways fit, nothing is guessed.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

from ucformat.formats.deepspeed.evidence import HEAD_ITEMS, Span, Weights, complete, items_of, settle
from ucformat.formats.deepspeed.optim import FlatGroup, RankOptim, mapping, sequence
from ucformat.formats.deepspeed.records import Opened, dense, state
from ucformat.formats.deepspeed.zero import OptimizerState, add_optimizer
from ucformat.pickles.unpickle import StoredTensor
from ucformat.values.tree import join_name

_MAX_POSITIONS = 200_000  # of the search through one buffer


def add_fused(
    opened: Opened,
    masters: Sequence[StoredTensor],
    by_index: Mapping[Any, Any],
    raw_groups: Sequence[Mapping[Any, Any]],
    module: Mapping[str, StoredTensor],
    found: OptimizerState,
    file: str,
) -> OptimizerState:
    """Add `optimizer/<parameter>/<state>`, or the flat buffers as they are when it can't be told whose they are."""
    members = _members(opened, masters, module) if len(masters) == len(raw_groups) else None
    if members is None:
        _keep_flat(opened, masters, by_index, raw_groups, found, file)
        return found
    groups, hyper = [], []
    for master, raw in zip(masters, raw_groups, strict=True):
        index = sequence(raw.get("params"), file, "params of a param group")[0]
        groups.append(FlatGroup(master, mapping(by_index.get(index, {}), file, "optimizer state")))
        hyper.append({key: value for key, value in raw.items() if key not in ("params", "param_names")})
    rank = RankOptim(file, sliced=False, groups=groups, counts=[], param_groups=hyper, members=[[g] for g in range(len(groups))])
    shapes = [{name: module[name].shape for name in group} for group in members]
    named = add_optimizer(opened, [rank], shapes, lambda name: state(name, "fp32"))
    named.extra.update(found.extra)
    return named


def _keep_flat(
    opened: Opened,
    masters: Sequence[StoredTensor],
    by_index: Mapping[Any, Any],
    raw_groups: Sequence[Mapping[Any, Any]],
    found: OptimizerState,
    file: str,
) -> None:
    """Keep the buffers under the numbers of their groups."""
    for index, master in enumerate(masters):
        opened.tensor(f"deepspeed/optimizer_state/{index}/fp32", master)
    for index, held in by_index.items():
        for key, value in mapping(held, file, f"state {index}").items():
            tensor = dense(value, file, f"{key} of group {index}")
            if tensor is not None:
                opened.tensor(join_name("deepspeed", "optimizer_state", str(index), str(key)), tensor)
    found.extra["param_groups"] = [dict(group) for group in raw_groups]
    opened.remarks.append(
        "a fused optimizer keeps flat buffers without names, and nothing proves where each parameter lies in them (several "
        "weights equal the rounded master weights, or none does): kept as deepspeed/optimizer_state/<number of the group>/<state>"
    )


def _members(opened: Opened, masters: Sequence[StoredTensor], module: Mapping[str, StoredTensor]) -> list[list[str]] | None:
    """The parameters in each group's buffer, in its order; None when several ways fit, or none."""
    weights = Weights(opened, module)
    cuts = [_cut(opened, master, weights) for master in masters]
    found = [cut for cut in cuts if cut is not None]
    return complete(settle(found)) if len(found) == len(cuts) else None


def _cut(opened: Opened, master: StoredTensor, weights: Weights) -> list[list[str]] | None:
    """The weights that each run of a buffer rounds to, when there is one way to cut it; else None."""
    size = master.shape[0]
    lengths = sorted({n for n, _ in weights.sizes if n})
    ways: dict[int, int] = {0: 1}
    into: dict[int, tuple[int, list[str]]] = {}  # position → where a run that ends there starts, and whose it may be
    waiting, done = [0], 0
    while waiting:
        at = heapq.heappop(waiting)
        done += 1
        if done > _MAX_POSITIONS:
            return None
        head = items_of(opened, Span(master, at, min(HEAD_ITEMS, size - at)))
        for n in lengths:
            if at + n > size:
                break
            names = weights.rounding_of(Span(master, at, n), head[:n])
            if names:
                if at + n not in ways:
                    heapq.heappush(waiting, at + n)
                ways[at + n] = min(2, ways.get(at + n, 0) + ways[at])
                into[at + n] = at, names
    if ways.get(size) != 1:
        return None
    cut: list[list[str]] = []
    at = size
    while at:
        at, names = into[at]
        cut.insert(0, names)
    return cut
