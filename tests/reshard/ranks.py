"""Real gloo ranks for tests, what they hold, and a catalog of it that can be read back."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from tests.scripts import forked
from ucformat import box as boxes
from ucformat import values
from ucformat.box import Box
from ucformat.catalog import Catalog, CatalogBuilder, File, TensorSpec
from ucformat.dtypes import from_torch
from ucformat.group import current
from ucformat.reshard.reading.execute import execute
from ucformat.reshard.reading.lazy import read_many
from ucformat.reshard.reading.plan import plan, wants
from ucformat.reshard.restoring.prepare import Loading, prepare, restore
from ucformat.reshard.state.walk import Collected, collect
from ucformat.storage.open import open_store


@dataclass
class Held:
    """What one rank collected, in memory of its own."""

    specs: tuple[TensorSpec, ...]
    pieces: list[tuple[str, Box, torch.Tensor]]
    replicated: dict[str, bool]
    values: Any
    aliases: dict[str, str]
    mesh: dict[str, int]
    coords: dict[str, int] | None


def held(state: Mapping[str, object]) -> Held:
    """Collect `state` on this rank."""
    return keep(collect(state, current()))


def keep(found: Collected) -> Held:
    for piece in found.pieces:
        assert tuple(piece.view.shape) == piece.box.length
    return Held(
        found.specs,
        [(piece.spec.name, piece.box, piece.view.clone()) for piece in found.pieces],
        {piece.spec.name: piece.replicated for piece in found.pieces},
        found.values,
        dict(found.aliases),
        dict(found.mesh),
        None if found.coords is None else dict(found.coords),
    )


def union(ranks: Sequence[Held]) -> dict[str, torch.Tensor]:
    """The logical tensors that the ranks hold together: every element there, once, or several times alike."""
    aliases = {alias for rank in ranks for alias in rank.aliases}
    specs = {spec.name: spec for rank in ranks for spec in rank.specs if spec.name not in aliases}
    out = {}
    for name, spec in specs.items():
        assert all(spec in rank.specs for rank in ranks if name in {s.name for s in rank.specs})
        full = torch.zeros(spec.shape, dtype=spec.kind.torch)
        distinct: dict[Box, torch.Tensor] = {}
        for rank in ranks:
            for piece, box, data in rank.pieces:
                if piece == name:
                    assert same(distinct.setdefault(box, data), data), f"{name}: replicas of {box} differ"
        for box, data in distinct.items():
            full[box.slices] = data
        offset = boxes.pad([box.offset for box in distinct], len(spec.shape), 0)
        length = boxes.pad([box.length for box in distinct], len(spec.shape), 1)
        assert boxes.flaw(Box.whole(spec.shape), offset, length) is None, f"{name}: {sorted(map(str, distinct))}"
        out[name] = full
    return out


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in shape, dtype and every bit."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert same(found[name], tensor.detach()), name


def catalog_of(
    directory: Path, tensors: Mapping[str, torch.Tensor], tree: object = None, aliases: Mapping[str, str] | None = None
) -> Catalog:
    """A catalog of whole tensors, with their bytes in one raw file in `directory`."""
    builder = CatalogBuilder(open_store(str(directory)))
    data = {name: t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in tensors.items()}
    (directory / "data").write_bytes(b"".join(data.values()))
    file = builder.file(File("data", sum(map(len, data.values()))))
    at = 0
    for name, tensor in tensors.items():
        builder.tensor(name, from_torch(tensor.dtype).name, tensor.shape)
        builder.fragment(name, file, at)
        at += len(data[name])
    for alias, target in (aliases or {}).items():
        builder.alias(alias, target)
    return builder.build(tree)


def catalog_of_ranks(directory: Path, ranks: Sequence[Held]) -> Catalog:
    aliases = {alias: target for rank in ranks for alias, target in rank.aliases.items()}
    return catalog_of(directory, union(ranks), values.merge([rank.values for rank in ranks]), aliases)


def load(state: dict[str, object], catalog: Catalog) -> Loading:
    """Load a catalog into a live state, as `ucformat.load` does."""
    loading = prepare(state, catalog, current())
    assert not loading.missing
    columns = wants(catalog, [(piece.spec.name, piece.box) for piece in loading.pieces])
    execute(plan(catalog, columns), [piece.view for piece in loading.pieces], threads=1)
    fresh = read_many(catalog, [(name, None) for name in loading.fresh], threads=1)
    restore(loading, dict(zip(loading.fresh, fresh, strict=True)))
    return loading


def on_ranks(world: int, function: Callable[..., Any], *args: object) -> list[Any]:
    """Run `function(*args)` on `world` gloo ranks; what each returned, in rank order. `function` is a module's own."""
    forked()  # much faster than spawning
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_main, (world, folder, function, args), nprocs=world, start_method="forkserver")
        return [pickle.loads(Path(folder, f"rank{rank}").read_bytes()) for rank in range(world)]


def _main(rank: int, world: int, folder: str, function: Callable[..., Any], args: Iterable[object]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        torch.manual_seed(0)
        result = function(*args)
        Path(folder, f"rank{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()
