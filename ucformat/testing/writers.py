"""What every writer must do: write exactly what it is given, appear only when complete, and leave nothing when it fails."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from ucformat import values
from ucformat.box import Box
from ucformat.catalog import Catalog, TensorSpec
from ucformat.containers.file_image import ByteRequest
from ucformat.dtypes import DTYPES, from_torch
from ucformat.errors import ConflictError, ExistsError, StorageError, UcformatError
from ucformat.formats import Reader, WriteJob, Writer, locate
from ucformat.formats.target import OutputBox
from ucformat.storage.open import open_store
from ucformat.testing.bits import bits, files_in, read_all, same

VALUES: dict[str, object] = {
    "step": 7,
    "lr": [1e-3, float("inf"), -0.0],
    "tuple": (1, (2, None), ()),
    "keys": {1: "one", "a/b": True, "": {}},
    "text": "ünï/%2F",
    "bytes": b"\x00\xff",
    "big": 1 << 70,
}
"""What a format that keeps values has to keep exactly."""


class WriterTests:
    """Subclass this, and set `writer` and the `reader` by which its checkpoints are read back.

    Writers are called as a conversion calls them, on one rank.
    """

    writer: Writer
    reader: Reader
    dtypes: Sequence[str] = tuple(name for name in DTYPES if not name.startswith("F6_"))
    """Names of the dtypes that the format can hold."""
    values: ClassVar[Mapping[str, object]] = VALUES
    """The values that are written and read back, for a format that keeps values."""

    # -- the bytes ---------------------------------------------------------------------------------------------------------

    def test_every_dtype_and_shape_comes_back_bit_for_bit(self, tmp_path: Path) -> None:
        tensors = samples(self.dtypes)
        self._write(tmp_path / "out", tensors)
        found = read_all(self._open(tmp_path / "out"))
        assert found.keys() == tensors.keys()
        assert [name for name, tensor in tensors.items() if not same(found[name], tensor)] == []

    def test_tied_tensors_are_read_under_both_names(self, tmp_path: Path) -> None:
        tensors = samples(["F32"])
        first = min(tensors)
        self._write(tmp_path / "out", tensors, aliases={"model/tied": first})
        found = read_all(self._open(tmp_path / "out"))
        assert same(found["model/tied"], tensors[first])

    def test_values_come_back_exactly(self, tmp_path: Path) -> None:
        held = {} if self.writer.values == "none" else dict(self.values)
        self._write(tmp_path / "out", samples(["F32"]), tree=held)
        assert values.encode(self._open(tmp_path / "out").values) == values.encode(held)

    def test_boxes_of_tensors_make_the_whole_again(self, tmp_path: Path) -> None:
        tensor = _random("F32", (6, 5))
        spec = TensorSpec("model/w", "F32", (6, 5))
        boxes = [Box((0, 0), (2, 5)), Box((2, 0), (4, 2)), Box((2, 2), (4, 3))]
        job = self._job(tmp_path / "out", {"model/w": tensor})
        parts = [bits(tensor[box.slices]) for box in boxes]
        job = replace(job, targets=[OutputBox(spec, box) for box in boxes], fill=_filler(parts), layout=[[0, 2], [1]])
        if not self.writer.takes_layout:
            with pytest.raises(UcformatError):
                self.writer.write(replace(job, layout=None))
            assert not os.path.lexists(tmp_path / "out")
            return
        self.writer.write(job)
        assert same(read_all(self._open(tmp_path / "out"))["model/w"], tensor)

    def test_progress_adds_up_to_all_bytes(self, tmp_path: Path) -> None:
        tensors, lock, done = samples(["F32", "U8"]), threading.Lock(), [0]

        def on_bytes(nbytes: int) -> None:
            with lock:
                done[0] += nbytes

        self.writer.write(replace(self._job(tmp_path / "out", tensors), on_bytes=on_bytes))
        assert done[0] == sum(tensor.nbytes for tensor in tensors.values())

    def test_the_files_that_a_dry_run_lists_hold_all_bytes(self, tmp_path: Path) -> None:
        tensors = samples(["F32", "U8"])
        job, _ = self.writer.prepare(replace(self._job(tmp_path / "out", tensors), max_file_bytes=512))
        assert sum(self.writer.file_sizes(job)) == sum(tensor.nbytes for tensor in tensors.values())

    # -- all or nothing ------------------------------------------------------------------------------------------------------

    def test_what_is_there_is_replaced_only_when_asked(self, tmp_path: Path) -> None:
        old, new = samples(["F32"]), samples(["F16"])
        self._write(tmp_path / "out", old)
        before = files_in(tmp_path)
        with pytest.raises(ExistsError):
            self._write(tmp_path / "out", new)
        assert files_in(tmp_path) == before
        self._write(tmp_path / "out", new, overwrite=True)
        assert self._holds(tmp_path / "out", new)
        assert os.listdir(tmp_path) == ["out"]

    def test_files_of_others_stay_when_it_is_replaced(self, tmp_path: Path) -> None:
        self._write(tmp_path / "out", samples(["F32"]))
        mine = tmp_path / "mine.txt" if self.writer.single_file else tmp_path / "out" / "mine.txt"
        mine.write_text("mine")
        self._write(tmp_path / "out", samples(["F16"]), overwrite=True)
        assert mine.read_text() == "mine"

    @pytest.mark.parametrize("old", [False, True], ids=["new", "replacing"])
    @pytest.mark.parametrize("when", ["first bytes", "last bytes", "before the commit"])
    def test_a_failure_leaves_what_was_there(self, tmp_path: Path, old: bool, when: str) -> None:
        if old:
            self._write(tmp_path / "out", samples(["F32"]))
        before = _all_paths(tmp_path), files_in(tmp_path)
        tensors = samples(["F32", "F16", "U8"])
        job = replace(self._job(tmp_path / "out", tensors), overwrite=old)

        def fail(*_: object) -> None:
            raise StorageError("the source", "is gone")

        failing = (
            replace(job, finish=fail)
            if when == "before the commit"
            else replace(job, fill=_failing(job, fail, first=when == "first bytes"))
        )
        with pytest.raises(StorageError, match="is gone"):
            self.writer.write(failing)
        assert (_all_paths(tmp_path), files_in(tmp_path)) == before

    @pytest.mark.parametrize("old", [False, True], ids=["new", "replacing"])
    def test_a_kill_leaves_what_was_there_and_the_next_one_clears_up(self, tmp_path: Path, old: bool) -> None:
        was, new = samples(["F32"]), samples(["F16", "U8"])
        if old:
            self._write(tmp_path / "out", was)
        job = replace(self._job(tmp_path / "out", new), overwrite=old)
        _in_child(lambda: self.writer.write(replace(job, finish=lambda: os._exit(9))))  # all is written, nothing committed
        assert self._holds(tmp_path / "out", was) if old else not self._is_there(tmp_path / "out")
        self._write(tmp_path / "out", new, overwrite=old)
        assert self._holds(tmp_path / "out", new)
        assert os.listdir(tmp_path) == ["out"], "what was left is cleared away"

    def test_of_two_that_write_to_one_place_one_succeeds(self, tmp_path: Path) -> None:
        both = [samples(["F32"]), samples(["F16"])]
        barrier = threading.Barrier(2)

        def attempt(tensors: Mapping[str, torch.Tensor]) -> bool:
            def wait() -> None:
                try:
                    barrier.wait(5)
                except threading.BrokenBarrierError:
                    pass  # the other was refused before it came here

            try:
                self.writer.write(replace(self._job(tmp_path / "out", tensors), finish=wait))
            except (ExistsError, ConflictError):
                barrier.abort()
                return False
            return True

        with ThreadPoolExecutor(2) as pool:
            done = list(pool.map(attempt, both))
        assert done.count(True) == 1
        assert self._holds(tmp_path / "out", both[done.index(True)])

    # -- how it is called ------------------------------------------------------------------------------------------------------

    def _job(
        self,
        path: Path,
        tensors: Mapping[str, torch.Tensor],
        *,
        tree: object = None,
        aliases: Mapping[str, str] | None = None,
        overwrite: bool = False,
    ) -> WriteJob:
        specs = [TensorSpec(name, from_torch(tensor.dtype).name, tuple(tensor.shape)) for name, tensor in sorted(tensors.items())]
        alone = self.writer.single_file
        return WriteJob(
            store=open_store(str(path.parent if alone else path)),
            file=path.name if alone else None,
            targets=[OutputBox(spec, Box.whole(spec.shape)) for spec in specs],
            fill=_filler([bits(tensors[spec.name]) for spec in specs]),
            values={} if tree is None else tree,
            aliases=aliases or {},
            overwrite=overwrite,
        )

    def _write(
        self,
        path: Path,
        tensors: Mapping[str, torch.Tensor],
        *,
        tree: object = None,
        aliases: Mapping[str, str] | None = None,
        overwrite: bool = False,
    ) -> None:
        self.writer.write(self._job(path, tensors, tree=tree, aliases=aliases, overwrite=overwrite))

    def _open(self, path: Path) -> Catalog:
        source = locate(str(path))
        assert self.reader.detect(source)
        return self.reader.open_catalog(source)

    def _holds(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> bool:
        found = read_all(self._open(path))
        return found.keys() == tensors.keys() and all(same(found[name], tensors[name]) for name in tensors)

    def _is_there(self, path: Path) -> bool:
        try:
            return self.reader.detect(locate(str(path)))
        except UcformatError:
            return False


def samples(dtypes: Sequence[str]) -> dict[str, torch.Tensor]:
    """Tensors of each dtype, with names of a model: a matrix, a vector of an odd length, a scalar, and an empty one."""
    shapes = {"matrix": (3, 5), "vector": (7,), "scalar": (), "empty": (0, 4)}
    kept = ((dtype, kind) for dtype in dtypes for kind in shapes if shapes[kind] or DTYPES[dtype].group == (1, 1))
    return {f"model/{dtype.lower()}.{kind}": _random(dtype, shapes[kind]) for dtype, kind in kept}  # packed: no scalars


def _random(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bits, NaNs of all kinds among them."""
    kind = DTYPES[dtype]
    out = kind.empty(shape)
    nbytes = out.numel() * kind.itemsize
    data = np.random.default_rng(nbytes).integers(0, 2 if dtype == "BOOL" else 256, nbytes, dtype=np.uint8)
    return torch.from_numpy(data).view(kind.torch).view(shape) if nbytes else out


def _filler(parts: Sequence[bytes]) -> Callable[[Sequence[ByteRequest]], None]:
    arrays = [np.frombuffer(part, dtype=np.uint8) for part in parts]

    def fill(requests: Sequence[ByteRequest]) -> None:
        for request in requests:
            request.out[:] = arrays[request.piece][request.start : request.stop]

    return fill


def _failing(job: WriteJob, fail: Callable[..., None], *, first: bool) -> Callable[[Sequence[ByteRequest]], None]:
    """A fill that fails when it is asked for its first bytes, or for those of the last tensor."""
    last = max(i for i, target in enumerate(job.targets) if target.nbytes)

    def fill(requests: Sequence[ByteRequest]) -> None:
        if first or any(request.piece == last for request in requests):
            fail()
        job.fill(requests)

    return fill


def _all_paths(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def _in_child(call: Callable[[], None]) -> None:
    """Call it in a forked process, which has to be ended by it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks of a process with threads: the child needs none of them
        child = os.fork()
    if child == 0:
        try:
            call()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, "the writer did not call WriteJob.finish"
