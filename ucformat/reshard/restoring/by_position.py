"""Optimizer states that are stored under numbers, as `optimizer.state_dict()` gives them, for a live optimizer with names.

Such a file doesn't say which parameters it is of: as in torch's `load_state_dict`, the parameters of each group are taken in
order. What can be checked is checked: the number of groups, their sizes, and shapes (here and in `forms`). The result is a
catalog with names, which loads as any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ucformat import values
from ucformat.catalog import Catalog
from ucformat.errors import ShapeMismatchError, UnsupportedError
from ucformat.reshard.restoring.apply import find
from ucformat.reshard.state.assign import Pending
from ucformat.reshard.state.optimizer import EXTRA, GROUPS, Named

PLACES: tuple[tuple[str, ...], ...] = (
    *((name,) for name in ("optimizer", "optim", "optim_state", "optimizer_state", "optimizer_state_dict", "optim_state_dict")),
    ("optimizer_states",),  # Lightning: a list of them
    (),  # the file is the state dict itself: optimizer.pt of Hugging Face's Trainer, optimizer.bin of accelerate
)
"""Where programs keep the state of their optimizers, looked at when nothing is stored under the live one's own key."""


@dataclass(frozen=True, slots=True)
class Found:
    """The state dicts for an optimizer, or for several in one list."""

    path: tuple[str, ...]
    dicts: list[dict[str, Any]]


def with_names(catalog: Catalog, tree: object, optimizers: Sequence[Sequence[Named]]) -> tuple[Catalog, tuple[str, ...]]:
    """The catalog with names in place of numbers, for every live optimizer that is stored by number; remarks about these.

    `tree` is the stored tree with its tensors pending. Raises UnsupportedError when numbers of groups or parameters differ, or a
    parameter has parts of several; ShapeMismatchError.
    """
    remarks = []
    for items in optimizers:
        found = _find(tree, items, alone=len(optimizers) == 1)
        if found is None:
            continue
        key = items[0].key
        if any(isinstance(find(tree, found.path[:depth]), (list, tuple)) for depth in range(len(found.path))):
            raise UnsupportedError(key, "stored by number, in a list with other things: load the optimizers from a dict")
        node: dict[str, Any] = {GROUPS: []}
        for item, given in zip(items, found.dicts, strict=True):
            named = _named(item, given, f"{catalog.url}: {'/'.join(found.path) or 'the optimizer state'}", catalog)
            node = {**node, **named, GROUPS: [*node[GROUPS], *named[GROUPS]]}
        catalog = _put(catalog, found.path, key, node)
        names = [name for item in items for group in item.groups for name in item.group_names(group)]
        remarks.append(
            f"{key}: stored by number ({'/'.join(found.path) or 'at the top of the file'}): its states were given to the "
            f"parameters in the order of the groups, {', '.join(names[:3])}…"
        )
    return catalog, tuple(remarks)


def _find(tree: object, items: Sequence[Named], *, alone: bool) -> Found | None:
    """The state dicts by number at the optimizer's key, or in a usual place when it is the only one and has nothing there."""
    own = tuple(values.split_name(items[0].key))
    here = find(tree, own)
    if here is not None or not alone:
        return _as_dicts(own, here, len(items))
    for path in PLACES:
        found = _as_dicts(path, find(tree, path), len(items))
        if found is not None:
            return found
    return None


def _as_dicts(path: tuple[str, ...], node: Any, count: int) -> Found | None:
    dicts = node if isinstance(node, list) else [node]
    return Found(path, dicts) if len(dicts) == count and all(map(_is_by_number, dicts)) else None


def _is_by_number(node: object) -> bool:
    if not isinstance(node, dict) or not isinstance(node.get(GROUPS), list) or not isinstance(node.get("state", {}), dict):
        return False
    groups = node[GROUPS]
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        return False
    numbers = [i for group in groups for i in group["params"]]
    return bool(numbers) and all(type(i) is int for i in numbers)


