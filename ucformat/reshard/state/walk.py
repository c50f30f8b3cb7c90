"""From a live training state to pieces: which box of which logical tensor lies in which memory of this rank.

The same pieces serve saving (their views are read) and loading (their views are written). Everything that is no tensor
becomes the value tree. `collect` is for saving; `restore` does the same walk to load.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ucformat import values
from ucformat.box import Box
from ucformat.catalog import TensorSpec
from ucformat.dtypes import from_torch
from ucformat.errors import UnrepresentableError, UnsupportedError, ValueConflictError
from ucformat.group import Group
from ucformat.process import collected_later
from ucformat.reshard.state import megatron, module, optimizer, uneven
from ucformat.reshard.state.assign import DICTS, SEQUENCES, exact, is_stateful, state_of
from ucformat.reshard.state.leaf import Leaf, Part, forget, is_tensor, leaf, plain, refuse_unwritable, with_plain_strides
from ucformat.reshard.state.markers import RankLocalItem
from ucformat.reshard.state.placement import shard


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One box of a logical tensor and the live memory that holds it."""

    spec: TensorSpec
    """Name, dtype and global shape."""
    box: Box
    view: torch.Tensor
    """Of the box's shape, any strides and device; shares memory with the state."""
    replicated: bool
    """Other ranks may hold the same box. False only where that can't be: replicas are then written once per rank."""
    first_rank_wins: bool = False
    """Replicas may differ, and the first rank's counts: module buffers, which DDP broadcasts from there."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What this rank holds of the state."""

    specs: tuple[TensorSpec, ...]
    """Sorted by name; also of tensors of which this rank has no element."""
    pieces: tuple[Piece, ...]
    """Sorted by name, none empty. Those of one tensor are disjoint."""
    values: object
    """The value tree of this rank: rank-local items hold its own value alone, `values.merge` unites the ranks' trees."""
    aliases: Mapping[str, str]
    """Other name of a tensor → its name in `specs`, as seen on this rank: a tensor that is an alias on one is one on all."""
    mesh: Mapping[str, int]
    """Named axes of the device meshes in the state, and their sizes."""
    coords: Mapping[str, int] | None
    """This rank's place on these axes."""


def collect(state: Mapping[str, object], group: Group | None = None) -> Collected:
    """Take `state` apart. Every rank of `group` calls; exchanges only errors, and sizes of uneven DTensors.

    Raises UnrepresentableError and UnsupportedError naming the path. An error on one rank is raised on every rank.
    """
    group = group or Group()
    with collected_later():
        return gather(Walker(state, group, loading=False), group)


def gather(walker: Walker, group: Group) -> Collected:
    """`collect` with a walker of the caller's own, which knows afterwards what it found where."""
    leaves, tree, error = _attempt(walker)
    forget()
    claims = compare_uneven(leaves, error, group)
    aliases = dict(walker.aliases)
    specs: tuple[TensorSpec, ...] = ()
    pieces: tuple[Piece, ...] = ()
    with group.together("collecting the state"):
        leaves = place_uneven(leaves, claims)
        specs, pieces = make_pieces(leaves, aliases)
    mesh, coords = mesh_axes(_meshes(item for parts in leaves.values() for item in parts))
    return Collected(specs, pieces, tree, aliases, mesh, coords)


Leaves = dict[str, list[Leaf]]
"""By name; several when one rank has several shards of a tensor."""


def _attempt(walker: Walker) -> tuple[Leaves, object, Exception | None]:
    """Walk, keeping an error until all ranks have met."""
    try:
        leaves, tree = walker.split()
        values.encode(tree)  # what can't be stored must fail here, before the ranks go on
    except Exception as error:
        return {}, {}, error
    return leaves, tree, None


