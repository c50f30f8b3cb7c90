"""Training state as torch programs nest it ↔ the canonical nest that names are made of.

Readers of torch.save and DCP pass what they read through `to_canonical`, their writers pass it back through
`to_torch`. Only forms that torch itself or its best-known trainers write are recognised; everything else stays. What was
put elsewhere is said in an `Outer` shape, by which `to_torch` puts it back: so a file still loads in its own program.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import numpy as np

from ucformat.errors import UnrepresentableError
from ucformat.values.codec import Opaque, RankLocal

Nest = dict[str, Any]

_MODEL_KEYS = ("model_state_dict", "state_dict")
_OPTIMIZER_KEYS = ("optimizer", "optim", "optim_state", "optimizer_state", "optimizer_state_dict", "optim_state_dict")
_RANK_LOCAL = "ucf.rank_local"  # key of a dict that stands for a rank-local item: its policy; beside it coords and values
_EXTRA = "_extra_state"  # what an optimizer's own state_dict has beside states and groups (see `reshard.state.optimizer`)
_APP_KEYS = frozenset({"model", *_OPTIMIZER_KEYS})


Outer = dict[str, str]
"""How a program arranges its state: `model` and `optimizer` → the key where it keeps them (empty: the model's tensors stand
at the top), `form` → that of the optimizer (see `_FLAT`), `around` → a key around all. What is as usual is not said."""

_FLAT, _FLAT_WITH_NAMES = "flat", "flat, with param_names"
"""Forms of optimizer state: keys `state.<parameter>.<state>` and `param_groups.<parameter>.<setting>`."""
_LIST = "optimizer_states"  # Lightning's key: a list of optimizers


def to_canonical(tree: Nest, is_tensor: Callable[[object], bool]) -> tuple[Nest, Outer]:
    """The nest with `model` and `optimizer` in their canonical places, and how it was arranged; leaves are untouched.

    Recognised: torch's optimizer state by parameter name (nested, or flattened to `state.<fqn>.<x>` keys) or by number under
    one of its usual keys; a bare state dict, alone or beside such an optimizer; one `app` around both.
    """
    outer: Outer = {}
    top = {key: _restore(value) for key, value in tree.items()}
    if set(top) == {"app"} and isinstance(top["app"], dict) and "model" in top["app"] and set(top["app"]) <= _APP_KEYS:
        top, outer["around"] = dict(top["app"]), "app"
    names = _optimizer_in_place(top, is_tensor, outer)
    _model_in_place(top, names, is_tensor, outer)
    return top, outer


def _restore(tree: Any) -> Any:
    """Rank-local items back from the dicts that `plain` made of them."""
    if isinstance(tree, list):
        return [_restore(value) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if set(tree) == {_RANK_LOCAL, "coords", "values"} and isinstance(tree["coords"], list) and isinstance(tree["values"], list):
        return RankLocal(tree[_RANK_LOCAL], tuple(tree["coords"]), tuple(map(_restore, tree["values"])))
    return {key: _restore(value) for key, value in tree.items()}


def _optimizer_in_place(top: Nest, is_tensor: Callable[[object], bool], outer: Outer) -> set[str]:
    """Bring the one optimizer to `optimizer`; the names of the parameters that it has state of."""
    held = [key for key in _OPTIMIZER_KEYS if isinstance(top.get(key), dict)]
    if not held and _is_single(top.get(_LIST)):
        held, top[_LIST] = [_LIST], top[_LIST][0]
    if len(held) != 1:
        return set()
    state = top[held[0]]
    canonical = _by_parameter(state)
    if canonical is None and not _by_number(state):
        return set()
    if held[0] != "optimizer":
        outer["optimizer"] = held[0]
    if canonical is not None and "state" not in state and "param_groups" not in state:
        named = any(str(key).endswith(".param_names") for key in state)
        outer["form"] = _FLAT_WITH_NAMES if named else _FLAT
    moved = _with_numbers(state) if canonical is None else canonical
    items = list(top.items())
    top.clear()
    top.update({"optimizer" if key == held[0] else key: moved if key == held[0] else value for key, value in items})
    states = {} if canonical is None else canonical
    return {name for name, state in states.items() if name not in {"param_groups", _EXTRA} and _holds_tensor(state, is_tensor)}


def _is_single(states: object) -> TypeGuard[list[Nest]]:
    """Whether this is Lightning's list of optimizers with one in it that torch wrote."""
    return isinstance(states, list) and len(states) == 1 and isinstance(states[0], dict) and _by_number(states[0])


def _by_number(state: Nest) -> bool:
    """Whether this is a torch optimizer's state dict whose parameters are numbered."""
    groups = state.get("param_groups")
    if set(state) != {"state", "param_groups"} or not isinstance(state["state"], dict) or not _are_groups(groups):
        return False
    numbers = [param for group in groups for param in group["params"]]
    return all(type(number) is int for number in numbers) and len(set(numbers)) == len(numbers)


def _with_numbers(state: Nest) -> Nest:
    """A numbered state dict with integers as keys: DCP makes text of them."""
    numbers = {str(number): number for group in state["param_groups"] for number in group["params"]}
    return {**state, "state": {numbers.get(key, key): held for key, held in state["state"].items()}}