def _named(item: Named, given: Mapping[str, Any], where: str, catalog: Catalog) -> dict[str, Any]:
    """{parameter: states, "param_groups": groups} of one state dict."""
    stored = given[GROUPS]
    flat = next((held for held in item.names.values() if len(held) > 1), None)
    if flat is not None:
        raise UnsupportedError(
            item.key,
            f"{where} is stored by number, and one parameter here is made of several ({flat[0].fqn}, {flat[1].fqn}…): "
            "use FSDP with use_orig_params=True, or fully_shard",
        )
    sizes, live = [len(group["params"]) for group in stored], [len(group["params"]) for group in item.groups]
    if sizes != live:
        raise UnsupportedError(
            item.key,
            f"{where} is stored by number, with groups of {_list(sizes)} parameters, and this optimizer has groups of "
            f"{_list(live)}: make it with the same groups, in the same order",
        )
    pairs = [pair for s, g in zip(stored, item.groups, strict=True) for pair in zip(s["params"], g["params"], strict=True)]
    names: dict[object, str] = {number: item.names[id(parameter)][0].fqn for number, parameter in pairs}
    states: dict[Any, Any] = given.get("state", {})
    out: dict[str, Any] = {}
    extra: dict[str, Any] = {name: x for name, x in given.items() if name not in {"state", GROUPS}}
    for number, state in states.items():
        name = names.get(_number(number))
        if name is None:
            extra.setdefault("state", {})[number] = state
        else:
            _check_shapes(item, name, state, catalog)
            out[name] = state
    groups = [{**s, "params": [names[i] for i in s["params"]]} for s in stored]
    return {**out, GROUPS: [{key: x for key, x in group.items() if key != "param_names"} for group in groups], **_if(extra)}


def _if(extra: dict[str, Any]) -> dict[str, Any]:
    return {EXTRA: extra} if extra else {}


def _number(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isdecimal() else key  # DCP writes integer keys as text


def _check_shapes(item: Named, name: str, state: object, catalog: Catalog) -> None:
    """Refuse a tensor that would have the parameter's shape if the order were another (a transposed or wider neighbour)."""
    owned = next(o for entry in item.names.values() for o in entry if o.fqn == name)
    shape = owned.leaf.shape
    for x in state.values() if isinstance(state, dict) else ():
        if isinstance(x, Pending):
            spec = catalog.spec(x.name)
            if len(spec.shape) == len(shape) and spec.shape != shape and 1 not in spec.shape:
                raise ShapeMismatchError(f"{x.name} (by position: {name})", spec.shape, shape)


def _list(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def _put(catalog: Catalog, path: tuple[str, ...], key: str, node: dict[str, Any]) -> Catalog:
    """The catalog with `node` at `key` instead of what stands at `path`: its tensors get the names of their new places."""
    place = values.split_name(key)
    nest: Any = node
    for part in reversed(place):
        nest = {part: nest}
    kept, tensors = values.split(nest, lambda x: isinstance(x, Pending))
    moved = {pending.name: name for name, pending in tensors.items()}
    rest = _without(catalog.values, path)
    renamed = catalog.rename(lambda name: moved.get(name, name))
    return replace(renamed, values=_merge(rest, kept))


def _without(tree: Any, path: Sequence[str]) -> Any:
    if not path:
        return {name: x for name, x in tree.items() if name not in {"state", GROUPS}} if isinstance(tree, dict) else tree
    if not isinstance(tree, dict) or path[0] not in tree:
        return tree
    if len(path) == 1:
        return {name: x for name, x in tree.items() if name != path[0]}
    return {**tree, path[0]: _without(tree[path[0]], path[1:])}


def _merge(a: Any, b: Any) -> Any:
    if isinstance(a, dict) and isinstance(b, dict):
        return {**a, **{name: _merge(a[name], x) if name in a else x for name, x in b.items()}}
    return b
