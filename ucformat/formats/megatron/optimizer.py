"""The distributed optimizer's state in legacy checkpoints: `distrib_optim.pt` of each model-parallel rank, by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ucformat import dtypes
from ucformat.errors import FormatError, UnsupportedError
from ucformat.formats.megatron import names
from ucformat.formats.megatron.buffers import Local, Placed, buffers, coalesced, in_buckets
from ucformat.formats.megatron.evidence import agree
from ucformat.formats.megatron.flat_state import FlatState, is_parameter
from ucformat.formats.megatron.folders import OPTIMIZER_FILE
from ucformat.formats.megatron.grid import Grid
from ucformat.formats.megatron.joins import EMBEDDING, OUTPUT, Join, Joins, Shard
from ucformat.formats.megatron.plain_state import add_plain
from ucformat.formats.megatron.ranks import Opened, RankFile
from ucformat.formats.megatron.settings import Settings
from ucformat.lazy_torch import torch
from ucformat.naming import MASTER
from ucformat.pickles.unpickle import StoredTensor
from ucformat.views import View

States = dict[str, dict[str, View]]
"""Kind of state (`fp32`, `exp_avg`, …) → parameter → view."""

_DEFAULT_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000  # items; Megatron's default is the larger one, times ranks


def read_states(opened: Opened, grid: Grid, joins: Joins, settings: Settings) -> States:
    """State by parameter, empty when no rank has any: with a remark where there was one.

    Raises FormatError and UnsupportedError where nothing proves what lies where.
    """
    paths = [rank.optimizer for rank in grid.ranks if rank.optimizer is not None]
    trees = dict(zip(paths, opened.trees(paths), strict=True))
    flat = FlatState()
    if not paths:
        add_plain(opened, joins, flat)
        if not flat.views and any(rank.rest.get("optimizer") for rank in grid.ranks):
            opened.remarks.append(f"no state of the optimizer: its settings are there, and no rank has a {OPTIMIZER_FILE}")
    for number, rank in enumerate(grid.ranks):
        if rank.optimizer is not None:
            _add_rank(opened, grid, joins, settings, number, trees[rank.optimizer], flat)
    return {kind: dict(_joined(joins, held, kind, grid.ranks)) for kind, held in flat.views.items()}


def _joined(joins: Joins, held: Mapping[Shard, View], kind: str, ranks: Sequence[RankFile]) -> Iterator[tuple[str, View]]:
    for name, join in joins.found.items():
        if not is_parameter(name):
            continue
        shards = [next((s for s in (shard, *copies) if s in held), None) for shard, copies in _places(join)]
        if None in shards:
            missing = join.shards[shards.index(None)]
            raise FormatError(ranks[missing.rank].path, f"no file has the optimizer's {kind} of {name}")
        views = [held[shard] for shard in shards if shard is not None]
        yield name, join.how(views) if views[0].ndim else views[0]


def _places(join: Join) -> Iterator[tuple[Shard, list[Shard]]]:
    """Each shard with other places that hold the same. One that all tensor ranks hold whole has its own first."""
    yield from zip(join.shards, join.copies, strict=True)


def _add_rank(opened: Opened, grid: Grid, joins: Joins, settings: Settings, number: int, tree: object, flat: FlatState) -> None:
    path = grid.ranks[number].optimizer
    assert path is not None
    optimizers = tree if isinstance(tree, list) else [tree]
    apart = grid.ep > 1  # experts have an optimizer of their own
    kinds = [False, True] if len(optimizers) == 2 and apart else [None if not apart else False]
    if len(optimizers) != len(kinds):
        raise UnsupportedError(path, f"the state of {len(optimizers)} optimizers")
    for held, experts in zip(optimizers, kinds, strict=True):
        if held is None:
            continue
        if not isinstance(held, dict):
            raise FormatError(path, "holds no dict of buffers")
        parts = [list(_locals(grid, joins, number, v, experts)) for v in range(grid.virtual)]
        _add_buffers(opened, joins, settings, path, held, buffers(parts), flat)


def _locals(grid: Grid, joins: Joins, number: int, v: int, experts: bool | None) -> Iterator[Local[Shard]]:
    """Parameters of one part in the order of registration: of experts, of all others, or (None) of both."""
    for key, tensor in grid.ranks[number].parts[v].tensors.items():
        is_expert = names.expert_of(key) is not None or names.STACKED_EXPERTS.fullmatch(key) is not None
        if is_parameter(key) and experts in (None, is_expert):
            shared = joins.dropped is not None and grid.pp > 1 and key in (EMBEDDING, OUTPUT)
            yield Local(Shard(number, v, key), tensor.shape, tensor.dtype, alone=shared)


def _add_buffers(
    opened: Opened,
    joins: Joins,
    settings: Settings,
    path: str,
    held: Mapping[Any, Any],
    expected: Sequence[tuple[str, Sequence[Local[Shard]]]],
    flat: FlatState,
) -> None:
    stored = [(key, value) for key, value in held.items() if type(key) is int]
    if len(stored) != len(expected):
        raise FormatError(path, f"holds {len(stored)} buffers, and the model has parameters for {len(expected)}")
    for (number, by_dtype), (dtype, params) in zip(sorted(stored), expected, strict=True):
        state = _single(by_dtype, dtype, path, number)
        tensors = {_kind(key): value for key, value in state.items() if isinstance(value, (StoredTensor, list))}
        if MASTER not in tensors:
            raise FormatError(path, f"buffer {number} has no master weights")
        placed = _place(opened, joins, settings, params, tensors[MASTER], path, number)
        for kind, value in tensors.items():
            for one in placed:
                flat.add(kind, one.local.token, _at(opened, value, one, path))


def _kind(key: object) -> str:
    return MASTER if key == "param" else str(key)


def _single(by_dtype: object, dtype: str, path: str, number: int) -> Mapping[Any, Any]:
    """The state of a buffer, which is below its dtypes: (of the parameters, of the gradients)."""
    if not isinstance(by_dtype, dict) or len(by_dtype) != 1:
        raise FormatError(path, f"buffer {number} is not of one dtype")
    key, state = next(iter(by_dtype.items()))
    first = key[0] if isinstance(key, tuple) and key else key
    name = dtypes.from_torch(first).name if isinstance(first, torch.dtype) else None
    if name != dtype or not isinstance(state, dict):
        raise FormatError(path, f"buffer {number} is of {name}, and the model's parameters there of {dtype}")
    return state


def _place(
    opened: Opened,
    joins: Joins,
    settings: Settings,
    params: Sequence[Local[Shard]],
    master: object,
    path: str,
    number: int,
) -> list[Placed[Shard]]:
    """Where each parameter lies in a buffer, proven by the master weights."""
    if isinstance(master, list):
        sizes = [_flat(tensor, path).shape[0] for tensor in master]
        ways = in_buckets(params, sizes, padded=True)
    else:
        world = settings.number("data_parallel_size") or 1
        sizes = [settings.number("ddp_bucket_size") or 0, _DEFAULT_BUCKET, _BUCKET_PER_RANK * world]
        ways = coalesced(params, _flat(master, path).shape[0], [size for size in dict.fromkeys(sizes) if size])
    tried = 0
    for placed in ways:
        tried += 1
        pairs = [(_at(opened, master, one, path), joins.weight(one.local.token)) for one in placed]
        if agree(opened.store, opened.rewrite.files, pairs):
            return placed
    why = "none of them has master weights that round to the model's" if tried else "none of them fills it"
    raise FormatError(path, f"buffer {number}: there are {tried} ways in which its parameters can lie in it, and {why}")


def _at(opened: Opened, value: object, one: Placed[Shard], path: str) -> View:
    tensor = _flat(value[one.bucket] if isinstance(value, list) else value, path)
    if one.at + one.local.items > tensor.shape[0]:
        raise FormatError(path, f"its state of {one.local.token.key} is shorter than the master weights")
    return opened.flat(tensor, one.at, one.local.shape)


def _flat(value: object, path: str) -> StoredTensor:
    if not isinstance(value, StoredTensor) or len(value.shape) != 1 or not value.contiguous:
        raise FormatError(path, "holds something that is no flat buffer")
    return value
