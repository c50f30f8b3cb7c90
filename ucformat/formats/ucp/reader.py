"""Reading a universal folder: state of parameters, weights of model files, and what they say of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ucformat.catalog import Catalog, Notes
from ucformat.errors import MissingFileError
from ucformat.formats import tagged
from ucformat.formats.deepspeed.files import RankFiles
from ucformat.formats.deepspeed.join import TensorJoin, merged
from ucformat.formats.deepspeed.model import Model, add_frozen, parse_model, tied
from ucformat.formats.deepspeed.optim import mapping, sequence
from ucformat.formats.deepspeed.placement import Rules
from ucformat.formats.deepspeed.records import Opened, numel, state, weight
from ucformat.formats.deepspeed.shards import Degrees, ModelFiles, count, degrees_of, open_models, refuse
from ucformat.formats.deepspeed.values import value_tree
from ucformat.formats.deepspeed.zero import OptimizerState, Shapes, shape_dict, shapes_of
from ucformat.formats.source import Source
from ucformat.formats.training_files import with_training_state
from ucformat.formats.ucp.folder import GLOBAL, NAME, UniversalFiles, discover
from ucformat.formats.ucp.state import ParameterState, add_states, open_states, step_of

_FLAT = ("fp32_flat_groups", "single_partition_of_fp32_groups", "base_optimizer_state")
_LAYOUT = {
    *_FLAT, "param_groups", "optimizer_state_dict", "partition_count", "group_paddings", "param_alignment_paddings", "zero_stage",
    "ds_config", "param_slice_mappings",
}  # fmt: skip
"""Entries of the optimizer's settings that describe what is gone, or are read elsewhere."""


def open_catalog(source: Source) -> Catalog:
    """The catalog of a universal folder, or of the run folder whose `latest_universal` names it.

    Reads the directory and pickle of each file. Raises MissingFileError and FormatError naming files that are missing or
    damaged, UnsupportedError for experts of AutoEP.
    """
    folder = _open(source)
    weights = folder.weights()
    found = folder.add_optimizer(weights)
    folder.add_settings(found)
    opened, degrees, tree = folder.opened, folder.degrees, folder.models[0].tree
    held = [(files, degrees.coords(mp)) for mp, files in enumerate(folder.models)]
    rest = {name: value for module in reversed(folder.modules) for name, value in module.rest.items()}
    values = value_tree(opened, held, rest, found)
    step, mesh = tree.get("global_steps"), {"pp": degrees.pp, "tp": degrees.tp}
    notes = Notes(
        NAME,
        step if type(step) is int else None,
        {a: n for a, n in mesh.items() if n > 1},
        tuple(opened.remarks),
        tagged.origin_layout(source.store, NAME),
    )
    catalog = opened.build(values, notes)
    return with_training_state(merged(catalog, replace(weights, files=catalog.files)), source.store)


