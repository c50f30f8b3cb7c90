"""What ranks keep beside the model: arguments, scheduler, random numbers. Compared, and where it differs kept for each rank."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ucformat import dtypes
from ucformat.formats.megatron.ranks import Opened, RankFile
from ucformat.formats.torchsave import is_tensor, placeholders
from ucformat.pickles.unpickle import StoredTensor, to_values
from ucformat.values.codec import Opaque, RankLocal
from ucformat.values.tree import split
from ucformat.views import View

CANONICAL = {
    "args": "args",
    "iteration": "step",
    "opt_param_scheduler": "scheduler",
    "lr_scheduler": "scheduler",
    "rng_state": "rng",
}
"""Entries of Megatron's files that have a place of their own; all others go below `megatron`."""
BOOKKEEPING = frozenset({"args", "megatron", "rng", "step"})
"""See `formats.bookkeeping`."""
_OF_RANK = frozenset({"rank", "local_rank", "data_parallel_rank", "transformer_pipeline_model_parallel_size"})
"""Arguments that every process has its own value of."""
_SHOWN = 8

Values = dict[str, Any]


def values_beside(opened: Opened, ranks: Sequence[RankFile]) -> Values:
    """What the ranks' files hold beside model and optimizer, under canonical keys; tensors are still in it."""
    ordered = sorted(ranks, key=lambda rank: (rank.pp, rank.tp, rank.ep))
    own: Values = {}
    found: Values = {}
    for key in dict.fromkeys(key for rank in ordered for key in rank.rest if key != "optimizer"):
        held = [to_values(rank.rest.get(key), rank.path) for rank in ordered]
        value = _arguments(opened, held) if key == "args" else _united(opened, key, held, ordered)
        place = CANONICAL.get(key)
        if place is None or value is None:
            own[key] = value
        else:
            found[place] = value
    if own:
        found["megatron"] = own
    return found


def placed(opened: Opened, found: Values) -> tuple[Values, dict[str, View]]:
    """Values without the tensors in them, and views of those. Stand-ins of unknown classes are remarked on."""
    values, leaves = split(found, is_tensor)
    assert isinstance(values, dict)
    opened.remarks.extend(placeholders(values))
    views = {}
    for name, leaf in leaves.items():
        views[name] = opened.view(leaf) if isinstance(leaf, StoredTensor) else array_view(opened, name, leaf)
    return values, views


def array_view(opened: Opened, name: str, array: np.ndarray[Any, Any]) -> View:
    """A view of a numpy array, which lies in the pickle."""
    import torch

    dtype = dtypes.from_torch(torch.from_numpy(np.empty(0, array.dtype)).dtype).name
    return opened.rewrite.inline(dtype, array.shape, np.ascontiguousarray(array).tobytes(), f"numpy array {name}")


def _united(opened: Opened, key: str, held: Sequence[object], ranks: Sequence[RankFile]) -> object:
    if all(same(opened.same, held[0], other) for other in held[1:]):
        return held[0]
    if key != "rng_state":
        opened.remarks.append(f"{key!r} differs between ranks: kept for each rank")
    return RankLocal("error", tuple({"tp": rank.tp, "pp": rank.pp, "ep": rank.ep} for rank in ranks), tuple(held))


def _arguments(opened: Opened, held: Sequence[object]) -> object:
    """Those of the first rank; the names of others that differ are remarked on."""
    spaces = [vars(value) if isinstance(value, argparse.Namespace) else {} for value in held]
    names = {name for space in spaces for name in space} - _OF_RANK
    odd = sorted(
        name
        for name in names
        if not all(same(opened.same, spaces[0].get(name, ...), space.get(name, ...)) for space in spaces[1:])
    )
    if odd:
        opened.remarks.append(f"arguments differ between ranks, those of the first are kept: {', '.join(odd[:_SHOWN])}")
    return held[0]


def same(same_tensors: Callable[[StoredTensor, StoredTensor], bool], one: Any, other: Any) -> bool:
    """Whether two values are equal; NaN equals itself, and of tensors the bytes count."""
    if type(one) is not type(other):
        return False
    if isinstance(one, StoredTensor):
        return same_tensors(one, other)
    if isinstance(one, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, argparse.Namespace):
        return same(same_tensors, vars(one), vars(other))
    if isinstance(one, Opaque):
        return one.class_name == other.class_name and same(same_tensors, one.state, other.state)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(same_tensors, one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(same_tensors, a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)
