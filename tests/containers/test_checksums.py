"""A range that is read in parts is checked as soon as its last byte has come, in whatever order and however often."""

from __future__ import annotations

import zlib
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucformat.box import Ints
from ucformat.catalog import Algorithm, Checks
from ucformat.containers.checksums import Ledger, crc32_combine, digest
from ucformat.storage.store import Bytes

SIZE = 400  # bytes of data; the ranges below lie in it, with gaps
STARTS: Ints = np.array([0, 100, 110])
STOPS: Ints = np.array([100, 107, 390])


def data() -> Bytes:
    return np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)


def checks() -> Checks:
    digests = [digest("crc32", data()[a:b]) for a, b in zip(STARTS, STOPS, strict=True)]
    return Checks("crc32", STARTS, STOPS, np.array(digests, dtype=np.uint64))


@given(st.binary(max_size=50), st.binary(max_size=50))
def test_crc32_of_a_whole_follows_from_those_of_its_parts(a: bytes, b: bytes) -> None:
    first, second = (digest("crc32", np.frombuffer(x, dtype=np.uint8)) for x in (a, b))
    assert crc32_combine(first, second, len(b)) == digest("crc32", np.frombuffer(a + b, dtype=np.uint8)) == zlib.crc32(a + b)


@given(
    st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted), max_size=12),
    st.integers(0, SIZE - 1),
    st.randoms(),
)
def test_damage_is_found_in_any_order_of_overlapping_parts(parts: list[list[int]], at: int, random: Random) -> None:
    damaged = data()
    damaged[at] ^= 1
    parts = [*parts, [0, 150], [140, SIZE]]
    random.shuffle(parts)
    expected = {i for i, (a, b) in enumerate(zip(STARTS, STOPS, strict=True)) if a <= at < b}
    for content, wrong in ((data(), set[int]()), (damaged, expected)):
        ledger = Ledger(checks())
        assert {ledger.add(start, content[start:stop]) for start, stop in parts} - {None} == wrong


@pytest.mark.parametrize("step", [1, 7, 50])
def test_nothing_is_said_before_a_range_is_complete(step: int) -> None:
    damaged = data()
    damaged[300] ^= 1
    ledger = Ledger(checks())
    told = [ledger.add(at, damaged[at : at + step]) for at in range(0, SIZE, step)]
    assert told.count(2) == 1
    assert told.index(2) == (390 - 1) // step


@pytest.mark.parametrize("algorithm", ["crc32", "xxh3-64"])
@given(st.lists(st.integers(0, SIZE), max_size=5))
def test_a_checksum_does_not_tell_how_many_buffers_its_bytes_lie_in(algorithm: Algorithm, cuts: list[int]) -> None:
    whole = data()
    parts = np.split(whole, sorted(cuts))
    assert digest(algorithm, *parts) == digest(algorithm, whole)
