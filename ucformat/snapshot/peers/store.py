"""A host's snapshot directory, seen from another host: a read-only `Store` over its server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from ucformat.errors import FormatError, MissingFileError, StorageError, UnsupportedError
from ucformat.snapshot.peers import handshake as proof
from ucformat.snapshot.peers.wire import LENGTH, READ_BYTES, REPLIES, List, Read, Reply, Request, Size, frame
from ucformat.storage.store import Bytes, Store, Writer

CONNECT_S = 5.0  # to connect and prove membership
SILENCE_S = 20.0  # without a byte of an answer
SLOWEST = 1 << 20  # bytes per second: an answer may take so long on top of `SILENCE_S`
TRIES = 3  # connections before a peer counts as gone: it may have had no room for a moment
PAUSE_S = 0.2
STREAMS = 4  # requests at a time
ANSWER_BYTES = 8 << 20  # of an answer that is no range of a file


@dataclass(frozen=True, slots=True)
class Address:
    """Where a host serves its snapshots."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PeerStore(Store):
    """The directory that the server at `address` serves. Thread-safe. Every call is bounded in time.

    Raises StorageError for a peer that can't be reached, is silent, or does not have the key; what is not there is a
    MissingFileError as in every store. `nbytes` counts what was read of files.
    """

    streams = STREAMS

    def __init__(self, address: Address, key: bytes, timeout_s: float = SILENCE_S) -> None:
        self.address, self.url, self.nbytes = address, f"peer://{address}", 0
        self._key, self._timeout = key, timeout_s
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()

    # -- reading ---------------------------------------------------------------------------------------------------

    def size(self, path: str) -> int:
        return self._ask(Size(path), path)[0].value

    def exists(self, path: str) -> bool:
        try:
            self.size(path)
        except MissingFileError:
            return False
        return True

    def list(self, path: str = "") -> Sequence[str]:
        data = self._ask(List(path), path)[1]
        try:
            return msgspec.json.decode(data, type=list[str])
        except msgspec.DecodeError as error:
            raise StorageError(self._where(path), error) from error

    def read_into(self, path: str, start: int, out: Bytes) -> None:
        for at in range(0, out.nbytes, READ_BYTES):
            part = out[at : at + READ_BYTES]
            self._ask(Read(path, start + at, start + at + part.nbytes), path, part)
        with self._lock:
            self.nbytes += out.nbytes

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        if stop is not None:
            return super().read(path, start, stop)
        return self._ask(Read(path, start), path)[1]  # in one request: the file may be replaced by a longer one

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    # -- what it does not do ---------------------------------------------------------------------------------------

    def put(self, path: str, data: bytes) -> None:
        raise self._read_only(path)

    def writer(self, path: str, size: int) -> Writer:
        raise self._read_only(path)

    def remove(self, path: str = "") -> None:
        raise self._read_only(path)

    def sub(self, path: str) -> Store:
        raise self._read_only(path)

    def _read_only(self, path: str) -> UnsupportedError:
        return UnsupportedError(self._where(path), "the memory of another host can only be read, by paths from its top")

    # -- asking ----------------------------------------------------------------------------------------------------

    def _where(self, path: str) -> str:
        return f"{self.url}/{path}"

    def _ask(self, request: Request, path: str, out: Bytes | None = None) -> tuple[Reply, bytes]:
        """The reply, and what came with it where `out` does not take it. Raises MissingFileError, FormatError, StorageError."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            try:
                return self._exchange(connection, request, path, out)
            except OSError:
                self.close()  # the others are as old: the server may have been started anew
        try:
            return self._exchange(self._connect(), request, path, out)
        except OSError as error:
            raise StorageError(self._where(path), error) from error

    def _exchange(self, connection: socket.socket, request: Request, path: str, out: Bytes | None) -> tuple[Reply, bytes]:
        """Ask over one connection, which is kept for the next question unless anything goes wrong. Raises OSError too."""
        kept = False
        try:
            nbytes = 0 if out is None else out.nbytes
            deadline = time.monotonic() + self._timeout + nbytes / SLOWEST
            connection.settimeout(self._timeout)
            connection.sendall(frame(request))
            (length,) = LENGTH.unpack(self._receive(connection, LENGTH.size, deadline))
            reply = self._decode(self._receive(connection, length, deadline), path)
            body = self._body(connection, reply, path, out, deadline)
            kept = True
        finally:
            if kept:
                with self._lock:
                    self._idle.append(connection)
            else:
                connection.close()
        return reply, self._accept(reply, body, path)

    def _decode(self, data: bytes, path: str) -> Reply:
        try:
            return REPLIES.decode(data)
        except msgspec.DecodeError as error:
            raise StorageError(self._where(path), f"its answer is not understood: {error}") from error

    def _body(self, connection: socket.socket, reply: Reply, path: str, out: Bytes | None, deadline: float) -> bytes:
        if reply.status != "ok" or not reply.nbytes:
            return b""
        if out is None:
            if not 0 <= reply.nbytes <= READ_BYTES:
                raise StorageError(self._where(path), f"an answer of {reply.nbytes} bytes is too long")
            return self._receive(connection, reply.nbytes, deadline + reply.nbytes / SLOWEST)
        if reply.nbytes != out.nbytes:
            raise StorageError(self._where(path), f"its answer has {reply.nbytes} bytes instead of {out.nbytes}")
        self._fill(connection, memoryview(out).cast("B"), deadline)
        return b""

    def _accept(self, reply: Reply, body: bytes, path: str) -> bytes:
        if reply.status == "missing":
            raise MissingFileError(self._where(path))
        if reply.status == "short":
            raise FormatError(self._where(path), f"is cut short: it has {reply.value} bytes", reply.value)
        if reply.status != "ok":
            raise StorageError(self._where(path), reply.message)
        return body

    # -- connections -----------------------------------------------------------------------------------------------

    def _connect(self) -> socket.socket:
        """A new connection whose both ends have proved that they have the key. Raises OSError, StorageError."""
        for attempt in range(1, TRIES + 1):
            try:
                connection = socket.create_connection((self.address.host, self.address.port), CONNECT_S)
            except (TimeoutError, ConnectionRefusedError):
                raise
            except OSError:
                if attempt == TRIES:
                    raise
            else:
                try:
                    self._prove(connection)
                except (OSError, StorageError):
                    connection.close()
                    if attempt == TRIES:
                        raise
                else:
                    return connection
            time.sleep(PAUSE_S * attempt)
        raise AssertionError  # the last attempt returns or raises

    def _prove(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + CONNECT_S
        connection.settimeout(CONNECT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = self._receive(connection, proof.HELLO_BYTES, deadline)
        if not hello.startswith(proof.GREETING):
            raise StorageError(self.url, "does not serve snapshots of this version")
        server, client = hello[len(proof.GREETING) :], proof.new_nonce()
        connection.sendall(client + proof.client_proof(self._key, server, client))
        try:
            answer = self._receive(connection, proof.PROOF_BYTES, deadline)
        except ConnectionError as error:
            raise StorageError(self.url, "closed the connection: it is full, or serves another job") from error
        if not proof.proves(answer, proof.server_proof(self._key, server, client)):
            raise StorageError(self.url, "has not the key of this job")

    def _receive(self, connection: socket.socket, count: int, deadline: float) -> bytes:
        data = np.empty(count, dtype=np.uint8)
        self._fill(connection, memoryview(data), deadline)
        return data.tobytes()

    @staticmethod
    def _fill(connection: socket.socket, view: memoryview, deadline: float) -> None:
        while view:
            if time.monotonic() > deadline:
                raise TimeoutError("its answer takes too long")
            count = connection.recv_into(view)
            if not count:
                raise ConnectionResetError("the connection was closed")
            view = view[count:]
