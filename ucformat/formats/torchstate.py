"""Training state as torch programs nest it ↔ the canonical nest that names are made of.

Readers of torch.save and DCP pass what they read through `to_canonical`, their writers pass it back through
`to_torch`. Only forms that torch itself or its best-known trainers write are recognised; everything else stays.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable
from typing import Any, TypeGuard

import numpy as np

from ucformat.errors import UnrepresentableError
from ucformat.values.codec import Opaque, RankLocal

Nest = dict[str, Any]

_MODEL_KEYS = ("model_state_dict", "state_dict")
_OPTIMIZER_KEYS = ("optimizer", "optim", "optim_state", "optimizer_state", "optimizer_state_dict", "optim_state_dict")
_RANK_LOCAL = "ucf.rank_local"  # key of a dict that stands for a rank-local item: its policy; beside it coords and values
_APP_KEYS = frozenset({"model", *_OPTIMIZER_KEYS})


def to_canonical(tree: Nest, is_tensor: Callable[[object], bool]) -> Nest:
    """The nest with `model` and `optimizer` in their canonical places; leaves are untouched.

    Recognised: torch's optimizer state by parameter name (nested, or flattened to `state.<fqn>.<x>` keys) under one of
    its usual keys; a bare state dict, alone or beside such an optimizer; one `app` around both.
    """
    top = {key: _restore(value) for key, value in tree.items()}
    if set(top) == {"app"} and isinstance(top["app"], dict) and "model" in top["app"] and set(top["app"]) <= _APP_KEYS:
        top = dict(top["app"])
    names = _optimizer_in_place(top, is_tensor)
    _model_in_place(top, names, is_tensor)
    return top


def _restore(tree: Any) -> Any:
    """Rank-local items back from the dicts that `plain` made of them."""
    if isinstance(tree, list):
        return [_restore(value) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if set(tree) == {_RANK_LOCAL, "coords", "values"} and isinstance(tree["coords"], list) and isinstance(tree["values"], list):
        return RankLocal(tree[_RANK_LOCAL], tuple(tree["coords"]), tuple(map(_restore, tree["values"])))
    return {key: _restore(value) for key, value in tree.items()}


def _optimizer_in_place(top: Nest, is_tensor: Callable[[object], bool]) -> set[str]:
    """Bring the one optimizer to `optimizer`; the names of the parameters that it has state of."""
    held = [key for key in _OPTIMIZER_KEYS if isinstance(top.get(key), dict)]
    if len(held) != 1:
        return set()
    canonical = _by_parameter(top[held[0]])
    if canonical is None:
        return set()
    items = list(top.items())
    top.clear()
    top.update({"optimizer" if key == held[0] else key: canonical if key == held[0] else value for key, value in items})
    return {name for name, state in canonical.items() if name != "param_groups" and _holds_tensor(state, is_tensor)}


def _holds_tensor(state: object, is_tensor: Callable[[object], bool]) -> bool:
    return isinstance(state, dict) and any(map(is_tensor, state.values()))


def _by_parameter(state: Nest) -> Nest | None:
    """{fqn: state, "param_groups": groups} of a torch optimizer's state dict; None when it is not by parameter name."""
    if state and all(str(key).startswith(("state.", "param_groups.")) for key in state):
        return _unflatten(state)
    groups, states = state.get("param_groups"), state.get("state", {})
    if not set(state) <= {"state", "param_groups"} or not isinstance(states, dict) or not _are_groups(groups):
        return None
    names = _parameter_names(groups)
    if names is None or "param_groups" in names.values():
        return None
    by_name = all(isinstance(param, str) for group in groups for param in group["params"])
    known = (lambda key: isinstance(key, str)) if by_name else names.__contains__  # tied parameters have state under both names
    if not all(isinstance(held, dict) and known(key) for key, held in states.items()):
        return None
    renamed = [
        {key: [names[p] for p in value] if key == "params" else value for key, value in group.items() if key != "param_names"}
        for group in groups
    ]
    return {**{names.get(key, str(key)): held for key, held in states.items()}, "param_groups": renamed}


def _are_groups(groups: object) -> TypeGuard[list[Nest]]:
    return isinstance(groups, list) and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)


