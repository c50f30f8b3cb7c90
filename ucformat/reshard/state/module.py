"""The tensors of an `nn.Module` by fully qualified name, whatever it is wrapped in, and who owns each parameter.

Names are those of the unwrapped model: DDP, FSDP, activation checkpointing and torch.compile leave no trace. Modules whose state
goes through methods or hooks of their own are left to `own_methods`.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ucformat.errors import UnrepresentableError, UnsupportedError
from ucformat.naming import TRANSPARENT
from ucformat.reshard.state import fsdp, own_methods
from ucformat.reshard.state.leaf import Leaf, leaf
from ucformat.values import bytes_io

EXTRA_STATE = "_extra_state"  # torch's own name for what get_extra_state gives


@dataclass(frozen=True, slots=True)
class Owned:
    """One logical tensor that a live parameter holds, or holds a part of."""

    module: str
    """Where the module stands in the state."""
    fqn: str
    leaf: Leaf
    """How the parameter's local tensor is placed; states of the same local shape are placed alike."""


Owners = dict[int, tuple[Owned, ...]]
"""By `id` of the live parameter."""


@dataclass(slots=True)
class Found:
    """What a module, or the modules that together are one model, hold."""

    key: str
    at: tuple[str, ...] = ()
    """Where it stands in the state; `key` is the same as text."""
    leaves: dict[str, Leaf] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    """Tied fqn → the fqn under which the tensor was found first."""
    extra: dict[str, nn.Module] = field(default_factory=dict)
    """fqn of extra state → the module that has it."""
    owners: Owners = field(default_factory=dict)
    seen: dict[int, str] = field(default_factory=dict)
    """`id` of tensors → fqn."""
    flattened: set[int] = field(default_factory=set)
    """`id` of parameters that are views of a flat one."""
    flat_modules: set[int] = field(default_factory=set)
    """`id` of modules whose parameters FSDP1 flattened."""
    units: list[own_methods.Unit] = field(default_factory=list)
    optional: set[str] = field(default_factory=set)
    """Buffers that older versions of torch did not have: they stay as they are where they are not stored."""
    after: dict[str, nn.Module] = field(default_factory=dict)
    """Modules with hooks to run after a load, children first, by their place in the state."""
    loading: bool = False


def find(modules: Sequence[nn.Module], at: Sequence[str], *, loading: bool = False) -> Found:
    """Everything in `modules`: one model, or pipeline stages whose names unite to one. `at` is where it stands in the state.

    Raises UnsupportedError when two of them hold different tensors of one name, or a module's own methods can't be honoured.
    """
    found = Found(".".join(at), tuple(at), loading=loading)
    for module in modules:
        _walk(module, "", found, root=True)
    return found


def _walk(module: nn.Module, prefix: str, found: Found, *, root: bool) -> None:
    fsdp.reshard(module)
    for flat in fsdp.flat_parameters(module):
        found.flat_modules |= flat.modules
        _add_flat(flat, prefix, found)
    if own_methods.is_unit(module, root=root) and not _is_flattened(module, prefix, found):
        _add_unit(module, prefix, found, root=root)
        return
    for name, tensor in _own(module, prefix, found):
        _add(name, tensor, found, first_rank_wins=name.removeprefix(prefix) in module._buffers)  # no public dict of own buffers
    if isinstance(module, _NormBase) and module._buffers.get("num_batches_tracked") is not None:
        found.optional.add(f"{prefix}num_batches_tracked")
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        found.extra[prefix + EXTRA_STATE] = module
    for name, child in module._modules.items():  # named_children leaves repeats out
        if child is not None:
            transparent = name in TRANSPARENT or isinstance(module, (DistributedDataParallel, DataParallel))
            _walk(child, prefix if transparent else f"{prefix}{name}.", found, root=root and transparent)
    if own_methods.has_after_load(module):
        found.after[f"{found.key}/{prefix}"] = module


def _is_flattened(module: nn.Module, prefix: str, found: Found) -> bool:
    """Whether FSDP1 flattened parameters of `module`, which its methods then can't load; saving needs none that only load."""
    inside = list(module.modules())
    if not any(id(x) in found.flat_modules or isinstance(x, fsdp.known("FullyShardedDataParallel")) for x in inside):
        return False
    if found.loading or own_methods.saves_itself(module):
        raise UnsupportedError(
            f"{found.key}/{prefix.removesuffix('.')}",
            f"{type(module).__qualname__} has state-dict methods or hooks of its own, which FSDP1's flat parameters can't go "
            "through: use fully_shard (FSDP2) instead",
        )
    return True


