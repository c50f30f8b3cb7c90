"""State of optimizers that are not distributed, in `model_optim_rng.pt`: parameters are numbered, group by group.

In which group a parameter is follows from Megatron's own rule (see `groups`), its place in the group from the order in which it
was registered; shapes must agree, and master weights must round to the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ucformat.formats.megatron.evidence import agree
from ucformat.formats.megatron.flat_state import FlatState, is_parameter
from ucformat.formats.megatron.groups import assigned
from ucformat.formats.megatron.joins import Joins, Shard
from ucformat.formats.megatron.names import STACKED_EXPERTS, expert_of
from ucformat.formats.megatron.ranks import Opened, RankFile
from ucformat.naming import MASTER
from ucformat.pickles.unpickle import StoredTensor

MASTERS = "fp32_from_fp16_params"


def add_plain(opened: Opened, joins: Joins, flat: FlatState) -> None:
    """Add the state in all ranks' files; where nothing proves whose it is, it is left out with a remark."""
    for number, rank in enumerate(joins.grid.ranks):
        for entry, experts in _optimizers(rank, apart=joins.grid.ep > 1):
            found = list(_of_optimizer(entry, joins, number, experts))
            if not found:
                continue
            wrong = _wrong(opened, joins, found)
            if wrong:
                opened.remarks.append(f"{rank.path}: optimizer state left out, since {wrong}")
                flat.views.clear()
                return
            for kind, shard, tensor in found:
                flat.add(kind, shard, opened.view(tensor))


_Found = tuple[str, Shard, StoredTensor]
"""Kind of state, parameter, tensor."""


def _optimizers(rank: RankFile, *, apart: bool) -> Iterator[tuple[Mapping[Any, Any], bool | None]]:
    """Entries of the optimizers in a rank's file, and whether they are of experts, of all others, or (None) of both."""
    entry = rank.rest.get("optimizer")
    numbered = isinstance(entry, dict) and bool(entry) and all(type(key) is int for key in entry)
    entries = list(entry.values()) if numbered and isinstance(entry, dict) else entry if isinstance(entry, list) else [entry]
    for i, held in enumerate(entries):
        if isinstance(held, dict):
            yield held, (None if len(entries) == 1 and not apart else bool(i))


def _of_optimizer(entry: Mapping[Any, Any], joins: Joins, number: int, experts: bool | None) -> Iterator[_Found]:
    """State as the groups' rule gives it; none where the entry is no state dict of torch or the groups are others."""
    inner = entry.get("optimizer", entry)
    state = inner.get("state") if isinstance(inner, dict) else None
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if not isinstance(state, dict) or not isinstance(groups, list) or not state:
        return
    tensors = {
        Shard(number, v, key): tensor
        for v, part in enumerate(joins.grid.ranks[number].parts)
        for key, tensor in part.tensors.items()
        if is_parameter(key) and experts in (None, _is_expert(key))
    }
    names = {str(i): shard for i, shard in enumerate(tensors)}
    ndim = {name: len(tensors[shard].shape) for name, shard in names.items()}
    labels = {name: shard.key for name, shard in names.items()}
    members = assigned([group for group in groups if isinstance(group, dict)], list(names), ndim, labels)
    masters = entry.get(MASTERS) or [[] for _ in groups]
    for (group, params), held in zip(members or [], masters, strict=False):
        shards = [names[name] for name in params]
        low = [shard for shard in shards if tensors[shard].dtype in ("F16", "BF16")]
        numbers = group.get("params", [])
        if len(numbers) != len(shards):
            return
        for number_, shard in zip(numbers, shards, strict=True):
            for key, tensor in state.get(number_, {}).items():
                if isinstance(tensor, StoredTensor):
                    yield str(key), shard, tensor
        for shard, tensor in zip(low, held, strict=False):
            if isinstance(tensor, StoredTensor):
                yield MASTER, shard, tensor


def _is_expert(key: str) -> bool:
    return expert_of(key) is not None or STACKED_EXPERTS.fullmatch(key) is not None


def _wrong(opened: Opened, joins: Joins, found: Sequence[_Found]) -> str:
    """Why the state can't be that of these parameters; empty when it can."""
    for kind, shard, tensor in found:
        shape = joins.tensor(shard).shape
        if tensor.shape not in (shape, ()):
            return f"{kind} of shape {list(tensor.shape)} would be that of {shard.key} of shape {list(shape)}"
    pairs = [(opened.view(tensor), joins.weight(shard)) for kind, shard, tensor in found if kind == MASTER]
    return "" if agree(opened.store, opened.rewrite.files, pairs) else "master weights are not those of the model"
