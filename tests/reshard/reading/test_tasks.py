"""Cutting plans into tasks: all that was wanted, in file order, no block for two tasks where that can be helped."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoints import CountingStore, bits, open_native, write_native
from tests.reshard.ranks import catalog_of
from ucformat.box import Box
from ucformat.catalog import Catalog, CatalogBuilder, File
from ucformat.containers.checksums import BLOCK_BYTES
from ucformat.reshard.reading.execute import execute
from ucformat.reshard.reading.plan import TASK_BYTES, plan, wants
from ucformat.reshard.reading.tasks import tasks
from ucformat.storage.local import LocalStore

MIB = 1 << 20


def _catalog(*sizes: int) -> Catalog:
    """Tensors of these bytes, one after the other in one file that nobody reads."""
    builder = CatalogBuilder(LocalStore("/nowhere"))
    file = builder.file(File("data", sum(sizes)))
    at = 0
    for i, size in enumerate(sizes):
        builder.tensor(f"t{i:03}", "U8", (size,))
        builder.fragment(f"t{i:03}", file, at)
        at += size
    return builder.build(None)


SIZES = st.lists(st.one_of(st.integers(1, 100), st.integers(1, 3 * TASK_BYTES)), min_size=1, max_size=12)


@given(SIZES, st.data())
def test_tasks_bring_every_byte_that_is_wanted_once_to_every_one_who_wants_it(sizes: list[int], data: st.DataObject) -> None:
    catalog = _catalog(*sizes)
    wanted = data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=12))
    planned = plan(catalog, wants(catalog, [(f"t{i:03}", None) for i in wanted]))
    flat = np.array(data.draw(st.lists(st.booleans(), min_size=len(planned.want), max_size=len(planned.want))), dtype=bool)
    found = tasks(planned, flat, {0: None})
    brought: dict[int, list[tuple[int, int]]] = {}
    for task in found:
        assert task.segments
        for piece, start, stop in task.segments:
            assert task.start <= start < stop <= task.stop
            brought.setdefault(piece, []).append((start, stop))
    for piece, (start, stop) in enumerate(zip(planned.start.tolist(), planned.stop.tolist(), strict=True)):
        parts = sorted(brought[piece])
        assert [start, *(b for _, b in parts)] == [*(a for a, _ in parts), stop], "without gaps, nothing twice"
    assert all(a.start <= b.start for a, b in pairwise(found))
    if flat.all():
        assert all(task.stop - task.start <= TASK_BYTES for task in found)


def test_loading_all_of_a_file_reads_no_block_twice(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        f"t{i:02}": torch.randint(0, 256, (n * 101,), dtype=torch.uint8) for i, n in enumerate([50_000] * 7 + [200_000, 3])
    }
    write_native(tmp_path / "ck", tensors, shards=1)
    catalog = open_native(CountingStore(str(tmp_path / "ck")))
    store = catalog.store
    assert isinstance(store, CountingStore)
    store.read_bytes.clear()
    out = [torch.empty_like(tensor) for tensor in tensors.values()]
    execute(plan(catalog, wants(catalog, [(name, None) for name in tensors])), out)
    shard = next(size for path, size in store.read_bytes.items() if "shards" in path)
    assert shard <= sum(tensor.nbytes for tensor in tensors.values()) + 2 * BLOCK_BYTES
    assert [bits(tensor) for tensor in out] == [bits(tensor) for tensor in tensors.values()]


def test_overlapping_parts_of_a_large_tensor_all_arrive(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensor = torch.randint(0, 256, (5 * TASK_BYTES // 2,), dtype=torch.uint8)
    catalog = catalog_of(tmp_path, {"w": tensor, "v": tensor[:100]})
    size = len(tensor)
    parts = [(0, size), (0, size), *((a * MIB, b * MIB) for a, b in ((3, 12), (3, 4), (12, 14), (14, 15), (17, 18)))]
    out = [torch.zeros(stop - start, dtype=torch.uint8) for start, stop in parts]
    columns = wants(catalog, [("w", Box((start,), (stop - start,))) for start, stop in parts])
    execute(plan(catalog, columns), out)
    for (start, stop), found in zip(parts, out, strict=True):
        assert bits(found) == bits(tensor[start:stop]), (start, stop)
