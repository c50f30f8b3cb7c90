"""Does a checkpoint keep to specs/format.md? All violations that can be told apart, each with its clause, file and bytes.

Readers stop at the first thing that they can't accept; whoever writes a writer wants to know all of it, also what readers
need not look at (order of entries, padding, what shards say of themselves).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ucformat import box as boxes
from ucformat import values as trees
from ucformat.box import Box
from ucformat.catalog import FragmentTable, TensorSpec
from ucformat.containers.envelope import unseal
from ucformat.errors import (
    CoverageError,
    FormatError,
    MissingFileError,
    NotACheckpointError,
    OverlapError,
    UcformatError,
    ValueConflictError,
)
from ucformat.formats.native.checkpoint import check_aliases
from ucformat.formats.native.fragments import prove_whole
from ucformat.formats.native.manifest import MANIFEST, Index, Record, decode_record, read_index
from ucformat.formats.native.reindex import rebuilt
from ucformat.formats.native.run import ROLLBACK, passed_over, step_name, step_numbers
from ucformat.formats.native.shard import PAGE, RESERVED, hex_digest
from ucformat.formats.native.validate_shard import shard_violations
from ucformat.formats.native.violation import Violation, of_error
from ucformat.storage.store import Store

_FORM = re.compile(rb'\{"ucf":"[^"]*","digest":"[0-9a-f]{16}","record":\S.*\}\n', re.DOTALL)


_DIGITS = 20  # of the longest integer, with its sign


@dataclass(frozen=True, slots=True)
class Validation:
    """What was looked at, and all that is wrong with it."""

    checkpoints: tuple[str, ...]
    violations: tuple[Violation, ...]

    @property
    def ok(self) -> bool:
        return not self.violations


def validate(store: Store) -> Validation:
    """A checkpoint, or all that a run directory holds. Reads everything. Raises NotACheckpointError, StorageError."""
    names = store.list()
    if MANIFEST in names:
        return Validation((store.url,), tuple(_checkpoint(store)))
    runs = [store.sub(step_name(step)) for step in step_numbers(names)]
    committed = [step for step in runs if step.exists(MANIFEST)]
    if not committed:
        raise NotACheckpointError(store.url, f"no {MANIFEST}: nothing of this format was committed here")
    found: list[Violation] = []
    try:
        passed_over(store, names)
    except UcformatError as error:
        found.append(of_error(error, f"{store.url}/{ROLLBACK}", "run.rollback-damaged"))
    for step in committed:
        found += _checkpoint(step)
    return Validation(tuple(step.url for step in committed), tuple(found))


def _checkpoint(store: Store) -> Iterator[Violation]:
    where = f"{store.url}/{MANIFEST}"
    data = store.read(MANIFEST)
    if _FORM.fullmatch(data) is None and _is_json(data):
        yield Violation("envelope.form", where, 0, len(data), "members in another order, with white space between, or no newline")
    try:
        unseal(data, where)
    except UcformatError as error:
        yield _why_not(error, data, where)
        return
    try:
        record = decode_record(data, where)
    except UcformatError as error:
        yield of_error(error, where)
        return
    yield from _values(record, where)
    index: Index | None = None
    try:
        index = read_index(store, record)
    except UcformatError as error:
        yield of_error(error, f"{store.url}/{record.index.file}")
    if index is not None:
        yield from _index(store, record, index, where)
    for number, shard in enumerate(record.shards):
        rows = None if index is None else _rows_of(index, number)
        yield from shard_violations(store, shard, record.block_bytes, rows)
    try:
        rebuilt(store)
    except ValueConflictError:
        yield Violation("rebuild.agree", store.url, why="entries of its shards disagree about dtype or shape of a tensor")
    except (CoverageError, OverlapError) as error:
        yield of_error(error, store.url, "rebuild.tile")
    except UcformatError:
        pass  # found above
    yield from _companions(store, record)


def _why_not(error: UcformatError, data: bytes, where: str) -> Violation:
    """Of a file that is no record: whether it is the values in it that are none, and why."""
    found = of_error(error, where)
    if found.clause not in {"envelope.json", "record.twice", "envelope.digest"}:
        return found
    twice: list[bool] = []
    large: list[str] = []

    def members(pairs: list[tuple[str, object]]) -> dict[str, object]:
        tree = dict(pairs)
        if len(tree) != len(pairs):
            twice.append("index" in tree or "ucf" in tree or "table_digest" in tree or "aliases" in tree)
        return tree

    def constant(text: str) -> object:
        raise FormatError(where, f"{text} is no JSON", clause="values.nan")

    def integer(text: str) -> int:
        large.extend([text] if len(text) > _DIGITS else [])
        return 0

    clause = found.clause
    try:
        tree = json.loads(data.decode(), object_pairs_hook=members, parse_constant=constant, parse_int=integer)
        json.dumps(tree, ensure_ascii=False).encode()
    except FormatError as other:
        clause = other.clause
    except RecursionError:
        clause = "values.depth"
    except UnicodeEncodeError:
        clause = "values.unicode"
    except ValueError:
        clause = "envelope.json"
    if large and clause == "envelope.json":
        clause = "values.range"
    if clause == "record.twice" and twice and not any(twice):
        clause = "values.twice"
    return Violation(clause, where, found.start, found.stop, found.why)


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def _values(record: Record, where: str) -> Iterator[Violation]:
    try:
        trees.decode(bytes(record.values), where)
    except UcformatError as error:
        yield of_error(error, where)


def _index(store: Store, record: Record, index: Index, where: str) -> Iterator[Violation]:
    path = f"{store.url}/{record.index.file}"
    lead = store.read(record.index.file, 0, 8)
    start = 8 + int.from_bytes(lead, "little")
    if start % PAGE:
        yield Violation("header.aligned", path, 0, start, f"its data starts at byte {start}, no multiple of {PAGE}")
    header = json.loads(store.read(record.index.file, 8, start))
    if header["__metadata__"].get("format") != "pt":
        yield Violation("header.pt", path, 8, start, '__metadata__ has no "format": "pt"')
    for spec in index.tensors:
        if spec.name.startswith(RESERVED):
            yield Violation(
                "name.reserved", path, 0, start, f"tensor {spec.name!r}: names that start with {RESERVED!r} are reserved"
            )
    yield from _packed(index.tensors, index.fragments, path, start)
    try:
        check_aliases(record.aliases, {spec.name for spec in index.tensors}, where)
    except FormatError as error:
        yield of_error(error, where)
    yield from _coverage(index, [shard.file for shard in record.shards], store.url, path)


def _packed(tensors: Sequence[TensorSpec], table: FragmentTable, path: str, start: int) -> Iterator[Violation]:
    """Boxes of packed dtypes that are no whole groups of items."""
    for number, spec in enumerate(tensors):
        items = spec.kind.group[1]
        if items == 1:
            continue
        lengths = [
            spec.shape,
            *(table.box(row, len(spec.shape)).length for row in range(*table.rows(number).indices(len(table)))),
        ]
        for length in lengths:
            if not length or length[-1] % items:
                why = f"tensor {spec.name!r}: {list(length)} items of {spec.dtype} are no whole groups of {items}"
                yield Violation("dtype.packed", path, 0, start, why)
                break


def _coverage(index: Index, files: Sequence[str], url: str, path: str) -> Iterator[Violation]:
    """Tensors that their fragments do not tile, each by itself."""
    try:
        prove_whole(index.tensors, index.fragments, files, url)
        return
    except (CoverageError, OverlapError):
        pass  # found again below, with all others
    for number, spec in enumerate(index.tensors):
        rows, ndim = index.fragments.rows(number), len(spec.shape)
        flaw = boxes.flaw(Box.whole(spec.shape), index.fragments.offset[rows, :ndim], index.fragments.length[rows, :ndim])
        if flaw is not None:
            clause, what = ("read.overlap", "stored more than once") if flaw.overlap else ("read.coverage", "not stored")
            yield Violation(clause, path, why=f"tensor {spec.name!r}: box {flaw.box} is {what}")


def _rows_of(index: Index, number: int) -> Mapping[tuple[str, tuple[int, ...]], tuple[TensorSpec, tuple[int, ...], int]]:
    """(name, box offset) → tensor, box lengths and first byte, of the fragments in a shard by the index."""
    table = index.fragments
    out = {}
    for row in np.flatnonzero(table.file == number).tolist():
        spec = index.tensors[table.tensor[row]]
        box = table.box(row, len(spec.shape))
        out[spec.name, box.offset] = (spec, box.length, int(table.start[row]))
    return out


def _companions(store: Store, record: Record) -> Iterator[Violation]:
    for item in record.companions:
        path = f"{store.url}/{item.file}"
        try:
            size = store.size(item.file)
            if size != item.size:
                yield Violation("file.size", path, 0, size, f"has {size} bytes, was committed with {item.size}")
            elif hex_digest(store.read(item.file)) != item.digest:
                yield Violation("companion.digest", path, 0, size, "is not the file that was committed")
        except MissingFileError as error:
            yield of_error(error, path)
