"""Generators of random numbers go on after a load exactly as they would have without one."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ucformat
from tests.reshard.ranks import on_ranks
from ucformat.errors import UnsupportedError


def _numpy(kind: type[np.random.BitGenerator]) -> Callable[[int], Any]:
    return lambda seed: np.random.Generator(kind(seed))


KINDS: dict[str, Callable[[int], Any]] = {
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "random": random.Random,
    "legacy": np.random.RandomState,  # what older data pipelines use
    "PCG64": _numpy(np.random.PCG64),
    "PCG64DXSM": _numpy(np.random.PCG64DXSM),
    "MT19937": _numpy(np.random.MT19937),
    "Philox": _numpy(np.random.Philox),
    "SFC64": _numpy(np.random.SFC64),
    "bits": np.random.PCG64,
}


def draw(x: Any) -> list[Any]:
    if isinstance(x, torch.Generator):
        return [torch.rand(3, generator=x).tolist(), torch.randn(3, generator=x).tolist()]
    if isinstance(x, np.random.BitGenerator):
        return [int(n) for n in x.random_raw(4)]
    if isinstance(x, random.Random):
        return [x.random(), x.gauss(0, 1)]
    return [float(x.standard_normal()), *map(float, x.random(3))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("local", [False, True])
def test_a_generator_continues_exactly_where_it_was_saved_and_stays_the_same_object(
    tmp_path: Path, kind: str, local: bool
) -> None:
    saved = KINDS[kind](5)
    draw(saved)
    state: dict[str, Any] = {"data": {"rng": ucformat.rank_local(saved) if local else saved}}
    ucformat.save(tmp_path / "ck", state)
    expected = draw(saved)
    live = KINDS[kind](6)
    into: dict[str, Any] = {"data": {"rng": ucformat.rank_local(live) if local else live}}
    ucformat.load(tmp_path / "ck", into=into)
    assert (into["data"]["rng"].value if local else into["data"]["rng"]) is live
    assert draw(live) == expected
    for to in ("dcp", "torchsave"):
        ucformat.convert(tmp_path / "ck", tmp_path / to, to=to)
        ucformat.load(tmp_path / to, into=into)
        assert draw(live) == expected


def test_a_generator_of_another_kind_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    ucformat.save(tmp_path / "ck", {"a": {"rng": np.random.default_rng(1)}, "w": torch.ones(2), "plain": 3})
    cases: list[tuple[Any, str]] = [
        (torch.Generator(), r"a torch.Generator\(cpu\) here, and a numpy.random.Generator\(PCG64\) is stored"),
        (np.random.Generator(np.random.Philox(1)), r"Generator\(Philox\) here, and a numpy.random.Generator\(PCG64\)"),
    ]
    for live, why in cases:
        before = live.get_state().tolist() if isinstance(live, torch.Generator) else None
        into: dict[str, Any] = {"a": {"rng": live}, "w": torch.zeros(2), "plain": 0}
        with pytest.raises(UnsupportedError, match=f"a/rng: .*{why}"):
            ucformat.load(tmp_path / "ck", into=into)
        assert into["w"].tolist() == [0, 0]
        assert before is None or live.get_state().tolist() == before
    with pytest.raises(UnsupportedError, match=r"plain: a random\.Random here, and stored is no state of a generator"):
        ucformat.load(tmp_path / "ck", into={"plain": random.Random(1)}, strict=False)


def _differ(path: str) -> tuple[bool, bool]:
    rng = torch.Generator().manual_seed(dist.get_rank())
    with pytest.raises(ucformat.errors.ValueConflictError, match="rng"):
        ucformat.save(path, {"rng": rng})
    ucformat.save(path, {"rng": ucformat.rank_local(rng)})
    expected = draw(rng)
    live = torch.Generator()
    ucformat.load(path, into={"rng": ucformat.rank_local(live)})
    return draw(live) == expected, True


def test_generators_that_differ_between_ranks_are_never_rank_0s(tmp_path: Path) -> None:
    assert on_ranks(2, _differ, str(tmp_path / "ck")) == [(True, True)] * 2
