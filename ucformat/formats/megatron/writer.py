"""Writing a megatron-core distributed checkpoint (`torch_dist`), which Megatron loads at any parallelism.

A run folder with one iteration. Parameters get Megatron's global keys: one tensor for all layers where they are alike, keys with
the layer's number otherwise. Optimizer state is written as `fully_reshardable`.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ucformat import values as trees
from ucformat.box import Box
from ucformat.catalog import TensorSpec
from ucformat.containers.file_image import ByteRequest
from ucformat.containers.zip_write import RecordWriter, pickle_tree, write_head, write_tail, zip_size
from ucformat.errors import UnsupportedError
from ucformat.formats import notes_file, owned, sidecar_files
from ucformat.formats.contract import Owns
from ucformat.formats.dcp.metadata import FILE
from ucformat.formats.dcp.writer import Planned, metadata, place, tensor_items, value_item, write_share
from ucformat.formats.megatron.beside import CANONICAL
from ucformat.formats.megatron.folders import COMMON, ITERATION, TRACKER
from ucformat.formats.megatron.names import LAYER, expert_of
from ucformat.formats.source import Source
from ucformat.formats.staging import publish
from ucformat.formats.target import OutputBox, WriteJob, shorten
from ucformat.formats.torchstate import plain
from ucformat.storage.store import Store

_STATES = {"fp32": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Kinds of optimizer state that have a place, and Megatron's names of them. The step has one in the param groups."""
_WRITTEN = frozenset({"args", "step", "scheduler", "megatron", "optimizer"})
_EXTRA = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
"""Modules of a layer for which Megatron looks for a state of their own; there is none, and that is stored, too."""
_WRITTEN_HERE = "megatron:written"
"""Key of the notes beside what we wrote: the iteration's folder."""
_SHARDING = "fully_reshardable"
_CONTENT = {"distrib_optim_sharding_type": _SHARDING, "singleton_local_shards": False, "chained_optim_avoid_prefix": True}
_VERSIONS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a parameter lies in Megatron's global tensor: its key, the axes in front, and the place along these."""

    key: str
    front: tuple[int, ...] = ()
    at: tuple[int, ...] = ()

    def of(self, target: OutputBox, key: str) -> OutputBox:
        """A piece of the parameter as one of that tensor, called `key`."""
        spec = TensorSpec(key, target.spec.dtype, (*self.front, *target.spec.shape))
        return OutputBox(spec, Box((*self.at, *target.box.offset), ((1,) * len(self.at)) + target.box.length))


def takes(names: Sequence[str]) -> list[str]:
    """Names that have a place: the model's, and those of its optimizer's usual states."""
    return [name for name in names if _parsed(name) is not None]


def _parsed(name: str) -> tuple[str, str] | None:
    """A parameter and the kind of its state (empty: the weight)."""
    parts = trees.split_name(name)
    if len(parts) == 2 and parts[0] == "model":
        return parts[1], ""
    known = len(parts) == 3 and parts[0] == "optimizer" and (parts[2] in _STATES or parts[2] == "step")
    return (parts[1], parts[2]) if known else None


def prepare(job: WriteJob) -> tuple[WriteJob, tuple[str, ...]]:
    """The job, and remarks on values that have no place. Raises UnsupportedError for a model that is none of Megatron's."""
    placements(job)
    values = job.values if isinstance(job.values, dict) else {}
    left = sorted(str(key) for key in values if key not in _WRITTEN)
    return job, ((f"values left out, Megatron keeps them for each rank or not at all: {shorten(left)}",) if left else ())


def owned_files(source: Source) -> Owns:
    """What belongs to a run folder that was written here, and in which nobody trained on.

    Raises UnsupportedError for every other: Megatron's own checkpoints are never replaced.
    """
    store = source.store
    written = notes_file.read_origin_layout(store).get(_WRITTEN_HERE)
    folders = [name.rstrip("/") for name in store.list() if ITERATION.fullmatch(name)]
    if written is None or folders != [written] or store.read(TRACKER).decode(errors="replace") != _tracked(written):
        raise UnsupportedError(store.url, "holds checkpoints that Megatron wrote, which are never replaced: remove them yourself")
    inner = rf"{re.escape(written)}/(?:\.metadata|metadata\.json|common\.pt|__\d+_\d+\.distcp)"
    return owned.by_pattern(rf"{re.escape(TRACKER)}|{re.escape(notes_file.FILE)}|companions(?:/.*)?|{inner}")(source)


