"""Loading into torch optimizers: what is stored is checked and given memory first, and put into the live optimizer at the end.

Until then the live optimizer stays as it is: states that it lacks are made beside it, in `Named.states`. Parameter groups are
matched by the names of their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ucformat import values
from ucformat.catalog import TensorSpec
from ucformat.errors import UnsupportedError
from ucformat.naming import MASTER
from ucformat.reshard.restoring import forms
from ucformat.reshard.state.assign import Pending, assign, pending
from ucformat.reshard.state.leaf import is_tensor
from ucformat.reshard.state.module import Owned
from ucformat.reshard.state.optimizer import EXTRA, GROUPS, PARAMETERS, Named, has_nothing

OWN_CHOICES = frozenset({"foreach", "fused", "capturable"})
"""How the optimizer of this run computes, on its own device: loading does not change it."""

_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})
"""What torch's schedulers add to groups."""

Read = Callable[[Sequence[str]], Sequence[torch.Tensor]]
"""Reads stored tensors by name."""

Specs = Mapping[str, Mapping[str, TensorSpec]]
"""Parameter → state → what is stored of it."""


@dataclass(slots=True)
class Matched:
    """The stored parameter groups for the live ones of an optimizer, or of several in one list."""

    groups: list[tuple[Named, dict[str, Any], Mapping[str, Any] | None]]
    """(optimizer, live group, stored hyper-parameters), None where nothing stored belongs to it."""
    missing: list[str] = field(default_factory=list)
    """Paths of parameters that no stored group holds."""
    remarks: list[str] = field(default_factory=list)

    def of(self, item: Named) -> list[tuple[dict[str, Any], Mapping[str, Any] | None]]:
        return [(group, chosen) for owner, group, chosen in self.groups if owner is item]


def match(items: Sequence[Named], stored: Sequence[Mapping[str, Any]], read: Read | None = None) -> Matched:
    """Find the stored group of every live one: that which held its parameters, or for one without any, that of its position.

    `read` reads hyper-parameters that are tensors and not read yet. Raises UnsupportedError when the parameters of a live group
    were stored in groups with different hyper-parameters.
    """
    live = [(item, group) for item in items for group in item.groups]
    held = [_holding(item, group, stored) for item, group in live]
    found = Matched([])
    rest = [i for i in range(len(stored)) if not any(i in numbers for numbers in held)]
    empty = [i for i, (_, group) in enumerate(live) if not group["params"]]
    for i, ((item, group), numbers) in enumerate(zip(live, held, strict=True)):
        chosen: Mapping[str, Any] | None = None
        if numbers:
            chosen = _alike(item, group, [stored[n] for n in numbers], read)
        elif not group["params"] and i in rest:
            chosen = stored[i]
        elif not group["params"] and len(rest) == len(empty):
            chosen = stored[rest[empty.index(i)]]
        found.groups.append((item, group, chosen))
        _account(found, item, group, chosen, i)
        known = {name for n in numbers for name in stored[n]["params"]}
        found.missing += [f"{item.key}/{values.escape(name)}" for name in item.group_names(group) if name not in known]
    return found


def _holding(item: Named, group: Mapping[str, Any], stored: Sequence[Mapping[str, Any]]) -> list[int]:
    mine = set(item.group_names(group))
    return [i for i, s in enumerate(stored) if not mine.isdisjoint(s.get("params", []))]


def _alike(item: Named, group: Mapping[str, Any], held: Sequence[Mapping[str, Any]], read: Read | None) -> Mapping[str, Any]:
    first, *others = ({**one, "params": []} for one in held)
    if any(_differ(first, other, read) for other in others):
        names = item.group_names(group)
        raise UnsupportedError(
            f"{item.key}/{GROUPS}",
            f"the parameters of one group ({names[0]}, …) were stored in {len(held)} groups with different hyper-parameters: "
            "make the optimizer with the same groups",
        )
    return first


def _differ(a: Mapping[str, Any], b: Mapping[str, Any], read: Read | None) -> bool:
    (values_a, tensors_a), (values_b, tensors_b) = (values.split(dict(x), _is_leaf) for x in (a, b))
    if values.encode(values_a) != values.encode(values_b) or tensors_a.keys() != tensors_b.keys():
        return True
    for name in tensors_a:
        x, y = tensors_a[name], tensors_b[name]
        if isinstance(x, Pending) and isinstance(y, Pending) and read is not None:
            x, y = (x, x) if x == y else read([x.name, y.name])
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and not torch.equal(x, y):
            return True
    return False


