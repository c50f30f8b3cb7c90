"""The training example: what one layout saved, another resumes exactly."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from examples.demo_training import Report
from examples.proof import run, torchrun
from examples.text import TextSampler, load_corpus

TIMEOUT_S = 120.0


@pytest.mark.slow
def test_a_run_resumes_in_another_layout_with_the_same_state_and_loss(tmp_path: Path) -> None:
    saved_to, again = str(tmp_path / "run"), str(tmp_path / "again")
    first = Report.of(
        run(
            torchrun(
                2, "examples.train", "--mesh", "dp=2", "--steps", "3", "--save-to", saved_to, "--save-every", "2", "--digests"
            ),
            tmp_path / "first.log",
            TIMEOUT_S,
        )
    )
    resume = ("--seed", "1", "--steps", "3", "--resume-from", saved_to, "--resave-to", again, "--digests")
    second = Report.of(run(torchrun(2, "examples.train", "--mesh", "tp=2", *resume), tmp_path / "second.log", TIMEOUT_S))

    assert first.states[2]["tensors"]
    assert second.states[2] == first.states[2]
    assert list(second.losses) == [3]
    assert math.isclose(second.losses[3], first.losses[3], rel_tol=1e-5)


def test_the_global_batch_does_not_depend_on_the_number_of_ranks() -> None:
    text = load_corpus(100_000)
    whole = TextSampler(text, 16)
    whole.next_batch(12)
    inputs, targets = whole.next_batch(12)

    for ranks in (2, 3):
        rows = []
        for rank in range(ranks):
            sampler = TextSampler(text, 16, seed=5)
            sampler.load_state_dict({"seed": 0, "position": 12})
            rows += list(zip(*sampler.next_batch(12, rank, ranks), strict=True))
            assert sampler.state_dict() == whole.state_dict()
        assert all(a.equal(x) and b.equal(y) for (a, b), x, y in zip(rows, inputs, targets, strict=True))


def test_a_batch_that_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="can't be shared by 5 ranks"):
        TextSampler(load_corpus(1000), 16).next_batch(12, 0, 5)
