"""The tensors of an `nn.Module` by fully qualified name, whatever it is wrapped in, and who owns each parameter.

Names are those of the unwrapped model: DDP, FSDP, activation checkpointing and torch.compile leave no trace. Each module's own
`_save_to_state_dict` says what it has (persistent buffers only); hooks on state dicts are not run.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ucformat.errors import UnrepresentableError, UnsupportedError
from ucformat.naming import TRANSPARENT
from ucformat.reshard.state import fsdp
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


def find(modules: Sequence[nn.Module], key: str) -> Found:
    """Everything in `modules`: one model, or pipeline stages whose names unite to one. `key` is where it stands in the state.

    Raises UnsupportedError when two of them hold different tensors of one name.
    """
    found = Found(key)
    for module in modules:
        _walk(module, "", found)
    return found


def _walk(module: nn.Module, prefix: str, found: Found) -> None:
    fsdp.reshard(module)
    for flat in fsdp.flat_parameters(module):
        _add_flat(flat, prefix, found)
    for name, tensor in _own(module, prefix, found):
        _add(name, tensor, found, first_rank_wins=name.removeprefix(prefix) in module._buffers)  # no public dict of own buffers
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        found.extra[prefix + EXTRA_STATE] = module
    for name, child in module._modules.items():  # named_children leaves repeats out
        if child is not None:
            transparent = name in TRANSPARENT or isinstance(module, (DistributedDataParallel, DataParallel))
            _walk(child, prefix if transparent else f"{prefix}{name}.", found)


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


def _add(fqn: str, tensor: torch.Tensor, found: Found, *, first_rank_wins: bool) -> None:
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
    found.leaves[fqn] = leaf(tensor, f"{found.key}/{fqn}", first_rank_wins=first_rank_wins)
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
