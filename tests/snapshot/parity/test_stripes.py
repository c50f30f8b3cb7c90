"""Whatever the sizes of slots and groups, a lost one is computed bit for bit, and no group loses two members with a domain."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucformat.snapshot.parity.groups import form_groups
from ucformat.snapshot.parity.lost_slot import xor_into
from ucformat.snapshot.parity.stripes import chunk_bytes, chunk_in, cut, stripe_of


@given(st.integers(2, 9), st.data())
@settings(deadline=None, max_examples=60)
def test_every_byte_of_any_lost_slot_is_computed(members: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 30_000), min_size=members, max_size=members))
    random = np.random.default_rng(sum(sizes))
    slots = [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    chunk = chunk_bytes(sizes)
    padded = [np.pad(slot, (0, chunk * (members - 1) - len(slot))) for slot in slots]
    stripes = []
    for j in range(members):
        total = np.zeros(chunk, dtype=np.uint8)
        for k in range(members):
            if k != j:
                at = chunk_in(j, k) * chunk
                xor_into(total, padded[k][at : at + chunk])
        stripes.append(total)
    lost = data.draw(st.integers(0, members - 1))
    start = data.draw(st.integers(0, sizes[lost]))
    stop = data.draw(st.integers(start, sizes[lost]))
    out = np.zeros(stop - start, dtype=np.uint8)
    parts = list(cut(lost, start, stop, chunk))
    assert [(a.stop, b.start) for a, b in pairwise(parts)] == [(b.start, b.start) for b in parts[1:]]
    for part in parts:
        assert part.stripe != lost
        target = out[part.start - start : part.stop - start]
        target[:] = stripes[part.stripe][part.at : part.at + part.stop - part.start]
        for k in set(range(members)) - {lost, part.stripe}:
            a, b = part.of(k, chunk, sizes[k])
            xor_into(target, slots[k][a:b])
    assert (out == slots[lost][start:stop]).all()


@given(st.integers(2, 9), st.data())
def test_each_stripe_has_one_chunk_of_each_other_member(members: int, data: st.DataObject) -> None:
    member = data.draw(st.integers(0, members - 1))
    seen = [stripe_of(chunk, member) for chunk in range(members - 1)]
    assert sorted(seen) == [stripe for stripe in range(members) if stripe != member]
    assert [chunk_in(stripe, member) for stripe in seen] == list(range(members - 1))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(2, 9))
def test_groups_take_their_members_from_different_domains(domains: list[int], members: int) -> None:
    names = [str(domain) for domain in domains]
    grouping = form_groups(names, members)
    for group in grouping.groups:
        assert len({names[rank] for rank in group}) == len(group) >= 2
    assert sorted([*grouping.alone, *(rank for group in grouping.groups for rank in group)]) == list(range(len(names)))
    if len(set(names)) > 1:
        counts = {name: names.count(name) for name in names}
        if len(set(counts.values())) == 1:  # as many ranks on each: nobody is left over
            assert not grouping.alone
            assert max(map(len, grouping.groups)) - min(map(len, grouping.groups)) <= 1
            assert max(map(len, grouping.groups)) <= max(members, 3)
    else:
        assert grouping.alone == tuple(range(len(names)))


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        form_groups(["a", "b"], 1)
