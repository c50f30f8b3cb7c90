"""Which address of this host its peers reach it at, and a socket that listens there."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from ucformat.errors import StorageError
from ucformat.snapshot.peers.server import BACKLOG
from ucformat.snapshot.peers.store import Address

_SIOCGIFADDR = 0x8915  # ioctl: the IPv4 address of an interface
_ANY_PORT = 9  # a datagram socket that is "connected" sends nothing


def listen(interface: str | None = None) -> tuple[socket.socket, Address]:
    """A listening socket on a free port of one address: that of `interface`, a name such as `eth1` or an address.

    By default that from which the job's master (`MASTER_ADDR`) is reached. Raises StorageError.
    """
    what = interface or "the network"
    try:
        host = _address(interface) if interface else _towards(os.environ.get("MASTER_ADDR") or socket.gethostname())
        what = f"{host} ({what})"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((host, 0))
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise StorageError(what, f"can't serve snapshots there: {error}") from error
    return listener, Address(host, listener.getsockname()[1])


def _address(interface: str) -> str:
    """The address of an interface; an address stands for itself."""
    if interface not in {name for _, name in socket.if_nameindex()}:
        return str(socket.getaddrinfo(interface, None, type=socket.SOCK_STREAM)[0][4][0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(found[20:24])


def _towards(host: str) -> str:
    """The address of this host that talks to `host`."""
    family, kind, _, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