@dataclass(slots=True)
class _Folder:
    """A universal folder, opened."""

    opened: Opened
    files: UniversalFiles
    models: Sequence[ModelFiles]
    degrees: Degrees
    modules: Sequence[Model]
    settings: Mapping[Any, Any]
    """What `zero/optimizer_state.pt` holds."""
    groups: Sequence[Shapes]
    """Trained parameters of each param group, with the shapes of a tensor rank; empty when the folder does not say."""
    states: Mapping[str, ParameterState]
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def trained(self) -> list[str]:
        """Parameters that have state, those of the groups first."""
        named = dict.fromkeys(name for group in self.groups for name in group)
        named |= dict.fromkeys(name for name, held in self.states.items() if set(held.tensors) - {"fp32"} or held.values)
        return list(named)

    def weights(self) -> Catalog:
        """`model/<name>` of everything that the model files hold."""
        forks = [self.opened.fork() for _ in self.models]
        known = {name for group in self.groups for name in group}
        for fork, module in zip(forks, self.modules, strict=True):
            aliases = tied(self.opened, module)
            for name, tensor in module.tensors.items():
                if name not in aliases and (numel(tensor) or not self.files.sliced):
                    fork.tensor(weight(name), tensor)
            for alias, owner in aliases.items():
                if owner in module.tensors and numel(module.tensors[owner]):
                    fork.builder.alias(weight(alias), weight(owner))
            self.aliases |= aliases
        shared = self.modules[0].shared
        self.aliases |= {alias: owner for alias, owner in shared.items() if alias not in known and owner in known}
        if self.files.sliced:
            self._add_frozen(forks[0])
        if len(forks) == 1:
            return forks[0].build()
        return self._joined([fork.build() for fork in forks])

    def _joined(self, shards: Sequence[Catalog]) -> Catalog:
        """Weights of all model-parallel ranks. Pipelines keep none in these files."""
        degrees = self.degrees
        rules = Rules(self.models[0].tree.get("universal_checkpoint_info") or {}, self.models[0].paths[0])
        if not any(shard.tensors for shard in shards):
            return shards[0]
        labels = [f"mp_rank_{mp:02d}" for mp in range(degrees.tp)]
        parameters = {name for module in self.modules for name in module.tensors} - set(self.modules[0].buffers)
        return TensorJoin(self.opened, rules, labels, named=True).join(shards[: degrees.tp], parameters)

    def _add_frozen(self, fork: Opened) -> None:
        """Frozen weights of ZeRO-3, which DeepSpeed's converter leaves in the model files of all ranks."""
        module, held = self.modules[0], self.models[0]
        frozen = shape_dict(module.tree.get("frozen_param_shapes") or {}, module.file, "frozen_param_shapes")
        lost = {name: shape for name, shape in frozen.items() if name not in self.states}
        if not lost:
            return
        if len(held.trees) == count(held.tree, "dp_world_size") and len(self.models) == 1:
            add_frozen(fork, lost, held.trees)
        else:
            self.opened.remarks.append(f"frozen weights are not in it: {', '.join(sorted(lost)[:6])}")

    def add_optimizer(self, weights: Catalog) -> OptimizerState:
        """Add state of trained parameters, weights that only have their masters, and names of tied ones."""
        opened, names = self.opened, set(weights.names)
        trained = [name for name in self.trained if name not in self.aliases]
        found = add_states(opened, self.states, trained, self.files.store.url, step_of(self.settings, GLOBAL))
        for name, held in self.states.items():
            if name in found.states:
                if weight(name) not in names:
                    opened.builder.alias(weight(name), state(name, "fp32"))
            elif weight(name) not in names and name not in self.aliases and "fp32" in held.tensors:
                opened.tensor(weight(name), held.tensors["fp32"])
        for alias, owner in self.aliases.items():
            if owner not in found.states:
                continue
            if weight(alias) not in names and weight(owner) not in names:
                opened.builder.alias(weight(alias), state(owner, "fp32"))
            for key in found.states[owner]:
                opened.builder.alias(state(alias, key), state(owner, key))
        buffers = {weight(name): name for module in self.modules for name in module.buffers}
        if lost := [name for full, name in buffers.items() if full not in names and full not in opened.builder.specs]:
            opened.remarks.append(f"buffers that DeepSpeed's converter leaves out are not in it: {', '.join(sorted(lost)[:6])}")
        low = sorted({tensor.dtype for module in self.modules for tensor in module.tensors.values()} & {"BF16", "F16"})
        if low and any(weight(name) not in names for name in trained):
            opened.remarks.append(f"weights are the master weights, and the run computed in {', '.join(low)}")
        return found

    def add_settings(self, found: OptimizerState) -> None:
        """Add hyper-parameters of groups, and the optimizer's other values."""
        found.extra.update({key: value for key, value in self.settings.items() if key not in _LAYOUT})
        if any(key in self.settings for key in _FLAT):
            self.opened.remarks.append(f"{GLOBAL} repeats rank 0's part of the state, which the folder holds whole: not taken")
        raw = [
            mapping(g, GLOBAL, "a param group") for g in sequence(self.settings.get("param_groups") or [], GLOBAL, "param_groups")
        ]
        names = [list(group) for group in self.groups]
        if not names and len(raw) == 1:
            names = [list(found.states)]
        hyper = [{key: value for key, value in group.items() if key != "params"} for group in raw]
        if len(names) != len(hyper):
            self.opened.remarks.append(
                "nothing says which parameters its param groups hold: kept as deepspeed/optimizer/param_groups"
            )
            found.extra["param_groups"] = hyper
            return
        found.values["param_groups"] = [{**group, "params": own} for group, own in zip(hyper, names, strict=True)]


def _open(source: Source) -> _Folder:
    files = discover(source)
    opened = Opened(files.store)
    rank_files = RankFiles(files.store, files.model, {}, files.sliced, {}, layers_by_rank=False, experts={})
    if 0 not in files.model:
        raise MissingFileError(f"{files.store.url}/mp_rank_00_model_states.pt", "the model file of rank 0 is missing")
    first = open_models(opened, rank_files, 0)
    refuse(first.tree, files.store.url)
    degrees = degrees_of(first.tree, rank_files)
    models = [first, *(open_models(opened, rank_files, mp) for mp in range(1, degrees.pp * degrees.tp))]
    settings = mapping(opened.trees([GLOBAL])[0], GLOBAL, "the optimizer's settings")
    groups = _groups(models, settings, files)
    shapes = {} if degrees.tp > 1 else {name: shape for group in groups for name, shape in group.items()}
    states = open_states(opened, files, shapes)
    modules = [parse_model(held.tree, held.paths[0], (), held.tree.get("module") or {}) for held in models]
    return _Folder(opened, files, models, degrees, modules, settings, groups, states)


def _groups(models: Sequence[ModelFiles], settings: Mapping[Any, Any], files: UniversalFiles) -> list[Shapes]:
    """Trained parameters of each param group. Under ZeRO-3 `param_shapes` is by sub-group, and groups list theirs."""
    united: list[Shapes] = []
    for held in models:
        for g, group in enumerate(shapes_of(held.tree.get("param_shapes"), held.paths[0]) or []):
            if g == len(united):
                united.append({})
            united[g].update(group)
    if not files.sliced:
        return united
    groups: list[Shapes] = []
    taken: set[int] = set()
    for raw in sequence(settings.get("param_groups") or [], GLOBAL, "param_groups"):
        members = mapping(raw, GLOBAL, "a param group").get("params") or []
        own = [i for i in sequence(members, GLOBAL, "params") if type(i) is int and 0 <= i < len(united)]
        groups.append({name: shape for i in own for name, shape in united[i].items()})
        taken |= set(own)
    if len(groups) == 1 and not taken:  # some versions save the group after they took its parameters out
        return [{name: shape for group in united for name, shape in group.items()}]
    return groups if taken == set(range(len(united))) else united
