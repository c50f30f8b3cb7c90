"""Which rank of the tensor, pipeline and expert parallel groups each folder is, and whether all of them are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ucformat.errors import FormatError, MissingFileError, UnsupportedError
from ucformat.formats.megatron.names import LAYER, STACKED_EXPERTS, expert_of
from ucformat.formats.megatron.ranks import Opened, Part, RankFile
from ucformat.formats.megatron.settings import Settings

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Grid:
    """Sizes of the groups, and the rank files by place."""

    tp: int
    pp: int
    ep: int
    etp: int
    """Tensor parallel size within experts."""
    ranks: tuple[RankFile, ...]
    virtual: int
    """Model parts of each rank."""

    def dense(self, pp: int) -> list[list[RankFile]]:
        """For each tensor rank of a pipeline stage, the files that hold it: one for each rank of the expert group."""
        return [[rank for rank in self.ranks if (rank.pp, rank.tp) == (pp, tp)] for tp in range(self.tp)]

    def experts(self, pp: int, ep: int) -> list[list[RankFile]]:
        """For each tensor rank within the experts of a pipeline stage and expert rank, the files that hold it."""
        held = [rank for rank in self.ranks if (rank.pp, rank.ep) == (pp, ep)]
        return [held] if self.etp == 1 else [[rank for rank in held if rank.tp == tp] for tp in range(self.etp)]

    def first_layers(self) -> dict[tuple[int, int], dict[str, int]]:
        """For each pipeline stage and model part, the number of its first layer in each stack of layers.

        Layers are dealt out part by part, within a part stage by stage, so the numbers follow from how many each has.
        """
        done: dict[str, int] = {}
        first: dict[tuple[int, int], dict[str, int]] = {}
        for v in range(self.virtual):
            for pp in range(self.pp):
                part = self.dense(pp)[0][0].parts[v]
                counts = _layers(part)
                first[pp, v] = {stack: done.get(stack, 0) for stack in counts}
                for stack, count in counts.items():
                    done[stack] = done.get(stack, 0) + count
        return first

    def layers(self) -> dict[str, int]:
        """How many layers each stack has in all."""
        total: dict[str, int] = {}
        for pp in range(self.pp):
            for part in self.dense(pp)[0][0].parts:
                for stack, count in _layers(part).items():
                    total[stack] = total.get(stack, 0) + count
        return total


def _layers(part: Part) -> dict[str, int]:
    """Stack → number of layers in this part. Raises FormatError when they are not numbered from 0."""
    found: dict[str, set[int]] = {}
    for name in part.tensors:
        match = LAYER.fullmatch(name)
        if match:
            found.setdefault(match["stack"], set()).add(int(match["index"]))
    for stack, numbers in found.items():
        if numbers != set(range(len(numbers))):
            raise FormatError(part.file, f"the layers of {stack} are numbered {sorted(numbers)[:_SHOWN]}, not from 0 on")
    return {stack: len(numbers) for stack, numbers in found.items()}


def arrange(opened: Opened, ranks: Sequence[RankFile], settings: Settings) -> Grid:
    """Give each file its place. Raises MissingFileError naming the ranks that are not there, FormatError and UnsupportedError."""
    url = opened.store.url
    _number(ranks, settings, url)
    tp, pp, ep = (max(getattr(rank, axis) for rank in ranks) + 1 for axis in ("tp", "pp", "ep"))
    tp = max(tp, settings.number("tensor_model_parallel_size") or 1)
    pp = max(pp, settings.number("pipeline_model_parallel_size") or 1)
    has_experts = any(_has_experts(part) for rank in ranks for part in rank.parts)
    ep = max(ep, (settings.number("expert_model_parallel_size") or 1) if has_experts else 1)
    _expect(ranks, tp, pp, ep, url)
    virtual = {len(rank.parts) for rank in ranks}
    if len(virtual) > 1:
        raise FormatError(url, f"some ranks have {min(virtual)} model parts and others {max(virtual)}: of different runs?")
    etp = _expert_tensor_size(opened, ranks, settings, tp, url) if has_experts else tp
    return Grid(tp, pp, ep, etp, tuple(ranks), virtual.pop())


def _has_experts(part: Part) -> bool:
    return any(expert_of(name) or STACKED_EXPERTS.fullmatch(name) for name in part.tensors)


def _number(ranks: Sequence[RankFile], settings: Settings, url: str) -> None:
    """Set `tp`, `pp` and `ep` of each file. The second of two numbers is the stage's or the expert rank's: see `_is_expert`."""
    count = len(ranks[0].numbers)
    second = "ep" if count == 2 and _is_expert(ranks, settings, url) else "pp"
    for rank in ranks:
        rank.tp = rank.numbers[0]
        if count == 3:
            rank.pp, rank.ep = rank.numbers[1:]
        elif count == 2:
            setattr(rank, second, rank.numbers[1])


def _is_expert(ranks: Sequence[RankFile], settings: Settings, url: str) -> bool:
    """Whether the second number counts expert ranks: what the arguments say, and what is in the files.

    Files of an expert group all repeat the parameters that are no experts; stages of a pipeline share none but embeddings.
    """
    pp, ep = settings.number("pipeline_model_parallel_size"), settings.number("expert_model_parallel_size")
    held = [rank for rank in ranks if rank.tp == ranks[0].tp]
    dense = [{name for part in rank.parts for name in part.tensors if not expert_of(name)} for rank in held]
    alike = len(held) > 1 and all(names == dense[0] for names in dense)
    experts = any(_has_experts(part) for rank in ranks for part in rank.parts)
    if pp is not None or ep is not None:
        if (pp or 1) > 1 and (ep or 1) > 1:
            raise FormatError(url, f"arguments say pipeline size {pp} and expert size {ep}, but folders have only two numbers")
        by_arguments = (ep or 1) > 1
        if alike and by_arguments != experts and experts:
            raise FormatError(url, "arguments say that folders are stages of a pipeline, but all hold the same layers")
        return by_arguments
    if len(held) == 1 and experts:
        raise UnsupportedError(url, f"{held[0].path}: nothing says whether the second number is the pipeline's or the experts'")
    return alike and experts


def _expect(ranks: Sequence[RankFile], tp: int, pp: int, ep: int, url: str) -> None:
    """Every dense shard and every expert rank of every stage must be there. Raises MissingFileError."""
    dense = {(rank.tp, rank.pp) for rank in ranks}
    experts = {(rank.pp, rank.ep) for rank in ranks}
    lost = [_folder(t, p, None, pp, ep) for p in range(pp) for t in range(tp) if (t, p) not in dense]
    lost += [_folder(None, p, e, pp, ep) for p in range(pp) for e in range(ep) if (p, e) not in experts]
    if lost:
        shown = ", ".join(lost[:_SHOWN]) + (f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else "")
        sizes = f"tensor size {tp}, pipeline size {pp}, expert size {ep}"
        raise MissingFileError(f"{url}/{lost[0]}", f"missing: {shown} ({sizes}); there is {len(ranks)} of them")


def _folder(tp: int | None, pp: int, ep: int | None, pps: int, eps: int) -> str:
    """The name of a rank's folder; where a number may be any, a star."""
    name = "mp_rank_" + ("*" if tp is None else f"{tp:02d}")
    name += f"_{pp:03d}" if pps > 1 else ""
    return name + (("_*" if ep is None else f"_{ep:03d}") if eps > 1 else "")


