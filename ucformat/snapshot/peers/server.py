"""Serves byte ranges of one snapshot directory to members of the job, and to nobody else.

One thread, one loop, no buffer that a client can make grow: files go from memory to the socket within the kernel. Whoever has not
proved within seconds that it has the job's key is disconnected, and counted. Served files may change meanwhile: readers prove
afterwards that they did not (`formats.snapshot.SlotGuard`).
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from ucformat.errors import FormatError
from ucformat.snapshot.peers import handshake as proof
from ucformat.snapshot.peers.wire import (
    LENGTH,
    READ_BYTES,
    REQUEST_BYTES,
    REQUESTS,
    List,
    Read,
    Reply,
    Request,
    Size,
    frame,
    may_list,
    may_read,
)
from ucformat.storage.regular_file import open_regular

TICK_S = 0.05  # between looks at the clock and at whether to stop
SEND_BYTES = 1 << 20  # to one client before the others have their turn
LIST_BYTES = 8 << 20  # of one list of names
BACKLOG = 128


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients may take of this process."""

    members: int = 64
    """Connections of those that have proved their membership."""
    strangers: int = 128
    """Connections that have not: of more, the oldest is closed."""
    proof_s: float = 5.0
    """From the connection to the proof."""
    idle_s: float = 120.0
    """Without a request."""
    stall_s: float = 30.0
    """Of an answer that nobody reads."""


@dataclass(slots=True)
class Tally:
    """What a server has met."""

    accepted: int = 0
    members: int = 0
    refused: int = 0
    """Wrong proofs, and garbage in place of one."""
    expired: int = 0
    """No proof in time, or not reading."""
    idle: int = 0
    """Members that asked for nothing; they connect again."""
    crowded: int = 0
    """Closed for want of room."""
    malformed: int = 0
    """Members that sent what is no request."""
    requests: int = 0
    nbytes: int = 0
    """Bytes of files that were sent."""


@dataclass(slots=True, eq=False)
class _Client:
    """One connection."""

    socket: socket.socket
    nonce: bytes
    deadline: float
    member: bool = False
    received: bytearray = field(default_factory=bytearray)
    waiting: memoryview = field(default_factory=lambda: memoryview(b""))
    """Bytes to send before those of the file."""
    file: int = -1
    start: int = 0
    stop: int = 0

    @property
    def sending(self) -> bool:
        return bool(self.waiting) or self.file >= 0


