"""Where the tensors of a state lie, told in microseconds: what modules and optimizers hold, by type, name and address.

Two surveys with equal facts are of states whose pieces lie in the same memory. The facts are all that `reshard.collect`
goes by in the modules and optimizers of a state; what it may see otherwise is unfamiliar, and needs a full look.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, eq
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ucformat.reshard.state import fsdp, own_methods
from ucformat.reshard.state.optimizer import goes_through_state_dict
from ucformat.reshard.state.walk import as_modules, as_optimizers, is_leafy

Path = tuple[str, ...]
"""Keys from the state's root."""

_PLAIN = frozenset({torch.Tensor, nn.Parameter})
_ATOMS = frozenset({type(None), bool, int, float, str})
_STR = frozenset({str})
MANY = 32  # tensors in a dict: fewer may be random states and the like, which come in new memory every time


class UnfamiliarError(Exception):
    """Something that can't be told without a full look."""


@dataclass(slots=True)
class Loose:
    """What is no tensor in the state of one optimizer, and the groups as they are now."""

    groups: list[dict[str, Any]]
    states: list[tuple[int, dict[str, object]]] = field(default_factory=list)
    """By `id` of the parameter."""


@dataclass(slots=True)
class Survey:
    """What modules and optimizers of a state hold, in the order in which they stand there."""

    facts: list[object] = field(default_factory=list)
    """Hold no tensors: a survey that is kept keeps no memory alive."""
    tensors: list[torch.Tensor] = field(default_factory=list)
    """Live memory of each tensor, each parameter once."""
    wrappers: list[DTensor] = field(default_factory=list)
    """DTensors among parameters and optimizer states."""
    modules: list[nn.Module] = field(default_factory=list)
    """All, with those inside others."""
    models: list[tuple[Path, object]] = field(default_factory=list)
    """Each module of the state itself, list of modules, or dict of many tensors, and where it stands."""
    optimizers: list[tuple[Path, object, list[Loose]]] = field(default_factory=list)
    """Each optimizer or list of them."""
    seen: set[int] = field(default_factory=set)
    """`id` of parameters and buffers."""


def survey(state: Mapping[str, object]) -> Survey:
    """Raises UnfamiliarError, or RuntimeError for tensors without an address, where a full look must tell."""
    found = Survey()
    with torch.no_grad():  # what DTensors give is then their local tensor itself
        _nest(state, (), found, named=True)
    return found


def _nest(x: Any, at: Path, found: Survey, *, named: bool) -> None:
    """`named` while only dicts with str keys lie between the root and here: tensors leave no trace in the values then."""
    modules, optimizers = (as_modules(x), as_optimizers(x)) if at else (None, None)
    if modules is not None or optimizers is not None:
        if not named:
            raise UnfamiliarError(at)
        found.facts.append(at)
    if modules is not None:
        found.models.append((at, x))
        for module in modules:
            _module(module, found)
    elif optimizers is not None:
        found.optimizers.append((at, x, [_optimizer(optimizer, found) for optimizer in optimizers]))
    elif type(x) in {dict, OrderedDict}:
        _dict(x, at, found, named=named and _STR.issuperset(map(type, x)))
    elif not at:
        raise UnfamiliarError(type(x))
    elif not is_leafy(x):
        for item in x.values() if isinstance(x, dict) else x:
            _nest(item, (*at, ""), found, named=False)


def _dict(x: dict[Any, object], at: Path, found: Survey, *, named: bool) -> None:
    if at and named and len(x) >= MANY and all(isinstance(item, torch.Tensor) for item in x.values()):
        found.facts += (at, tuple(x))
        found.models.append((at, x))
        wrappers = len(found.wrappers)
        for tensor in x.values():
            _tensor(cast(torch.Tensor, tensor), found)
        del found.wrappers[wrappers:]  # these may change at any time
        return
    for key, item in x.items():
        _nest(item, (*at, key), found, named=named)


_SAVE = nn.Module._save_to_state_dict


