"""Digests of tensors that are the same in every format and layout: see specs/fingerprint.md.

Two checkpoints that do not fit on one machine, or whose copies lie far apart, are compared by their fingerprints: each side is
read once, where it is, and a few bytes per tensor travel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from ucformat.box import Box
from ucformat.catalog import Catalog, TensorSpec
from ucformat.containers.file_image import CHUNK_BYTES, stream
from ucformat.formats.target import OutputBox
from ucformat.group import Group
from ucformat.reshard.reading.fill import CatalogFill
from ucformat.reshard.reading.plan import plan, refuse_expanded, wants

BLOCK_BYTES = 1 << 20
VERSION = 1
assert CHUNK_BYTES % BLOCK_BYTES == 0  # what is hashed at a time begins where a block begins


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tensors a checkpoint holds, by name and content."""

    tensors: Mapping[str, str]
    """Name → 32 hexadecimal digits, sorted by name; a tied tensor under each of its names."""
    nbytes: int
    """Bytes of the tensors, each tied one once."""

    @property
    def digest(self) -> str:
        """One digest over all names and theirs."""
        lines = "".join(f"{name}\t{digest}\n" for name, digest in sorted(self.tensors.items(), key=lambda item: item[0].encode()))
        return xxhash.xxh3_128_hexdigest(f"ucf-checkpoint-{VERSION}\n{lines}".encode())

    def differences(self, other: Mapping[str, str]) -> list[str]:
        """Names that only one of two has, or whose tensors differ; sorted."""
        return sorted(name for name in self.tensors.keys() | other.keys() if self.tensors.get(name) != other.get(name))


def fingerprint(catalog: Catalog, group: Group | None = None, on_bytes: Callable[[int], None] | None = None) -> Fingerprint:
    """The fingerprint of a checkpoint, read once, in bounded memory. Every rank of `group` calls it and reads its share.

    Raises what reading raises: CoverageError, ChecksumError, StorageError…, on every rank alike, and UnsupportedError for
    expanded views that are much larger than what is stored; RankFailedError.
    """
    group = group or Group()
    mine: dict[str, str] = {}
    with group.together(f"reading {catalog.url}"):
        mine = _digests(catalog, _share(catalog.tensors, group.rank, group.size), on_bytes)
    found = {name: digest for part in group.all_gather(mine) for name, digest in part.items()}
    found |= {alias: found[catalog.tensors[catalog.find(alias)].name] for alias in catalog.aliases}
    return Fingerprint(dict(sorted(found.items())), catalog.nbytes)


def _share(specs: Sequence[TensorSpec], rank: int, size: int) -> list[TensorSpec]:
    """The tensors of one rank: runs of them that follow one another, alike in bytes."""
    total = max(1, sum(spec.nbytes for spec in specs))
    mine, at = [], 0
    for spec in specs:
        if min(size - 1, (2 * at + spec.nbytes) * size // (2 * total)) == rank:
            mine.append(spec)
        at += spec.nbytes
    return mine


def _digests(catalog: Catalog, specs: Sequence[TensorSpec], on_bytes: Callable[[int], None] | None) -> dict[str, str]:
    names = [spec.name for spec in specs]
    needed = wants(catalog, [(name, None) for name in names])
    refuse_expanded(catalog, needed)
    plan(catalog, needed)  # what is missing is known before anything is read
    fill = CatalogFill(catalog, [OutputBox(spec, Box.whole(spec.shape)) for spec in specs], names)
    hashers = [xxhash.xxh3_128(_head(spec)) for spec in specs]
    for part in stream([spec.nbytes for spec in specs], fill):
        for at in range(0, len(part.data), BLOCK_BYTES):
            hashers[part.piece].update(xxhash.xxh3_128_digest(part.data[at : at + BLOCK_BYTES].data))
        if on_bytes is not None:
            on_bytes(len(part.data))
    fill.complete()
    return {name: hasher.hexdigest() for name, hasher in zip(names, hashers, strict=True)}


def _head(spec: TensorSpec) -> bytes:
    return f"ucf-tensor-{VERSION}\n{spec.dtype}\n{','.join(map(str, spec.shape))}\n".encode()