def _add_unit(module: nn.Module, prefix: str, found: Found, *, root: bool) -> None:
    where = f"{found.key}/{prefix}".rstrip("./")
    unit = own_methods.take(module, prefix, where, root=root, loading=found.loading)
    first_rank_wins = own_methods.buffers(unit)
    for name, key in unit.keys.items():
        x = unit.given[key]
        if isinstance(x, torch.Tensor):
            _add(name, x, found, first_rank_wins=id(x) in first_rank_wins, reads_into=unit.scratch.get(id(x)))
    found.units.append(unit)


def unit_values(unit: own_methods.Unit) -> dict[str, object]:
    """What a unit holds that is no tensor, by name in the model."""
    out = {name: unit.given[key] for name, key in unit.keys.items() if not isinstance(unit.given[key], torch.Tensor)}
    out = {name: bytes_io.to_value(x) if type(x) is io.BytesIO else x for name, x in out.items()}
    return {**out, unit.prefix + own_methods.VERSIONS: unit.versions} if unit.adapts else out


def put_unit(unit: own_methods.Unit, stored: Mapping[str, Any], found: Found) -> None:
    """Give a unit its state. `stored` maps names in the model to values and tensors; pending ones were read into `scratch`."""
    held = {id(unit.given[key]) for name, key in unit.keys.items() if name in stored}
    state: dict[str, object] = {}
    for name, key in unit.keys.items():
        x = unit.given[key]
        if isinstance(x, torch.Tensor) and id(x) in held:  # under this name, or one that it is tied to
            told = stored.get(name)
            read = (
                unit.scratch[id(x)] if found.seen[id(x)] in unit.keys else x
            )  # tied to another module's, which was read in place
            state[name] = told if isinstance(told, torch.Tensor) else read
        elif name in stored:
            state[name] = stored[name]
    versions = stored.get(unit.prefix + own_methods.VERSIONS)
    own_methods.give(unit, state, versions if isinstance(versions, dict) else None)


def _own(module: nn.Module, prefix: str, found: Found) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's own parameters and persistent buffers, without its children's and FSDP's flat ones."""
    held: dict[str, object] = {}
    module._save_to_state_dict(held, prefix, keep_vars=True)  # what a module overrides to say what it has
    for name, tensor in held.items():
        if name == prefix + EXTRA_STATE or fsdp.is_flat(tensor) or id(tensor) in found.flattened:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise UnrepresentableError(f"{found.key}/{name}", f"{type(tensor).__name__} in a module's state")
        yield name, tensor


def _add(fqn: str, tensor: torch.Tensor, found: Found, *, first_rank_wins: bool, reads_into: torch.Tensor | None = None) -> None:
    if id(tensor) in found.seen:
        if found.seen[id(tensor)] != fqn:
            found.aliases[fqn] = found.seen[id(tensor)]
        return
    if nn.parameter.is_lazy(tensor):
        raise UnsupportedError(f"{found.key}/{fqn}", "a lazy parameter has no shape yet: run a forward pass first")
    if fqn in found.leaves:
        raise UnsupportedError(
            f"{found.key}/{fqn}", "two modules hold different tensors of this name: put them under keys of their own"
        )
    found.seen[id(tensor)] = fqn
    held = tensor if reads_into is None else reads_into
    found.leaves[fqn] = leaf(held, f"{found.key}/{fqn}", first_rank_wins=first_rank_wins)
    found.owners[id(tensor)] = (Owned(found.key, fqn, found.leaves[fqn]),)


def _add_flat(flat: fsdp.FlatParameter, prefix: str, found: Found) -> None:
    for item in flat.items:
        fqn = prefix + _clean(item.fqn)
        if fqn in found.leaves:
            raise UnsupportedError(f"{found.key}/{fqn}", "two modules hold different tensors of this name")
        found.leaves[fqn] = item.leaf
        if item.original is not None:
            assert item.own is not None
            found.flattened.add(id(item.original))
            found.owners[id(item.original)] = (Owned(found.key, fqn, item.own),)
    found.owners[id(flat.parameter)] = tuple(Owned(found.key, prefix + _clean(item.fqn), item.leaf) for item in flat.items)
    for alias, target in flat.aliases.items():
        found.aliases[prefix + _clean(alias)] = prefix + _clean(target)


def _clean(fqn: str) -> str:
    return ".".join(part for part in fqn.split(".") if part not in TRANSPARENT)


def extra_state(module: nn.Module) -> object:
    """What `get_extra_state` gives, in types that values have (Transformer Engine gives a BytesIO)."""
    state: object = module.get_extra_state()
    return bytes_io.to_value(state) if type(state) is io.BytesIO else state


def put_extra_state(module: nn.Module, stored: object) -> None:
    """Give a module its extra state back. Earlier releases stored the bytes of a BytesIO."""
    wrap = isinstance(stored, bytes) and isinstance(module.get_extra_state(), io.BytesIO)
    module.set_extra_state(io.BytesIO(stored) if wrap else stored)  # type: ignore[arg-type]  # bytes, as just seen
