"""Parameters under fully sharded data parallel, read from where they live, without any gather.

FSDP1 flattens the parameters of a module into one and gives each rank a range of it: its own bookkeeping says which
elements of which parameter lie where. FSDP2 parameters are DTensors; they only have to be in their sharded state.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ucformat.errors import UnsupportedError
from ucformat.reshard.state.leaf import Leaf
from ucformat.reshard.state.placement import flat, whole

_REPEATED = {"NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"}
"""Names of the sharding strategies of FSDP1 under which several ranks hold the same."""


@dataclass(frozen=True, slots=True)
class FlatItem:
    """One original parameter of a flat one."""

    fqn: str
    """Relative to the FSDP module, wrappers included."""
    leaf: Leaf
    """Its part of the flat shard."""
    original: torch.Tensor | None
    """With `use_orig_params`: the parameter that the optimizer has."""
    own: Leaf | None
    """How that parameter's own local tensor is placed."""


@dataclass(frozen=True, slots=True)
class FlatParameter:
    """The flat parameter of one FSDP1 module."""

    parameter: torch.Tensor
    items: tuple[FlatItem, ...]
    aliases: dict[str, str]
    modules: frozenset[int]
    """`id` of the modules that the parameters belong to."""


def known(name: str) -> tuple[Any, ...]:
    """A class of torch.distributed.fsdp for isinstance and issubclass, as long as nobody imported that: none, no object is of it.

    It isn't imported from here: default arguments in what it imports take the process group that is alive by then, and keep
    it. A gloo group that outlives its destruction has threads at the exit of the interpreter, which may abort the process.
    """
    found = getattr(sys.modules.get("torch.distributed.fsdp"), name, None)
    return () if found is None else (found,)


def reshard(module: nn.Module) -> None:
    """Bring parameters that a forward pass left gathered back to their sharded state: that is what optimizers see.

    The gathered copy must go too, even where the sharded one is in use already: the next forward pass would take it for current.
    """
    if isinstance(module, known("FSDPModule")):
        module.reshard()
    if isinstance(module, known("FullyShardedDataParallel")):
        from torch.distributed.fsdp._runtime_utils import _reshard

        handle: Any = module._handle
        if handle is not None and handle.uses_sharded_strategy and hasattr(handle.flat_param, "_full_param_padded"):
            _reshard(module, handle, True)


def is_flat(tensor: object) -> bool:
    """Whether `tensor` is a flat parameter itself."""
    return bool(getattr(tensor, "_is_flat_param", False)) or hasattr(tensor, "_shard_param_infos")


def flat_parameters(module: nn.Module) -> Iterator[FlatParameter]:
    """The flat parameter of an FSDP1 module; nothing for others.

    Raises UnsupportedError for parameters that were no plain contiguous tensors when they were flattened.
    """
    if not isinstance(module, known("FullyShardedDataParallel")):
        return
    handle = module._handle  # FSDP1 has no public view of its shards that does not gather
    if handle is None:
        return
    parameter: Any = handle.flat_param
    local = parameter.detach()
    repeated = module.sharding_strategy.name in _REPEATED or dist.get_world_size(handle.process_group) < dist.get_world_size()
    originals = parameter._params if parameter._params is not None else [None] * len(parameter._fqns)
    items = []
    for i, (fqn, info) in enumerate(zip(parameter._fqns, parameter._shard_param_infos, strict=True)):
        _refuse_unusual(parameter, i, fqn)
        shape = tuple(parameter._shapes[i])
        start, count, at = (info.intra_param_start_idx, info.numel_in_shard, info.offset_in_shard) if info.in_shard else (0, 0, 0)
        part = flat(shape, start, start + count, local.numel(), at, replicated=repeated)
        own, original = None, originals[i]
        if original is not None:
            if handle.uses_sharded_strategy:
                placed = flat(shape, start, start + count, count, replicated=repeated)
            else:
                placed = whole(shape)
            own = Leaf(shape, local.dtype, ((original.detach(), placed),))
        items.append(FlatItem(fqn, Leaf(shape, local.dtype, ((local, part),)), original, own))
    yield FlatParameter(parameter, tuple(items), _tied(parameter), frozenset(id(info.module) for info in parameter._param_infos))


def _refuse_unusual(parameter: Any, i: int, fqn: str) -> None:
    if parameter._param_extensions[i] is not None:
        raise UnsupportedError(fqn, "FSDP1 over tensor parallel parameters: use fully_shard (FSDP2) instead")
    if not parameter._contiguities[i]:
        raise UnsupportedError(
            fqn, "FSDP1 flattened it in another memory order than row-major: make it contiguous before wrapping"
        )


def _tied(parameter: Any) -> dict[str, str]:
    """Tied fqn → the fqn that the flat parameter knows the tensor by."""
    out = {}
    for name, _, module, primary_name, _, primary_module in parameter._shared_param_infos:
        primary = f"{primary_module}.{primary_name}" if primary_module else primary_name
        out[f"{module}.{name}" if module else name] = primary
    return out