class Walker:
    """Walks a state once: finds its modules, then makes leaves of its tensors.

    While loading only what is read in place counts: states that objects take back as values, rank-local items and
    hyper-parameters are left out.
    """

    def __init__(self, state: Mapping[str, object], group: Group, *, loading: bool, meshes: Sequence[DeviceMesh] = ()) -> None:
        self.state, self.group, self.loading = state, group, loading
        self.meshes = meshes
        """On which the state is known to lie, beside those that it shows."""
        self.aliases: dict[str, str] = {}
        self.fixed: Leaves = {}
        self.objects: dict[tuple[str, str, str], object] = {}
        self.found: dict[int, module.Found] = {}
        self.owners: module.Owners = {}
        self.named: dict[int, list[optimizer.Named]] = {}
        self.coords: dict[str, int] | None = None

    def prepare(self) -> None:
        """Find modules and optimizers and name their parameters."""
        _visit(self.state, (), self._find_module)
        _visit(self.state, (), self._find_optimizer)

    def _find_module(self, x: object, at: tuple[str, ...]) -> bool:
        modules = as_modules(x)
        if modules is None:
            return is_leafy(x)
        found = module.find(modules, at, loading=self.loading)
        self.found[id(x)] = found
        self.owners.update(found.owners)
        for alias, target in found.aliases.items():
            self.aliases[values.join_name(*at, alias)] = values.join_name(*at, target)
        return True

    def _find_optimizer(self, x: object, at: tuple[str, ...]) -> bool:
        optimizers = as_optimizers(x)
        if optimizers is None:
            return is_leafy(x)
        found = [optimizer.named(one, values.join_name(*at), self.owners, loading=self.loading) for one in optimizers]
        items = [item for item in found if item is not None]
        if len(items) == len(found):
            self.named[id(x)] = items
            return True
        return is_leafy(x)  # into a list: each for itself then

    def split(self) -> tuple[Leaves, object]:
        """All leaves by name, and the value tree."""
        if not self.found and not self.named:
            self.prepare()
        _, self.coords = mesh_axes([*self.meshes, *framing(self.state, self.found.values())])
        tree = {key: item for key, item in ((k, self.node(x, (str(k),))) for k, x in self.state.items()) if item is not _GONE}
        for (top, key, part), item in self.objects.items():
            inner = tree.setdefault(top, {})
            if not isinstance(inner, dict):
                raise UnsupportedError(top, "sharded objects must stand in a dict")
            inner.setdefault(key, {})[part] = item
        rest, tensors = values.split(tree, lambda x: isinstance(x, Leaf))
        leaves = dict(self.fixed)
        for name, x in tensors.items():
            if self.loading and isinstance(x, np.ndarray):
                refuse_unwritable(x, name)
            item = leaf(x, name) if isinstance(x, np.ndarray) else x
            leaves.setdefault(name, []).append(item)
        return leaves, rest

    # -- one node ------------------------------------------------------------------------------------------------

    def node(self, x: Any, at: tuple[str, ...]) -> Any:
        """`x` as a nest of plain containers, values and leaves."""
        if type(x) in _PLAIN:
            return x
        path = "/".join(at)
        if id(x) in self.found:
            return self._module(self.found[id(x)], at)
        if id(x) in self.named:
            return self._optimizers(self.named[id(x)])
        if is_tensor(x):
            return leaf(x, path)
        if isinstance(x, RankLocalItem):
            return _GONE if self.loading else self._rank_local(x, at)
        kind = megatron.kind_of(x)
        if kind is not None:
            return self._megatron(x, kind, at)
        if is_stateful(x):
            return _GONE if self.loading else self.node(exact(state_of(x, path)), at)
        if type(x) in DICTS:
            return self._dict(x, at)
        if type(x) in SEQUENCES:
            items = [self.node(y, (*at, str(i))) for i, y in enumerate(x)]
            return _GONE if items and all(i is _GONE for i in items) else _plain(x)(None if i is _GONE else i for i in items)
        return x

    def _dict(self, x: dict[Any, Any], at: tuple[str, ...]) -> Any:
        out = {key: item for key, item in ((k, self.node(y, (*at, str(k)))) for k, y in x.items()) if item is not _GONE}
        return _GONE if x and not out else _plain(x)(out)

    def _module(self, found: module.Found, at: tuple[str, ...]) -> dict[str, object]:
        out: dict[str, object] = dict(found.leaves)
        if not self.loading:
            out.update((fqn, self.node(module.extra_state(owner), (*at, fqn))) for fqn, owner in found.extra.items())
            for unit in found.units:
                out.update((fqn, self.node(exact(x), (*at, fqn))) for fqn, x in module.unit_values(unit).items())
        return out

    def _optimizers(self, items: list[optimizer.Named]) -> dict[str, object]:
        trees = [optimizer.tree(item, lambda x, at: self.node(x, (at,)), groups=not self.loading) for item in items]
        out: dict[str, object] = {}
        for tree in trees:
            for key, item in tree.items():
                if key in out and key != optimizer.GROUPS:
                    raise UnsupportedError(f"{items[0].key}/{key}", "two optimizers in one list have such a state: use a dict")
                out[key] = item
        if not self.loading:
            out[optimizer.GROUPS] = unite([tree[optimizer.GROUPS] for tree in trees])
        return out

    def _rank_local(self, x: RankLocalItem, at: tuple[str, ...]) -> values.RankLocal:
        own = self._own(x.value, at)
        return values.RankLocal(x.on_resize, (self.coords or None,), (own,), self.group.rank)

    def _own(self, x: Any, at: tuple[str, ...]) -> Any:
        """A rank's own item: objects by their `state_dict`, tensors whole."""
        if is_stateful(x):
            return self._own(exact(state_of(x, "/".join(at))), at)
        if is_tensor(x):
            if type(x) not in {torch.Tensor, nn.Parameter}:
                raise UnsupportedError(
                    "/".join(at), f"a {type(x).__name__} is part of a whole, not rank-local: take its local tensor"
                )
            local = plain(x, "/".join(at))
            place = shard(local.shape, [0] * local.dim(), local.shape)  # whole, but under a name that no other rank has
            return Leaf(place.shape, local.dtype, ((local, place),))
        if type(x) in DICTS:
            return _plain(x)((key, self._own(item, (*at, str(key)))) for key, item in x.items())
        if type(x) in SEQUENCES:
            return _plain(x)(self._own(item, (*at, str(i))) for i, item in enumerate(x))
        return x

    def _megatron(self, x: Any, kind: megatron.Kind, at: tuple[str, ...]) -> Any:
        if kind == "tensor":
            item = megatron.leaf(x, at[0])
            assert item.name is not None
            self.fixed.setdefault(item.name, []).append(item)
        elif kind == "object" and not self.loading:
            place = megatron.object_place(at[0], x)
            self.objects[place] = self.node(megatron.object_value(x), place)
        elif kind == "factory":
            self.node(megatron.build(x, "/".join(at), loading=self.loading), at)
        return _GONE


