"""The state of a torch optimizer by parameter name: taken out for saving, allocated and put back for loading.

`<optimizer>/<fqn>/<state>` are tensors, `<optimizer>/param_groups` values whose `params` are names. A parameter that is in
no module of the state is called by the optimizer's own `param_names` if it has them, else `param_<group>_<position>`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from ucformat import values
from ucformat.catalog import TensorSpec
from ucformat.errors import NamesMismatchError, UnrepresentableError, UnsupportedError
from ucformat.reshard.state.assign import Pending, assign, pending
from ucformat.reshard.state.leaf import Leaf, is_tensor, leaf, plain
from ucformat.reshard.state.module import Owned, Owners

GROUPS = "param_groups"
OWN_CHOICES = frozenset({"foreach", "fused", "capturable"})
"""How the optimizer of this run computes, on its own device: loading does not change it."""

PARAMETERS = frozenset({"params", "param_names"})
"""What of a group is no hyper-parameter."""

MASTER = "fp32"  # canonical name of master weights, which torch's own optimizers do not keep


@dataclass(frozen=True, slots=True)
class Named:
    """One optimizer with names for its parameters."""

    optimizer: torch.optim.Optimizer
    """The one that holds the states."""
    groups: list[dict[str, Any]]
    """Live parameter groups, of which the hyper-parameters count."""
    key: str
    names: dict[int, tuple[Owned, ...]]
    """By `id` of the parameter: one name, or those of all parameters that a flat one holds."""

    @property
    def used(self) -> set[str]:
        return {owned.fqn for entry in self.names.values() for owned in entry}

    def parameters(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """Each parameter whose states this rank keeps, with its group."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, group

    def group_names(self, group: Mapping[str, Any]) -> list[str]:
        return [owned.fqn for parameter in group["params"] for owned in self.names[id(parameter)]]


def named(optimizer: torch.optim.Optimizer, key: str, owners: Owners) -> Named:
    """Name every parameter of `optimizer`, which stands at `key` in the state. Names of one optimizer are unique."""
    groups, holder = optimizer.param_groups, optimizer
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        if getattr(optimizer, "_overlap_with_ddp", False):
            raise UnsupportedError(key, "ZeroRedundancyOptimizer with overlap_with_ddp keeps no state that can be read")
        holder = cast(Any, optimizer).optim
    names: dict[int, tuple[Owned, ...]] = {}
    for g, group in enumerate(groups):
        own = group.get("param_names")
        for p, parameter in enumerate(group["params"]):
            name = str(own[p]) if own else f"param_{g}_{p}"
            names[id(parameter)] = owners.get(id(parameter)) or (Owned("", name, leaf(parameter, f"{key}/{name}")),)
    used = [owned.fqn for entry in names.values() for owned in entry]
    if len(set(used)) < len(used):  # one optimizer over several models
        names = {i: tuple(replace(o, fqn=f"{o.module}.{o.fqn}" if o.module else o.fqn) for o in e) for i, e in names.items()}
    if any(owned.fqn == GROUPS for entry in names.values() for owned in entry):
        raise UnsupportedError(key, f"a parameter is called {GROUPS!r}, which names the groups here: rename it")
    return Named(holder, groups, key, names)


Node = Callable[[object, str], object]
"""Makes leaves of a nest of values: (value, path)."""


def tree(item: Named, node: Node, *, groups: bool) -> dict[str, object]:
    """The optimizer as a nest of dicts with leaves; its groups too if asked for."""
    out: dict[str, object] = {}
    for parameter in item.optimizer.state:
        if id(parameter) not in item.names:
            raise UnrepresentableError(item.key, f"optimizer state for a {type(parameter).__name__} that is no parameter")
    for parameter, _ in item.parameters():
        state = item.optimizer.state.get(parameter, {})
        for owned in item.names[id(parameter)] if state else ():
            at = f"{item.key}/{owned.fqn}"
            out[owned.fqn] = {name: _placed(x, owned.leaf, node, f"{at}/{name}") for name, x in state.items()}
    if groups:
        out[GROUPS] = [
            {
                **{name: node(x, f"{item.key}/{GROUPS}/{g}/{name}") for name, x in group.items() if name not in PARAMETERS},
                "params": item.group_names(group),
            }
            for g, group in enumerate(item.groups)
        ]
    return out


def _placed(x: object, like: Leaf, node: Node, at: str) -> object:
    """The leaf of one state: sharded like its parameter when it has the parameter's local shape, else whole."""
    if isinstance(x, torch.Tensor) and not isinstance(x, DTensor):
        local = plain(x, at)
        placed = like.parts[0][1] if like.parts else None
        if placed is not None and tuple(local.shape) == tuple(like.parts[0][0].shape):
            return Leaf(like.shape, local.dtype, ((local, placed),), frame=like.frame)
    if isinstance(x, dict):
        return {key: _placed(item, like, node, f"{at}/{key}") for key, item in x.items()}
    if type(x) in {list, tuple}:
        items: Any = x
        return type(items)(_placed(item, like, node, f"{at}/{i}") for i, item in enumerate(items))
    return node(x, at)


# ---------------------------------------------------------------- loading


