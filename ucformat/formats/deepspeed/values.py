"""The value tree of a DeepSpeed checkpoint: what the model files hold beside weights, and the optimizer's plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ucformat.formats.deepspeed.per_rank import Coords, unite
from ucformat.formats.deepspeed.records import Opened
from ucformat.formats.deepspeed.shards import ModelFiles
from ucformat.formats.deepspeed.zero import OptimizerState
from ucformat.formats.torchsave import add_leaves, is_tensor, placeholders
from ucformat.pickles.unpickle import StoredTensor, to_values
from ucformat.values.tree import split

_STRUCTURE = {"module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"}
"""Entries of the model file that become tensors, aliases and names."""
_CANONICAL = {"lr_scheduler": "scheduler", "data_sampler": "data", "args": "args", "global_steps": "step"}
_OWN = {
    "buffer_names", "random_ltd", "sparse_tensor_module_names", "csr_tensor_module_names", "skipped_steps", "global_samples",
    "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version", "num_experts",
    "ds_autoep_layers", "autoep_layers", "universal_checkpoint_info",
}  # fmt: skip
"""Other entries that DeepSpeed writes; all the rest came from the client."""


def value_tree(
    opened: Opened, models: Sequence[tuple[ModelFiles, Coords]], rest: Mapping[str, object], found: OptimizerState
) -> dict[str, object]:
    """The value tree. Tensors and arrays in it (a client's RNG state, say) are added by name.

    There is a model file per model-parallel rank, and under ZeRO-3 per data-parallel rank: what a client keeps in them may be
    each rank's own. `rest`: what the modules hold beside tensors.
    """
    paths, trees, coords = _model_files(models)
    state: dict[str, Any] = {"model": dict(rest), "optimizer": dict(found.values)}
    own: dict[object, object] = {}
    client: dict[object, object] = {}
    for key in dict.fromkeys(key for tree in trees for key in tree):
        if key in _OWN:
            own[key] = trees[0].get(key)
        elif key not in _STRUCTURE:
            value = unite(opened, [tree.get(key) for tree in trees], paths, f"{key!r} of the model files", coords)
            if key not in _CANONICAL:
                client[key] = value
            elif value is not None:
                state[_CANONICAL[key]] = value
    if found.per_rank:
        own["optimizer_state"] = found.per_rank
    own["optimizer"] = dict(found.extra)
    state |= {"deepspeed": own, "client": client}
    plain = to_values({key: value for key, value in state.items() if value != {}}, paths[0])
    values, tensors = split(plain, is_tensor)
    for name, leaf in tensors.items():
        if isinstance(leaf, StoredTensor):
            opened.tensor(name, leaf)
        else:
            add_leaves(opened.builder, {name: leaf}, {})
    opened.remarks.extend(placeholders(values))
    assert isinstance(values, dict)
    return values


def _model_files(models: Sequence[tuple[ModelFiles, Coords]]) -> tuple[list[str], list[Mapping[Any, Any]], list[Coords]]:
    """Path, contents and mesh coordinates of every model file."""
    held = [(files, at, dp) for files, at in models for dp in range(len(files.paths))]
    coords: list[Coords] = [{**at, **({"dp": dp} if len(files.paths) > 1 or not at else {})} for files, at, dp in held]
    return [files.paths[dp] for files, _, dp in held], [files.trees[dp] for files, _, dp in held], coords
