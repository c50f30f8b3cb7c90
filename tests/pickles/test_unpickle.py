"""Restricted unpickling: what may be decoded is exact, what is unknown stays inert, what is hostile is refused."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import enum
import io
import os
import pathlib
import pickle
import struct
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.torchfiles import without_crc
from ucformat.errors import ChecksumError, FormatError, UcformatError, UnsafePickleError, UnsupportedError
from ucformat.pickles.precheck import scan
from ucformat.pickles.unpickle import Inert, RefusedTensor, StoredTensor, open_torch_zip, to_values, unpickle
from ucformat.pickles.values import values
from ucformat.storage.open import open_store
from ucformat.values.codec import Opaque, encode


class Colour(enum.Enum):
    RED = 1


class Unknown:
    """A class that the reader must never import."""

    def __init__(self, a: int) -> None:
        self.a = a

    def __setstate__(self, state: object) -> None:
        raise AssertionError("ran code of the pickled class")


class Calls:
    """Pickles as a call of `function` with `args`."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def call(name: str, *args: object) -> bytes:
    """A pickle that calls "module name" with `args`, also for names that this Python lacks."""
    module, _, function = name.rpartition(".")
    body = pickle.dumps(args, protocol=0)[:-1]
    return b"c" + module.encode() + b"\n" + function.encode() + b"\n" + body + b"R."


PLAIN: list[Any] = [
    None,
    True,
    1 << 100,
    -5,
    2.5,
    float("inf"),
    "ä",
    b"\x00\xff",
    (1, (2,)),
    [1, [2]],
    {1: "a", "b": (None,)},
    {1, 2},
    frozenset([3]),
    1 + 2j,
    pathlib.PurePosixPath("/a/b"),
    pathlib.Path("c"),
    pathlib.PureWindowsPath("d:/e"),
    torch.Size([2, 3]),
    torch.float16,
    torch.device("cuda", 1),
    np.float32(2.5),
    np.int64(-1),
    np.bool_(True),
    np.complex128(1j),
]


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_come_back_exactly(value: Any, protocol: int) -> None:
    back = to_values(unpickle(pickle.dumps(value, protocol=protocol), "f"), "f")
    assert type(back) is type(value)
    assert back == value


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(3).astype(">i4"),
        np.array(7.5),
        np.zeros((0, 4), np.float32),
        np.array([True, False]),
        np.array([1 + 1j]),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)
def test_numpy_arrays_of_numbers_come_back(array: np.ndarray[Any, Any], protocol: int) -> None:
    back = unpickle(pickle.dumps({"a": [array]}, protocol=protocol), "f")["a"][0]
    assert back.dtype == array.dtype.newbyteorder("=")
    assert back.shape == array.shape
    assert np.array_equal(back, array)


def test_arrays_of_objects_and_text_stay_inert() -> None:
    back = to_values(unpickle(pickle.dumps([np.array(["a"]), np.array([None, 1], dtype=object)]), "f"), "f")
    assert [x.class_name for x in back] == ["numpy.ndarray", "numpy.ndarray"]


def test_namespace_comes_back_with_its_content() -> None:
    space = argparse.Namespace(lr=0.1, inner=argparse.Namespace(x=np.arange(2)))
    back = unpickle(pickle.dumps({"args": space}), "f")["args"]
    assert type(back) is argparse.Namespace
    assert back.lr == 0.1
    assert np.array_equal(back.inner.x, np.arange(2))


def test_ordered_and_default_dicts_become_dicts_in_order() -> None:
    tree = {"o": collections.OrderedDict([("b", 1), ("a", 2)]), "d": collections.defaultdict(list, {1: [2]})}
    back = to_values(unpickle(pickle.dumps(tree), "f"), "f")
    assert list(back["o"].items()) == [("b", 1), ("a", 2)]
    assert back["d"] == {1: [2]}
    assert type(back["o"]) is type(back["d"]) is dict


def test_unknown_object_keeps_name_and_state() -> None:
    back = unpickle(pickle.dumps([Unknown(5)]), "f")[0]
    assert isinstance(back, Inert)
    assert back.class_name == f"{Unknown.__module__}.Unknown"
    assert back.attributes == {"a": 5}
    assert to_values(back, "f") == Opaque(back.class_name, {"state": {"a": 5}})


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_enum_members_and_dates_are_shown_by_name(protocol: int) -> None:
    tree = {"c": Colour.RED, "t": dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc), "k": collections.deque([1]), "r": range(3)}
    back = to_values(unpickle(pickle.dumps(tree, protocol=protocol), "f"), "f")
    assert back["c"].class_name.endswith("Colour")
    assert back["t"].class_name == "datetime.datetime"
    assert back["k"].class_name == "collections.deque"
    assert back["r"].class_name.endswith("range")