def _is_leaf(x: object) -> bool:
    return is_tensor(x) or isinstance(x, Pending)


def _account(found: Matched, item: Named, group: Mapping[str, Any], chosen: Mapping[str, Any] | None, number: int) -> None:
    """Note hyper-parameters that stay as they are, as nothing is stored for them."""
    defaults = set(getattr(item.optimizer, "defaults", {})) - PARAMETERS - OWN_CHOICES
    if chosen is None:
        if not group["params"]:
            found.remarks.append(f"{item.key}: group {number} has no parameters and no stored counterpart: it stays as it is")
        return
    kept = sorted(name for name in group if name in defaults and name not in chosen)
    unknown = sorted(chosen.keys() - group.keys() - PARAMETERS - OWN_CHOICES - _OF_SCHEDULERS)
    if kept:
        found.remarks.append(f"{item.key}: not stored, so they stay as they are in group {number}: {', '.join(kept)}")
    if kept and unknown:
        kind = type(forms.innermost(item.optimizer)).__name__
        found.remarks.append(f"{item.key}: {kind} knows no {', '.join(unknown)}: is the stored state of another optimizer?")


def knows(stored: object, item: Named) -> set[str]:
    """The names of those parameters whose states, or lack of them, the stored values tell."""
    groups = stored.get(GROUPS) if isinstance(stored, dict) else None
    held = {name for group in groups or [] if isinstance(group, dict) for name in group.get("params", [])}
    return held & item.used


# ---------------------------------------------------------------- before reading


def check(matched: Matched, node: Mapping[str, Any], specs: Specs) -> None:
    """Compare stored states with what the optimizers can go on from: see `forms.check`."""
    for item, group, chosen in matched.groups:
        for parameter in group["params"]:
            for owned in item.names[id(parameter)]:
                told = node.get(owned.fqn)
                stored: dict[str, TensorSpec | None] = dict.fromkeys(told if isinstance(told, dict) else ())
                stored.update(specs.get(owned.fqn, {}))
                forms.check(item, parameter, owned, {**group, **(chosen or {})}, stored)


def allocate(item: Named, specs: Specs) -> None:
    """Make the states that are stored and that the optimizer does not have yet, zero, placed like their parameters.

    They are no part of the optimizer until `put`. Master weights are left out for torch's own optimizers, which would not use
    them. Raises UnsupportedError for a state whose shape does not tell how it is placed.
    """
    own = forms.is_torchs(item.optimizer)
    for parameter, group in item.parameters():
        for owned in item.names[id(parameter)]:
            if has_nothing(parameter, owned):
                continue  # an optimizer makes no state for it
            for name, spec in specs.get(owned.fqn, {}).items():
                state = item.states.setdefault(id(parameter), {})
                if name not in state and not (own and name == MASTER):
                    state[name] = _zeros(parameter, group, owned, name, spec, own=own)


def _zeros(
    parameter: torch.Tensor, group: Mapping[str, Any], owned: Owned, name: str, spec: TensorSpec, *, own: bool
) -> torch.Tensor:
    dtype = spec.kind.torch
    if own and name not in forms.SCALARS and dtype.is_floating_point and parameter.is_floating_point() and spec.shape:
        dtype = parameter.dtype  # torch's own optimizers compute with states of the parameter's dtype only
    if name not in forms.SCALARS and spec.shape == owned.leaf.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if spec.shape == ():
        # as torch's optimizers do: counters stay on the host, unless the update runs wholly on the device (or is that of ASGD)
        on_device = group.get("capturable") or group.get("fused") or (own and "lambd" in group)
        return torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")
    if isinstance(parameter, DTensor) or tuple(parameter.shape) != owned.leaf.shape:
        raise UnsupportedError(
            spec.name,
            f"a state of shape {list(spec.shape)} for a sharded parameter of shape {list(owned.leaf.shape)}: "
            "run one optimizer step before loading, so that it exists",
        )
    return torch.zeros(spec.shape, dtype=dtype, device=parameter.device)


