"""The catalog of a DeepSpeed checkpoint: its files are opened, each model-parallel rank's on their own, and joined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ucformat.catalog import Catalog, Notes
from ucformat.errors import MissingFileError, UnsupportedError
from ucformat.formats import tagged
from ucformat.formats.deepspeed import files as found_files
from ucformat.formats.deepspeed.files import RankFiles
from ucformat.formats.deepspeed.grid import join_shards, unite_optimizers
from ucformat.formats.deepspeed.join import merged
from ucformat.formats.deepspeed.model import frozen_excluded
from ucformat.formats.deepspeed.records import Opened
from ucformat.formats.deepspeed.shards import Degrees, count, degrees_of, open_models, open_shards, refuse
from ucformat.formats.deepspeed.values import value_tree
from ucformat.formats.deepspeed.writer import NAME
from ucformat.formats.source import Source
from ucformat.formats.training_files import with_training_state


def open_catalog(source: Source) -> Catalog:
    """The catalog of a run folder (with `latest`), a tag folder, or a Trainer's checkpoint folder.

    Reads the directory and pickle of each file, and of tensors what it takes to prove whose the optimizer's state is and that
    replicas are equal. Raises UnsupportedError for parallelism and offloading that are not read, MissingFileError and
    FormatError naming files that are missing, left over, or damaged.
    """
    files = found_files.discover(source)
    if 0 not in files.model:
        _, name = min((mp, next(iter(row.values()))) for mp, row in files.model.items())
        first = f"{files.store.url}/{name.replace(name[name.index('mp_rank_') :], 'mp_rank_00_model_states.pt')}"
        raise MissingFileError(first, "the model file of rank 0 is missing")
    opened = Opened(files.store)
    first_files = open_models(opened, files, 0)
    refuse(first_files.tree, files.store.url)
    degrees = degrees_of(first_files.tree, files)
    if degrees.tp > 1 and not first_files.tree.get("universal_checkpoint_info"):
        raise UnsupportedError(
            files.store.url,
            f"a DeepSpeed checkpoint of {degrees.tp} tensor-parallel ranks that does not say how they share parameters: its "
            "model files have no universal_checkpoint_info, and nothing else tells along which dimension they were cut",
        )
    models = [first_files, *(open_models(opened, files, mp) for mp in range(1, degrees.pp * degrees.tp))]
    shards = open_shards(opened, files, models, degrees)
    if frozen_excluded(shards[0].model, _stage(first_files.tree)):
        opened.remarks.append(
            "weights that were not trained are not in it (saved with exclude_frozen_parameters, as LoRA runs are): "
            "they come from the base model"
        )
    joined = join_shards(opened, shards, degrees) if len(shards) > 1 else None
    held = [(shard.files, shard.coords) for shard in shards]
    rest = {name: value for shard in reversed(shards) for name, value in shard.model.rest.items()}
    values = value_tree(opened, held, rest, unite_optimizers(opened, shards))
    layout = tagged.origin_layout(source.store, NAME)
    notes = Notes(NAME, _step(first_files.tree), _mesh(first_files.tree, files, degrees), tuple(opened.remarks), layout)
    catalog = opened.build(values, notes)
    if joined is not None:
        catalog = merged(catalog, replace(joined, files=catalog.files))
    return with_training_state(catalog, source.store)


def _stage(tree: Mapping[Any, Any]) -> object:
    """The ZeRO stage that the configuration names."""
    config = tree.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return zero.get("stage") if isinstance(zero, dict) else None


def _step(tree: Mapping[Any, Any]) -> int | None:
    step = tree.get("global_steps")
    return step if type(step) is int else None


def _mesh(tree: Mapping[Any, Any], files: RankFiles, degrees: Degrees) -> dict[str, int]:
    world = len(files.optim.get(0, ())) or count(tree, "dp_world_size")
    mesh = {"pp": degrees.pp, "dp": world, "tp": degrees.tp}
    return {axis: n for axis, n in mesh.items() if n > 1 or (axis == "dp" and n)}