def _tracked(folder: str) -> str:
    """What the tracker file says of a folder."""
    return folder if folder == "release" else str(int(folder.removeprefix("iter_")))


def placements(job: WriteJob) -> dict[str, Placement]:
    """Where each parameter goes. Raises UnsupportedError when the names are not Megatron's."""
    specs = {parsed[0]: t.spec for t in job.targets if (parsed := _parsed(t.name)) is not None and not parsed[1]}
    if not any(name.startswith(("embedding.", "decoder.", "encoder.")) for name in specs):
        why = "its parameters have no names of Megatron: translate them with family= (--family)"
        raise UnsupportedError(job.store.url, why)
    layers: dict[str, dict[int, dict[str, TensorSpec]]] = {}
    for name, spec in specs.items():
        match = LAYER.fullmatch(name)
        if match is not None:
            layers.setdefault(match["stack"], {}).setdefault(int(match["index"]), {})[match["rest"]] = spec
    found = {name: Placement(name) for name in specs if LAYER.fullmatch(name) is None}
    for stack, by_index in layers.items():
        for index, by_rest in by_index.items():
            front = (len(by_index),) if _alike(by_index) else ()
            for rest in by_rest:
                found[f"{stack}.{index}.{rest}"] = _placement(stack, index, rest, by_rest, front)
    return found


def _alike(by_index: Mapping[int, Mapping[str, TensorSpec]]) -> bool:
    """Whether all layers hold the same parameters, of the same shapes and dtypes."""
    forms = [{rest: (spec.dtype, spec.shape) for rest, spec in layer.items()} for layer in by_index.values()]
    return set(by_index) == set(range(len(by_index))) and all(form == forms[0] for form in forms)


def _placement(stack: str, index: int, rest: str, layer: Mapping[str, TensorSpec], front: tuple[int, ...]) -> Placement:
    prefix = f"{stack}." if front else f"{stack}.{index}."
    at = (index,) if front else ()
    expert = expert_of(rest)
    if expert is not None:
        count = len({e[1] for name in layer if (e := expert_of(name))})
        return Placement(f"{prefix}{expert[0]}.experts.{expert[2]}", (*front, count), (*at, expert[1]))
    what = rest.rpartition(".")[2]
    if rest.startswith("input_layernorm.") and "self_attention.linear_qkv.weight" in layer:
        rest = f"self_attention.linear_qkv.layer_norm_{what}"
    elif rest.startswith("pre_mlp_layernorm.") and "mlp.linear_fc1.weight" in layer:
        rest = f"mlp.linear_fc1.layer_norm_{what}"
    return Placement(prefix + rest, front, at)


def write(job: WriteJob) -> None:
    """Write `job.store` as a run folder. Every rank calls it and writes its share of the files.

    Raises UnsupportedError for names that are not Megatron's and F6 dtypes, UnrepresentableError for values of unknown classes,
    ExistsError, StorageError, RankFailedError.
    """
    specs, items = _plan(job)
    placed = place(job, items)
    step = job.notes.step
    folder = "release" if step is None else f"iter_{step:07d}"
    common = _common(job)

    def write_mine(store: Store) -> None:
        write_share(job, placed, store.sub(folder))

    def commit(store: Store) -> None:
        sidecar_files.carry(job.companions, store, sidecar_files.PREFIX, job.dtype)
        inner = store.sub(folder)
        _put_common(inner, common)
        inner.put(FILE, metadata(specs, {}, placed))
        inner.put("metadata.json", json.dumps(_VERSIONS).encode())
        notes_file.put(store, replace(job.notes, origin_layout={**job.notes.origin_layout, _WRITTEN_HERE: folder}))
        store.put(TRACKER, _tracked(folder).encode())

    publish(job, write_mine, commit, last=TRACKER)


