"""Which files make up a DeepSpeed checkpoint: the tag folder, the names in it, the ranks they stand for.

Only directory listings and the text of `latest` are read here. Kinds that this release does not read (pipeline,
tensor parallel, mixture of experts, universal folders, offloaded state) are told apart by their file names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ucformat.errors import FormatError, MissingFileError, NotACheckpointError, UcformatError, UnsupportedError
from ucformat.formats.source import Source
from ucformat.storage.store import Store

LATER = "support comes in a later release"
_SCRIPT = "zero_to_fp32.py"  # DeepSpeed puts it beside the tags
_TAG_BYTES = 4096  # a longer `latest` is no name of a folder

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?P<prefix>(?:bf16_|fp16_)?)zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_\d+(?:-model_\d+)?-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_states\.pt")
_TAG = re.compile(r"global_step\d+/|pytorch_model/|checkpoint/")
"""Folders that DeepSpeed, Accelerate and Lightning put tags into, looked at when `latest` is missing."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one checkpoint, by data-parallel rank. Paths are relative to `store`, the tag folder."""

    store: Store
    model: Mapping[int, str]
    """Rank → model file: one per rank under ZeRO-3, else the single file under 0."""
    optim: Mapping[int, str]
    """Rank → optimizer file; empty under ZeRO-0."""
    sliced: bool
    """Whether the model files are one per rank (ZeRO-3)."""


def _is_deepspeed(names: Iterable[str]) -> bool:
    return any(pattern.fullmatch(name) for name in names for pattern in (_MODEL, _OPTIM, _LAYER, _EXPERT))


def detect(source: Source) -> bool:
    """Whether a directory is a DeepSpeed run folder or tag folder, or one that does not say which tag. Never raises."""
    if source.file is not None:
        return False
    try:
        return _find(source.store) is not None
    except (MissingFileError, NotACheckpointError):
        return True  # `open_catalog` says what is missing
    except UcformatError:
        return False


def _find(store: Store) -> Store | None:
    """The tag folder in or at `store`, or None.

    Raises MissingFileError for a `latest` that leads nowhere, NotACheckpointError when nothing says which of several is meant.
    """
    names = store.list()
    if _is_deepspeed(names):
        return store
    tags = [name.rstrip("/") for name in names if _TAG.fullmatch(name) and _is_deepspeed(store.list(name.rstrip("/")))]
    for pointer in ("latest", "latest_universal"):
        if pointer not in names:
            continue
        tag = _tag(store, pointer)
        if tag is not None and _is_deepspeed(store.list(tag)):
            return store.sub(tag)
        if tags or (tag is not None and _SCRIPT in names):
            told = f"{pointer!r} names {tag!r}, which holds no DeepSpeed files" if tag else f"{pointer!r} names no folder"
            there = f"there is {', '.join(tags)}: give that folder" if tags else "and there are no others"
            raise MissingFileError(f"{store.url}/{tag or pointer}", f"{told}; {there}")
    if len(tags) > 1:
        why = f"a DeepSpeed run without a file `latest` that says which of {', '.join(tags)} to take: give one of these folders"
        raise NotACheckpointError(store.url, why)
    return store.sub(tags[0]) if tags else None


def _tag(store: Store, pointer: str) -> str | None:
    """The folder name in `latest`, or None when the file is no such pointer."""
    if store.size(pointer) > _TAG_BYTES:
        return None
    try:
        tag = store.read(pointer).decode().strip()
    except UnicodeDecodeError:
        return None
    plain = bool(tag) and tag not in (".", "..") and not any(c in tag for c in "/\\\0\n")
    return tag if plain else None


def discover(source: Source) -> RankFiles:
    """The files of the checkpoint at `source`.

    Raises UnsupportedError for kinds read by a later release, MissingFileError and FormatError naming files that
    are missing or doubled, NotACheckpointError when nothing is found.
    """
    store = _find(source.store)
    if store is None:
        raise NotACheckpointError(source.url, "no DeepSpeed files in it")
    names = store.list()
    _refuse(store.url, names)
    model = [(name, found) for name in names if (found := _MODEL.fullmatch(name))]
    optim = [(name, found) for name in names if (found := _OPTIM.fullmatch(name))]
    tensor_ranks = {int(found["mp"]) for _, found in [*model, *optim]}
    if tensor_ranks - {0}:
        raise UnsupportedError(
            store.url,
            f"a DeepSpeed checkpoint with tensor or pipeline parallelism (mp_rank 0-{max(tensor_ranks)}): {LATER}",
        )
    sliced = any(found["dp"] is not None for _, found in model)
    if not model:
        raise MissingFileError(f"{store.url}/mp_rank_00_model_states.pt", "the model file of the optimizer files is missing")
    models = _by_rank(store.url, model, "model")
    optims = _by_rank(store.url, optim, "optimizer")
    if sliced and None in {found["dp"] for _, found in model}:
        raise FormatError(
            f"{store.url}/mp_rank_00_model_states.pt",
            "a model file of ZeRO-0/1/2 beside those of ZeRO-3: one of them is left over from another run",
        )
    return RankFiles(store, models, optims, sliced)


def _refuse(url: str, names: Sequence[str]) -> None:
    """Raise UnsupportedError for the kinds that their file names give away."""
    if "zero/" in names:
        raise UnsupportedError(url, f"a DeepSpeed universal checkpoint (UCP folder): {LATER}")
    if any(_EXPERT.fullmatch(name) for name in names):
        raise UnsupportedError(url, f"a DeepSpeed checkpoint with mixture of experts (expert files): {LATER}")
    if any(_LAYER.fullmatch(name) for name in names):
        raise UnsupportedError(url, f"a DeepSpeed checkpoint with pipeline parallelism (layer files): {LATER}")
    if "offloaded_tensors/" in names:
        raise UnsupportedError(url, f"a DeepSpeed checkpoint whose optimizer state was offloaded to NVMe: {LATER}")


def _by_rank(url: str, found: Sequence[tuple[str, re.Match[str]]], kind: str) -> dict[int, str]:
    """Files by data-parallel rank, in numeric order (rank 10 comes after 9). Raises FormatError when two claim a rank."""
    by_rank: dict[int, str] = {}
    for name, match in sorted(found, key=lambda item: int(item[1]["dp"] or 0)):
        rank = int(match["dp"] or 0)
        if rank in by_rank and match["dp"] is not None:
            second = f"a second {kind} file of rank {rank} beside {by_rank[rank]}"
            raise FormatError(f"{url}/{name}", f"{second}: left over from another run? move one away")
        by_rank[rank] = name
    return by_rank


def expect_ranks(files: Mapping[int, str], world: int, url: str, told_by: str) -> None:
    """Check that the files are those of ranks 0 to world-1.

    Raises MissingFileError or FormatError that names the first file too few or too many; `told_by` says who knows `world`.
    """
    sample = next(iter(files.values()))
    for rank in range(world):
        if rank not in files:
            name = re.sub(r"zero_pp_rank_\d+_", f"zero_pp_rank_{rank}_", sample)
            raise MissingFileError(f"{url}/{name}", f"the file of rank {rank} is missing: {told_by} says {world} ranks")
    for rank in sorted(files):
        if rank >= world:
            raise FormatError(
                f"{url}/{files[rank]}",
                f"the file of a rank {rank}, and {told_by} says {world} ranks: left over from another run? move it away",
            )
