"""What every reader must do: say truly what is stored, prove that all of it is there, and refuse what is damaged by name."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import ucformat
from ucformat import formats, values
from ucformat.catalog import Catalog
from ucformat.dtypes import DTYPES
from ucformat.errors import UcformatError
from ucformat.formats import Reader, Source, locate
from ucformat.reshard.reading.lazy import Checkpoint
from ucformat.reshard.reading.plan import plan, wants
from ucformat.testing.bits import bits, files_in, read_all, same

_SUFFIXES = (".pt", ".bin", ".safetensors", ".json", ".index.json", ".distcp", ".npz", ".metadata")
_JUNK = (b"", b"\0" * 300, b"[]", b"{}", b"null", b'"x"', b"[" * 100_000, b"\x80\x04.", b"PK\x03\x04" + b"\xff" * 60)
"""What a file is replaced with: nothing, zeros, other JSON, JSON nested without end, an empty pickle, the start of a zip."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A checkpoint, and what is in it."""

    path: Path
    """Its directory, or its one file."""
    tensors: Mapping[str, torch.Tensor]
    """By canonical name, aliases included. Two dimensions or more, and a scalar, show more."""
    values: object = None
    """The value tree; None: it isn't compared."""


class ReaderTests:
    """Subclass this, set `reader`, and override `make`.

    The reader must be registered as an entry point, or be one of ucformat's own, since paths are opened by it, too.
    """

    reader: Reader
    checks_every_byte: bool = False
    """Whether the format has checksums, so that no flipped bit of a tensor may go unnoticed."""
    flips: int = 40
    """How many single bits are flipped, one at a time, each in a copy."""

    def make(self, folder: Path) -> Sample:
        """Write a small checkpoint (kilobytes) into `folder`, which exists and is empty, preferably by its own program.

        Nothing but the checkpoint may be in the folder.
        """
        raise NotImplementedError("override make() in the subclass")

    @pytest.fixture(scope="class")
    @classmethod
    def sample(cls, tmp_path_factory: pytest.TempPathFactory) -> Sample:
        return cls().make(tmp_path_factory.mktemp("sample"))

    # -- what it is ------------------------------------------------------------------------------------------------------

    def test_its_checkpoints_are_recognised(self, sample: Sample) -> None:
        source = locate(str(sample.path))
        assert self.reader.detect(source) is True
        assert formats.detect(source).name == self.reader.name
        assert formats.open_named(str(sample.path))[0] == self.reader.name

    def test_other_things_are_not_and_raise_nothing(self, sample: Sample, tmp_path: Path) -> None:
        ucformat.save(str(tmp_path / "native"), {"w": torch.ones(2)})
        for name in ("x.txt", "README.md"):
            (tmp_path / name).write_text("nothing that anybody could take for a checkpoint")
        others = [Source(locate(str(tmp_path)).store), *(locate(str(tmp_path / name)) for name in os.listdir(tmp_path))]
        for source in others:
            native = source.file is None and source.store.url.endswith("native")
            assert self.reader.detect(source) is (native and self.reader.name == "native"), source.url
        junk = [f"junk{suffix}" for suffix in _SUFFIXES]
        for name in (*junk, *(os.path.basename(path) for path in files_in(_folder(sample.path)))):
            (tmp_path / "junk").mkdir(exist_ok=True)
            (tmp_path / "junk" / name).write_bytes(b"junk")
            _refused(self.reader, Source(locate(str(tmp_path / "junk")).store, name))
        _refused(self.reader, Source(locate(str(tmp_path / "junk")).store))

    # -- what is in it -----------------------------------------------------------------------------------------------------

    def test_names_dtypes_and_shapes_are_those_that_were_saved(self, sample: Sample) -> None:
        catalog = self._open(sample.path)
        found = {name: (catalog.spec(name).dtype, catalog.spec(name).shape) for name in catalog.names}
        assert found == {name: (_dtype(tensor), tuple(tensor.shape)) for name, tensor in sample.tensors.items()}

    def test_every_byte_is_the_one_that_was_saved(self, sample: Sample) -> None:
        found = read_all(self._open(sample.path))
        assert [name for name, tensor in sample.tensors.items() if not same(found[name], tensor)] == []

    def test_slices_are_those_of_the_whole(self, sample: Sample) -> None:
        opened = Checkpoint(self._open(sample.path))
        for name, tensor in sample.tensors.items():
            for index in _indices(tensor.shape):
                assert bits(opened[name][index]) == bits(tensor[index]), (name, index)

    def test_values_are_those_that_were_saved(self, sample: Sample) -> None:
        if sample.values is not None:
            assert values.encode(self._open(sample.path).values) == values.encode(sample.values)

    def test_the_catalog_is_in_order(self, sample: Sample) -> None:
        catalog = self._open(sample.path)
        names = [spec.name for spec in catalog.tensors]
        assert names == sorted(set(names))
        assert set(catalog.aliases).isdisjoint(names)
        assert set(catalog.aliases.values()) <= set(names)
        assert (catalog.fragments.tensor[1:] >= catalog.fragments.tensor[:-1]).all()
        assert all(spec.dtype in DTYPES for spec in catalog.tensors)
        sizes = {n: file.size if file.inline is None else len(file.inline) for n, file in enumerate(catalog.files)}
        assert all(file.inline is not None or catalog.store.size(file.path) == file.size for file in catalog.files)
        stops = catalog.stops()
        assert all(
            table_start >= 0 and stop <= sizes[int(file)]
            for table_start, stop, file in zip(catalog.fragments.start, stops, catalog.fragments.file, strict=True)
        )

    def test_it_is_proven_that_every_tensor_is_wholly_stored(self, sample: Sample) -> None:
        catalog = self._open(sample.path)
        plan(catalog, wants(catalog, [(spec.name, None) for spec in catalog.tensors]))

    def test_it_converts_and_the_copy_is_equal(self, sample: Sample, tmp_path: Path) -> None:
        ucformat.convert(sample.path, tmp_path / "native", to="native")
        assert ucformat.diff(sample.path, tmp_path / "native").equal
        assert ucformat.verify(sample.path).ok

    def test_reading_changes_nothing(self, sample: Sample) -> None:
        before = files_in(_folder(sample.path))
        read_all(self._open(sample.path))
        assert files_in(_folder(sample.path)) == before

    # -- what is wrong with it -----------------------------------------------------------------------------------------------

    def test_a_file_that_is_cut_short_or_missing_is_noticed(self, sample: Sample, tmp_path: Path) -> None:
        for path, whole in files_in(_folder(sample.path)).items():
            for size in sorted({0, 1, len(whole) // 2, max(0, len(whole) - 1)}):
                with _copy(sample, tmp_path) as copy:
                    (_folder(copy) / path).write_bytes(whole[:size])
                    self._expect_noticed(copy, sample, f"{path} cut to {size} of {len(whole)} bytes")
            if path != sample.path.name:
                with _copy(sample, tmp_path) as copy:
                    (_folder(copy) / path).unlink()
                    self._expect_noticed(copy, sample, f"{path} removed")

    def test_a_file_that_holds_something_else_is_refused(self, sample: Sample, tmp_path: Path) -> None:
        for path in files_in(_folder(sample.path)):
            for junk in _JUNK:
                with _copy(sample, tmp_path) as copy:
                    (_folder(copy) / path).write_bytes(junk)
                    self._expect_noticed(copy, sample, f"{path} replaced with {junk[:8]!r}", bytes_too=self.checks_every_byte)

    def test_a_flipped_bit_is_noticed_or_harmless(self, sample: Sample, tmp_path: Path) -> None:
        draw = random.Random(0)
        held = [(path, data) for path, data in files_in(_folder(sample.path)).items() if data]
        for number in range(self.flips):
            path, data = held[number % len(held)]
            at = draw.randrange(len(data))
            with _copy(sample, tmp_path) as copy:
                wrong = bytearray(data)
                wrong[at] ^= 1 << draw.randrange(8)
                (_folder(copy) / path).write_bytes(wrong)
                found = self._outcome(copy)
                if found is not None and self.checks_every_byte:
                    assert _equal(found[0], sample.tensors), f"a bit of byte {at} of {path} was flipped, and nothing said so"

    def _open(self, path: Path) -> Catalog:
        return self.reader.open_catalog(locate(str(path)))

    def _outcome(self, path: Path) -> tuple[dict[str, torch.Tensor], tuple[str, ...]] | None:
        """What can be read of it, and the remarks; None when it is refused. Any other error is a failure of the test."""
        try:
            source = locate(str(path))
            if not self.reader.detect(source):
                return None
            catalog = self.reader.open_catalog(source)
            return read_all(catalog), catalog.notes.remarks
        except UcformatError:
            return None

    def _expect_noticed(self, copy: Path, sample: Sample, what: str, *, bytes_too: bool = True) -> None:
        found = self._outcome(copy)
        if found is None or _equal(found[0], sample.tensors):
            return
        held, remarks = found
        known = self._open(sample.path).notes.remarks
        if not bytes_too and _shapes(held) == _shapes(sample.tensors):
            return
        assert all(same(tensor, sample.tensors[name]) for name, tensor in held.items() if name in sample.tensors), what
        assert set(held) < set(sample.tensors), f"{what}: other tensors"
        assert set(remarks) - set(known), f"{what}: tensors are missing, and nothing said so"


class _copy:  # noqa: N801  # used like a function
    """A copy of a sample that is gone afterwards."""

    def __init__(self, sample: Sample, folder: Path) -> None:
        self._sample, self._folder = sample, folder / "copy"

    def __enter__(self) -> Path:
        shutil.copytree(_folder(self._sample.path), self._folder, symlinks=True)
        return self._folder if self._sample.path.is_dir() else self._folder / self._sample.path.name

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder)


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _dtype(tensor: torch.Tensor) -> str:
    from ucformat.dtypes import from_torch

    return from_torch(tensor.dtype).name


def _equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(same(found[name], wanted[name]) for name in wanted)


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def _refused(reader: Reader, source: Source) -> None:
    """Junk is not recognised, or refused with an error of ucformat's."""
    if reader.detect(source):
        with pytest.raises(UcformatError):
            read_all(reader.open_catalog(source))


def _indices(shape: Sequence[int]) -> Iterator[Any]:
    """Rows, columns, single items, nothing, and all."""
    yield (...)
    if shape:
        n = shape[0]
        yield from (slice(0, n // 2), slice(n // 2, n), slice(1, 1), slice(max(0, n - 1), n))
        yield from (0, -1) if n else ()
    if len(shape) > 1 and all(shape):
        yield from ((..., slice(0, 1)), (slice(None), -1), (0, ..., slice(shape[-1] // 2, None)))
