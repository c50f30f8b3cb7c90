"""Snapshot directories of the ucf checkpoint format (section 7), read as one checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from specs.readers.python.ucf_json import RefusedError, need
from specs.readers.python.ucf_reader import SLOT, Checkpoint, newest_step, unseal
from specs.readers.python.ucf_values import check_value, merge


class Snapshot(Checkpoint):
    """One version, from the records of its ranks. `verified` says whether all its slots have checksums."""

    def __init__(self, root: Path, slots: list[dict[str, Any]], passed_over: list[str]) -> None:
        self.root, self.shards, self.tensors, self.passed_over = root, slots, {}, passed_over
        mesh = {axis: size for slot in slots for axis, size in slot.get("mesh", {}).items()}
        self.record = {"step": slots[0]["step"], "mesh": mesh}
        self.block = slots[0]["block_bytes"]
        need(all(slot["block_bytes"] == self.block for slot in slots), "slots of several block sizes")
        self.rebuild()
        self.verified = all(slot.get("table_digest") is not None for slot in slots)
        self.values = merge([check_value(slot["values"]) for slot in slots])
        united: dict[str, str] = {}
        for alias, target in (pair for slot in slots for pair in slot.get("aliases", {}).items()):
            need(united.setdefault(alias, target) == target, f"ranks tie {alias!r} to different tensors", "conflict")
        self.aliases = {alias: united.get(target, target) for alias, target in united.items()}
        need(
            all(b in self.tensors and a not in self.tensors for a, b in self.aliases.items()),
            "an alias of nothing, or of a taken name",
        )


def versions(root: Path) -> dict[tuple[int, int, str], dict[int, dict[str, Any]]]:
    """(step, world, run) → rank → record; records that must be ignored are."""
    found: dict[tuple[int, int, str], dict[int, dict[str, Any]]] = {}
    for path in sorted(root.glob("rank-*/slot-*.json")):
        if not re.fullmatch("slot-(0|[1-9][0-9]*)", path.stem) or not re.fullmatch("rank-[0-9]{5,}", path.parent.name):
            continue
        try:
            record = unseal(path, SLOT)
        except RefusedError:
            continue
        slot = path.with_suffix(".safetensors")
        named = (
            path.parent.name == f"rank-{record['rank']:05d}" and record["rank"] < record["world"] and record["file"] == slot.name
        )
        if named and slot.is_file() and slot.stat().st_size == record["size"]:
            ranks = found.setdefault((record["step"], record["world"], record.get("run", "")), {})
            if ranks.get(record["rank"], {}).get("created", "") <= record.get("created", ""):
                ranks[record["rank"]] = record | {"file": f"{path.parent.name}/{slot.name}"}
    return found


def open_snapshot(root: Path) -> Snapshot:
    """The newest complete version that is not refused."""
    passed_over: list[str] = []
    held = [(ranks, key) for key, ranks in versions(root).items()]
    held.sort(key=lambda one: (one[1][0], max(record.get("created", "") for record in one[0].values())), reverse=True)
    for ranks, (step, world, _) in held:
        try:
            need(len(ranks) == world, "incomplete")
            return Snapshot(root, [ranks[rank] for rank in sorted(ranks)], passed_over)
        except RefusedError as error:
            passed_over.append(f"step {step}: {error}")
    raise RefusedError("not-a-checkpoint", f"{root}: no complete version: {'; '.join(passed_over)}")


def open_any(path: Path, *, rebuild: bool = False) -> Checkpoint:
    """A checkpoint, the newest one of a run directory, or the newest version of a snapshot directory."""
    names = [item.name for item in path.iterdir()] if path.is_dir() else []
    if "ucf.json" not in names and any(re.fullmatch("rank-[0-9]{5,}", name) for name in names):
        return open_snapshot(path)
    if "ucf.json" not in names and any(name.startswith("step-") for name in names):
        path = newest_step(path)
    return Checkpoint(path, rebuild=rebuild)
