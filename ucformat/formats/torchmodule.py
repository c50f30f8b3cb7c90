"""Whole modules in a torch.save file: the state dict that is in them, without the classes that made them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ucformat.pickles.unpickle import Inert

_PARTS = ("_parameters", "_buffers", "_modules")
_MAX_DEPTH = 64  # modules within modules: more is a cycle or an attack


def to_state_dicts(tree: Any, replaced: list[str]) -> Any:
    """The tree with every pickled `torch.nn.Module` that dicts lead to replaced by its state dict.

    The classes of what was replaced are added to `replaced`.
    """
    if is_module(tree):
        replaced.append(tree.class_name)
        return dict(_entries(tree, "", 0))
    if isinstance(tree, dict) and any(isinstance(value, (Inert, dict)) for value in dict.values(tree)):
        return {key: to_state_dicts(value, replaced) for key, value in dict.items(tree)}
    return tree


def is_module(tree: Any) -> bool:
    """Whether a stand-in has the attributes that every module has."""
    if not isinstance(tree, Inert):
        return False
    held = tree.attributes
    return all(isinstance(held.get(part), dict) for part in _PARTS)


def _entries(module: Inert, prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    """What `module.state_dict()` gave: parameters, persistent buffers, then those of its modules."""
    held = module.attributes
    transient = held.get("_non_persistent_buffers_set")
    hidden = transient if isinstance(transient, (set, frozenset)) else frozenset()
    for part in ("_parameters", "_buffers"):
        for name, tensor in dict.items(held[part]):
            if tensor is not None and not (part == "_buffers" and name in hidden):
                yield f"{prefix}{name}", tensor
    for name, inner in dict.items(held["_modules"]):
        if is_module(inner) and depth < _MAX_DEPTH:
            yield from _entries(inner, f"{prefix}{name}.", depth + 1)
