"""Reader of megatron-core's distributed checkpoints (`torch_dist`): DCP files, with keys and objects of Megatron's own.

What is not sharded lies in `common.pt`, or since 2026 in a sharded object `common_state`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ucformat.catalog import Catalog, CatalogBuilder, Notes
from ucformat.errors import FormatError, UnsupportedError
from ucformat.formats.dcp.fragments import add_tensor, files_of
from ucformat.formats.dcp.items import Item, open_items
from ucformat.formats.dcp.metadata import FILE, Chunk, Metadata, read_metadata
from ucformat.formats.megatron import beside, bucket_state, keys
from ucformat.formats.megatron.evidence import differing
from ucformat.formats.megatron.folders import COMMON
from ucformat.formats.megatron.groups import add_groups
from ucformat.formats.megatron.ranks import Opened
from ucformat.formats.megatron.settings import Settings
from ucformat.formats.target import shorten
from ucformat.naming import MASTER
from ucformat.pickles.unpickle import RefusedTensor, StoredTensor, to_values
from ucformat.storage.store import Store
from ucformat.values.codec import RankLocal
from ucformat.values.tree import join_name
from ucformat.views import View

ORIGIN = "megatron"
_OBJECT = re.compile(r"(?P<key>.+)/shard_(?P<offset>[\d.]+)_(?P<shape>[\d.]+)", re.DOTALL)
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer")
_ROUNDED = frozenset({"F32", "F16", "BF16"})
"""dtypes of weights that are a master weight, rounded."""
_CHECKED = 256  # parameters, spread over the model: all of them once one is wrong
_ONE_OF_ALL = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")

Objects = dict[str, dict[str, Any]]
"""Sharded objects: key → place (`<offset>_<shape>`) → what is stored there."""


def open_distributed(store: Store) -> Catalog:
    """The catalog of an iteration's folder. Reads the metadata, and the first and last few KiB of each item.

    Raises MissingFileError, FormatError and UnsupportedError naming files and keys.
    """
    metadata = read_metadata(store)
    items = open_items(store, metadata)
    opened = Opened(store)
    raw = _raw(store, metadata, items)
    opened.start_from(raw)
    common, objects = _common(opened, metadata, items)
    settings = Settings.of(common.get("args"))
    states, views = _views(opened, metadata, raw)
    _check_layers(views, settings, store.url)
    groups = bucket_state.find(opened, (stored.name for stored in metadata.tensors))
    states.update(bucket_state.states(opened, groups, views, settings, _tensor_size(metadata)))
    _leave_out_strangers(opened, states, views)
    weights = {join_name("model", name): view for name, view in views.items()}
    for kind, held in states.items():
        weights.update((join_name("optimizer", name, kind), view) for name, view in held.items())
    found = _values(opened, common, objects)
    records = [common.get("optimizer")]
    records += [tree for key, shards in objects.items() if _OPTIMIZER.fullmatch(key) for tree in shards.values()]
    add_groups(opened, found, records, states, weights, {name: view.ndim for name, view in views.items()})
    values, more = beside.placed(opened, found)
    weights.update(more)
    step = values.get("step")
    notes = Notes(ORIGIN, step if type(step) is int else None, {}, tuple(opened.remarks))
    return opened.rewrite.build(weights, {}, values, notes)


def _raw(store: Store, metadata: Metadata, items: Mapping[Chunk, Item]) -> Catalog:
    """A catalog of the tensors as they are stored, by key."""
    if metadata.odd:
        key, what = next(iter(metadata.odd.items()))
        raise UnsupportedError(store.url, f"{key} is {what}")
    builder = CatalogBuilder(store)
    numbers = {path: builder.file(file) for path, file in files_of(store.size, items).items()}
    for stored in metadata.tensors:
        add_tensor(builder, stored.name, stored, items, numbers)
    return builder.build()


def _leave_out_strangers(opened: Opened, states: dict[str, dict[str, View]], weights: Mapping[str, View]) -> None:
    """Leave out the optimizer's state of parameters whose master weights are not those of the model.

    Megatron-core itself writes such files (`fully_reshardable`, where buffers have several buckets that are filled up).
    """
    masters = states.get(MASTER, {})
    names = [name for name in masters if name in weights and weights[name].dtype in _ROUNDED]

    def wrong(some: Sequence[str]) -> list[str]:
        return differing(opened.store, opened.rewrite.files, {name: (masters[name], weights[name]) for name in some})

    if not wrong(names[:: -(-len(names) // _CHECKED) or 1]):
        return
    strangers = set(wrong(names))
    for kind, held in states.items():
        states[kind] = {name: view for name, view in held.items() if name not in strangers}
    opened.remarks.append(
        f"the optimizer's state of {len(strangers)} parameters is left out: their master weights are not those of the model, a "
        f"fault of Megatron-core's fully_reshardable form: {shorten(sorted(strangers))}"
    )


def _tensor_size(metadata: Metadata) -> int:
    """Into how many shards weights are cut whose columns Megatron cuts; 1 when there is no such weight."""
    for stored in metadata.tensors:
        if re.fullmatch(r"decoder\.layers\..*(?:linear_proj|mlp\.linear_fc2)\.weight", stored.name):
            return len({chunk.offset[-1] for chunk in stored.chunks}) or 1
    return 1


def _views(opened: Opened, metadata: Metadata, raw: Catalog) -> tuple[dict[str, dict[str, View]], dict[str, View]]:
    """State of the optimizer by kind and parameter, and weights by name."""
    by_kind: dict[str, dict[str, View]] = {}
    where = f"{opened.store.url}/{FILE}"
    for spec in raw.tensors:
        held = keys.parse(spec.name)
        if held is None:
            continue
        view = opened.rewrite.view(spec.name)
        added = metadata.megatron.get(spec.name)
        shape = added.get("nd_reformulated_orig_global_shape") if isinstance(added, dict) else None
        if shape is not None:
            try:
                view = keys.from_fragments(view, tuple(map(int, shape)))
            except (TypeError, ValueError) as error:
                raise FormatError(where, f"{spec.name}: {error}") from None
        if by_kind.setdefault(held.kind, {}).setdefault(held.key, view) is not view:
            raise FormatError(where, f"two tensors hold {held.key}")
    weights = keys.parameters(by_kind.pop("", {}), where)
    return {kind: keys.parameters(held, where) for kind, held in by_kind.items()}, weights


def _common(opened: Opened, metadata: Metadata, items: Mapping[Chunk, Item]) -> tuple[dict[str, Any], Objects]:
    """What is not sharded, and the objects by key and place."""
    objects: Objects = {}
    for chunk in metadata.blobs:
        item, match = items.get(chunk), _OBJECT.fullmatch(chunk.key)
        if item is None:
            continue
        tree = item.tree[0] if isinstance(item.tree, list) and len(item.tree) == 1 else item.tree
        if match is None:
            objects.setdefault(chunk.key, {})[""] = tree
        else:
            objects.setdefault(match["key"], {})[f"{match['offset']}_{match['shape']}"] = tree
    held = objects.pop("common_state", {})
    common: object = next(iter(held.values()), {})
    if opened.store.exists(COMMON):
        common = opened.trees([COMMON])[0]
    if not isinstance(common, dict):
        raise FormatError(f"{opened.store.url}/{COMMON}", "holds no dict")
    if not common:
        opened.remarks.append("there is no common.pt, nor a common_state: arguments, step and hyper-parameters are not in it")
    return {str(key): value for key, value in common.items()}, objects


def _values(opened: Opened, common: Mapping[str, Any], objects: Mapping[str, Mapping[str, object]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for key, value in common.items():
        if key == "optimizer":
            continue
        plain = to_values(value, COMMON)
        if key in beside.CANONICAL and plain is not None:
            found[beside.CANONICAL[key]] = plain
        else:
            own[key] = plain
    extra = 0
    for key, shards in objects.items():
        if key.endswith("_extra_state"):
            extra += sum(not _is_empty(tree) for tree in shards.values())
        elif key == "rng_state":
            kept = tuple(to_values(tree, FILE) for tree in shards.values())
            found["rng"] = RankLocal("error", (None,) * len(kept), kept)
        elif not _ONE_OF_ALL.match(key):
            own[key] = {place: to_values(tree, FILE) for place, tree in shards.items()}
    if extra:
        opened.remarks.append(f"{extra} states that layers keep for themselves (_extra_state) are not read")
    if own:
        found["megatron"] = own
    return found


def _is_empty(tree: object) -> bool:
    return tree is None or (isinstance(tree, StoredTensor) and 0 in tree.shape) or isinstance(tree, RefusedTensor)


def _check_layers(views: Mapping[str, View], settings: Settings, url: str) -> None:
    """The layers of the main stack are as many as the arguments say. Raises FormatError."""
    told = settings.number("num_layers")
    numbers = {int(match[1]) for name in views if (match := re.match(r"(?:decoder|encoder)\.layers\.(\d+)\.", name))}
    if told is not None and numbers and numbers != set(range(told)):
        raise FormatError(url, f"holds {len(numbers)} layers, and its arguments say {told}")
