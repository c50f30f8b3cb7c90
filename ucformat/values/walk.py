"""The one walk over value trees: what a container holds, and containers made again of other items.

Containers are dicts, lists, tuples, namespaces, rank-local items and stand-ins for objects; everything else is a leaf.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

from ucformat.errors import UnrepresentableError
from ucformat.values.codec import MAX_DEPTH, Opaque, RankLocal

ATOMS = frozenset({type(None), bool, int, float, str, bytes, complex})
DICTS = (dict, OrderedDict)
SEQUENCES = (list, tuple)

Items = list[tuple[Any, Any]]
"""(key or index, item), in order."""


def items(x: object) -> Items | None:
    """What a container holds; None for a leaf. A stand-in holds its state, under its class."""
    if isinstance(x, DICTS):
        return list(x.items())
    if type(x) in SEQUENCES:
        return list(enumerate(cast(list[Any], x)))
    if type(x) is argparse.Namespace:
        return list(vars(x).items())
    if type(x) is RankLocal:
        return list(enumerate(x.values))
    if type(x) is Opaque:
        return [(x.class_name, x.state)]
    return None


def rebuilt(x: object, held: Items) -> object:
    """A container like `x` with other items."""
    if type(x) is argparse.Namespace:
        return argparse.Namespace(**dict(held))
    if type(x) is RankLocal:
        return replace(x, values=tuple(item for _, item in held))
    if type(x) is Opaque:
        return Opaque(x.class_name, held[0][1])
    kind = cast(Any, type(x))
    return kind(held) if isinstance(x, DICTS) else kind(item for _, item in held)


def nodes(tree: object) -> Iterator[object]:
    """Every container and leaf but for the atoms (numbers, text, bytes, None), containers before what they hold."""
    yield tree
    if type(tree) in SEQUENCES and set(map(type, cast(list[Any], tree))) <= ATOMS:
        return
    for _, item in items(tree) or ():
        if type(item) not in ATOMS:
            yield from nodes(item)


def changed(tree: object, change: Callable[[object], object], depth: int = 0) -> object:
    """A copy with every node that `change` gives another one for; what it gives back as it is has its items changed.

    Raises UnrepresentableError for nests deeper than MAX_DEPTH.
    """
    new = change(tree)
    if new is not tree or type(tree) in ATOMS:
        return new
    held = items(tree)
    if held is None:
        return tree
    if depth > MAX_DEPTH:
        raise UnrepresentableError("…", f"nest of more than {MAX_DEPTH} levels", "flatten it, or break its cycle")
    return rebuilt(tree, [(key, item if type(item) in ATOMS else changed(item, change, depth + 1)) for key, item in held])
