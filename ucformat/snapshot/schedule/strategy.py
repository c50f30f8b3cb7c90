"""How the training is laid out: sizes of the parallel axes, the schedule, and the stages of this rank.

Derived from what the user has anyway, a DeviceMesh with named axes and the schedule object. Which pieces are replicas is
not decided here: `reshard.collect` marks them and `reshard.own` gives each to one writer.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from ucformat.errors import LayoutError
from ucformat.snapshot.schedule.actions import Schedule
from ucformat.snapshot.schedule.from_torch import of_schedule, rank_of

PIPELINE = frozenset({"pp", "pipe", "pipeline"})
TENSOR = frozenset({"tp", "mp", "tensor", "model"})
DATA = frozenset({"data", "ddp", "fsdp", "hsdp", "zero", "replicate", "shard"})  # and whatever begins with "dp"


@dataclass(frozen=True, slots=True)
class Strategy:
    """The layout as one rank sees it."""

    axes: tuple[tuple[str, int], ...]
    """All axes of the mesh by name, outermost first; empty without a mesh."""
    dp: int
    """Ranks over which data are split, sharding axes included."""
    tp: int
    pp: int
    other: int
    """The product of the axes that are none of these (context, expert, …)."""
    schedule: Schedule | None
    rank: int
    """This rank's place in the pipeline."""

    @property
    def stages(self) -> tuple[int, ...]:
        """Stages that this rank holds: none without a schedule."""
        return self.schedule.stages_of(self.rank) if self.schedule else ()

    @property
    def microbatches(self) -> int:
        return self.schedule.microbatches if self.schedule else 1

    def __str__(self) -> str:
        sizes = " × ".join(f"{name} {size}" for name, size in self.axes) or f"pp {self.pp}"
        if self.schedule is None:
            return f"{sizes}: no pipeline schedule"
        stages = ", ".join(map(str, self.stages)) or "none"
        total = len(self.schedule.stage_rank)
        return (
            f"{sizes}: {self.schedule.name}, {self.microbatches} microbatches; rank {self.rank} holds {stages} of {total} stages"
        )


def derive(mesh: DeviceMesh | None = None, schedule: object | None = None, rank: int | None = None) -> Strategy:
    """The strategy of this rank. `schedule` is a torch schedule object, or a `Schedule` of a loop of one's own.

    `rank` in the pipeline is only needed where neither mesh nor schedule tells. Raises LayoutError when mesh and schedule
    contradict each other or the rank is not known; what `of_schedule` raises for a schedule that it can't read.
    """
    axes = _axes(mesh) if mesh is not None else ()
    size = {"dp": 1, "tp": 1, "pp": 1, "other": 1}
    for name, length in axes:
        size[family(name)] *= length
    if schedule is None:
        found = None
    else:
        found = schedule if isinstance(schedule, Schedule) else of_schedule(schedule)
        if any(family(name) == "pp" for name, _ in axes) and size["pp"] != len(found.ranks):
            raise LayoutError(_told(axes), f"the schedule {found.name} runs on {len(found.ranks)} pipeline ranks")
        size["pp"] = len(found.ranks)
    place = _place(mesh, axes, schedule, rank)
    if not 0 <= place < size["pp"]:
        raise LayoutError(_told(axes), f"there is no pipeline rank {place}")
    return Strategy(axes, size["dp"], size["tp"], size["pp"], size["other"], found, place)


def family(axis: str) -> str:
    """Which kind of parallelism an axis of this name is: dp, tp, pp or other."""
    name = axis.lower()
    if name in PIPELINE:
        return "pp"
    if name in TENSOR:
        return "tp"
    return "dp" if name in DATA or name.startswith("dp") else "other"


def _axes(mesh: DeviceMesh) -> tuple[tuple[str, int], ...]:
    names = mesh.mesh_dim_names
    if names is None:
        if mesh.ndim > 1:
            raise LayoutError(f"mesh of shape {list(mesh.shape)}", "its axes have no names: pass mesh_dim_names")
        names = ("dp",)
    return tuple((name, mesh.size(dim)) for dim, name in enumerate(names))


def _place(mesh: DeviceMesh | None, axes: tuple[tuple[str, int], ...], schedule: object | None, rank: int | None) -> int:
    """The rank in the pipeline, from whoever knows it."""
    if rank is not None:
        return rank
    coordinate = mesh.get_coordinate() if mesh is not None else None
    for dim, (name, _) in enumerate(axes):
        if family(name) == "pp" and coordinate is not None:
            return int(coordinate[dim])
    if schedule is None:
        return 0
    if isinstance(schedule, Schedule):
        if len(schedule.ranks) == 1:
            return 0
        raise LayoutError(_told(axes), "neither a mesh with a pipeline axis nor `rank` tells the rank in the pipeline")
    return rank_of(schedule)


def _told(axes: tuple[tuple[str, int], ...]) -> str:
    return " × ".join(f"{name} {size}" for name, size in axes) or "without a mesh"
