"""The state of a torch optimizer by parameter name.

`<optimizer>/<fqn>/<state>` are tensors, `<optimizer>/param_groups` values whose `params` are names. A parameter that is in
no module of the state is called by the optimizer's own `param_names` if it has them, else `param_<group>_<position>`. An
optimizer with a `state_dict` or hooks of its own is asked for its state through these: what it adds to torch's form is
`<optimizer>/_extra_state`. Loading is in `restoring.optimizers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from ucformat.errors import UnrepresentableError, UnsupportedError
from ucformat.reshard.state.leaf import Leaf, leaf, plain
from ucformat.reshard.state.module import Owned, Owners

GROUPS = "param_groups"
EXTRA = "_extra_state"
"""What an optimizer's own `state_dict` gives beside states and groups; under the key `state`, states of what is no parameter."""

RESERVED = frozenset({GROUPS, EXTRA})

PARAMETERS = frozenset({"params", "param_names"})
"""What of a group is no hyper-parameter."""


States = dict[int, dict[str, Any]]
"""By `id` of the parameter."""


@dataclass(frozen=True, slots=True)
class Named:
    """One optimizer with names for its parameters."""

    optimizer: torch.optim.Optimizer
    """The one that holds the states."""
    groups: list[dict[str, Any]]
    """Parameter groups, of which the hyper-parameters count: the live ones, or those of its own `state_dict`."""
    key: str
    names: dict[int, tuple[Owned, ...]]
    """By `id` of the parameter: one name, or those of all parameters that a flat one holds."""
    states: States
    """To save: what there is. To load: what is read in place, which `restoring.optimizers.allocate` adds to."""
    extra: dict[str, object] = field(default_factory=dict)
    through: bool = False
    """It has a `state_dict`, `load_state_dict` or hooks of its own, so its state goes through them."""

    @property
    def used(self) -> set[str]:
        return {owned.fqn for entry in self.names.values() for owned in entry}

    def parameters(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """Each parameter whose states this rank keeps, with its group."""
        for group in self.groups if self.through else self.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, group

    def group_names(self, group: Mapping[str, Any]) -> list[str]:
        return [owned.fqn for parameter in group["params"] for owned in self.names[id(parameter)]]


def named(optimizer: torch.optim.Optimizer, key: str, owners: Owners, *, loading: bool) -> Named | None:
    """Name every parameter of `optimizer`, which stands at `key` in the state. Names of one optimizer are unique.

    None when its own `state_dict` is not in torch's form: it is then an object with state like any other. Raises UnsupportedError
    where that can't be, since parameters are sharded.
    """
    if not hasattr(optimizer, "state") or not hasattr(optimizer, "param_groups"):
        raise UnsupportedError(
            key, f"{type(optimizer).__name__} is an Optimizer without state and param_groups: put what it wraps into the state"
        )
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        holder = _of_zero(optimizer, key)
        names = _names(optimizer.param_groups, key, owners)
        return Named(holder, optimizer.param_groups, key, names, _live_states(holder, key, names, loading=loading))
    names = _names(optimizer.param_groups, key, owners)
    if not goes_through_state_dict(optimizer):
        return Named(optimizer, optimizer.param_groups, key, names, _live_states(optimizer, key, names, loading=loading))
    given = optimizer.state_dict()
    if not _in_torch_form(given, optimizer):
        if any(_is_sharded(parameter, names) for group in optimizer.param_groups for parameter in group["params"]):
            raise UnsupportedError(
                key,
                f"{type(optimizer).__name__}.state_dict() is not in the form of torch's optimizers (state, param_groups), so its "
                "states can't be matched with sharded parameters: put what it wraps into the state instead",
            )
        return None
    return _through(optimizer, given, key, names, loading=loading)


def goes_through_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its class or a hook may give or take another state than what `state` and `param_groups` hold."""
    kind, base = type(optimizer), torch.optim.Optimizer
    methods = ("state_dict", "load_state_dict", "_process_value_according_to_param_policy")
    if any(getattr(kind, m) is not getattr(base, m) or m in optimizer.__dict__ for m in methods):
        return True
    if any(optimizer.__dict__.get(name) for name in _HOOKS):
        return True
    return not all(isinstance(key, torch.Tensor) for key in optimizer.state)


_HOOKS = tuple(f"_optimizer_{when}_{order}_hooks" for when in ("state_dict", "load_state_dict") for order in ("pre", "post"))


def _of_zero(optimizer: torch.optim.Optimizer, key: str) -> torch.optim.Optimizer:
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise UnsupportedError(key, "ZeroRedundancyOptimizer with overlap_with_ddp keeps no state that can be read")
    if any(optimizer.__dict__.get(name) for name in _HOOKS):
        raise UnsupportedError(
            key, "ZeroRedundancyOptimizer with hooks on state dicts: register them on the optimizer that it wraps"
        )
    holder: torch.optim.Optimizer = cast(Any, optimizer).optim
    if goes_through_state_dict(holder):
        raise UnsupportedError(
            key, f"ZeroRedundancyOptimizer over {type(holder).__name__}, which has a state_dict or hooks of its own"
        )
    return holder


def _names(groups: Sequence[Mapping[str, Any]], key: str, owners: Owners) -> dict[int, tuple[Owned, ...]]:
    names: dict[int, tuple[Owned, ...]] = {}
    for g, group in enumerate(groups):
        own = group.get("param_names")
        for p, parameter in enumerate(group["params"]):
            name = str(own[p]) if own else f"param_{g}_{p}"
            names[id(parameter)] = owners.get(id(parameter)) or (Owned("", name, leaf(parameter, f"{key}/{name}")),)
    used = [owned.fqn for entry in names.values() for owned in entry]
    if len(set(used)) < len(used):  # one optimizer over several models
        names = {i: tuple(replace(o, fqn=f"{o.module}.{o.fqn}" if o.module else o.fqn) for o in e) for i, e in names.items()}
    for reserved in RESERVED & {owned.fqn for entry in names.values() for owned in entry}:
        raise UnsupportedError(key, f"a parameter is called {reserved!r}, which has another meaning here: rename it")
    return names


def _live_states(optimizer: torch.optim.Optimizer, key: str, names: Mapping[int, tuple[Owned, ...]], *, loading: bool) -> States:
    for parameter in optimizer.state:
        if id(parameter) not in names:
            raise UnrepresentableError(
                key, f"optimizer state for a {type(parameter).__name__} that is in no parameter group", "remove it from `state`"
            )
        if not isinstance(optimizer.state[parameter], dict):
            raise UnrepresentableError(f"{key}/{names[id(parameter)][0].fqn}", f"{type(optimizer.state[parameter]).__name__}")
    live = {id(parameter): state for parameter, state in optimizer.state.items()}
    return {i: dict(state) for i, state in live.items()} if loading else live


def _in_torch_form(given: Any, optimizer: torch.optim.Optimizer) -> bool:
    """{"state": by position, "param_groups": as many, each with as many positions as the live ones have parameters}."""
    if not isinstance(given, dict) or not isinstance(given.get("state"), Mapping) or not isinstance(given.get(GROUPS), list):
        return False
    groups, live = given[GROUPS], optimizer.param_groups
    return len(groups) == len(live) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and len(group["params"]) == len(own["params"])
        and all(type(i) is int for i in group["params"])
        for group, own in zip(groups, live, strict=True)
    )


def _is_sharded(parameter: torch.Tensor, names: Mapping[int, tuple[Owned, ...]]) -> bool:
    held = names[id(parameter)]
    return isinstance(parameter, DTensor) or len(held) > 1 or held[0].leaf.shape != tuple(parameter.shape)


def _through(
    optimizer: torch.optim.Optimizer, given: dict[str, Any], key: str, names: dict[int, tuple[Owned, ...]], *, loading: bool
) -> Named:
    """What the optimizer's own `state_dict` gave."""
    live = optimizer.param_groups
    if loading:  # all of it is handed to load_state_dict, nothing is written into live tensors
        return Named(optimizer, live, key, names, {}, {}, through=True)
    parameter = {
        i: p for group, own in zip(given[GROUPS], live, strict=True) for i, p in zip(group["params"], own["params"], strict=True)
    }
    states = {id(parameter[i]): state for i, state in given["state"].items() if i in parameter}
    extra = {name: x for name, x in given.items() if name not in {"state", GROUPS}}
    others = {i: state for i, state in given["state"].items() if i not in parameter}
    if others:
        extra["state"] = others
    groups = [{**group, "params": own["params"]} for group, own in zip(given[GROUPS], live, strict=True)]
    return Named(optimizer, groups, key, names, states, extra, through=True)


Node = Callable[[object, str], object]
"""Makes leaves of a nest of values: (value, path)."""


def tree(item: Named, node: Node, *, groups: bool) -> dict[str, object]:
    """The optimizer as a nest of dicts with leaves; its groups and extra state too if asked for."""
    out: dict[str, object] = {}
    for parameter, _ in item.parameters():
        state = item.states.get(id(parameter), {})
        for owned in (o for o in item.names[id(parameter)] if state and not has_nothing(parameter, o)):
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
        if item.extra:
            out[EXTRA] = node(item.extra, f"{item.key}/{EXTRA}")
    return out


def has_nothing(parameter: torch.Tensor, owned: Owned) -> bool:
    """Whether FSDP1 gave this rank no element of a parameter. It gets no gradients then: its counters, if any, stand still."""
    if parameter.numel() > 0 or owned.leaf.frame is not None or 0 in owned.leaf.shape:
        return False
    return bool(owned.leaf.parts) and not owned.leaf.parts[0][1].held


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
