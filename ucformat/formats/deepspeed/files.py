"""Which files make up a DeepSpeed checkpoint: the tag folder, the names in it, the ranks they stand for.

Only directory listings and the text of `latest` are read here. Kinds that this release does not read (offloaded state, experts
without ZeRO) are told apart by their file names.
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
_LAYER = re.compile(r"layer_(?P<layer>\d+)(?:-model_(?P<tp>\d+))?-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")
_EXPERT_OPTIM = re.compile(r"expp_rank_\d+_mp_rank_\d+_optim_states\.pt")
_TAG = re.compile(r"global_step\d+/|pytorch_model/|checkpoint/")
"""Folders that DeepSpeed, Accelerate and Lightning put tags into, looked at when `latest` is missing."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one checkpoint. Paths are relative to `store`, the tag folder.

    `mp` is DeepSpeed's model-parallel rank, `stage * tensor ranks + tensor rank`; `dp` the data-parallel one.
    """

    store: Store
    model: Mapping[int, Mapping[int, str]]
    """mp → dp → model file: one per data-parallel rank under ZeRO-3, else the single file under 0."""
    optim: Mapping[int, Mapping[int, str]]
    """mp → dp → optimizer file; empty under ZeRO-0."""
    sliced: bool
    """Whether the model files are one per data-parallel rank (ZeRO-3)."""
    layers: Mapping[int, Mapping[int, str]]
    """Tensor rank → layer of a pipeline → file of its weights."""
    layers_by_rank: bool
    """Whether the layer files name a tensor rank: without, they are those of all of them."""
    experts: Mapping[int, Mapping[tuple[int, int], str]]
    """mp → (mixture-of-experts layer, expert) → file of its weights."""


def _is_deepspeed(names: Iterable[str]) -> bool:
    return any(pattern.fullmatch(name) for name in names for pattern in (_MODEL, _OPTIM, _LAYER, _EXPERT, _EXPERT_OPTIM))


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

    Raises UnsupportedError for kinds that are not read, MissingFileError and FormatError naming files that
    are missing or doubled, NotACheckpointError when nothing is found.
    """
    store = _find(source.store)
    if store is None:
        raise NotACheckpointError(source.url, "no DeepSpeed files in it")
    names = store.list()
    _refuse(store.url, names)
    model = [(name, found) for name in names if (found := _MODEL.fullmatch(name))]
    optim = [(name, found) for name in names if (found := _OPTIM.fullmatch(name))]
    if not model:
        raise MissingFileError(f"{store.url}/mp_rank_00_model_states.pt", "the model file of the other files is missing")
    sliced = any(found["dp"] is not None for _, found in model)
    if sliced and (odd := [name for name, found in model if found["dp"] is None]):
        raise FormatError(
            f"{store.url}/{odd[0]}",
            "a model file of ZeRO-0/1/2 beside those of ZeRO-3: one of them is left over from another run",
        )
    layers, by_rank = _layers(store.url, names)
    return RankFiles(
        store, _grid(store.url, model, "model"), _grid(store.url, optim, "optimizer"), sliced, layers, by_rank, _experts(names)
    )


def _refuse(url: str, names: Sequence[str]) -> None:
    """Raise UnsupportedError for the kinds that their file names give away."""
    if any(_EXPERT_OPTIM.fullmatch(name) for name in names):
        raise UnsupportedError(url, f"a DeepSpeed checkpoint with mixture of experts under ZeRO-0 (expp_rank files): {LATER}")
    if "offloaded_tensors/" in names:
        raise UnsupportedError(url, f"a DeepSpeed checkpoint whose optimizer state was offloaded to NVMe: {LATER}")


def _grid(url: str, found: Sequence[tuple[str, re.Match[str]]], kind: str) -> dict[int, dict[int, str]]:
    """Files by model-parallel, then data-parallel rank, in numeric order (rank 10 comes after 9).

    Raises FormatError when two claim a place.
    """
    grid: dict[int, dict[int, str]] = {}
    for name, match in sorted(found, key=lambda item: (int(item[1]["mp"]), int(item[1]["dp"] or 0))):
        mp, dp = int(match["mp"]), int(match["dp"] or 0)
        row = grid.setdefault(mp, {})
        if dp in row:
            second = f"a second {kind} file of rank {dp} beside {row[dp]}"
            raise FormatError(f"{url}/{name}", f"{second}: left over from another run? move one away")
        row[dp] = name
    return grid


def _layers(url: str, names: Sequence[str]) -> tuple[dict[int, dict[int, str]], bool]:
    """Layer files by tensor rank and layer, and whether their names say the rank. Raises FormatError for a mix."""
    found = [(name, match) for name in names if (match := _LAYER.fullmatch(name))]
    kinds = {match["tp"] is not None for _, match in found}
    if len(kinds) > 1:
        odd = next(name for name, match in found if match["tp"] is None)
        why = "a layer file without a tensor rank beside some with one: left over from another run? move it away"
        raise FormatError(f"{url}/{odd}", why)
    layers: dict[int, dict[int, str]] = {}
    for name, match in sorted(found, key=lambda item: int(item[1]["layer"])):
        row = layers.setdefault(int(match["tp"] or 0), {})
        if int(match["layer"]) in row:
            raise FormatError(f"{url}/{name}", f"a second file of the layer of {row[int(match['layer'])]}: move one away")
        row[int(match["layer"])] = name
    return layers, True in kinds


def _experts(names: Sequence[str]) -> dict[int, dict[tuple[int, int], str]]:
    """Expert files by model-parallel rank, layer (0 where old names have none) and global expert."""
    experts: dict[int, dict[tuple[int, int], str]] = {}
    for name in names:
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(int(match["mp"]), {})[int(match["layer"] or 0), int(match["expert"])] = name
    return {mp: dict(sorted(row.items())) for mp, row in sorted(experts.items())}


def expect_ranks(files: Mapping[int, str], world: int, url: str, source: str) -> None:
    """Check that the files are those of data-parallel ranks 0 to world-1.

    Raises MissingFileError or FormatError that names the first file too few or too many; `source` says who knows `world`.
    """
    sample = next(iter(files.values()))
    for rank in range(world):
        if rank not in files:
            name = re.sub(r"zero_pp_rank_\d+_", f"zero_pp_rank_{rank}_", sample)
            raise MissingFileError(f"{url}/{name}", f"the file of rank {rank} is missing: {source} says {world} ranks")
    for rank in sorted(files):
        if rank >= world:
            raise FormatError(
                f"{url}/{files[rank]}",
                f"the file of a rank {rank}, and {source} says {world} ranks: left over from another run? move it away",
            )


def expect_model_ranks(files: RankFiles, degree: int, source: str) -> None:
    """Check that there are model and optimizer files of model-parallel ranks 0 to degree-1, and of no others.

    Raises MissingFileError or FormatError that names the first file too few or too many.
    """
    url = files.store.url
    for grid in filter(None, (files.model, files.optim)):
        sample = next(iter(next(iter(grid.values())).values()))
        for mp in range(degree):
            if mp not in grid:
                name = re.sub(r"mp_rank_\d+", f"mp_rank_{mp:02d}", sample)
                raise MissingFileError(
                    f"{url}/{name}", f"the file of model-parallel rank {mp} is missing: {source} says {degree} of them"
                )
        if odd := [mp for mp in grid if mp >= degree]:
            name = next(iter(grid[odd[0]].values()))
            why = f"the file of a model-parallel rank {odd[0]}, and {source} says {degree} of them: left over from another run?"
            raise FormatError(f"{url}/{name}", f"{why} move it away")
