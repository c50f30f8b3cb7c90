"""Writing a universal folder that DeepSpeed resumes from under ZeRO-1, 2, 3 and BF16_Optimizer, on any number of ranks.

DeepSpeed's own converter writes one form for ZeRO-1 and 2 and another for ZeRO-3, and each stage refuses the other's. All of them
load state files that hold a dict; what differs beside is the name of the model file, of which there are two here, and where the
optimizer's step and settings are looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ucformat.containers.zip_write import Outgoing
from ucformat.dtypes import DTYPES
from ucformat.errors import UnsupportedError
from ucformat.formats import tagged
from ucformat.formats.deepspeed.optim import mapping
from ucformat.formats.deepspeed.placement import Rules
from ucformat.formats.deepspeed.run_state import (
    VERSION,
    RunState,
    Tensor,
    model_entries,
    record,
    run_state,
    settings_of,
    shapes,
)
from ucformat.formats.staging import publish
from ucformat.formats.target import Companions, WriteJob, shorten
from ucformat.formats.torchfile import Leaves, Range, TorchSaved, write_files
from ucformat.formats.ucp.folder import GLOBAL, NAME, POINTER, STATE
from ucformat.naming import MASTER
from ucformat.storage.store import Store

_MODEL = "mp_rank_00_model_states.pt"
_MODEL_OF_3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"
"""What ZeRO-3 looks for. It reads counters and schedulers in it, no weights."""
_ADAM = {MASTER, "exp_avg", "exp_avg_sq", "step"}
"""State that DeepSpeed's ZeRO-3 loads; the others load any."""


def write(job: WriteJob) -> None:
    """Write `job.store` as a run folder with one universal folder and `latest_universal`. Every rank writes its share.

    Raises UnsupportedError for names that no file can have; ExistsError, StorageError, RankFailedError.
    """
    tag, files, _, _ = plan(job)

    def write_mine(store: Store) -> None:
        write_files(job, store, files[job.group.rank :: job.group.size])

    publish(job, write_mine, lambda store: tagged.put(store, job.notes, NAME, POINTER, tag), last=POINTER)


def prepare(job: WriteJob) -> tuple[WriteJob, tuple[str, ...]]:
    """See `Writer.prepare`."""
    _, _, left_out, remarks = plan(job)
    lost = [item.path for item in job.companions.files]
    said = [f"not copied, a universal folder has no place for them: {shorten(lost)}"] if lost else []
    return replace(job, companions=Companions(), left_out=left_out), (*remarks, *said)


def file_sizes(job: WriteJob) -> list[int]:
    """See `Writer.file_sizes`."""
    return [file.nbytes for file in plan(job)[1]]


def plan(job: WriteJob) -> tuple[str, list[TorchSaved], tuple[str, ...], list[str]]:
    """(name of the universal folder, files to be, tensors that have no place, remarks). Reads nothing."""
    if not job.targets:
        raise UnsupportedError(job.store.url, "nothing in the source is a model or its optimizer's state")
    state = run_state(job)
    step = job.notes.step
    tag = "universal" if step is None else f"global_step{step}_universal"
    files: list[TorchSaved | None] = [
        _model_file(job, state, f"{tag}/{_MODEL}", whole=True),
        _model_file(job, state, f"{tag}/{_MODEL_OF_3}", whole=False),
        _settings(job, state, f"{tag}/{GLOBAL}"),
    ]
    hints = _Hints(job)
    for name, held in _directories(state).items():
        for key, tensor in held.items():
            files.append(
                _state_file(f"{tag}/{STATE}/{_checked(name, job)}/{_checked(key, job)}.pt", name, key, tensor, hints, state)
            )
    found = [file for file in files if file is not None]
    return tag, found, tuple(state.left_out), [*dict.fromkeys(state.remarks), *_limits(state)]


def _checked(name: str, job: WriteJob) -> str:
    if not name or name in (".", "..") or any(c in name for c in "/\\\0"):
        raise UnsupportedError(job.store.url, f"{name!r} can't be the name of a file, as universal folders need")
    return name


def _directories(state: RunState) -> dict[str, dict[str, Tensor]]:
    """Parameter → its files. Without any optimizer state, every floating-point weight gets its master: a start from weights."""
    if not state.states:
        floating = {name: t for name, t in state.weights.items() if DTYPES[t.spec.dtype].torch.is_floating_point}
        return {name: {MASTER: tensor} for name, tensor in floating.items()}
    masters = state.masters
    return {name: {**held, **({MASTER: masters[name]} if name in masters else {})} for name, held in state.states.items()}


def _state_file(path: str, name: str, key: str, tensor: Tensor, hints: _Hints, state: RunState) -> TorchSaved | None:
    leaves = Leaves()
    leaf = _leaf(leaves, tensor, "F32" if key == MASTER else tensor.spec.dtype)
    if key == "step":
        return leaves.file(path, leaf)
    if not tensor.spec.shape and state.masters[name].spec.shape:
        state.leave_out(name, key, f"state {key!r} is one number of a parameter, which DeepSpeed can't take up: left out")
        return None
    return leaves.file(path, {"param": leaf, **hints.of(name, tensor.spec.shape)})