_PLAIN = frozenset({str, int, float, bool, type(None)})
_GONE: Any = object()  # what stays of items that are stored elsewhere, or not at all


def _plain(x: object) -> Any:
    """The type in which the items of a container are stored: see `assign.DICTS`."""
    if type(x) in {Counter, defaultdict}:
        return dict
    return list if type(x) is deque else type(x)


def is_leafy(x: object) -> bool:
    """Whether no modules or optimizers are looked for inside."""
    return not isinstance(x, (dict, list, tuple, deque)) or isinstance(x, torch.Size)


def as_modules(x: object) -> list[nn.Module] | None:
    """A module, or a list of pipeline stages that together are one model."""
    if isinstance(x, nn.Module):
        return [x]
    return list(x) if isinstance(x, (list, tuple)) and x and all(isinstance(item, nn.Module) for item in x) else None


def as_optimizers(x: object) -> list[torch.optim.Optimizer] | None:
    """An optimizer, or a list of them that together are one."""
    if isinstance(x, torch.optim.Optimizer):
        return [x]
    return list(x) if isinstance(x, (list, tuple)) and x and all(isinstance(i, torch.optim.Optimizer) for i in x) else None


def _visit(x: Any, at: tuple[str, ...], stop: Callable[[Any, tuple[str, ...]], bool]) -> None:
    """Call `stop` on every node, and go into those where it is False."""
    if at and stop(x, at):
        return
    for key, item in x.items() if isinstance(x, Mapping) else enumerate(x):
        if type(item) not in _PLAIN:
            _visit(item, (*at, str(key)), stop)


def unite(groups: list[Any]) -> list[Any]:
    """The parameter groups of several optimizers in one list.

    By position, as the ranks' groups are, where they are alike (the stages of a pipeline), else one after the other (Muon beside
    AdamW). Loading goes by the names of their parameters.
    """
    try:
        merged: Any = values.merge([{optimizer.GROUPS: item} for item in groups])
    except (ValueConflictError, UnrepresentableError):
        return [group for item in groups for group in item]
    return list(merged[optimizer.GROUPS])


