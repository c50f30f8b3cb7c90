"""Whole modules in a torch.save file: the state dict that is in them, without the classes that made them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ucformat.errors import FormatError, brief
from ucformat.pickles.unpickle import Inert

_PARTS = ("_parameters", "_buffers", "_modules")
_MAX_DEPTH = 64  # modules within modules: more is a cycle or an attack
_MAX_MODULES = 1_000_000


def to_state_dicts(tree: Any, replaced: list[str], file: str = "", done: dict[int, Any] | None = None, depth: int = 0) -> Any:
    """The tree with every pickled `torch.nn.Module` that dicts lead to replaced by its state dict.

    The classes of what was replaced are added to `replaced`. `done` maps ids to results, so that dicts which contain
    themselves still do. Raises FormatError for modules that are shared without end.
    """
    done = {} if done is None else done
    if id(tree) in done:
        return done[id(tree)]
    if is_module(tree):
        replaced.append(tree.class_name)
        done[id(tree)] = held = dict(_entries(tree, "", 0, [_MAX_MODULES], file))
        return held
    if isinstance(tree, dict) and depth < _MAX_DEPTH and any(isinstance(value, (Inert, dict)) for value in dict.values(tree)):
        done[id(tree)] = out = dict[Any, Any]()
        out.update((key, to_state_dicts(value, replaced, file, done, depth + 1)) for key, value in dict.items(tree))
        return out
    return tree


def is_module(tree: Any) -> bool:
    """Whether a stand-in has the attributes that every module has."""
    if not isinstance(tree, Inert):
        return False
    held = tree.attributes
    return all(isinstance(held.get(part), dict) for part in _PARTS)


def _entries(module: Inert, prefix: str, depth: int, left: list[int], file: str) -> Iterator[tuple[str, Any]]:
    """What `module.state_dict()` gave: parameters, persistent buffers, then those of its modules."""
    left[0] -= 1
    if left[0] < 0:
        raise FormatError(file, f"a module of more than {_MAX_MODULES} modules: shared ones multiply")
    held = module.attributes
    transient = held.get("_non_persistent_buffers_set")
    hidden = transient if isinstance(transient, (set, frozenset)) else frozenset()
    for part in ("_parameters", "_buffers"):
        for name, tensor in dict.items(held[part]):
            if tensor is not None and not (part == "_buffers" and name in hidden):
                yield f"{prefix}{name if isinstance(name, str) else brief(name)}", tensor
    for name, inner in dict.items(held["_modules"]):
        if is_module(inner) and depth < _MAX_DEPTH:
            below = f"{prefix}{name if isinstance(name, str) else brief(name)}."
            yield from _entries(inner, below, depth + 1, left, file)
