"""Is a checkpoint whole and undamaged: coverage of every tensor, and every checksum that the format has.

Unlike loading, which stops at the first error, this finds all damage and says what each piece of it hits.
Memory is bounded: files are read in steps on a few threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ucformat.catalog import Catalog, Checks
from ucformat.containers import checksums as sums
from ucformat.errors import ChecksumError, CoverageError, FormatError, MissingFileError, OverlapError, StorageError, UcformatError
from ucformat.formats import native
from ucformat.formats.native.shard import ShardChecks, hex_digest
from ucformat.reshard.reading.plan import plan, wants
from ucformat.reshard.reading.seen import tensors_at
from ucformat.storage.store import Bytes, Reader, Sheet

STEP_BYTES = 4 << 20  # read and hashed at a time by one thread
THREADS = 4


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong. File and bytes where it has a place, and the tensors that it hits."""

    what: str
    file: str = ""
    start: int | None = None
    stop: int | None = None
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verification:
    """What was checked, and all that is wrong."""

    tensors: int
    nbytes: int
    """Bytes of tensors according to the metadata."""
    checked: int
    """Bytes whose checksum was computed."""
    unchecked: tuple[str, ...]
    """Files that have no checksums: only their structure could be checked."""
    damages: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        return not self.damages


def verify(catalog: Catalog, on_bytes: Callable[[int], None] | None = None) -> Verification:
    """Check everything that the catalog's format lets one check. Never raises for damage: it is in the result."""
    damages = list(_coverage(catalog))
    numbers = [number for number, file in enumerate(catalog.files) if file.inline is None]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="ucf-verify") as pool:
        futures = [pool.submit(_file, catalog, number, on_bytes) for number in numbers]
        try:
            results = [future.result() for future in futures]
        except BaseException:  # an interrupt: files that nobody has begun are left
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for _, found in results:
        damages.extend(found)
    damages.extend(_companions(catalog))
    unchecked = [catalog.files[number].path for number in numbers if catalog.files[number].checks is None]
    checked = sum(nbytes for nbytes, _ in results)
    return Verification(len(catalog.tensors), catalog.nbytes, checked, tuple(unchecked), tuple(damages))


def _coverage(catalog: Catalog) -> Iterator[Damage]:
    """Tensors that their fragments do not tile; one plan when all do, else one per tensor."""
    try:
        plan(catalog, wants(catalog, [(spec.name, None) for spec in catalog.tensors]))
        return
    except (CoverageError, OverlapError):
        pass  # found again below, with all others
    for spec in catalog.tensors:
        try:
            plan(catalog, wants(catalog, [(spec.name, None)]))
        except (CoverageError, OverlapError) as error:
            yield Damage(str(error), tensors=(spec.name,))


def _file(catalog: Catalog, number: int, on_bytes: Callable[[int], None] | None) -> tuple[int, list[Damage]]:
    """Bytes checked in one file, and what is wrong with it."""
    file = catalog.files[number]
    store = catalog.store_of(number)
    where = f"{store.url}/{file.path}"
    damages: list[Damage] = []
    checked = 0
    try:
        size = store.size(file.path)
        if size != file.size:
            what = f"the file has {size} bytes, should have {file.size}"
            damages.append(Damage(what, where, min(size, file.size), file.size, _hit(catalog, number, size, file.size)))
        if file.checks is None:
            return 0, damages
        found = file.checks.load(store, file.path)
        with store.reader(file.path) as reader:
            if isinstance(file.checks, ShardChecks):
                damages.extend(_shard_header(file.checks, reader, where))
            for start, stop, wrong in _ranges(found, reader, on_bytes):
                checked += stop - start
                if wrong:
                    what = f"{found.algorithm} does not match"
                    damages.append(Damage(what, where, start, stop, _hit(catalog, number, start, stop)))
    except (MissingFileError, FormatError, ChecksumError, StorageError) as error:
        damages.append(_from_error(catalog, number, where, error))
    if file.guard is not None:
        file.guard()
    return checked, damages


def _from_error(catalog: Catalog, number: int, where: str, error: UcformatError) -> Damage:
    start, stop = getattr(error, "start", None), getattr(error, "stop", None)
    low, high = (
        (0, catalog.files[number].size) if start is None else (start, catalog.files[number].size if stop is None else stop)
    )
    return Damage(str(error).removeprefix(f"{where}: "), where, start, stop, _hit(catalog, number, low, high))


def _hit(catalog: Catalog, number: int, start: int, stop: int) -> tuple[str, ...]:
    return tuple(tensors_at(catalog, number, start, stop)) if start < stop else ()


def _companions(catalog: Catalog) -> Iterator[Damage]:
    """Files that travel with a native checkpoint and are not those that were committed."""
    if not any(isinstance(file.checks, ShardChecks) for file in catalog.files) or not native.is_committed(catalog.store):
        return  # slots of a snapshot are shards too, and have no companions
    for item in native.read_record(catalog.store).companions:
        where = f"{catalog.store.url}/{item.file}"
        try:
            whole = catalog.store.size(item.file) == item.size and hex_digest(catalog.store.read(item.file)) == item.digest
        except (MissingFileError, StorageError) as error:
            yield Damage(str(error).removeprefix(f"{where}: "), where)
        else:
            if not whole:
                yield Damage("the file is not the one that was committed", where)


def _shard_header(checks: ShardChecks, reader: Reader, where: str) -> Iterator[Damage]:
    header = np.empty(checks.record.data_start, dtype=np.uint8)
    reader.read_into(0, header)
    if hex_digest(header) != checks.record.header_digest:
        yield Damage("the header is not the one that was committed", where, 0, checks.record.data_start)


def _ranges(found: Checks, reader: Reader, on_bytes: Callable[[int], None] | None) -> Iterator[tuple[int, int, bool]]:
    """(start, stop, whether it is wrong) of every checked range. Small ones share a read, large ones are read in steps."""
    buffer = np.empty(STEP_BYTES, dtype=np.uint8)
    first = 0
    while first < len(found.start):
        start, last = int(found.start[first]), first + 1
        while last < len(found.start) and int(found.stop[last]) - start <= STEP_BYTES:
            last += 1
        stop = int(found.stop[last - 1])
        if stop - start <= STEP_BYTES:
            data = buffer[: stop - start]
            reader.read_into(start, data)
            wrong = set(sums.mismatches(found, Sheet(start, data), start, stop))
            yield from ((int(found.start[i]), int(found.stop[i]), i in wrong) for i in range(first, last))
        else:
            yield start, stop, _crc(reader, start, stop, buffer) != int(found.digest[first])
        if on_bytes is not None:
            on_bytes(stop - start)
        first = last


def _crc(reader: Reader, start: int, stop: int, buffer: Bytes) -> int:
    """crc32 of a range longer than the buffer; only crc32 has such ranges."""
    crc = 0
    for at in range(start, stop, len(buffer)):
        data = buffer[: min(len(buffer), stop - at)]
        reader.read_into(at, data)
        crc = sums.crc32(data.data, crc)
    return crc
