"""Loading into a live state: what has to be read where, and afterwards putting the values back.

    loading = prepare(state, catalog, group)     # nothing is read or changed, memory for optimizer states is made
    ...                                          # read loading.pieces in place, loading.fresh as new tensors
    restore(loading, fresh)                      # values, objects with state, rank-local items

Tensors, DTensors and modules' tensors are read in place. What an object takes back through `load_state_dict`, and plain
containers of values with all tensors stored in them, come fresh.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ucformat import values
from ucformat.catalog import Catalog, TensorSpec
from ucformat.errors import ShapeMismatchError, ValueConflictError
from ucformat.group import Group
from ucformat.reshard.reading.lazy import read_many
from ucformat.reshard.restoring import by_position, optimizers
from ucformat.reshard.restoring.apply import Putter, find, own_settings
from ucformat.reshard.restoring.shared_memory import same_bytes, to_base
from ucformat.reshard.state import optimizer
from ucformat.reshard.state.assign import Pending
from ucformat.reshard.state.leaf import Leaf, forget
from ucformat.reshard.state.placement import clip
from ucformat.reshard.state.walk import Leaves, Piece, Walker, compare_uneven, make_pieces, place_uneven


@dataclass(frozen=True, slots=True, eq=False)
class Loading:
    """What this rank reads, and what it needs to know to put the values back."""

    pieces: tuple[Piece, ...]
    """Read in place. A spec is what the state wants: the stored one may differ in dtype or shape, or not be there."""
    fresh: tuple[str, ...]
    """Stored tensors to read whole, as new CPU tensors."""
    names: frozenset[str]
    """All names of tensors that the state asks for on this rank, aliases too, stored or not."""
    missing: tuple[str, ...]
    """Paths of values that the state asks for and that are not stored."""
    unused: tuple[str, ...]
    """Paths of stored values that the state on this rank has no place for."""
    remarks: tuple[str, ...]
    """What a user should know: what was assumed, or stays as it is since nothing is stored for it."""
    state: MutableMapping[str, object]
    walker: Walker
    catalog: Catalog
    surplus: tuple[torch.Tensor, ...]
    """Views that lie outside what is stored of tensors whose shape may differ: set to zero."""


def prepare(state: MutableMapping[str, object], catalog: Catalog, group: Group | None = None) -> Loading:
    """Find out what to read for `state`. Every rank of `group` calls; exchanges as little as `collect`.

    Makes memory for states that an optimizer will get. Raises UnsupportedError, UnrepresentableError, NamesMismatchError and
    RankLocalError (world resized, and no policy) before anything is read.
    """
    group = group or Group()
    walker = Walker(state, group, loading=True)
    leaves: Leaves = {}
    tree: object = {}
    remarks: tuple[str, ...] = ()
    error: Exception | None = None
    try:
        tree = values.join(catalog.values, {name: Pending(name) for name in catalog.names})
        walker.prepare()
        catalog, remarks = by_position.with_names(catalog, tree, list(walker.named.values()))
        if remarks:
            tree = values.join(catalog.values, {name: Pending(name) for name in catalog.names})
        for items in walker.named.values():
            _prepare_optimizers(items, catalog, tree, walker)
        leaves, _ = walker.split()
        _drop_states(walker, leaves, catalog, tree)
        remarks = (*remarks, *_leave_to_modules(walker, leaves, catalog))
    except Exception as caught:
        error = caught
    forget()
    claims = compare_uneven(leaves, error, group)
    loading: Loading | None = None
    with group.together("preparing the load"):
        loading = _plan(state, catalog, walker, place_uneven(leaves, claims), tree)
    assert loading is not None
    return replace(loading, remarks=(*remarks, *loading.remarks))


def _plan(state: MutableMapping[str, object], catalog: Catalog, walker: Walker, leaves: Leaves, tree: object) -> Loading:
    """What to read, from the leaves of the state and the stored tree with its tensors pending."""
    surplus = _fit(leaves, catalog)
    aliases = dict(walker.aliases)
    specs, pieces = make_pieces(leaves, aliases)
    names = {*(spec.name for spec in specs), *aliases}
    _check_empty(specs, catalog)
    pieces = tuple(_writable(to_base(piece, catalog)) for piece in _by_stored_name(pieces, aliases, catalog))
    _compare_tied(pieces, aliases, catalog, walker.group.rank)
    dry = Putter(walker, frozenset(names), partial(_read, catalog), dry=True)
    dry.put_all(state, tree)
    return Loading(
        pieces=pieces,
        fresh=tuple(sorted(set(dry.fresh) - names)),
        names=frozenset(names | set(dry.fresh) | set(dry.others)),
        missing=(*dry.missing, *_missing_empty(specs, aliases, catalog)),
        unused=tuple(dry.unused),
        remarks=tuple(dry.remarks),
        state=state,
        walker=walker,
        catalog=catalog,
        surplus=tuple(surplus),
    )


def restore(loading: Loading, fresh: Mapping[str, torch.Tensor]) -> None:
    """Put values back, after the pieces have been read in place; `fresh` are the tensors that `loading.fresh` names."""
    with torch.no_grad():
        for view in loading.surplus:
            view.zero_()
    known: dict[str, object] = {name: Pending(name) for name in loading.catalog.names}
    tree = values.join(loading.catalog.values, {**known, **fresh})
    putter = Putter(loading.walker, loading.names - set(loading.fresh), partial(_read, loading.catalog), dry=False)
    putter.put_all(loading.state, tree)


# ---------------------------------------------------------------- tensors


def _prepare_optimizers(items: Sequence[optimizer.Named], catalog: Catalog, tree: object, walker: Walker) -> None:
    """Check what is stored for an optimizer, or several in one list, and make what they lack."""
    node = find(tree, values.split_name(items[0].key))
    groups = node.get(optimizer.GROUPS) if isinstance(node, dict) else None
    if not isinstance(groups, list):
        return
    groups = [own_settings(group, walker, f"{items[0].key}/{optimizer.GROUPS}") for group in groups]
    specs = _stored_states(catalog, items[0].key)
    optimizers.check(optimizers.match(items, groups, partial(_read, catalog)), node, specs)
    for item in items:
        optimizers.allocate(item, specs)


def _read(catalog: Catalog, names: Sequence[str]) -> list[torch.Tensor]:
    return read_many(catalog, [(name, None) for name in names])


def _stored_states(catalog: Catalog, key: str) -> dict[str, dict[str, TensorSpec]]:
    """Stored optimizer states under `key`: parameter → state → spec."""
    out: dict[str, dict[str, TensorSpec]] = {}
    for name in catalog.names:
        if name.startswith(key + "/"):
            below = values.split_name(name[len(key) + 1 :])
            if len(below) == 2 and below[0] not in optimizer.RESERVED:
                out.setdefault(below[0], {})[below[1]] = catalog.spec(name)
    return out


def _drop_states(walker: Walker, leaves: Leaves, catalog: Catalog, tree: object) -> None:
    """Take out live states of optimizers that were stored without them: they go, or come from values."""
    stored = set(catalog.names)
    for item in (item for items in walker.named.values() for item in items):
        node = find(tree, values.split_name(item.key))
        prefixes = [values.join_name(fqn) for fqn in optimizers.knows(node, item)]
        gone = {f"{item.key}/{prefix}/" for prefix in prefixes}
        for name in [n for n in leaves if n not in stored and n.startswith(item.key + "/")]:
            if name[: name.index("/", len(item.key) + 1) + 1] in gone:
                del leaves[name]


def _leave_to_modules(walker: Walker, leaves: Leaves, catalog: Catalog) -> list[str]:
    """Take out what modules see to: tensors that their own loading may resize, and buffers that older files lack."""
    remarks = []
    stored = set(catalog.names)
    for found in walker.found.values():
        for unit in (unit for unit in found.units if unit.adapts):
            for name in (values.join_name(*found.at, fqn) for fqn in unit.keys):
                if name in leaves and name in stored and catalog.spec(name).shape != leaves[name][0].shape:
                    del leaves[name]
        absent = [name for name in (values.join_name(*found.at, fqn) for fqn in sorted(found.optional)) if name not in stored]
        absent = [name for name in absent if name in leaves and values.join_name(*found.at) not in stored]
        if absent:
            remarks.append(f"not stored, as before torch 0.4.1, and left as they are: {', '.join(absent[:8])}")
        for name in absent:
            del leaves[name]
    return remarks


def _check_empty(specs: Iterable[TensorSpec], catalog: Catalog) -> None:
    """Compare the shapes of tensors without elements, of which nothing is read. Raises ShapeMismatchError."""
    stored = set(catalog.names)
    for spec in specs:
        if 0 in spec.shape and spec.name in stored and catalog.spec(spec.name).shape != spec.shape:
            raise ShapeMismatchError(spec.name, catalog.spec(spec.name).shape, spec.shape)


def _missing_empty(specs: Iterable[TensorSpec], aliases: Mapping[str, str], catalog: Catalog) -> list[str]:
    """Names of tensors without elements that are not stored: pieces tell of all others."""
    stored = set(catalog.names)
    tied = {target for alias, target in aliases.items() if alias in stored}
    return [spec.name for spec in specs if 0 in spec.shape and spec.name not in stored and spec.name not in tied]


def _fit(leaves: Leaves, catalog: Catalog) -> list[torch.Tensor]:
    """Clip tensors that may be stored with another shape to it; the views that then lie outside are returned."""
    surplus: list[torch.Tensor] = []
    stored = set(catalog.names)
    for name, items in leaves.items():
        if not items[0].allow_shape_mismatch or name not in stored:
            continue
        shape = catalog.spec(name).shape
        if shape != items[0].shape and len(shape) == len(items[0].shape):
            for item in items:
                surplus += _outside(item, shape)
            leaves[name] = [replace(i, shape=shape, parts=tuple((t, clip(p, shape)) for t, p in i.parts)) for i in items]
    return surplus


def _outside(item: Leaf, shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
    for local, placed in item.parts:
        for box, view in placed.views(local):
            for dim, (offset, length) in enumerate(zip(box.offset, box.length, strict=True)):
                inside = min(length, max(0, shape[dim] - offset))
                if inside < length:
                    yield view.narrow(dim, inside, length - inside)


def _by_stored_name(pieces: Iterable[Piece], aliases: Mapping[str, str], catalog: Catalog) -> Iterator[Piece]:
    """Tied tensors go by that of their names which is stored."""
    stored = set(catalog.names)
    others: dict[str, str] = {}
    for alias, target in aliases.items():
        if alias in stored and target not in stored:
            others.setdefault(target, alias)
    for piece in pieces:
        name = others.get(piece.spec.name)
        yield piece if name is None else replace(piece, spec=replace(piece.spec, name=name))


def _writable(piece: Piece) -> Piece:
    """The piece with a view that can be written."""
    view = piece.view
    if view.is_inference():  # torch would refuse to write into it, though the memory is like any other
        alias = torch.empty(0, dtype=view.dtype, device=view.device)
        alias.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
        return replace(piece, view=alias)
    return piece


def _compare_tied(pieces: Iterable[Piece], aliases: Mapping[str, str], catalog: Catalog, rank: int) -> None:
    """Read what is one tensor here and stored apart under two names, piece by piece, before anything is changed.

    Raises ValueConflictError naming the tensor and this rank when the two are not equal in the checkpoint.
    """
    stored = set(catalog.names)
    apart: dict[str, list[str]] = {}
    for alias, target in aliases.items():
        if alias in stored and target in stored and catalog.find(alias) != catalog.find(target):
            apart.setdefault(target, []).append(alias)
    for piece in pieces:
        name = piece.spec.name
        for alias in apart.get(name, ()):
            if catalog.spec(name).shape != piece.spec.shape:
                continue  # refused for that
            alike = catalog.spec(alias).shape == piece.spec.shape
            a, b = read_many(catalog, [(name, piece.box), (alias, piece.box)]) if alike else (piece.view, None)
            if b is None or not same_bytes(a.to(piece.view.dtype), b.to(piece.view.dtype)):
                raise ValueConflictError(
                    alias, (rank,), f"tied to {name} here, and stored apart with other values", "untie them, or store them alike"
                )
