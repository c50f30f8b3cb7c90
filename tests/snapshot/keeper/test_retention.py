"""What keepers and killed saves left in a run is cleared away, and nothing that is somebody else's."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.checkpoints import write_native
from ucformat.formats import native, ownership
from ucformat.formats.native.manifest import MANIFEST
from ucformat.snapshot.keeper import contributions
from ucformat.snapshot.keeper.contributions import Refusal
from ucformat.snapshot.keeper.retention import clear_abandoned
from ucformat.storage.local import LocalStore

OURS, EARLIER = "run-2", "run-1"


def test_only_what_was_abandoned_is_cleared(tmp_path: Path) -> None:
    for step in (10, 20, 50):
        write_native(tmp_path / native.step_name(step), {"w": torch.full((3,), float(step))})
    run = LocalStore(str(tmp_path))
    (tmp_path / native.step_name(20) / MANIFEST).unlink()  # vouched for by nothing: perhaps the user's
    for step, token in ((11, OURS), (12, EARLIER), (13, OURS), (60, EARLIER)):
        contributions.refuse(run.sub(native.step_name(step)), token, Refusal(step, 0, "no space left"))
    run.put("step-00000014/parts.run-1/00000.json", b"{}")
    run.put("other/parts.run-1/00000.json", b"{}")
    alive = ownership.begin(run.sub(native.step_name(15)), "persist", token=EARLIER)
    waiting = ownership.begin(run.sub(native.step_name(16)), "persist", token=OURS)
    assert clear_abandoned(run, 50, OURS, but={13}) == {10, 11, 12, 14, 16, 20}
    left = [f"{native.step_name(step)}/" for step in (10, 13, 14, 15, 20, 50, 60)]
    assert list(run.list()) == ["other/", *left]
    for claim in (alive, waiting):
        claim.hold.release()
    assert clear_abandoned(run, 50, OURS, but={10, 11, 12, 20}) == {13, 14, 15}
    assert not (tmp_path / native.step_name(15)).exists()
