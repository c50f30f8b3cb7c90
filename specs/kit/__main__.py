"""Writes the kit: `python -m specs.kit`. Golden checkpoints and attacks of released versions must not change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from specs.kit import clauses
from specs.kit.attack import attack_json
from specs.kit.attacks import all_attacks
from specs.kit.golden import GOLDEN, Golden, expected_json, merged, slots
from specs.kit.write import contents
from specs.run_conformance import ATTACKS as ATTACK_FOLDER
from specs.run_conformance import GOLDEN as GOLDEN_FOLDER


def write_golden(name: str, made: Golden, root: Path) -> None:
    """One golden checkpoint, and what it holds."""
    folder = root / name
    shutil.rmtree(folder, ignore_errors=True)
    for path, data in made.files.items():
        target = folder / "checkpoint" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    (folder / "expected.json").write_text(pretty(expected_json(made)), encoding="utf-8")


def pretty(tree: object) -> str:
    return json.dumps(tree, indent=1, ensure_ascii=True) + "\n"


def main(golden: Path = GOLDEN_FOLDER, attacks: Path = ATTACK_FOLDER) -> None:
    """Write all of it."""
    made = {name: make() for name, make in GOLDEN.items()}
    for name, one in made.items():
        write_golden(name, one, golden)
    older = [{**contents(slots(n)[0]), "values": merged(n)} for n in (19,)]
    (golden / "snapshot" / "versions.json").write_text(pretty(older), encoding="utf-8")
    older = [{**contents(slots(20)[0]), "values": merged(20)}]
    (golden / "snapshot-unhashed" / "versions.json").write_text(pretty(older), encoding="utf-8")
    shutil.rmtree(attacks, ignore_errors=True)
    attacks.mkdir(parents=True)
    for attack in all_attacks(made):
        (attacks / f"{attack.name}.json").write_text(pretty(attack_json(attack, made)), encoding="utf-8")


if __name__ == "__main__":
    main()
    clauses.TABLE.write_text(clauses.table(), encoding="utf-8")
