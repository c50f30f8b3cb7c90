"""All attacks, in order."""

from __future__ import annotations

from collections.abc import Mapping

from specs.kit.attack import ATTACKS, Attack
from specs.kit.attacks_on_index import index_headers, indices
from specs.kit.attacks_on_records import envelopes, files_and_paths, records, runs
from specs.kit.attacks_on_shards import shards, snapshots, writers
from specs.kit.attacks_on_values import trees
from specs.kit.golden import Golden


def all_attacks(golden: Mapping[str, Golden]) -> list[Attack]:
    """Every attack, in order."""
    ATTACKS.clear()
    files_and_paths()
    runs(golden)
    envelopes()
    records()
    shards()
    indices()
    index_headers()
    trees()
    snapshots(golden)
    writers()
    return ATTACKS