def _expert_tensor_size(opened: Opened, ranks: Sequence[RankFile], settings: Settings, tp: int, url: str) -> int:
    """The tensor parallel size within experts. Without arguments, equal files show that experts are not cut."""
    told = settings.number("expert_tensor_parallel_size")
    if told is None and tp > 1:
        by_place: dict[tuple[int, int], list[RankFile]] = {}
        for rank in ranks:
            by_place.setdefault((rank.pp, rank.ep), []).append(rank)
        groups = [group for group in by_place.values() if len(group) == tp]
        if not groups:
            return 1  # each expert rank has one file: nothing else could hold another slice
        told = 1 if all(_experts_alike(opened, group) for group in groups) else tp
    if told not in (None, 1, tp):
        raise UnsupportedError(url, f"experts are cut over {told} ranks and the rest over {tp}: only 1 and {tp} are read")
    return told or tp


def _experts_alike(opened: Opened, group: Sequence[RankFile]) -> bool:
    """Whether the first expert weight is the same in all of these files."""
    for v, part in enumerate(group[0].parts):
        for name, tensor in part.tensors.items():
            if (expert_of(name) or STACKED_EXPERTS.fullmatch(name)) and len(tensor.shape) > 1:
                others = (rank.parts[v].tensors.get(name) for rank in group[1:])
                return all(other is not None and opened.same(tensor, other) for other in others)
    return False


def stages(grid: Grid) -> Mapping[str, int]:
    """The mesh of the run, as far as it is known."""
    sizes = {"tp": grid.tp, "pp": grid.pp, "ep": grid.ep}
    return {axis: size for axis, size in sizes.items() if size > 1}
