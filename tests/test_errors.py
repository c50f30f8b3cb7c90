"""Errors: messages name what went wrong and where."""

from __future__ import annotations

import pickle

import pytest

from ucformat import errors
from ucformat.box import Box

EXAMPLES = [
    (errors.FormatError("shards/0", "bad header", 8, 16), ["shards/0", "bytes 8-16", "bad header"]),
    (errors.MissingFileError("shards/7"), ["shards/7", "missing"]),
    (errors.ChecksumError("f", 0, 100, ["a", "b"]), ["f", "bytes 0-100", "a, b"]),
    (errors.CoverageError("w", Box((0, 2), (4, 1))), ["'w'", "[0:4, 2:3]"]),
    (errors.OverlapError("w", Box((0,), (4,)), ["x", "y"]), ["'w'", "[0:4]", "x, y"]),
    (errors.ShapeMismatchError("w", [1, 2], [2, 1]), ["'w'", "[1, 2]", "[2, 1]"]),
    (errors.DTypeMismatchError("w", "F32", "BF16"), ["'w'", "F32", "BF16", "cast=True"]),
    (errors.NamesMismatchError("p", ["a"], ["b"]), ["p", "a", "b"]),
    (errors.NamesMismatchError("p", [f"n{i}" for i in range(20)], []), ["n0", "n7", "12 more"]),
    (errors.VersionError("ucf.json", "9", "1"), ["ucf.json", "9", "1"]),
    (errors.UnsafePickleError("f", "os.system"), ["f", "os.system", "nothing was executed"]),
    (errors.UnrepresentableError("a/b", "slice"), ["a/b", "slice"]),
    (errors.ValueConflictError("a/b", [0, 3]), ["a/b", "0, 3", "rank_local"]),
    (errors.RankLocalError("rng", 4, 3), ["rng", "4", "3", "on_resize"]),
    (errors.ExistsError("runs/a"), ["runs/a", "overwrite=True"]),
    (errors.RankFailedError("save", {2: "disk full"}), ["save", "rank 2: disk full"]),
    (errors.SnapshotMemoryError("d", 5 << 20, -1, "in its tmpfs"), ["d: ", "5,242,880 bytes", "0 are free (in its tmpfs)"]),
    (errors.SnapshotInUseError("d", "process 7"), ["d: in use by process 7"]),
    (errors.StorageError("f", OSError(28, "No space left on device"), 0, 5), ["f", "bytes 0-5", "No space left"]),
]


@pytest.mark.parametrize(("error", "facts"), EXAMPLES, ids=[type(error).__name__ for error, _ in EXAMPLES])
def test_messages_name_the_facts(error: errors.UcformatError, facts: list[str]) -> None:
    assert all(fact in str(error) for fact in facts), str(error)


def test_every_error_is_a_ucformat_error() -> None:
    kinds = [x for x in vars(errors).values() if isinstance(x, type) and issubclass(x, Exception)]
    assert len(kinds) > 10
    assert all(issubclass(kind, errors.UcformatError) for kind in kinds)


@pytest.mark.parametrize("error", [error for error, _ in EXAMPLES], ids=[type(error).__name__ for error, _ in EXAMPLES])
def test_an_error_reaches_another_process_with_class_message_and_facts(error: errors.UcformatError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert {name: str(fact) for name, fact in vars(again).items()} == {name: str(fact) for name, fact in vars(error).items()}


def test_a_fact_that_can_not_be_pickled_travels_as_text() -> None:
    again = pickle.loads(pickle.dumps(errors.StorageError("f", ValueError(lambda: None))))
    assert "lambda" in str(again.cause)
    assert str(again).startswith("f: ")