def test_unknown_callable_is_recorded_and_its_module_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "trapdoor.py").write_text(f"open({str(marker)!r}, 'w')\ndef go(x): open({str(marker)!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    back = unpickle(call("trapdoor.go", 1), "f")
    assert isinstance(back, Inert)
    assert (back.class_name, back.args) == ("trapdoor.go", (1,))
    assert "trapdoor" not in sys.modules
    assert not marker.exists()


HOSTILE = """os.system posix.system nt.system subprocess.Popen subprocess.check_output builtins.eval builtins.exec builtins.open
builtins.__import__ builtins.compile __builtin__.eval __builtin__.execfile sys.exit sys.modules runpy.run_path runpy._run_code
importlib.import_module socket.socket shutil.rmtree pty.spawn
functools.reduce torch.hub.load torch.jit.load torch.load torch.serialization.load torch.package.PackageImporter
torch.utils.cpp_extension.load torch.multiprocessing.spawn numpy.load numpy.fromfile numpy.testing._private.utils.runstring
pickle.loads _pickle.loads marshal.loads ctypes.CDLL code.interact timeit.timeit webbrowser.open asyncio.run threading.Thread
multiprocessing.Process http.server.test urllib.request.urlopen requests.get types.CodeType types.FunctionType io.open _io.open
platform.popen pip.main pdb.run""".split()  # noqa: SIM905  # a list of 50 strings reads worse


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_global_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsafePickleError, match=r"nothing was executed") as caught:
        unpickle(call(name, "x"), "evil.pkl")
    assert caught.value.what == name.replace("__builtin__", "builtins")
    assert caught.value.file == "evil.pkl"


def test_pickle_that_would_run_a_command_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for payload in (
        Calls(os.system, f"touch {marker}"),
        Calls(eval, f"open({str(marker)!r}, 'w')"),
        Calls(open, str(marker), "w"),
    ):
        for protocol in (0, 2, 4):
            with pytest.raises(UnsafePickleError):
                unpickle(pickle.dumps({"a": [payload]}, protocol=protocol), "f")
    assert not marker.exists()


def test_dotted_names_do_not_reach_modules() -> None:
    data = b"\x80\x04\x8c\x13torch.serialization\x8c\x09os.system\x93)R."
    with pytest.raises(UnsafePickleError, match=r"os\.system"):
        unpickle(data, "f")


def test_getattr_reaches_nothing_but_stand_ins() -> None:
    member = unpickle(b"cbuiltins\ngetattr\n(csome.where\nThing\nVmember\ntR.", "f")
    assert to_values(member, "f") == Opaque("some.where.Thing", {"args": ("member",)})
    bound = unpickle(b"cbuiltins\ngetattr\n(Vx\nVupper\ntR.", "f")
    assert to_values(bound, "f") == Opaque("builtins.getattr", {"args": ("x", "upper")})
    with pytest.raises(UnsafePickleError, match="getattr"):
        unpickle(b"cbuiltins\ngetattr\n(csome.where\nThing\nV__subclasses__\ntR.", "f")


@pytest.mark.parametrize("name", ["torch.FloatStorage", "_codecs.encode", "collections.OrderedDict", "some.Thing", "torch.Size"])
@pytest.mark.parametrize("state", [b"}Vname\nVx\ns", b"(N}V_run\nVx\nst", b"(N}V__class__\nVx\nst"])
def test_state_cannot_be_set_on_what_other_pickles_use(name: str, state: bytes) -> None:
    module, _, attribute = name.rpartition(".")
    with pytest.raises(FormatError):
        unpickle(f"c{module}\n{attribute}\n".encode() + state + b"b.", "f")
    assert unpickle(pickle.dumps({"b": b"\xff"}, protocol=2), "f") == {"b": b"\xff"}
    assert getattr(values()["_codecs.encode"], "name", "") == "_codecs.encode"


@pytest.mark.parametrize("data", [b"\x80\x02}r\xff\xff\xff\x7f.", b"}p2147483647\n.", b"]q\x00r\x00\x00\x00\x40."])
def test_memo_bomb_is_refused_before_it_allocates(data: bytes) -> None:
    with pytest.raises(FormatError, match="memo index"):
        unpickle(data, "f")


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 50) + b"x.",
        b"B\xff\xff\xff\x7fxx.",
        b"\x80\x02X\xff\xff\xff\x7fa.",
        b"\x82\x01.",
        b"Pid\n.",
        b"\xff.",
        b"N",
        b"",
        b"cos",
        b"(lp0\n",
    ],
)
def test_lengths_beyond_the_pickle_and_foreign_opcodes_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        unpickle(data, "f")


