"""Reader of DeepSpeed checkpoints: ZeRO-0, 1, 2, 3 and BF16_Optimizer, without tensor or pipeline parallelism.

Fragments point into DeepSpeed's own files. `model/<name>` is the weight in the compute dtype, `optimizer/<name>/fp32` the
master weight; where the files hold only one of them (ZeRO-3, ZeRO-0 in fp32), the other is its alias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ucformat.catalog import Catalog, Notes
from ucformat.errors import FormatError, MissingFileError, UnsupportedError
from ucformat.formats import training_files
from ucformat.formats.contract import Reader
from ucformat.formats.deepspeed import files as found_files
from ucformat.formats.deepspeed.files import LATER, RankFiles, expect_ranks
from ucformat.formats.deepspeed.model import add_sliced, add_whole, frozen_excluded, parse_model
from ucformat.formats.deepspeed.optim import RankOptim, mapping, parse
from ucformat.formats.deepspeed.per_rank import unite
from ucformat.formats.deepspeed.records import Opened
from ucformat.formats.deepspeed.zero import OptimizerState
from ucformat.formats.source import Source
from ucformat.formats.torchsave import add_leaves, is_tensor, placeholders
from ucformat.formats.training_files import with_training_state
from ucformat.pickles.unpickle import StoredTensor, to_values
from ucformat.values.tree import split

NAME = "deepspeed"

_STRUCTURE = {"module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"}
"""Entries of the model file that become tensors, aliases and names."""
_CANONICAL = {"lr_scheduler": "scheduler", "data_sampler": "data", "args": "args", "global_steps": "step"}
_OWN = {
    "buffer_names", "random_ltd", "sparse_tensor_module_names", "csr_tensor_module_names", "skipped_steps", "global_samples",
    "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version", "num_experts",
    "ds_autoep_layers", "autoep_layers", "universal_checkpoint_info",
}  # fmt: skip
"""Other entries that DeepSpeed writes; all the rest came from the client."""

_BOOKKEEPING = frozenset({"deepspeed", "client", "args", "step"}) | training_files.BOOKKEEPING
"""The step is in the notes, too; schedulers and data samplers are state that goes on."""

detect = found_files.detect


def open_catalog(source: Source) -> Catalog:
    """The catalog of a run folder (with `latest`), a tag folder, or a Trainer's checkpoint folder.

    Reads the directory and pickle of each file, and of tensors what it takes to prove whose the optimizer's state is. Raises
    UnsupportedError for parallelism and offloading that a later release reads, MissingFileError and FormatError naming
    files that are missing, left over, or damaged.
    """
    files = found_files.discover(source)
    if 0 not in files.model:
        first = f"{files.store.url}/zero_pp_rank_0_mp_rank_00_model_states.pt"
        raise MissingFileError(first, "the model file of rank 0 is missing")
    opened = Opened(files.store)
    tree = mapping(opened.trees([files.model[0]])[0], files.model[0], "the model file")
    _refuse(tree, files)
    ranks = _open_ranks(opened, files, tree)
    model = parse_model(tree, files.model[0], ranks)
    others = _other_models(opened, files) if files.sliced else []
    found = add_sliced(opened, model, ranks, others) if files.sliced else add_whole(opened, model, ranks)
    if frozen_excluded(model, _stage(tree)):
        opened.remarks.append(
            "weights that were not trained are not in it (saved with exclude_frozen_parameters, as LoRA runs are): "
            "they come from the base model"
        )
    values = _values(opened, [tree, *others], model.rest, found, list(files.model.values()))
    step, world = tree.get("global_steps"), len(ranks) or _count(tree, "dp_world_size")
    notes = Notes(NAME, step if type(step) is int else None, {"dp": world} if world else {}, tuple(opened.remarks))
    return with_training_state(opened.build(values, notes), source.store)


def _refuse(tree: Mapping[Any, Any], files: RankFiles) -> None:
    """Raise UnsupportedError for kinds that only the contents give away."""
    url = files.store.url
    dims = tree.get("checkpoint_parallel_dimensions")
    sizes = [tree.get("mp_world_size"), *(dims.values() if isinstance(dims, dict) else ())]
    experts = tree.get("num_experts")
    config = tree.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    mics = zero.get("mics_shard_size") if isinstance(zero, dict) else None
    if tree.get("module", ...) is None:
        raise UnsupportedError(url, f"a DeepSpeed checkpoint with pipeline parallelism (its model file has no module): {LATER}")
    if any(type(size) is int and size > 1 for size in sizes):
        raise UnsupportedError(url, f"a DeepSpeed checkpoint with tensor or pipeline parallelism: {LATER}")
    if tree.get("ds_autoep_layers") or tree.get("autoep_layers"):
        raise UnsupportedError(url, f"a DeepSpeed checkpoint with AutoEP experts: {LATER}")
    if any(type(n) is int and n > 1 for n in (experts if isinstance(experts, list) else [experts])):
        raise UnsupportedError(url, f"a DeepSpeed checkpoint with mixture of experts: {LATER}")
    if type(mics) is int and mics > 0:
        raise UnsupportedError(url, f"a DeepSpeed checkpoint sharded in groups of {mics} ranks (MiCS): {LATER}")


def _stage(tree: Mapping[Any, Any]) -> object:
    """The ZeRO stage that the configuration names."""
    config = tree.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return zero.get("stage") if isinstance(zero, dict) else None


def _count(tree: Mapping[Any, Any], key: str) -> int:
    value = tree.get(key)
    return value if type(value) is int and value > 0 else 0


def _open_ranks(opened: Opened, files: RankFiles, tree: Mapping[Any, Any]) -> list[RankOptim]:
    """The optimizer files in rank order, once they are known to be all there and to belong together."""
    world, url = _count(tree, "dp_world_size"), files.store.url
    if not files.optim:
        if files.sliced or tree.get("param_shapes"):
            first = f"{url}/zero_pp_rank_0_mp_rank_00_optim_states.pt"
            raise MissingFileError(first, "the optimizer files of this ZeRO run are missing")
        return []
    told_by = "the model file (dp_world_size)"
    if not world:
        world, told_by = _partition_count(opened, files), "the first optimizer file (partition_count)"
    expect_ranks(files.optim, world, url, told_by)
    if files.sliced:
        expect_ranks(files.model, world, url, told_by)
    paths = list(files.optim.values())
    ranks = [parse(contents, path) for contents, path in zip(opened.trees(paths), paths, strict=True)]
    for rank in ranks:
        if any(count != world for count in rank.counts):
            found = f"partitioned over {sorted(set(rank.counts))} ranks"
            raise FormatError(rank.path, f"{found}, and {told_by} says {world}: left over from another run?")
        if rank.sliced != files.sliced:
            raise FormatError(rank.path, "of another ZeRO stage than the model file: left over from another run?")
    return ranks


def _partition_count(opened: Opened, files: RankFiles) -> int:
    """The number of ranks that the first optimizer file knows of, for versions whose model file does not say."""
    path = next(iter(files.optim.values()))
    return next(iter(parse(opened.trees([path])[0], path).counts), len(files.optim))


def _other_models(opened: Opened, files: RankFiles) -> Sequence[Mapping[Any, Any]]:
    paths = [path for rank, path in files.model.items() if rank]
    return [mapping(contents, path, "the model file") for contents, path in zip(opened.trees(paths), paths, strict=True)]


def _values(
    opened: Opened,
    trees: Sequence[Mapping[Any, Any]],
    rest: Mapping[str, object],
    found: OptimizerState,
    files: Sequence[str],
) -> dict[str, object]:
    """The value tree. Tensors and arrays in it (a client's RNG state, say) are added by name.

    `trees` are the model files, of which ZeRO-3 has one per rank: what a client keeps in them may be each rank's own.
    """
    state: dict[str, Any] = {"model": dict(rest), "optimizer": dict(found.values)}
    own: dict[object, object] = {}
    client: dict[object, object] = {}
    for key in dict.fromkeys(key for tree in trees for key in tree):
        if key in _OWN:
            own[key] = trees[0].get(key)
        elif key not in _STRUCTURE:
            value = unite(opened, [tree.get(key) for tree in trees], files, f"{key!r} of the model files")
            if key not in _CANONICAL:
                client[key] = value
            elif value is not None:
                state[_CANONICAL[key]] = value
    if found.per_rank:
        own["optimizer_state"] = found.per_rank
    own["optimizer"] = dict(found.extra)
    state |= {"deepspeed": own, "client": client}
    plain = to_values({key: value for key, value in state.items() if value != {}}, files[0])
    values, tensors = split(plain, is_tensor)
    for name, leaf in tensors.items():
        if isinstance(leaf, StoredTensor):
            opened.tensor(name, leaf)
        else:
            add_leaves(opened.builder, {name: leaf}, {})
    opened.remarks.extend(placeholders(values))
    assert isinstance(values, dict)
    return values


READER = Reader(name=NAME, detect=detect, open_catalog=open_catalog, bookkeeping=_BOOKKEEPING, has_masters=True)
