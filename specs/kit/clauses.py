"""The table of clauses: each id of the text, and the golden checkpoints, attacks and tests that it is covered by."""

from __future__ import annotations

import json
import re
from pathlib import Path

from specs.run_conformance import ATTACKS, GOLDEN

FORMAT = Path(__file__).parents[1] / "format.md"
TABLE = FORMAT.with_name("clauses.md")
_ID = re.compile(r"\[([a-z]+\.[a-z0-9-]+)\](?!\()")
_KEYWORD = re.compile(r"\bMUST\b")

WRITERS = {
    "run.rollback-kept": "tests/test_conformance.py::test_a_run_that_goes_back_notes_what_is_passed_over_and_forgets_it_when_saved_again",
    "commit.durable": "tests/test_conformance.py::test_all_files_are_durable_before_the_commit_record_appears",
    "commit.whole": "tests/formats/native/test_checkpoint.py::test_what_does_not_tile_its_tensors_is_never_committed",
    "commit.atomic": "tests/storage/test_local.py::test_of_many_processes_that_commit_at_once_exactly_one_does",
    "commit.untouched": "tests/formats/native/test_checkpoint.py::test_a_replacement_that_fails_leaves_the_old_checkpoint_readable",
    "commit.own": "tests/formats/test_ownership.py::test_of_several_writers_one_wins_and_its_checkpoint_is_whole",
    "owner.marker": "tests/formats/test_ownership.py::test_what_a_killed_writer_left_is_removed_by_the_next_and_the_old_one_stays_whole",
    "owner.last": "tests/formats/test_ownership.py::test_what_a_killed_writer_left_is_removed_by_the_next_and_the_old_one_stays_whole",
    "owner.removes": "tests/formats/test_ownership.py::test_files_that_no_marker_vouches_for_are_the_users",
    "slot.withdraw": "tests/snapshot/slots/test_slot_set.py::test_a_slot_that_is_begun_has_no_version",
    "slot.zero": "tests/snapshot/slots/test_slot_set.py::test_a_table_is_only_attached_to_the_version_whose_bytes_were_hashed",
    "slot.atomic": "tests/snapshot/slots/test_slot_set.py::test_a_killed_process_leaves_a_whole_version_whenever_it_dies",
    "slot.newest": "tests/snapshot/slots/test_slot_set.py::test_the_version_that_all_ranks_have_is_kept_until_they_have_a_newer_one",
    "slot.hash": "tests/snapshot/keeper/test_slot_copy.py::test_a_slot_taken_while_it_is_hashed_gets_no_checksums",
    "slot.lock": "tests/snapshot/slots/test_slot_set.py::test_a_slot_under_a_keepers_lock_is_passed_over",
    "slot.restart": "tests/snapshot/slots/test_restarts.py::test_versions_newer_than_the_fence_are_forgotten_those_of_former_ranks_too",
    "version.passed-over": "tests/formats/test_snapshot.py::test_a_damaged_record_or_header_gives_way_to_the_older_version",
}
"""Clause → the test of ucformat that covers it, where no golden checkpoint can: what a writer does in time."""


def clauses(text: str) -> list[str]:
    """The ids of the text, in its order."""
    return list(dict.fromkeys(_ID.findall(text)))


def unnamed(text: str) -> list[str]:
    """Sentences, items of lists and rows of tables that demand something and have no id."""
    body = text[text.index("## 1.") :]
    flat = re.sub(r"```.*?```", "", body, flags=re.DOTALL)
    parts = re.split(r"\n\n|\n(?=[-|])|(?<=[.\]])\s+(?=[A-Z`])", flat)
    return [part for part in parts if _KEYWORD.search(part) and not _ID.search(part)]


def covered() -> dict[str, list[str]]:
    """Clause → what covers it: golden checkpoints, attacks, tests."""
    found: dict[str, list[str]] = {}
    for path in sorted(GOLDEN.glob("*/expected.json")):
        for clause in json.loads(path.read_text(encoding="utf-8"))["clauses"]:
            found.setdefault(clause, []).append(f"golden `{path.parent.name}`")
    attacks: dict[str, list[str]] = {}
    for path in sorted(ATTACKS.glob("*.json")):
        attacks.setdefault(json.loads(path.read_text(encoding="utf-8"))["clause"], []).append(path.stem)
    for clause, names in attacks.items():
        found.setdefault(clause, []).append(f"{len(names)} attack{'s' if len(names) > 1 else ''} `{clause}-*`")
    for clause, test in WRITERS.items():
        found.setdefault(clause, []).append(f"`{test}`")
    return found


def table() -> str:
    """The content of `clauses.md`."""
    found, text = covered(), FORMAT.read_text(encoding="utf-8")
    rows = [f"| `{clause}` | {', '.join(found.get(clause, ['nothing']))} |" for clause in clauses(text)]
    return "\n".join([
        "# Clauses of the specification, and what covers each", "",
        "Written by `python -m specs.kit`. Golden checkpoints are in [conformance](conformance/), attacks in [attacks](attacks/).", "",
        "| clause | covered by |", "|---|---|", *rows, "",
    ])  # fmt: skip