# ---------------------------------------------------------------- leaves to pieces


def compare_uneven(leaves: Leaves, error: Exception | None, group: Group) -> uneven.Claims:
    """Learn how other ranks hold what is sharded unevenly. Every rank calls, with its error if it has one: all raise it."""
    claims: dict[str, uneven.ShardDescription] = {}
    try:
        claims = {name: uneven.claim(items[0]) for name, items in leaves.items() if items[0].frame is not None and items[0].parts}
    except Exception as caught:
        error = error or caught
    return uneven.compare(claims, error, group)


def place_uneven(leaves: Leaves, claims: uneven.Claims) -> Leaves:
    """Place the leaves whose shards are uneven. Raises UnsupportedError."""
    out = dict(leaves)
    for name, place in claims.place().items():
        first = leaves[name][0]
        out[name] = [replace(first, shape=place.shape, parts=((first.parts[0][0], place),), frame=None)]
    return out


def make_pieces(leaves: Leaves, aliases: dict[str, str]) -> tuple[tuple[TensorSpec, ...], tuple[Piece, ...]]:
    """Specs and pieces, sorted by name. Tensors in the same memory become aliases of the first, added to `aliases`."""
    specs: dict[str, TensorSpec] = {}
    pieces: list[Piece] = []
    seen: dict[object, str] = {}
    for name in sorted(leaves):
        made = [piece for item in leaves[name] for piece in _pieces(name, item, specs)]
        memory = (specs[name].dtype, specs[name].shape, *((p.view.data_ptr(), p.view.stride(), p.box) for p in made))
        if made and seen.setdefault(memory, name) != name:
            aliases[name] = seen[memory]
            del specs[name]
        else:
            pieces += made
    # names that the modules gave may themselves have turned out to be aliases
    aliases.update({alias: aliases.get(target, target) for alias, target in aliases.items()})
    return tuple(specs.values()), tuple(pieces)


def _pieces(name: str, item: Leaf, specs: dict[str, TensorSpec]) -> list[Piece]:
    try:
        spec = TensorSpec(name, from_torch(item.dtype).name, item.shape)
    except KeyError:
        raise UnrepresentableError(name, f"tensor of {item.dtype}") from None
    if specs.setdefault(name, spec) != spec:
        known = specs[name]
        raise UnsupportedError(name, f"shards of one tensor disagree: {known.dtype} {known.shape} and {spec.dtype} {spec.shape}")
    return [Piece(spec, box, view, placed.replicated, item.first_rank_wins) for box, view, placed in _views(name, item.parts)]


def _views(name: str, parts: Iterable[Part]) -> Iterable[tuple[Box, torch.Tensor, Any]]:
    for local, placed in parts:
        if tuple(local.shape) != placed.local:
            raise UnsupportedError(
                name, f"a local tensor of shape {list(local.shape)} where its placement says {list(placed.local)}"
            )
        for box, view in placed.views(local):
            yield box, with_plain_strides(view), placed


def mesh_axes(meshes: Iterable[DeviceMesh]) -> tuple[dict[str, int], dict[str, int] | None]:
    """Named axes of device meshes, with sizes and this rank's coordinates; the first of a name counts."""
    sizes: dict[str, int] = {}
    coords: dict[str, int] = {}
    for mesh in {id(mesh): mesh for mesh in meshes}.values():
        for axis, size, at in zip(mesh.mesh_dim_names or (), mesh.shape, mesh.get_coordinate() or (), strict=False):
            sizes.setdefault(axis, int(size))
            coords.setdefault(axis, at)
    return sizes, coords or None


def _meshes(leaves: Iterable[Leaf]) -> Iterator[DeviceMesh]:
    return (item.frame.mesh for item in leaves if item.frame is not None)


def framing(state: object, found: Iterable[module.Found]) -> list[DeviceMesh]:
    """Meshes that the state lies on, before it is walked for good."""
    meshes = [mesh for item in found for mesh in _meshes(item.leaves.values())]

    def note(x: Any, at: tuple[str, ...]) -> bool:
        if isinstance(x, torch.distributed.tensor.DTensor):
            meshes.append(x.device_mesh)
        return is_leafy(x)

    _visit(state, (), note)
    return meshes