def _module(module: nn.Module, found: Survey) -> None:
    kind = type(module)
    if (
        kind._save_to_state_dict is not _SAVE
        or own_methods.is_unit(module, root=True)
        or issubclass(kind, fsdp.known("FullyShardedDataParallel"))
    ):
        raise UnfamiliarError(kind)
    if issubclass(kind, fsdp.known("FSDPModule")):
        fsdp.reshard(module)
    parameters, buffers, children = module._parameters, module._buffers, module._modules
    transient = module._non_persistent_buffers_set
    found.modules.append(module)
    found.facts += (kind, kind.get_extra_state, tuple(parameters), tuple(buffers), tuple(transient), tuple(children))
    for parameter in parameters.values():
        _once(parameter, found)
    wrappers = len(found.wrappers)
    for name, buffer in buffers.items():
        if name not in transient:
            _once(buffer, found)
    del found.wrappers[wrappers:]  # these may change at any time
    for child in children.values():
        if child is None:
            found.facts.append(None)
        else:
            _module(child, found)


def _optimizer(optimizer: torch.optim.Optimizer, found: Survey) -> Loose:
    kind = type(optimizer)
    # its states are elsewhere, or what its own state_dict and hooks make of them
    if kind.__name__ == "ZeroRedundancyOptimizer" or goes_through_state_dict(optimizer):
        raise UnfamiliarError(kind)
    states, loose, held = optimizer.state, Loose(optimizer.param_groups), 0
    found.facts += (kind, len(optimizer.param_groups))
    for group in optimizer.param_groups:
        parameters, names = group["params"], group.get("param_names")
        found.facts += (len(parameters), names and tuple(names))
        for parameter in parameters:
            _once(parameter, found)
            state = states.get(parameter)
            if state is None:
                found.facts.append(None)
                continue
            held += 1
            if type(state) is not dict or not _STR.issuperset(map(type, state)):
                raise UnfamiliarError(kind)
            atoms = _states(state, found)
            if atoms:
                loose.states.append((id(parameter), atoms))
    if held != len(states):  # states of what is no parameter
        raise UnfamiliarError(kind)
    return loose


def _states(state: dict[str, object], found: Survey) -> dict[str, object]:
    """Add the tensors of one parameter's state; what is no tensor."""
    found.facts.append(tuple(state))
    if _PLAIN.issuperset(map(type, state.values())):  # in one go: most tensors of a state are here
        found.tensors += cast("dict[str, torch.Tensor]", state).values()
        return {}
    atoms: dict[str, object] = {}
    for name, x in state.items():
        if isinstance(x, torch.Tensor):
            _tensor(x, found)
        elif type(x) in _ATOMS:
            found.facts.append(name)  # this one is no tensor
            atoms[name] = x
        else:
            raise UnfamiliarError(type(x))
    return atoms


def _once(tensor: torch.Tensor | None, found: Survey) -> None:
    """A tensor of which it counts where else it is: parameters have names by identity."""
    key = id(tensor)
    found.facts.append(key)
    if tensor is not None and key not in found.seen:
        found.seen.add(key)
        _tensor(tensor, found)


def _tensor(tensor: torch.Tensor, found: Survey) -> None:
    kind = type(tensor)
    if kind in _PLAIN:
        found.tensors.append(tensor)
    elif isinstance(tensor, DTensor):
        local = tensor.to_local()
        if type(local) is not torch.Tensor:  # a collective under way
            raise UnfamiliarError(type(local))
        order = getattr(tensor._spec, "shard_order", None)  # has no public face yet
        found.facts.append((kind, tensor.device_mesh, tensor.placements, tensor.shape, order))
        found.tensors.append(local)
        found.wrappers.append(tensor)
    else:
        raise UnfamiliarError(kind)


_NUMBERS: tuple[Callable[[torch.Tensor], object], ...] = (
    *(torch.Tensor.data_ptr, torch.Tensor.storage_offset, torch.Tensor.is_neg, torch.Tensor.is_conj),
    *(attrgetter("dtype"), attrgetter("device")),
)
_TUPLES: tuple[Callable[[torch.Tensor], object], ...] = (attrgetter("shape"), torch.Tensor.stride)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Where the elements of tensors lie and what they are: a column per fact, since a call per tensor would take longer."""

    numbers: tuple[list[object], ...]
    tuples: tuple[list[object], ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> StateLayout:
        return cls(*(tuple(list(map(fact, tensors)) for fact in facts) for facts in (_NUMBERS, _TUPLES)))

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether `tensors`, as many as these are, lie as these did."""
        return all(list(map(fact, tensors)) == column for fact, column in zip(_NUMBERS, self.numbers, strict=True)) and all(
            all(map(eq, map(fact, tensors), column))  # one by one: thousands of new tuples would set off the garbage collector
            for fact, column in zip(_TUPLES, self.tuples, strict=True)
        )
