"""What of a checkpoint is meant: globs over the names of tensors and the paths of values.

A pattern without wildcards means what has that name and all below it; `*` also stands for `/`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ucformat import values as trees
from ucformat.catalog import Catalog
from ucformat.errors import UnsupportedError
from ucformat.formats.contract import Writer
from ucformat.naming import FILE_METADATA
from ucformat.values import bytes_io

_SHOWN = 5  # names in a remark before "and N more"
_OPAQUE_SHOWN = 20
_GONE = object()  # what is left of a value that was not chosen
_WILD = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class Chosen:
    """What of a checkpoint goes over into a format."""

    catalog: Catalog
    """Only what goes over."""
    left_out: tuple[str, ...]
    """Names of tensors that don't."""
    values_left_out: tuple[str, ...]
    """Paths of values that don't."""
    opaque_left_out: tuple[str, ...]
    """Paths of objects of unknown classes that don't, with the class: `args/policy (pkg.Policy)`."""

    no_place: tuple[str, ...] = ()
    """Of `left_out`, what was wanted, and the format has no place for."""

    def remarks(self, to: str) -> list[str]:
        """What a user has to be told of values."""
        told = [f"values left out: {shorten(self.values_left_out)}"] if self.values_left_out else []
        if self.opaque_left_out:
            shown = shorten(self.opaque_left_out, _OPAQUE_SHOWN)
            told.append(f"left out, {to} has no place for objects of unknown classes: {shown}")
        return told


def matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a name matches one of some globs."""

    def matches(name: str) -> bool:
        return any(
            fnmatch.fnmatchcase(name, pattern) or (_WILD.isdisjoint(pattern) and name.startswith(pattern.rstrip("/") + "/"))
            for pattern in patterns
        )

    return matches


def chooser(select: Sequence[str], exclude: Sequence[str]) -> Callable[[str], bool]:
    """Whether a name is selected (all are, without `select`) and not excluded."""
    selected, excluded = matcher(select), matcher(exclude)
    return lambda name: (not select or selected(name)) and not excluded(name)


def narrow(catalog: Catalog, select: Sequence[str], exclude: Sequence[str]) -> Catalog:
    """The part of a catalog whose names and paths of values are chosen. A list counts as one value, whatever is in it."""
    wanted = chooser(select, exclude)
    values = _leaves(catalog.values, chooser(_whole(select), _whole(exclude)), "")
    return replace(catalog.filter(wanted), values={} if values is _GONE else values)


def expect_matches(select: Sequence[str], catalogs: Sequence[Catalog], where: str, *, values: bool = False) -> None:
    """Raise UnsupportedError for a pattern that means nothing in any of `catalogs`; `values`: a value will do, too."""
    names = {name for catalog in catalogs for name in catalog.names}
    paths = {path for catalog in catalogs for path in _paths(catalog.values, "")} if values else set()
    for pattern in select:
        if not any(map(matcher([pattern]), names)) and not any(map(matcher(_whole([pattern])), paths)):
            raise UnsupportedError(where, f"no name matches {pattern!r}")


def choose(catalog: Catalog, to: Writer, select: Sequence[str], exclude: Sequence[str], where: str) -> Chosen:
    """The part of a catalog that goes over into a format, and what doesn't.

    Of the values, `select` takes those below the first component of a pattern, so that a selection of an optimizer's states
    keeps its hyper-parameters; `exclude` drops by path. Raises UnsupportedError when a pattern matches nothing or all is dropped.
    """
    chosen = list(filter(chooser(select, exclude), catalog.names))
    expect_matches(select, [catalog], where)
    expect_matches(exclude, [catalog], where, values=True)
    if catalog.names and not chosen:
        raise UnsupportedError(where, "the selection leaves no tensor")
    values, lost = _choose_values(catalog.values, select, exclude, none=to.values == "none")
    opaque: list[str] = []
    gone: set[str] = set()
    if to.values == "plain":
        values, opaque, gone = _without_opaque(values)
    kept = set(to.takes(chosen)) - gone
    part = catalog.filter(kept.__contains__)
    values = trees.prune(values, lambda _, x: isinstance(x, (trees.TensorRef, trees.ArrayRef)) and x.name not in kept)
    left_out = tuple(name for name in catalog.names if name not in kept)
    no_place = tuple(name for name in chosen if name not in kept)
    return Chosen(replace(part, values=values), left_out, tuple(lost), tuple(opaque), no_place)


def shorten(names: Sequence[str], limit: int = _SHOWN) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _choose_values(values: object, select: Sequence[str], exclude: Sequence[str], *, none: bool) -> tuple[object, list[str]]:
    """The values that go over, and the paths of the others: whole top-level keys where possible."""
    if not isinstance(values, dict):
        return values, []
    roots, excluded = [pattern.split("/")[0] for pattern in select], matcher(_whole(exclude))
    kept: dict[object, object] = {}
    lost: list[str] = []
    for key, value in values.items():
        if key == FILE_METADATA:
            kept[key] = value
            continue
        root = trees.escape(str(key))
        taken = not none and (not select or any(fnmatch.fnmatchcase(root, pattern) for pattern in roots))
        part = _leaves(value, lambda path: not excluded(path), root) if taken else _GONE
        if part is not _GONE:
            kept[key] = part
            lost += set(_paths(value, root)) - set(_paths(part, root))
        elif not _is_bare(value):
            lost.append(root)
    return kept, sorted(lost)


def _is_bare(value: object) -> bool:
    """Whether there is nothing in a value but containers and tensors, which have names of their own."""
    if isinstance(value, (trees.TensorRef, trees.ArrayRef)):
        return True
    return isinstance(value, (dict, list, tuple)) and all(map(_is_bare, value.values() if isinstance(value, dict) else value))


def _leaves(value: object, keep: Callable[[str], bool], path: str) -> object:
    """A tree with only those values whose path is to be kept; dicts that this empties go, _GONE when nothing is left."""
    if not isinstance(value, dict) or not value:
        return value if keep(path) else _GONE
    below = ((key, _leaves(item, keep, _join(path, key))) for key, item in value.items())
    return type(value)((key, item) for key, item in below if item is not _GONE) or _GONE


def _paths(value: object, path: str) -> Iterator[str]:
    """Paths of all values, dicts descended."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _paths(item, _join(path, key))
    else:
        yield path


def _join(path: str, key: object) -> str:
    component = trees.escape(str(key))
    return f"{path}/{component}" if path else component


def _whole(patterns: Sequence[str]) -> list[str]:
    """`x/*` means x itself, too, where x is a value."""
    return [*patterns, *(pattern[:-2] for pattern in patterns if pattern.endswith("/*"))]


def _without_opaque(values: object) -> tuple[object, list[str], set[str]]:
    """The values without objects of unknown classes; these, by path and class; names of tensors that only they held."""
    lost: list[str] = []

    def drop(path: str, value: object) -> bool:
        if isinstance(value, trees.Opaque) and not bytes_io.is_one(value):
            lost.append(f"{path} ({value.class_name})")
            return True
        return False

    kept = trees.prune(values, drop)
    return kept, lost, set(trees.refs(values)) - set(trees.refs(kept))