def _plan(job: WriteJob) -> tuple[dict[str, TensorSpec], list[Planned]]:
    """Specs of the global tensors, and all items to be written."""
    where = placements(job)
    masters = {parsed[0] for t in job.targets if (parsed := _parsed(t.name)) is not None and parsed[1] == "fp32"}
    moments = {parsed[0] for t in job.targets if (parsed := _parsed(t.name)) is not None and parsed[1] == "exp_avg"}
    pieces: dict[str, list[tuple[int, OutputBox]]] = {}
    for index, target in enumerate(job.targets):
        if target.spec.dtype.startswith("F6_"):
            raise UnsupportedError(job.store.url, f"tensor {target.name!r}: torch has no dtype {target.spec.dtype}")
        parsed = _parsed(target.name)
        if parsed is None or parsed[1] == "step":
            continue
        name, kind = parsed
        placement = where.get(name)
        if placement is None:
            raise UnsupportedError(job.store.url, f"optimizer state of {name}, which is no parameter of the model")
        kinds = [kind] if kind else ["", *(["fp32"] if name in moments - masters else [])]  # an F32 weight is its own master
        for each in kinds:
            key = f"optimizer.state.{_STATES[each]}.{placement.key}" if each else placement.key
            pieces.setdefault(key, []).append((index, placement.of(target, key)))
    specs = {key: held[0][1].spec for key, held in pieces.items()}
    items = [value_item(key, [None], {}) for key in _extra_states(where.values())]
    return specs, [*items, *(item for key, held in pieces.items() for item in tensor_items(key, held))]


def _extra_states(where: Iterable[Placement]) -> list[str]:
    """Keys of the (empty) states that layers keep for themselves."""
    found: dict[str, None] = {}
    for placement in where:
        module = placement.key.rpartition(".")[0]
        match = LAYER.fullmatch(placement.key)
        plain_key = match["rest"].rpartition(".")[0] if match else module.partition("layers.")[2]
        if plain_key not in _EXTRA and not plain_key.startswith("mlp.experts.experts."):
            continue
        front, at = placement.front or (1,), placement.at or (0,)
        place_ = f"shard_{'.'.join(map(str, at))}_{'.'.join(map(str, front))}"
        found[f"{module}._extra_state/{place_}"] = None
        if plain_key == "self_attention.linear_proj":
            found[f"{module.removesuffix('linear_proj')}core_attention._extra_state/{place_}"] = None
    return list(found)


def _common(job: WriteJob) -> dict[str, Any]:
    """What is not sharded."""
    values: Mapping[Any, Any] = job.values if isinstance(job.values, dict) else {}
    own = values.get("megatron")
    common: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": job.notes.step or 0}
    if isinstance(own, dict):
        common.update((key, value) for key, value in own.items() if key != "optimizer" and not isinstance(value, trees.RankLocal))
    names = {place: key for key, place in reversed(list(CANONICAL.items())) if place in ("args", "scheduler")}
    common.update((key, values[place]) for place, key in names.items() if values.get(place) is not None)
    common["content_metadata"] = dict(_CONTENT)
    groups = _groups(job, values)
    if groups:
        common["optimizer"] = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": _SHARDING}
    return dict(plain(common, exact=True))


def _groups(job: WriteJob, values: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """Param groups as Megatron keeps them: without parameters, with the step."""
    held = values.get("optimizer")
    groups = held.get("param_groups") if isinstance(held, dict) else None
    steps = {parsed[0]: i for i, t in enumerate(job.targets) if (parsed := _parsed(t.name)) is not None and parsed[1] == "step"}
    if not isinstance(groups, list):
        groups = []
    found = []
    for group in groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        step = next((_number(job, steps[name]) for name in group.get("params", []) if name in steps), None)
        found.append(settings if step is None else {**settings, "step": step})
    if any("wd_mult" not in group for group in found):
        base = found[0]  # of another program: Megatron wants a group with weight decay and one without
        rule = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True}
        found = [{**rule, "wd_mult": 1.0, **base}, {**rule, "wd_mult": 0.0, **base, "weight_decay": 0.0}]
    return found


def _number(job: WriteJob, index: int) -> float:
    """The value of a scalar tensor."""
    target = job.targets[index]
    image = np.empty(target.nbytes, dtype=np.uint8)
    job.fill([ByteRequest(index, 0, target.nbytes, image)])
    code = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}.get(target.spec.dtype)
    if code is None:
        raise UnsupportedError(job.store.url, f"{target.name} is of dtype {target.spec.dtype}, which is no count of steps")
    return float(struct.unpack(code, image.tobytes())[0])


def _put_common(store: Store, common: Mapping[str, Any]) -> None:
    data_pkl = pickle_tree(dict(common))
    with store.writer(COMMON, zip_size("common", data_pkl, [])) as writer:
        out = RecordWriter(writer.write, "common")
        write_head(out, data_pkl)
        write_tail(out)
