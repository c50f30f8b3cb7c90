"""The native format: shards, their index, and the record that commits them. Save, the keeper and the converter write it."""

from ucformat.formats.contract import Reader, Writer
from ucformat.formats.native.attempt import (
    NAME,
    Attempt,
    Contents,
    Generation,
    clear,
    clear_one,
    commit,
    committed_by,
    files_of,
    joined,
    owned_files,
    prepare,
    put_shards,
    read_record,
    torn_record,
)
from ucformat.formats.native.checkpoint import NOTHING, changed, detect, explain, find, is_unfinished, open_catalog
from ucformat.formats.native.fragments import ShardTable, gather_tables, merge, prove_whole, tabulate
from ucformat.formats.native.manifest import MANIFEST, Record
from ucformat.formats.native.reindex import reindex
from ucformat.formats.native.retention import clear_steps, expired, prune_steps, remove_step
from ucformat.formats.native.run import (
    committed_steps,
    is_committed,
    newest_first,
    newest_step,
    note_saved,
    passed_over,
    step_name,
    step_numbers,
)
from ucformat.formats.native.write import carry_companions, write

__all__ = [
    "MANIFEST",
    "NAME",
    "READER",
    "WRITER",
    "NOTHING",
    "Attempt",
    "Contents",
    "carry_companions",
    "Generation",
    "Record",
    "ShardTable",
    "gather_tables",
    "changed",
    "clear",
    "clear_one",
    "clear_steps",
    "commit",
    "committed_by",
    "committed_steps",
    "detect",
    "expired",
    "files_of",
    "find",
    "is_committed",
    "is_unfinished",
    "joined",
    "merge",
    "newest_first",
    "newest_step",
    "note_saved",
    "open_catalog",
    "owned_files",
    "passed_over",
    "prepare",
    "prove_whole",
    "prune_steps",
    "put_shards",
    "read_record",
    "reindex",
    "remove_step",
    "step_name",
    "step_numbers",
    "tabulate",
    "torn_record",
    "write",
]

READER = Reader(
    name=NAME,
    detect=detect,
    open_catalog=open_catalog,
    explain=explain,
    detects_changes=True,  # names of its files are never used again, and the record vouches for their checksums
    owned_files=lambda source: frozenset(owned_files(source)).__contains__,
)
WRITER = Writer(name=NAME, write=write, takes_layout=True)