def _parameter_names(groups: list[Nest]) -> dict[object, str] | None:
    """Parameter as `state` keys it → its name: itself where it is a name, else as `param_names` tells."""
    names: dict[object, str] = {}
    for group in groups:
        params, told = group["params"], group.get("param_names")
        if all(isinstance(param, str) for param in params):
            names.update((param, param) for param in params)
        elif isinstance(told, list) and len(told) == len(params) and all(isinstance(name, str) for name in told):
            for param, name in zip(params, told, strict=True):
                names[param] = name
                names[str(param)] = name  # DCP writes integer keys as text
        else:
            return None
    return names


def _unflatten(flat: Nest) -> Nest | None:
    """The inverse of torch's `flatten_optimizer_state_dict`. Parameters with equal hyper-parameters form a group again."""
    states: dict[str, Nest] = {}
    hyper: dict[str, Nest] = {}
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        name, _, leaf = rest.rpartition(".")
        if not name or name == "param_groups":
            return None
        if leaf != "param_names":  # the names are the keys
            (states if kind == "state" else hyper).setdefault(name, {})[leaf] = value
    groups: list[Nest] = []
    for name, settings in hyper.items():
        for group in groups:
            if {key: value for key, value in group.items() if key != "params"} == settings:
                group["params"].append(name)
                break
        else:
            groups.append({**settings, "params": [name]})
    return {**states, "param_groups": groups}


def _model_in_place(top: Nest, names: set[str], is_tensor: Callable[[object], bool]) -> None:
    """Bring the model to `model` where it lies bare at the top, or under another usual key."""
    if "model" in top:
        return
    for key in _MODEL_KEYS:
        if isinstance(top.get(key), dict):
            top["model"] = top.pop(key)
            return
    bare = [key for key, value in top.items() if is_tensor(value)]
    beside = names and names <= set(bare)
    alone = len(bare) == len(top) and any("." in str(key) for key in bare)
    if beside or alone:
        top["model"] = {key: top.pop(key) for key in bare}


def to_torch(tree: Nest, *, param_names: bool = False) -> Nest:
    """The nest with a canonical optimizer in torch's own form: {"state": {fqn: …}, "param_groups": […]}.

    `param_names` adds that key to groups: optimizers made from named parameters have it, and DCP wants every key there is.
    """
    held = tree.get("optimizer")
    if not isinstance(held, dict) or "state" in held:
        return tree
    states = {name: state for name, state in held.items() if name != "param_groups"}
    groups = held.get("param_groups", [])
    if not states and not groups:
        return tree
    if not all(isinstance(state, dict) for state in states.values()) or not (groups == [] or _are_groups(groups)):
        return tree
    if param_names:
        groups = [{**group, "param_names": group["params"]} for group in groups]
    return {**tree, "optimizer": {"state": states, "param_groups": groups}}


def plain(tree: Any, *, exact: bool, path: str = "") -> Any:
    """The nest in types that torch programs load. Raises UnrepresentableError for a stand-in of an unknown class.

    Rank-local items become marked dicts, which `to_canonical` knows. Unless `exact`, the result is what
    `torch.load(weights_only=True)` accepts: numpy scalars become numbers, namespaces dicts, paths text, frozensets sets.
    """

    def below(value: Any, key: object) -> Any:
        return plain(value, exact=exact, path=f"{path}/{key}" if path else str(key))

    if isinstance(tree, dict):
        return type(tree)((key, below(value, key)) for key, value in tree.items())
    if isinstance(tree, list) or type(tree) is tuple:
        items = [below(value, i) for i, value in enumerate(tree)]
        return items if isinstance(tree, list) else tuple(items)
    if isinstance(tree, argparse.Namespace):
        held = plain(vars(tree), exact=exact, path=path)
        return argparse.Namespace(**held) if exact else held
    if isinstance(tree, RankLocal):
        return plain({_RANK_LOCAL: tree.policy, "coords": list(tree.coords), "values": list(tree.values)}, exact=exact, path=path)
    if isinstance(tree, Opaque):
        raise UnrepresentableError(path, tree.class_name, "its class is not known here: leave it out")
    if type(tree).__module__.startswith("ucformat.pickles"):  # nobody who loads the file has to have us
        raise UnrepresentableError(path, type(tree).__name__, "no torch program knows it: leave it out")
    return tree if exact else _simple(tree)


def _simple(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return set(map(_simple, value))
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, pathlib.PurePath) else value