def fresh(item: Named, stored: Mapping[str, Any], inplace: AbstractSet[str]) -> Iterator[str]:
    """Names of stored tensors in states that are not read in place and that the optimizer takes all the same."""
    for parameter, _ in item.parameters():
        made = item.states.get(id(parameter), {})
        for owned in item.names[id(parameter)]:
            for name, x in stored.get(owned.fqn, {}).items():
                if name in made or not isinstance(x, Pending):
                    yield from (n for n in pending(x) if n not in inplace)
    if item.through:
        yield from pending(stored.get(EXTRA))


# ---------------------------------------------------------------- after reading


def put(matched: Matched, stored: Mapping[str, Any]) -> None:
    """Bring the optimizers to what was stored: `stored` maps parameter names to states, pending where they were read in place.

    States that were not stored are dropped, as torch's `load_state_dict` does. Optimizers with methods or hooks of their own
    get everything through their `load_state_dict`.
    """
    for item in {id(item): item for item, _, _ in matched.groups}.values():
        if item.through:
            item.optimizer.load_state_dict(_state_dict(item, matched, stored))
        else:
            _put_states(item, stored)
            _put_groups(item, matched)


def _put_states(item: Named, stored: Mapping[str, Any]) -> None:
    known = knows(stored, item)
    for parameter, _ in item.parameters():
        names = [owned for owned in item.names[id(parameter)] if not has_nothing(parameter, owned)]
        if any(owned.fqn in known for owned in names):
            new = _restored(item, parameter, known, stored)
            if new:
                live = item.optimizer.state[parameter]
                live.clear()
                live.update(new)
            else:
                item.optimizer.state.pop(parameter, None)


def _restored(item: Named, parameter: torch.Tensor, known: AbstractSet[str], stored: Mapping[str, Any]) -> dict[str, Any]:
    """The states of one parameter: those that were read in place, and values."""
    made = item.states.get(id(parameter), {})
    out: dict[str, Any] = {}
    for owned in item.names[id(parameter)]:
        held = owned.fqn in known and not has_nothing(parameter, owned)
        for name, x in stored.get(owned.fqn, {}).items() if held else ():
            if name in made or not isinstance(x, Pending):  # pending and unknown here: not for this optimizer
                out[name] = assign(made.get(name), x if name == "step" else _moved(x, parameter))
    return out


def _moved(x: Any, parameter: torch.Tensor) -> Any:
    """Tensors inside states (the history of LBFGS) on the device of their parameter."""
    if isinstance(x, torch.Tensor):
        return x.to(parameter.device)
    if type(x) is dict:
        return {key: _moved(item, parameter) for key, item in x.items()}
    if type(x) in {list, tuple}:
        return type(x)(_moved(item, parameter) for item in x)
    return x


def _put_groups(item: Named, matched: Matched) -> None:
    """Give each live group its hyper-parameters."""
    shared = [id(x) for group in item.groups for x in group.values() if isinstance(x, torch.Tensor)]
    for group, chosen in matched.of(item):
        for name, x in (chosen or {}).items():
            if name not in PARAMETERS and not (name in OWN_CHOICES and name in group):
                live = group.get(name)
                if isinstance(live, torch.Tensor) and shared.count(id(live)) > 1:  # one tensor for several groups
                    live = live.clone()
                group[name] = assign(live, x)
    # lets the class bring what an older version of it stored up to date, as torch's load_state_dict does
    item.optimizer.__setstate__({"state": item.optimizer.state, GROUPS: item.optimizer.param_groups})


def _state_dict(item: Named, matched: Matched, stored: Mapping[str, Any]) -> dict[str, Any]:
    """What was stored, in the form in which the optimizer's own `state_dict` gave it."""
    known = knows(stored, item)
    extra: dict[str, Any] = dict(stored.get(EXTRA) or {})
    state: dict[Any, Any] = dict(extra.pop("state", {}))
    groups: list[dict[str, Any]] = []
    number: dict[int, int] = {}
    for group, chosen in matched.of(item):
        for parameter in group["params"]:
            number.setdefault(id(parameter), len(number))
            told = any(owned.fqn in known for owned in item.names[id(parameter)])
            live: dict[str, Any] = forms.innermost(item.optimizer).state.get(parameter, {})
            states = _restored(item, parameter, known, stored) if told else live
            if states:
                state[number[id(parameter)]] = states
        hyper = {**(group if chosen is None else chosen), **{name: group[name] for name in OWN_CHOICES if name in group}}
        groups.append({**hyper, "params": [number[id(parameter)] for parameter in group["params"]]})
    return {**extra, "state": state, GROUPS: groups}
