"""Small pickles that ask for endless work, endless memory or endless recursion end soon, in one typed error or none."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.scripts import Script
from ucformat.errors import FormatError, brief
from ucformat.pickles.unpickle import to_values, unpickle

LEVELS = 60
LAUGHS = b"K\x01" + b"\x85" + b"2\x86" * LEVELS  # (x, x), (that, that), …: 2^60 leaves


def deep(levels: int) -> bytes:
    return b"K\x01" + b"\x85" * levels


BOMBS = {
    "deep tuple as key": b"}" + deep(1_000_000) + b"K\x01s.",
    "deep tuple as key of a dict made of the stack": b"(" + deep(1_000_000) + b"K\x01d.",
    "deep tuple in a set": b"\x8f(" + deep(1_000_000) + b"\x90.",
    "deep tuple in a frozenset": b"(" + deep(1_000_000) + b"\x91.",
    "deep tuple in builtins.frozenset": b"cbuiltins\nfrozenset\n](" + deep(1_000_000) + b"e\x85R.",
    "deep tuple in an OrderedDict": b"ccollections\nOrderedDict\n)R" + deep(1_000_000) + b"K\x01s.",
    "deep tuple in a defaultdict": b"ccollections\ndefaultdict\n)R" + deep(1_000_000) + b"K\x01s.",
    "deep tuple in a set that was called for": b"cbuiltins\nset\n)R(" + deep(1_000_000) + b"\x90.",
    "shared tuples as key": b"}" + LAUGHS + b"K\x01s.",
    "shared tuples as key among others": b"}(X\x01\x00\x00\x00aK\x01" + LAUGHS + b"K\x01u.",
    "shared tuples in a frozenset": b"(" + LAUGHS + b"\x91.",
    "shared tuples in a set": b"\x8f(" + LAUGHS + b"\x90.",
    "shared tuples in builtins.set": b"cbuiltins\nset\n](" + LAUGHS + b"e\x85R.",
    "shared tuples as a size": b"ctorch\nSize\n" + LAUGHS + b"\x85R.",
    "shared tuples as the argument of an unknown key": b"}(cpkg\nColour\n" + LAUGHS + b"\x85RK\x01u.",
    "shared tuples as a tensor's offset": b"ctorch._utils\n_rebuild_tensor_v2\n(N" + LAUGHS + b"))\x89NtR.",
    "shared tuples as a persistent id": LAUGHS + b"Q.",
    "shared tuples as a device": b"ctorch\ndevice\n" + LAUGHS + b"\x85R.",
}
MANY_COPIES = b"C\xff" + b"x" * 255
BOMBS["copies of bytes"] = b"(B\x00\x00\x10\x00" + b"x" * (1 << 20) + b"q\x00" + b"cbuiltins\nbytes\nh\x00\x85R" * 100_000 + b"t."


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_soon_in_a_process_that_survives(name: str, tmp_path: Path) -> None:
    script = """
        import resource, sys
        from ucformat.errors import UcformatError
        from ucformat.pickles.unpickle import to_values, unpickle
        resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
        try:
            to_values(unpickle(open(sys.argv[1], "rb").read(), "f", lambda pid: pid), "f", max_nodes=2_000_000)
        except UcformatError as error:
            assert len(str(error)) < 1000
    """
    (tmp_path / "bomb").write_bytes(BOMBS[name])
    assert Script(textwrap.dedent(script), tmp_path / "bomb").wait() == 0


def test_messages_show_values_briefly() -> None:
    value: object = 1
    for _ in range(100):
        value = (value, value)
    assert len(brief(value)) <= 80
    assert len(brief("x" * 10**6)) <= 80
    assert "bits" in brief(10**10_000)


def test_honest_keys_of_every_kind_are_read() -> None:
    for protocol in (0, 2, 4):
        import pickle

        tree = {(1, ("a", 2.5)): 1, frozenset({1, (2, 3)}): 2, 3: {4, (5,)}, 1 << 70: 3, None: 4, b"x": 5, 1.5: 6}
        assert to_values(unpickle(pickle.dumps(tree, protocol=protocol), "f"), "f") == tree


def test_more_dicts_than_a_pickle_has_room_for_are_refused() -> None:
    with pytest.raises(FormatError, match="dicts and sets"):
        unpickle(b"(" + b"}" * 3_000_000 + b"t.", "f")