def allocate(item: Named, specs: Mapping[str, Mapping[str, TensorSpec]]) -> None:
    """Make the states that are stored and that the optimizer does not have yet, zero, placed like their parameters.

    `specs` maps parameter names to stored states by name. Master weights are left out for torch's own optimizers, which would
    not use them. Raises UnsupportedError for a state whose shape does not tell how it is placed.
    """
    own = type(item.optimizer).__module__.startswith("torch.optim")
    for parameter, group in item.parameters():
        for owned in item.names[id(parameter)]:
            if parameter.numel() == 0 and owned.leaf.parts and not owned.leaf.parts[0][1].held and owned.leaf.frame is None:
                continue  # FSDP1 leaves an optimizer without state for parameters of which this rank has nothing
            for name, spec in specs.get(owned.fqn, {}).items():
                state = item.optimizer.state[parameter]
                if name not in state and not (own and name == MASTER):
                    state[name] = _zeros(parameter, group, owned, name, spec, own=own)


def _zeros(
    parameter: torch.Tensor, group: Mapping[str, Any], owned: Owned, name: str, spec: TensorSpec, *, own: bool
) -> torch.Tensor:
    dtype = spec.kind.torch
    if own and name != "step" and dtype.is_floating_point and parameter.is_floating_point() and spec.shape:
        dtype = parameter.dtype  # torch's own optimizers compute with states of the parameter's dtype only
    if name != "step" and spec.shape == owned.leaf.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if spec.shape == ():
        # as torch's optimizers do: counters stay on the host, unless the update runs wholly on the device
        on_device = group.get("capturable") or group.get("fused")
        return torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")
    if isinstance(parameter, DTensor) or tuple(parameter.shape) != owned.leaf.shape:
        raise UnsupportedError(
            spec.name,
            f"a state of shape {list(spec.shape)} for a sharded parameter of shape {list(owned.leaf.shape)}: "
            "run one optimizer step before loading, so that it exists",
        )
    return torch.zeros(spec.shape, dtype=dtype, device=parameter.device)


def knows(stored: object, item: Named) -> set[str]:
    """The names of those parameters whose states, or lack of them, the stored values tell."""
    groups = stored.get(GROUPS) if isinstance(stored, dict) else None
    told = {name for group in groups or [] if isinstance(group, dict) for name in group.get("params", [])}
    return told & item.used


def put_states(item: Named, stored: Mapping[str, Any]) -> None:
    """Bring every state to what was stored: `stored` maps parameter names to states, pending where they were read in place.

    States that were not stored are dropped, as torch's `load_state_dict` does.
    """
    told = knows(stored, item)
    for parameter, _ in item.parameters():
        fqns = [owned.fqn for owned in item.names[id(parameter)] if owned.fqn in told]
        wanted: dict[str, object] = {}
        for fqn in fqns:
            wanted.update(stored.get(fqn, {}))
        live = item.optimizer.state[parameter] if fqns and wanted else item.optimizer.state.get(parameter, {})
        for name in [name for name in live if fqns and name not in wanted]:
            del live[name]
        for name, x in wanted.items():
            if name in live or not isinstance(x, Pending):  # pending and unknown here: not for this optimizer
                live[name] = assign(live.get(name), x)
        if not live:
            item.optimizer.state.pop(parameter, None)


def put_groups(item: Named, stored: Sequence[Mapping[str, Any]]) -> None:
    """Give each live group the hyper-parameters of the stored group that held its parameters.

    Raises NamesMismatchError when none did, UnsupportedError when several with different hyper-parameters did.
    """
    for group in item.groups:
        chosen = choose_group(item, group, stored)
        for name, x in chosen.items():
            if name != "params" and not (name in OWN_CHOICES and name in group):
                group[name] = assign(group.get(name), x)
    # lets the class bring what an older version of it stored up to date, as torch's load_state_dict does
    item.optimizer.__setstate__({"state": item.optimizer.state, GROUPS: item.optimizer.param_groups})


def choose_group(item: Named, group: Mapping[str, Any], stored: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The hyper-parameters of the stored group that held the parameters of a live one; empty for one without parameters."""
    held = holding(item, group, stored)
    if not held:
        return {}
    first = {**held[0], "params": []}
    if any(_differ(first, {**other, "params": []}) for other in held[1:]):
        names = item.group_names(group)
        raise UnsupportedError(
            f"{item.key}/{GROUPS}", f"parameters of one group ({names[0]}, …) were stored in groups with other hyper-parameters"
        )
    return first


def holding(item: Named, group: Mapping[str, Any], stored: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The stored groups that held parameters of a live one. Raises NamesMismatchError for parameters that none held."""
    mine = set(item.group_names(group))
    held = [s for s in stored if not mine.isdisjoint(s.get("params", []))]
    missing = sorted(mine.difference(*(s["params"] for s in held)))
    if missing:
        raise NamesMismatchError(f"{item.key}/{GROUPS}", missing, ())
    return held


def fresh(item: Named, stored: Mapping[str, Any], inplace: AbstractSet[str]) -> Iterator[str]:
    """Names of stored tensors in states that are not read in place and that the optimizer takes all the same."""
    for parameter, _ in item.parameters():
        live = item.optimizer.state.get(parameter, {})
        for owned in item.names[id(parameter)]:
            for name, x in stored.get(owned.fqn, {}).items():
                if name in live or not isinstance(x, Pending):
                    yield from (n for n in pending(x) if n not in inplace)


def _differ(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    tensors_a, tensors_b = (values.split(dict(x), is_tensor) for x in (a, b))
    if values.encode(tensors_a[0]) != values.encode(tensors_b[0]) or tensors_a[1].keys() != tensors_b[1].keys():
        return True
    return any(not torch.equal(x, tensors_b[1][name]) for name, x in tensors_a[1].items() if isinstance(x, torch.Tensor))
