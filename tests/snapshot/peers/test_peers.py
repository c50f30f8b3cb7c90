"""What a host serves, to whom, and what strangers can do about it: real sockets on this machine."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ucformat.errors import FormatError, MissingFileError, StorageError, UnsupportedError
from ucformat.snapshot.peers import handshake as proof
from ucformat.snapshot.peers.interface import listen
from ucformat.snapshot.peers.server import Limits, PeerServer
from ucformat.snapshot.peers.store import Address, PeerStore
from ucformat.snapshot.peers.wire import LENGTH, READ_BYTES, Read, frame

KEY = proof.new_key()
SLOT = "rank-00000/slot-0.safetensors"
QUICK = Limits(members=2, strangers=4, proof_s=0.3, idle_s=0.5, stall_s=0.5)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "rank-00000").mkdir()
    (tmp_path / SLOT).write_bytes(os.urandom(3 << 20))
    (tmp_path / "rank-00000/slot-0.json").write_bytes(b"record")
    (tmp_path / "rank-00000/keeper.log").write_bytes(b"secret")
    (tmp_path / "other.txt").write_bytes(b"secret")
    return tmp_path


@contextmanager
def serving(place: Path, limits: Limits = Limits()) -> Iterator[tuple[PeerServer, Address]]:  # noqa: B008
    listener, address = listen("127.0.0.1")
    server = PeerServer(str(place), KEY, listener, limits)
    server.start()
    try:
        yield server, address
    finally:
        server.stop()


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def size(address: Address, key: bytes = KEY) -> int:
    """Of the slot, as a new client sees it."""
    with closing(PeerStore(address, key)) as store:
        return store.size(SLOT)


def connect(address: Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), 10)


def test_members_read_ranges_sizes_and_lists(place: Path) -> None:
    data = (place / SLOT).read_bytes()
    with serving(place) as (server, address):
        store = PeerStore(address, KEY)
        assert store.list() == ["other.txt", "rank-00000/"]
        assert "slot-0.json" in store.list("rank-00000")
        assert list(store.list("rank-00007")) == []
        assert store.size(SLOT) == len(data)
        assert store.read("rank-00000/slot-0.json") == b"record"
        assert store.read(SLOT, 5, 1 << 20) == data[5 : 1 << 20]
        assert store.read(SLOT, 7, 7) == b""
        assert (store.exists(SLOT), store.exists("rank-00000/slot-9.json")) == (True, False)
        threads = [threading.Thread(target=read_all, args=(store, data)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.close()
        until(lambda: server.tally.nbytes >= 8 * len(data))
        assert (server.tally.refused, server.tally.malformed) == (0, 0)


def read_all(store: PeerStore, data: bytes) -> None:
    out = np.empty(len(data), dtype=np.uint8)
    store.read_into(SLOT, 0, out)
    assert out.tobytes() == data


def test_only_slots_are_served_and_nothing_is_written(place: Path) -> None:
    (place / "rank-00000/slot-1.safetensors").symlink_to(place / "other.txt")
    with serving(place) as (_, address):
        store = PeerStore(address, KEY)
        for path in ("other.txt", "rank-00000/keeper.log", "rank-00000/../other.txt", "/etc/passwd", "../../etc/passwd"):
            with pytest.raises(StorageError, match="no file of a slot"):
                store.read(path)
            with pytest.raises(StorageError):
                store.size(path)
        with pytest.raises(StorageError, match="no folder"):
            store.list("..")
        with pytest.raises(StorageError):  # a link is not followed
            store.read("rank-00000/slot-1.safetensors", 0, 3)
        for write in (lambda: store.put("x", b""), lambda: store.writer("x", 1), lambda: store.remove("x")):
            with pytest.raises(UnsupportedError, match="only be read"):
                write()
        store.close()


def test_what_is_missing_or_cut_short_is_said(place: Path) -> None:
    with serving(place) as (_, address):
        store = PeerStore(address, KEY)
        with pytest.raises(MissingFileError, match="peer://"):
            store.read("rank-00000/slot-5.safetensors", 0, 10)
        with pytest.raises(FormatError, match="cut short"):
            store.read(SLOT, 3 << 20, (3 << 20) + 1)
        with pytest.raises(StorageError):
            store.read_into(SLOT, -5, np.empty(3, dtype=np.uint8))
        assert store.read(SLOT, 0, 4) == (place / SLOT).read_bytes()[:4]
        store.close()


def test_strangers_are_refused_and_counted(place: Path) -> None:
    with serving(place) as (server, address):
        with pytest.raises(StorageError, match="serves another job"):
            size(address, proof.new_key())
        assert server.tally.refused == 3  # each try
        for garbage in (b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" * 4, os.urandom(1000), b"\0" * 64):
            with connect(address) as stranger:
                stranger.sendall(garbage)
                assert drained(stranger) == proof.HELLO_BYTES
        until(lambda: server.tally.refused == 6)
        assert (server.tally.members, server.tally.requests) == (0, 0)
        assert size(address) == 3 << 20


def drained(stranger: socket.socket) -> int:
    """Bytes until the other end closes."""
    count = 0
    try:
        while data := stranger.recv(1 << 16):
            count += len(data)
    except ConnectionResetError:
        return proof.HELLO_BYTES
    return count


def test_a_recorded_proof_is_worth_nothing(place: Path) -> None:
    with serving(place) as (server, address):
        with connect(address) as first:
            nonce = first.recv(proof.HELLO_BYTES, socket.MSG_WAITALL)[len(proof.GREETING) :]
            answer = b"c" * 32 + proof.client_proof(KEY, nonce, b"c" * 32)
            first.sendall(answer)
            assert len(first.recv(32, socket.MSG_WAITALL)) == 32
        with connect(address) as second:
            second.recv(proof.HELLO_BYTES, socket.MSG_WAITALL)
            second.sendall(answer)
            assert second.recv(32) == b""
        assert server.tally.refused == 1


def test_a_server_without_the_key_is_not_believed(place: Path) -> None:
    listener, address = listen("127.0.0.1")

    def impostor() -> None:
        for _ in range(3):
            connection, _ = listener.accept()
            with connection:
                connection.sendall(proof.GREETING + b"n" * 32)
                connection.recv(64, socket.MSG_WAITALL)
                connection.sendall(b"p" * 32)

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(StorageError, match="has not the key"):
        size(address)
    thread.join()
    listener.close()


def test_a_flood_and_half_open_connections_make_room_for_members(place: Path) -> None:
    with serving(place, QUICK) as (server, address):
        silent = [connect(address) for _ in range(30)]
        store = PeerStore(address, KEY)
        assert store.size(SLOT) == 3 << 20
        until(lambda: server.tally.crowded + server.tally.expired >= 30)
        for stranger in silent:
            stranger.close()
        assert len(server._clients) <= QUICK.strangers + QUICK.members
        store.close()


def test_members_beyond_the_limit_and_idle_ones_are_closed(place: Path) -> None:
    with serving(place, replace(QUICK, idle_s=1.5)) as (server, address):
        stores = [PeerStore(address, KEY) for _ in range(2)]
        for store in stores:
            store.size(SLOT)
        with pytest.raises(StorageError, match="is full"):
            size(address)
        until(lambda: not server._clients)  # nobody asked for anything any more
        assert (server.tally.idle, server.tally.expired) == (2, 0)
        assert stores[0].size(SLOT) == 3 << 20  # over a new connection
        for store in stores:
            store.close()


def member(address: Address) -> socket.socket:
    connection = connect(address)
    nonce = connection.recv(proof.HELLO_BYTES, socket.MSG_WAITALL)[len(proof.GREETING) :]
    connection.sendall(b"c" * 32 + proof.client_proof(KEY, nonce, b"c" * 32))
    assert len(connection.recv(32, socket.MSG_WAITALL)) == 32
    return connection


def test_members_that_send_garbage_or_never_read_cost_only_themselves(place: Path) -> None:
    with serving(place, QUICK) as (server, address):
        for garbage in (b"\0\0", b"\xff\xff" + b"x" * 1024, LENGTH.pack(4) + b"nope", LENGTH.pack(9) + b'{"a":[[[['):
            with member(address) as connection:
                connection.sendall(garbage)
                assert connection.recv(1) == b""
        assert server.tally.malformed == 4
        with member(address) as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            for _ in range(20):
                deaf.sendall(frame(Read(SLOT, 0, 3 << 20)))
            until(lambda: server.tally.expired == 1)
        assert size(address) == 3 << 20


def test_a_peer_that_dies_or_is_silent_is_an_error_in_bounded_time(place: Path) -> None:
    with serving(place) as (_, address):
        store = PeerStore(address, KEY)
        assert store.size(SLOT) == 3 << 20
    with pytest.raises(StorageError, match="peer://"):
        store.size(SLOT)
    listener, silent = listen("127.0.0.1")
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ucformat.snapshot.peers.store.CONNECT_S", 0.1)
        with pytest.raises(StorageError, match="peer://"):
            size(silent)
    assert time.monotonic() - began < 30
    listener.close()


def test_no_request_makes_an_answer_endless(place: Path) -> None:
    os.truncate(place / SLOT, READ_BYTES + 1)
    with serving(place) as (server, address):
        store = PeerStore(address, KEY)
        with pytest.raises(StorageError, match="not served at once"):
            store._ask(Read(SLOT, 0, READ_BYTES + 1), SLOT)
        (place / SLOT).write_bytes(b"")
        with pytest.raises(FormatError, match="cut short"):
            store.read(SLOT, 0, 100)
        assert server.is_alive()
        store.close()


def test_interfaces_are_names_or_addresses() -> None:
    for interface in ("lo", "127.0.0.1", "localhost"):
        listener, address = listen(interface)
        listener.close()
        assert address.host in ("127.0.0.1", "::1")
    with pytest.raises(StorageError, match="can't serve snapshots"):
        listen("no-such-interface0")
