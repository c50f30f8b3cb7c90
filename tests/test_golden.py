"""Checkpoints of every released format version stay readable for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import golden
from tests.checkpoints import bits
from ucformat import formats
from ucformat.reshard.reading.lazy import read
from ucformat.values.tree import encode

VERSIONS = sorted(path for path in golden.FOLDER.iterdir() if path.is_dir())


def test_there_is_one_for_this_version() -> None:
    from ucformat.containers.envelope import VERSION

    assert VERSION in {path.name for path in VERSIONS}


@pytest.mark.parametrize("path", VERSIONS, ids=lambda path: path.name)
def test_a_released_version_reads_bit_for_bit(path: Path) -> None:
    catalog = formats.open_catalog(str(path))
    wanted = golden.tensors()
    assert {spec.name for spec in catalog.tensors} == set(wanted)
    for name, tensor in wanted.items():
        assert bits(read(catalog, name)) == bits(tensor), name
        assert catalog.spec(name).shape == tuple(tensor.shape)
    assert encode(catalog.values) == encode(golden.values())
    assert dict(catalog.aliases) == golden.ALIASES
    assert catalog.notes == golden.NOTES