def _holds_tensor(state: object, is_tensor: Callable[[object], bool]) -> bool:
    return isinstance(state, dict) and any(map(is_tensor, state.values()))


def _by_parameter(state: Nest) -> Nest | None:
    """{fqn: state, "param_groups": groups} of a torch optimizer's state dict; None when it is not by parameter name."""
    if state and all(str(key).startswith(("state.", "param_groups.")) for key in state):
        return _unflatten(state)
    groups, states = state.get("param_groups"), state.get("state", {})
    if not isinstance(states, dict) or not _are_groups(groups) or not all(isinstance(key, str) for key in state):
        return None
    extra = {key: value for key, value in state.items() if key not in {"state", "param_groups"}}
    if extra and "state" not in state:  # canonical already
        return None
    names = _parameter_names(groups)
    if names is None or not {"param_groups", _EXTRA}.isdisjoint(names.values()):
        return None
    by_name = all(isinstance(param, str) for group in groups for param in group["params"])
    known = (lambda key: isinstance(key, str)) if by_name else names.__contains__  # tied parameters have state under both names
    if not all(isinstance(held, dict) and known(key) for key, held in states.items()):
        return None
    renamed = [
        {key: [names[p] for p in value] if key == "params" else value for key, value in group.items() if key != "param_names"}
        for group in groups
    ]
    named = {names.get(key, str(key)): held for key, held in states.items()}
    return {**named, "param_groups": renamed, **({_EXTRA: extra} if extra else {})}


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


def _model_in_place(top: Nest, names: set[str], is_tensor: Callable[[object], bool], outer: Outer) -> None:
    """Bring the model to `model` where it lies bare at the top, or under another usual key."""
    if "model" in top:
        return
    for key in _MODEL_KEYS:
        if isinstance(top.get(key), dict):
            top["model"], outer["model"] = top.pop(key), key
            return
    # one that can't be read as a tensor (a sparse or quantised one, say) is still one of the model's
    bare = [key for key, value in top.items() if is_tensor(value) or (isinstance(value, Opaque) and "." in str(key))]
    if not any(is_tensor(top[key]) for key in bare):
        return
    beside = names and names <= set(bare)
    alone = len(bare) == len(top) and any("." in str(key) for key in bare)
    if beside or alone:
        outer["model"] = ""
        top["model"] = {key: top.pop(key) for key in bare}


def to_torch(tree: Nest, outer: Mapping[str, str] | None = None, *, param_names: bool = False) -> Nest:
    """The nest as a torch program keeps it: a canonical optimizer as {"state": {fqn: …}, "param_groups": […]}, and everything
    where `outer` says.

    `param_names` adds that key to groups: optimizers made from named parameters have it, and DCP wants every key there is.
    Raises UnrepresentableError when a name is taken where it has to go.
    """
    outer = outer or {}
    optimizer = _to_torch_optimizer(tree.get("optimizer"), outer.get("form", ""), param_names=param_names)
    if optimizer is not None:
        tree = {**tree, "optimizer": optimizer}
    if outer.get("optimizer") == _LIST and "optimizer" in tree:
        tree = {**tree, "optimizer": [tree["optimizer"]]}
    for name in ("optimizer", "model"):
        key = outer.get(name, name)
        if key != name and name in tree and (key or isinstance(tree[name], dict)):
            tree = _moved(tree, name, key)
    around = outer.get("around")
    return {around: tree} if around else tree


def _moved(tree: Nest, name: str, key: str) -> Nest:
    """The nest with what is at `name` at `key`, or with its items at the top."""
    items: Nest = {key: tree[name]} if key else tree[name]
    taken = next((other for other in items if other in tree and other != name), None)
    if taken is not None:
        raise UnrepresentableError(f"{name}/{taken}", "part of the state", f"{taken!r} is taken where its program looks for it")
    found: Nest = {}
    for other, value in tree.items():
        found.update(items if other == name else {other: value})
    return found


def _to_torch_optimizer(held: object, form: str, *, param_names: bool) -> Nest | None:
    """A canonical optimizer in torch's own form; None for anything else."""
    if not isinstance(held, dict) or "state" in held:
        return None
    extra = held.get(_EXTRA, {})
    states = {name: state for name, state in held.items() if name not in {"param_groups", _EXTRA}}
    groups = held.get("param_groups", [])
    if not isinstance(extra, dict) or not {"state", "param_groups"}.isdisjoint(extra):
        return None
    if not states and not groups:
        return None
    if not all(isinstance(state, dict) for state in states.values()) or not (groups == [] or _are_groups(groups)):
        return None
    if form in (_FLAT, _FLAT_WITH_NAMES):
        return _flatten(states, groups, names=form == _FLAT_WITH_NAMES)
    if param_names:
        groups = [{**group, "param_names": group["params"]} for group in groups]
    return {"state": states, "param_groups": groups, **extra}


def _flatten(states: Nest, groups: list[Nest], *, names: bool) -> Nest:
    """The inverse of `_unflatten`."""
    flat = {f"state.{name}.{key}": value for name, state in states.items() for key, value in state.items()}
    for group in groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        if names:
            settings["param_names"] = group["params"]
        flat.update({f"param_groups.{name}.{key}": value for name in group["params"] for key, value in settings.items()})
    return flat


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