def _leaf(leaves: Leaves, tensor: Tensor, dtype: str) -> Outgoing:
    items = tensor.spec.nbytes // tensor.spec.kind.itemsize
    return leaves.add(dtype, tensor.spec.shape, [Range(tensor.piece, 0, items * DTYPES[dtype].itemsize, dtype)])


def _model_file(job: WriteJob, state: RunState, path: str, *, whole: bool) -> TorchSaved:
    """A model file; with `whole`, with weights in the compute dtype, buffers and frozen weights."""
    leaves = Leaves()
    held = state.weights if whole else {}
    if whole and not state.states:  # each lies in a file of its own, unless that is of another dtype
        held = {name: t for name, t in held.items() if t.spec.dtype != "F32"}
    module: dict[str, Any] = {name: _leaf(leaves, tensor, tensor.spec.dtype) for name, tensor in held.items()}
    module |= {alias: module[owner] for alias, owner in state.tied.items() if owner in module}
    others = {name: _leaf(leaves, tensor, tensor.spec.dtype) for name, tensor in state.others.items()}
    names = record(job, "buffer_names")
    buffers = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    frozen = [name for name in state.weights if name not in state.states and name not in buffers] if state.states else []
    tree: dict[str, Any] = {
        "module": module,
        "buffer_names": buffers,
        "optimizer": None,
        "param_shapes": [shapes(state, group.names) for group in state.groups],
        "frozen_param_shapes": {name: tuple(state.weights[name].spec.shape) for name in frozen},
        "frozen_param_fragments": {name: module[name] for name in frozen if name in module},
        "shared_params": dict(state.tied),
        "dp_world_size": 1,
        "mp_world_size": 1,
        **model_entries(job, state, others),
    }
    info = record(job, "universal_checkpoint_info")
    tree["universal_checkpoint_info"] = info if isinstance(info, dict) else {"universal_checkpoint_version": 0.2}
    return leaves.file(path, tree)


def _settings(job: WriteJob, state: RunState, path: str) -> TorchSaved:
    """`optimizer_state.pt`: hyper-parameters of groups, and the step where ZeRO-3 looks for it.

    DeepSpeed's ZeRO-3 gives all groups the settings that it finds there: only those go there in which the groups agree, so that
    each keeps its own ones otherwise, from the training script.
    """
    leaves = Leaves()
    stepped = next((held["step"] for held in state.states.values() if "step" in held), None)
    step = {} if stepped is None else {"step": _leaf(leaves, stepped, stepped.spec.dtype)}
    settings = [dict(group.settings) for group in state.groups]
    common = {key: value for key, value in (settings or [{}])[0].items() if all(key in s and s[key] == value for s in settings)}
    tree = {
        **settings_of(job),
        "param_groups": [{**own, "params": [g]} for g, own in enumerate(settings)],
        "ds_version": record(job, "ds_version") or VERSION,
        "optimizer_state_dict": {"state": {0: step}, "param_groups": [{**common, "params": []}]},
    }
    return leaves.file(path, tree)


class _Hints:
    """How DeepSpeed is to cut a tensor for tensor-parallel ranks of Megatron's kind, by the patterns that the run recorded."""

    def __init__(self, job: WriteJob) -> None:
        info = record(job, "universal_checkpoint_info")
        self._rules = (
            Rules(mapping(info, job.store.url, "universal_checkpoint_info"), job.store.url) if isinstance(info, dict) else None
        )

    def of(self, name: str, shape: Sequence[int]) -> dict[str, object]:
        """Entries beside a parameter's tensor."""
        return {"cat_dim": 0} if self._rules is None or not shape else self._rules.hints(name, tuple(shape))


def _limits(state: RunState) -> list[str]:
    """What a user should know of how DeepSpeed resumes."""
    said: list[str] = []
    plain = [name for name in state.weights if name not in state.states and name not in state.tied]
    if plain and state.states:
        said.append(
            "DeepSpeed's load_universal restores no buffers and frozen weights: load `module` of mp_rank_00_model_states.pt into "
            f"the model before it ({shorten(plain[:4])}{'…' if len(plain) > 4 else ''})"
        )
    settings = [dict(group.settings) for group in state.groups]
    odd = sorted({key for one in settings for key in one for other in settings if key not in other or other[key] != one[key]})
    if odd:
        said.append(
            f"under ZeRO-3, DeepSpeed has no settings for each group: {shorten(odd)} are those of the training script there"
        )
    keys = sorted({key for held in state.states.values() for key in held} - _ADAM)
    if keys:
        said.append(f"under ZeRO-3, DeepSpeed loads the state of Adam alone: {shorten(keys)} is for the other stages")
    return said
