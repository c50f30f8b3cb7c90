"""A plan as a device is asked for it: every byte once, behind the gate that the plan means, in few copies."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from tests.snapshot.rigs.rigs import Piece, columns, questions
from ucformat.snapshot.copying.device import COPY_BYTES, batched
from ucformat.snapshot.copying.device_version import DEADLINE
from ucformat.snapshot.copyplan.plan import CHUNK_BYTES, EXPOSED, NEVER, OVERLAP, Mode, Rates, plan_copies
from ucformat.snapshot.schedule.replay import Track


@given(questions())
@settings(max_examples=100, deadline=None)
def test_batches_hold_every_chunk_of_a_plan_once_and_behind_its_gate(
    case: tuple[Track, list[Piece], Rates, Mode, float, int],
) -> None:
    track, pieces, rates, mode, margin, chunk_bytes = case
    plan = plan_copies(track, columns(pieces), rates, mode, margin=margin, chunk_bytes=chunk_bytes)
    gates = track.ready()
    found = batched(plan, gates)
    assert len({(batch.gate, batch.kind, batch.due) for batch in found}) == len(found)
    opens = [NEVER if batch.gate == DEADLINE else batch.gate for batch in found]
    assert opens == sorted(opens)
    copied = [(piece, first, last, batch) for batch in found for piece, first, last in batch.ranges.tolist()]
    for chunk in range(len(plan)):
        piece, start, stop = int(plan.piece[chunk]), int(plan.start[chunk]), int(plan.stop[chunk])
        (batch,) = [b for p, first, last, b in copied if p == piece and first <= start and stop <= last]
        assert batch.kind == plan.window[chunk]
        assert batch.due == plan.pieces.deadline[piece]
        if batch.kind == EXPOSED:
            assert batch.gate == DEADLINE
            continue
        assert batch.gate >= plan.pieces.ready[piece]
        if batch.kind == OVERLAP:
            assert gates[batch.gate] <= plan.begin[chunk] or batch.gate == plan.pieces.ready[piece]
        else:
            after = plan.windows[batch.kind].after
            assert batch.gate == max(0 if after is None else after + 1, plan.pieces.ready[piece])
    assert sum(last - first for _, first, last, _ in copied) == plan.pieces.nbytes.sum()


def test_adjoining_chunks_are_one_copy_up_to_a_limit() -> None:
    nbytes = 2 * COPY_BYTES + 5
    step = Track(np.array([1.0]), np.array([2.0]), 2.0)
    plan = plan_copies(step, columns([Piece(nbytes), Piece(3)]), Rates(1e9, 1e9), "bubble")
    assert len(plan) == 2 * COPY_BYTES // CHUNK_BYTES + 2
    (batch,) = batched(plan, step.ready())
    assert batch.ranges.tolist() == [
        [0, 0, COPY_BYTES],
        [0, COPY_BYTES, 2 * COPY_BYTES],
        [0, 2 * COPY_BYTES, nbytes],
        [1, 0, 3],
    ]