class PeerServer(threading.Thread):
    """Serves `directory` on `listener` until `stop`. `on_stranger` is called with words for the first refusal of each kind."""

    def __init__(
        self,
        directory: str,
        key: bytes,
        listener: socket.socket,
        limits: Limits = Limits(),
        on_stranger: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(name="ucf-peer-server", daemon=True)
        self._directory, self._key, self._listener, self._limits = os.path.abspath(directory), key, listener, limits
        self._on_stranger, self._kinds = on_stranger, set[str]()
        self._clients: dict[socket.socket, _Client] = {}
        self._selector = selectors.DefaultSelector()
        self._stopping = threading.Event()
        self.tally = Tally()

    def run(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            while not self._stopping.is_set():
                for key, _ in self._selector.select(TICK_S):
                    if key.data is None:
                        self._accept()
                    elif key.data.socket in self._clients:  # it may have made room for another one meanwhile
                        self._serve(key.data)
                self._expire()
        finally:
            for client in list(self._clients.values()):
                self._drop(client)
            self._selector.close()
            self._listener.close()

    def stop(self) -> None:
        """Close all connections and the listener; returns when that is done."""
        self._stopping.set()
        if self.is_alive():
            self.join()

    # -- connections ---------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # gone again, or no descriptor free: the next look tries again
            return
        self.tally.accepted += 1
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        strangers = [client for client in self._clients.values() if not client.member]
        if len(strangers) >= self._limits.strangers:
            self._refuse(min(strangers, key=lambda client: client.deadline), "crowded")
        client = _Client(connection, proof.new_nonce(), time.monotonic() + self._limits.proof_s)
        client.waiting = memoryview(proof.GREETING + client.nonce)
        self._clients[connection] = client
        self._selector.register(connection, selectors.EVENT_WRITE, client)

    def _serve(self, client: _Client) -> None:
        try:
            alive = self._send(client) if client.sending else self._receive(client)
            while alive and not client.sending and self._take(client):
                alive = self._send(client)
        except (OSError, FormatError):
            alive = False
        if not alive or client.socket not in self._clients:
            self._drop(client)
            return
        self._selector.modify(client.socket, selectors.EVENT_WRITE if client.sending else selectors.EVENT_READ, client)

    def _drop(self, client: _Client) -> None:
        if self._clients.pop(client.socket, None) is not None:
            self._selector.unregister(client.socket)
        client.socket.close()
        self._close_file(client)

    def _refuse(self, client: _Client, kind: str) -> None:
        """Disconnect, and count."""
        setattr(self.tally, kind, getattr(self.tally, kind) + 1)
        self._drop(client)
        if kind not in (*self._kinds, "idle") and self._on_stranger is not None:
            self._kinds.add(kind)
            self._on_stranger(f"a connection to the snapshots of this host was closed ({kind})")

    def _expire(self) -> None:
        now = time.monotonic()
        for client in [client for client in self._clients.values() if client.deadline < now]:
            self._refuse(client, "idle" if client.member and not client.sending else "expired")

    # -- bytes -----------------------------------------------------------------------------------------------------

    def _receive(self, client: _Client) -> bool:
        """Take what has arrived, no more than one request; whether the connection lives."""
        want = proof.ANSWER_BYTES if not client.member else LENGTH.size + REQUEST_BYTES
        try:
            data = client.socket.recv(want - len(client.received))
        except BlockingIOError:
            return True
        client.received += data
        return bool(data)

    def _send(self, client: _Client) -> bool:
        try:
            while client.waiting:
                client.waiting = client.waiting[client.socket.send(client.waiting) :]
                client.deadline = (
                    max(client.deadline, time.monotonic() + self._limits.stall_s) if client.member else client.deadline
                )
            if client.file >= 0:
                count = min(client.stop - client.start, SEND_BYTES)
                sent = os.sendfile(client.socket.fileno(), client.file, client.start, count)
                if not sent:
                    return False  # the file was cut short: the reader sees it in the missing bytes
                client.start += sent
                self.tally.nbytes += sent
                client.deadline = time.monotonic() + self._limits.stall_s
                if client.start == client.stop:
                    self._close_file(client)
                    client.deadline = time.monotonic() + self._limits.idle_s
        except BlockingIOError:
            return True
        return True

    @staticmethod
    def _close_file(client: _Client) -> None:
        if client.file >= 0:
            os.close(client.file)
        client.file = -1

    # -- requests --------------------------------------------------------------------------------------------------

    def _take(self, client: _Client) -> bool:
        """Act on what a client has sent if that is whole; whether there is something to send now."""
        if not client.member:
            return self._prove(client)
        if len(client.received) < LENGTH.size:
            return False
        (length,) = LENGTH.unpack_from(client.received)
        if not 0 < length <= REQUEST_BYTES:
            self._refuse(client, "malformed")
            return False
        if len(client.received) < LENGTH.size + length:
            return False
        data = bytes(client.received[LENGTH.size : LENGTH.size + length])
        del client.received[: LENGTH.size + length]
        try:
            request = REQUESTS.decode(data)
        except (msgspec.DecodeError, RecursionError):
            self._refuse(client, "malformed")
            return False
        self.tally.requests += 1
        client.deadline = time.monotonic() + self._limits.idle_s
        self._answer(client, request)
        return True

    def _prove(self, client: _Client) -> bool:
        if len(client.received) < proof.ANSWER_BYTES:
            return False
        nonce, found = bytes(client.received[: proof.NONCE_BYTES]), bytes(client.received[proof.NONCE_BYTES :])
        if not proof.proves(found, proof.client_proof(self._key, client.nonce, nonce)):
            self._refuse(client, "refused")
            return False
        if sum(other.member for other in self._clients.values()) >= self._limits.members:
            self._refuse(client, "crowded")
            return False
        client.member, client.deadline = True, time.monotonic() + self._limits.idle_s
        client.received.clear()
        client.waiting = memoryview(proof.server_proof(self._key, client.nonce, nonce))
        self.tally.members += 1
        return True

    def _answer(self, client: _Client, request: Request) -> None:
        """Make ready what is to be sent: an error of this host's files is an answer, too."""
        body = b""
        try:
            if isinstance(request, List):
                reply, body = self._list(request)
            elif isinstance(request, Size):
                reply = self._size(request)
            else:
                reply = self._open(client, request)
        except (FileNotFoundError, NotADirectoryError):
            reply = Reply("missing")
        except (OSError, FormatError) as error:
            reply = Reply("failed", message=str(error)[:500])
        client.waiting = memoryview(frame(reply) + body)

    def _list(self, request: List) -> tuple[Reply, bytes]:
        if not may_list(request.path):
            return Reply("refused", message="this is no folder of a rank"), b""
        try:
            with os.scandir(os.path.join(self._directory, request.path)) as entries:
                names = sorted(entry.name + "/" * entry.is_dir() for entry in entries)
        except (FileNotFoundError, NotADirectoryError):
            names = []
        body = msgspec.json.encode(names)
        if len(body) > LIST_BYTES:
            return Reply("failed", message=f"{len(names)} names are too many"), b""
        return Reply("ok", len(body)), body

    def _size(self, request: Size) -> Reply:
        if not may_read(request.path):
            return Reply("refused", message="this is no file of a slot")
        return Reply("ok", value=os.stat(os.path.join(self._directory, request.path)).st_size)

    def _open(self, client: _Client, request: Read) -> Reply:
        if not may_read(request.path):
            return Reply("refused", message="this is no file of a slot")
        file = open_regular(os.path.join(self._directory, request.path), os.O_RDONLY | os.O_NOFOLLOW)
        size = os.fstat(file).st_size
        stop = size if request.stop is None else request.stop
        count = stop - request.start
        if request.start < 0 or not 0 < count <= READ_BYTES or stop > size:
            os.close(file)
            if stop > size or count == 0:
                return Reply("short" if count else "ok", value=size)
            return Reply("refused", message=f"{count} bytes are not served at once")
        client.file, client.start, client.stop = file, request.start, stop
        return Reply("ok", count)