def test_long_runs_of_opcodes_take_no_memory_of_their_own() -> None:
    data = b"\x80\x02](" + b"N" * 3_000_000 + b"e."
    tracemalloc.start()
    try:
        assert scan(data, "f").length == len(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_bytearray_of_a_number_allocates_nothing() -> None:
    for name in ("builtins.bytearray", "builtins.bytes"):
        with pytest.raises(FormatError):
            unpickle(call(name, 1 << 50), "f")


def test_shared_parts_that_multiply_are_refused() -> None:
    bomb: list[Any] = []
    for _ in range(64):
        bomb = [bomb, bomb]
    with pytest.raises(FormatError, match="multiply"):
        to_values(unpickle(pickle.dumps(bomb), "f"), "f", max_nodes=100_000)


def test_what_contains_itself_or_never_ends_costs_only_itself() -> None:
    tree: dict[str, Any] = {"a": 1, "list": [5]}
    tree["list"].append(tree["list"])
    tree["up"] = (tree,)
    back = to_values(unpickle(pickle.dumps(tree), "f"), "f")
    assert back == {"a": 1, "list": [5, Opaque("cycle", "list")], "up": (Opaque("cycle", "/"),)}
    deep = b"\x80\x02}(X\x01\x00\x00\x00aK\x01X\x01\x00\x00\x00b" + b"]" * 200_000 + b"a" * 199_999 + b"u."
    back = to_values(unpickle(deep, "f"), "f")
    assert back["a"] == 1
    encode(back)


def _sample() -> bytes:
    out = io.BytesIO()
    pickle.dump({"a": [1, 2.5, Unknown(3)], "n": np.arange(4), "s": {"x"}, "o": collections.OrderedDict(k=(1,))}, out, protocol=4)
    return out.getvalue()


SAMPLE = _sample()


def test_every_truncation_is_one_typed_error() -> None:
    for length in range(len(SAMPLE)):
        with pytest.raises(FormatError):
            unpickle(SAMPLE[:length], "f")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, len(SAMPLE) - 1), st.binary(min_size=1, max_size=6))
def test_damaged_pickles_never_raise_anything_else(at: int, noise: bytes) -> None:
    try:
        to_values(unpickle(SAMPLE[:at] + noise + SAMPLE[at + len(noise) :], "f"), "f")
    except UcformatError:
        pass


# --- torch.save files ----------------------------------------------------------------------------------------------


def test_tensors_are_places_in_the_file(tmp_path: Path) -> None:
    base = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    torch.save({"a": base, "t": base.t(), "s": base[1:, 2], "p": torch.nn.Parameter(base.float())}, tmp_path / "x.pt")
    tree = open_torch_zip(open_store(str(tmp_path)), "x.pt").tree
    raw = (tmp_path / "x.pt").read_bytes()
    a, t, s, p = (tree[key] for key in "atsp")
    assert isinstance(a, StoredTensor)
    assert (a.dtype, a.shape, a.stride, a.contiguous) == ("I32", (3, 4), (4, 1), True)
    assert raw[a.start : a.start + 48] == base.numpy().tobytes()
    assert (t.shape, t.stride, t.contiguous, t.start) == ((4, 3), (1, 4), False, a.start)
    assert (s.shape, s.stride, s.start) == ((2,), (4,), a.start + 4 * 6)
    assert (p.parameter, p.requires_grad, p.dtype) == (True, True, "F32")


def test_what_is_no_dense_tensor_is_marked(tmp_path: Path) -> None:
    torch.save(
        {
            "sparse": torch.eye(2).to_sparse(),
            "meta": torch.empty(2, device="meta"),
            "conj": torch.ones(2, dtype=torch.complex64).conj(),
        },
        tmp_path / "x.pt",
    )
    tree = open_torch_zip(open_store(str(tmp_path)), "x.pt").tree
    assert {key: type(value) for key, value in tree.items()} == dict.fromkeys(["sparse", "meta", "conj"], RefusedTensor)
    assert "sparse" in tree["sparse"].kind


def test_hostile_checkpoint_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    torch.save({"w": torch.ones(2), "x": Calls(os.system, f"touch {marker}")}, tmp_path / "x.pt")
    with pytest.raises(UnsafePickleError, match=r"posix\.system"):
        open_torch_zip(open_store(str(tmp_path)), "x.pt")
    assert not marker.exists()


def test_legacy_file_is_refused_with_advice(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match="re-save"):
        open_torch_zip(open_store(str(tmp_path)), "x.pt")


def test_flipped_bit_in_the_pickle_is_a_checksum_error(tmp_path: Path) -> None:
    torch.save({"some_name": torch.ones(1)}, tmp_path / "x.pt")
    raw = bytearray((tmp_path / "x.pt").read_bytes())
    raw[raw.index(b"some_name")] ^= 1
    (tmp_path / "x.pt").write_bytes(raw)
    with pytest.raises(ChecksumError):
        open_torch_zip(open_store(str(tmp_path)), "x.pt")


def test_tensor_beyond_its_storage_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(4)}, tmp_path / "x.pt")
    raw = (tmp_path / "x.pt").read_bytes()
    # the shape (4,) becomes (5,): BININT1 4, TUPLE1, behind the storage's persistent id
    damaged = raw.replace(b"QK\x00K\x04\x85", b"QK\x00K\x05\x85")
    assert damaged != raw
    (tmp_path / "x.pt").write_bytes(without_crc(damaged))
    with pytest.raises(FormatError, match="beyond its storage"):
        open_torch_zip(open_store(str(tmp_path)), "x.pt")
