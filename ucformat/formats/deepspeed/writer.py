"""Writing a DeepSpeed run folder that DeepSpeed loads as its own: ZeRO-1, 2 or 3 on a number of ranks that is asked for.

Parallelism of other kinds is not written. Buffers are laid out as `flat` describes: ZeRO-1 and 2 lay a group's parameters end
to end, pad to twice the ranks and cut equally; ZeRO-3 cuts every parameter, and pads its last slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ucformat.containers.file_image import ByteRequest
from ucformat.containers.zip_write import Outgoing, OutgoingObject
from ucformat.dtypes import DTYPES
from ucformat.errors import UnsupportedError
from ucformat.formats import tagged
from ucformat.formats.deepspeed.experts import is_expert
from ucformat.formats.deepspeed.run_state import (
    VERSION,
    RunState,
    Tensor,
    items,
    model_entries,
    record,
    run_state,
    settings_of,
    shapes,
)
from ucformat.formats.deepspeed.shuffle import round_robin, shuffled
from ucformat.formats.staging import publish
from ucformat.formats.target import Companions, WriteJob, shorten
from ucformat.formats.torchfile import PADDING, Leaves, Range, TorchSaved, write_files
from ucformat.lazy_torch import torch
from ucformat.naming import MASTER
from ucformat.storage.store import Store

OPTIONS = frozenset({"stage", "dp"})
"""`stage`: 1, 2 or 3; `dp`: data-parallel ranks. By default those of the run that the source is of, else 1."""
NAME = "deepspeed"
POINTER = "latest"
_SUB_GROUP_ITEMS = 1_000_000_000  # DeepSpeed's default
_SCALER = OutgoingObject("deepspeed.runtime.fp16.loss_scaler", "LossScaler", {"cur_scale": 1.0, "dynamic": False})


@dataclass(frozen=True, slots=True)
class Flat:
    """One flat buffer: its parameters in order, and the param group that they are of."""

    names: Sequence[str]
    group: int


@dataclass(frozen=True, slots=True)
class Run:
    """What is to be written, decided."""

    job: WriteJob
    state: RunState
    stage: int
    dp: int
    compute: str
    """dtype of the weights that the engine computes with."""
    config: Mapping[str, Any]
    buffers: Sequence[Flat]

    @property
    def tag(self) -> str:
        return f"global_step{self.job.notes.step or 0}"

    def optimizer_file(self, rank: int) -> str:
        prefix = "bf16_" if self.compute == "BF16" else ""
        return f"{self.tag}/{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    def model_file(self, rank: int) -> str:
        return f"{self.tag}/{f'zero_pp_rank_{rank}_' if self.stage == 3 else ''}mp_rank_00_model_states.pt"

    @property
    def untrained(self) -> dict[str, Tensor]:
        """Frozen weights and buffers."""
        return {name: tensor for name, tensor in self.state.weights.items() if name not in self.state.states}

    @property
    def buffer_names(self) -> list[str]:
        """Buffers, as the records say; without records, all that was not trained under ZeRO-3, where a guess has to be made."""
        known = record(self.job, "buffer_names")
        if isinstance(known, list):
            return [name for name in known if isinstance(name, str)]
        return list(self.untrained) if self.stage == 3 else []


def write(job: WriteJob) -> None:
    """Write `job.store` as a run folder with one tag and `latest`. Every rank writes its share of the files.

    Raises UnsupportedError for what has no place in such a run; ExistsError, StorageError, RankFailedError.
    """
    run = plan(job)
    _check_numbers(run)
    files = _files(run)

    def write_mine(store: Store) -> None:
        write_files(job, store, files[job.group.rank :: job.group.size])

    publish(job, write_mine, lambda store: tagged.put(store, job.notes, NAME, POINTER, run.tag), last=POINTER)


def prepare(job: WriteJob) -> tuple[WriteJob, tuple[str, ...]]:
    """See `Writer.prepare`."""
    run = plan(job)
    _files(run)  # what it leaves out goes into the remarks
    said = list(dict.fromkeys(run.state.remarks))
    if run.stage == 3 and run.untrained and record(job, "buffer_names") is None:
        said.append(f"taken for buffers, since nothing says whether they are frozen parameters: {shorten(sorted(run.untrained))}")
    kept = [name for name in run.state.states if name in run.state.weights and MASTER in run.state.states[name]]
    if run.stage == 3 and any(run.state.weights[name] is not run.state.states[name][MASTER] for name in kept):
        said.append("the rounded weights are left out: ZeRO-3 keeps the master weights alone, and rounds them when it loads")
    if job.companions.files:
        said.append(f"not copied, DeepSpeed has no place for them: {shorten([item.path for item in job.companions.files])}")
    return replace(job, companions=Companions(), left_out=tuple(run.state.left_out)), tuple(said)


def file_sizes(job: WriteJob) -> list[int]:
    """See `Writer.file_sizes`."""
    return [file.nbytes for file in _files(plan(job))]


# --- planning ------------------------------------------------------------------------------------------------------


def plan(job: WriteJob) -> Run:
    """Decide everything; reads nothing. Raises UnsupportedError."""
    url, state = job.store.url, run_state(job)
    config = record(job, "ds_config")
    config = dict(config) if isinstance(config, dict) else {}
    zero = config.get("zero_optimization")
    zero = dict(zero) if isinstance(zero, dict) else {}
    world = record(job, "dp_world_size")
    before = zero.get("stage")
    stage = _option(job, "stage", before if type(before) is int and before in (1, 2, 3) else 1)
    dp = _option(job, "dp", world if type(world) is int and world > 0 else 1)
    if stage not in (1, 2, 3):
        raise UnsupportedError(url, f"ZeRO-{stage} is not written: choose 1, 2 or 3")
    if not state.masters:
        raise UnsupportedError(
            url, "nothing in the source was trained: a DeepSpeed run is made of weights and their optimizer's state"
        )
    _refuse(job, state)
    zero["stage"] = stage
    config["zero_optimization"] = zero
    return Run(job, state, stage, dp, _compute(state, config), config, _buffers(state, zero, stage, dp))


def _option(job: WriteJob, key: str, default: int) -> int:
    value = job.options.get(key, default)
    try:
        number = int(value)
    except ValueError:
        number = 0
    if number < 1:
        raise UnsupportedError(job.store.url, f"{key}={value} is no number of at least 1")
    return number


def _refuse(job: WriteJob, state: RunState) -> None:
    url = job.store.url
    dims = record(job, "checkpoint_parallel_dimensions")
    if isinstance(dims, dict) and dims.get("pp_degree", 1) != 1:
        raise UnsupportedError(
            url, "pipeline stages are not written, and its names are those of stages: write a universal folder (ucp)"
        )
    if odd := [name for name in state.states if is_expert(name)]:
        raise UnsupportedError(url, f"experts are not written as DeepSpeed has them ({odd[0]}): write a universal folder (ucp)")
    masters = state.masters
    if lost := [name for name in state.states if name not in masters]:
        raise UnsupportedError(url, f"{lost[0]!r} has optimizer state, and no weight")


def _compute(state: RunState, config: Mapping[str, Any]) -> str:
    """The dtype that the engine computes in: as its configuration says, else that of the weights."""
    for key, dtype in (("bf16", "BF16"), ("fp16", "F16")):
        section = config.get(key)
        if isinstance(section, dict) and section.get("enabled"):
            return dtype
    held = {state.weights[name].spec.dtype for name in state.states if name in state.weights}
    return held.pop() if len(held) == 1 and held <= {"BF16", "F16"} else "F32"


def _buffers(state: RunState, zero: Mapping[str, Any], stage: int, dp: int) -> list[Flat]:
    """Flat buffers in order: one per group, and under ZeRO-3 as many as it takes."""
    masters = state.masters
    if stage < 3:
        orders = [shuffled(group.names, dp) if round_robin(zero) else group.names for group in state.groups]
        return [Flat(names, g) for g, names in enumerate(orders)]
    size = zero.get("sub_group_size")
    size = int(size) if isinstance(size, (int, float)) and size > 0 else _SUB_GROUP_ITEMS
    found: list[Flat] = []
    for g, group in enumerate(state.groups):
        slices = {name: -(-items(masters[name]) // dp) for name in group.names}
        if size >= sum(slices.values()):
            found.append(Flat(group.names, g))
            continue
        held: list[str] = []
        for name in group.names:
            held.append(name)
            if sum(slices[other] for other in held) >= size or name == group.names[-1]:
                found.append(Flat(held, g))
                held = []
    return found


# --- files ---------------------------------------------------------------------------------------------------------


def _files(run: Run) -> list[TorchSaved]:
    models = [_model_file(run, rank) for rank in range(run.dp if run.stage == 3 else 1)]
    return [*models, *(_optimizer_file(run, rank) for rank in range(run.dp))]


def _whole(leaves: Leaves, tensor: Tensor, dtype: str = "") -> Outgoing:
    wanted = dtype or tensor.spec.dtype
    return leaves.add(wanted, tensor.spec.shape, [Range(tensor.piece, 0, items(tensor) * DTYPES[wanted].itemsize, wanted)])


def _model_file(run: Run, rank: int) -> TorchSaved:
    leaves, state = Leaves(), run.state
    masters, buffers = state.masters, run.buffer_names
    frozen = {name: tensor for name, tensor in run.untrained.items() if name not in buffers}
    module: dict[str, Any] = {}
    for name in (*state.states, *run.untrained):
        if run.stage == 3 and (name in state.states or name in frozen):
            module[name] = leaves.add(run.compute, (0,), [])
        elif name in state.weights:
            module[name] = _whole(leaves, state.weights[name])
        else:
            module[name] = _whole(leaves, masters[name], run.compute)
    module |= {alias: module[owner] for alias, owner in state.tied.items() if owner in module}
    fragments: dict[str, Outgoing] = {}
    for name, tensor in frozen.items():
        fragments[name] = _slice(leaves, tensor, run.dp, rank) if run.stage == 3 else module[name]
    others = {name: _whole(leaves, tensor) for name, tensor in state.others.items()}
    tree: dict[str, Any] = {
        "module": module,
        "buffer_names": buffers,
        "optimizer": None,
        "param_shapes": [shapes(state, buffer.names) for buffer in run.buffers],
        "frozen_param_shapes": {name: torch.Size(tensor.spec.shape) for name, tensor in frozen.items()},
        "frozen_param_fragments": fragments,
        "shared_params": dict(state.tied),
        "dp_world_size": run.dp,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        **model_entries(run.job, state, others),
        "ds_config": run.config,
    }
    return leaves.file(run.model_file(rank), tree)


def _slice(leaves: Leaves, tensor: Tensor, dp: int, rank: int) -> Outgoing:
    """A rank's slice of a parameter under ZeRO-3."""
    n, size = items(tensor), tensor.spec.kind.itemsize
    q = -(-n // dp)
    return leaves.add(tensor.spec.dtype, (q,), _sliced(tensor, tensor.spec.dtype, n, q, rank, size))


def _sliced(tensor: Tensor | None, dtype: str, n: int, q: int, rank: int, size: int) -> list[Range]:
    start, stop = min(n, rank * q), min(n, (rank + 1) * q)
    held = [Range(PADDING if tensor is None else tensor.piece, start * size, stop * size, dtype)]
    return [*held, Range(PADDING, 0, (q - (stop - start)) * size)]


def _optimizer_file(run: Run, rank: int) -> TorchSaved:
    leaves, state = Leaves(), run.state
    masters = [_flat(run, leaves, buffer, MASTER, rank, padded=run.stage == 3) for buffer in run.buffers]
    by_index = {b: _states(run, leaves, buffer, rank) for b, buffer in enumerate(run.buffers)}
    members = [[b for b, buffer in enumerate(run.buffers) if buffer.group == g] for g in range(len(state.groups))]
    groups = [{**group.settings, "params": own} for group, own in zip(state.groups, members, strict=True)]
    inner = {"state": {b: held for b, held in by_index.items() if held}, "param_groups": groups}
    body: dict[str, Any] = {"loss_scaler": _SCALER, "dynamic_loss_scale": False, "overflow": False, **settings_of(run.job)}
    body |= {"zero_stage": run.stage, "ds_version": record(run.job, "ds_version") or VERSION}
    if run.stage == 3:
        body |= {"partition_count": run.dp, "optimizer_state_dict": inner, "fp32_flat_groups": masters}
    else:
        body |= {
            "base_optimizer_state": inner,
            "single_partition_of_fp32_groups": masters,
            "group_paddings": [_padding(run, buffer, rank) for buffer in run.buffers],
            "param_alignment_paddings": [[0] * len(buffer.names) for buffer in run.buffers],
            "partition_count": [run.dp] * len(run.buffers),
            "param_slice_mappings": [_addresses(run, buffer, rank) for buffer in run.buffers],
        }
    tree = {"optimizer_state_dict": body, "ds_config": run.config, "ds_version": body["ds_version"]}
    return leaves.file(run.optimizer_file(rank), tree)


def _share(run: Run, buffer: Flat) -> tuple[int, int]:
    """(Elements of the buffer's parameters, of a rank's equal part of it.)"""
    masters = run.state.masters
    total = sum(items(masters[name]) for name in buffer.names)
    return total, -(-total // (2 * run.dp)) * 2


def _padding(run: Run, buffer: Flat, rank: int) -> int:
    total, share = _share(run, buffer)
    return max(0, min(share, (rank + 1) * share - total))


def _pieces(run: Run, buffer: Flat, rank: int) -> list[tuple[str, int, int, int]]:
    """(Parameter, first and last element, place in the rank's part) of ZeRO-1 and 2."""
    masters, (_, share) = run.state.masters, _share(run, buffer)
    low, high, at = rank * share, (rank + 1) * share, 0
    found: list[tuple[str, int, int, int]] = []
    for name in buffer.names:
        n = items(masters[name])
        start, stop = max(low, at), min(high, at + n)
        if start < stop:
            found.append((name, start - at, stop - at, start - low))
        at += n
    return found


def _addresses(run: Run, buffer: Flat, rank: int) -> dict[str, OutgoingObject]:
    place = "deepspeed.utils.tensor_fragment"
    return {
        name: OutgoingObject(place, "fragment_address", {"numel": stop - start, "start": at})
        for name, start, stop, at in _pieces(run, buffer, rank)
    }


def _flat(run: Run, leaves: Leaves, buffer: Flat, key: str, rank: int, *, padded: bool) -> Outgoing:
    """A rank's part of one state, F32 for masters. What a parameter lacks is zero."""
    masters = run.state.masters
    held = masters if key == MASTER else {n: run.state.states[n][key] for n in buffer.names if key in run.state.states[n]}
    dtype = "F32" if key == MASTER else next(iter(held.values())).spec.dtype
    size = DTYPES[dtype].itemsize
    parts: list[Range] = []
    if run.stage == 3:
        for name in buffer.names:
            n = items(masters[name])
            parts += _sliced(held.get(name), dtype, n, -(-n // run.dp), rank, size)
    else:
        for name, start, stop, _ in _pieces(run, buffer, rank):
            parts.append(Range(held[name].piece if name in held else PADDING, start * size, stop * size, dtype))
        parts.append(Range(PADDING, 0, _padding(run, buffer, rank) * size if padded else 0))
    return leaves.add(dtype, (sum(part.stop - part.start for part in parts) // size,), parts)


def _states(run: Run, leaves: Leaves, buffer: Flat, rank: int) -> dict[str, Any]:
    """The optimizer's state of one buffer."""
    state, masters = run.state, run.state.masters
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for name in buffer.names for key in state.states[name]):
        held = {name: state.states[name][key] for name in buffer.names if key in state.states[name]}
        first = next(iter(held.values()))
        if key == MASTER:
            continue
        if all(tensor.spec.shape == () for tensor in held.values()) and (
            key == "step" or any(masters[n].spec.shape for n in held)
        ):
            found[key] = _whole(leaves, first)
        elif all(tensor.spec.shape == masters[name].spec.shape for name, tensor in held.items()):
            found[key] = _flat(run, leaves, buffer, key, rank, padded=True)
            if len(held) < len(buffer.names):
                lacking = [name for name in buffer.names if name not in held]
                state.remarks.append(f"without {key!r}, and zero there, as DeepSpeed has one buffer for all: {shorten(lacking)}")
        else:
            why = f"state {key!r} is not of the shape of its parameters, which a flat buffer needs: left out"
            for name in held:
                state.leave_out(name, key, why)
    return found


# --- checks --------------------------------------------------------------------------------------------------------


def _check_numbers(run: Run) -> None:
    """Refuse scalars (steps) that differ within a buffer: it has one of each. Reads them."""
    for buffer in run.buffers:
        seen: dict[str, tuple[str, bytes]] = {}
        for name in buffer.names:
            for key, tensor in run.state.states[name].items():
                if tensor.spec.shape != () or key == MASTER or (key != "step" and not run.state.masters[name].spec.shape):
                    continue
                value = np.empty(tensor.spec.nbytes, dtype=np.uint8)
                run.job.fill([ByteRequest(tensor.piece, 0, len(value), value)])
                other, data = seen.setdefault(key, (name, value.tobytes()))
                if data != value.tobytes():
                    why = f"{key!r} of {name!r} and {other!r} differ, and DeepSpeed has one for all parameters of a group"
                    raise UnsupportedError(run.job.store.url, why)
