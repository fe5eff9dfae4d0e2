"""Short messages between two processes, on one machine or on two, over a TCP connection of their own.

The processes find each other through their common store. The listening process listens at the address from which it
reaches the store's host. That network works, because all processes reached the store over it. The higher rank should
listen, because the host of the first rank may know itself by an address that other hosts cannot reach.

gloo is not used here: it needs a third of a millisecond per message at best, through threads of its own. A message over
this connection takes ten microseconds.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
import time
from datetime import timedelta

import torch.distributed as dist

_COUNT = struct.Struct("<I")
_HANDSHAKE_SECONDS = 5.0


class Wire:
    """One end of a connection that carries short messages, which are lists of numbers."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)  # a receive waits for any length of time
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection

    def tell(self, *numbers: int) -> None:
        """Sends numbers as one message. Returns at once: the system buffers the message until the other side reads
        it."""
        self._connection.sendall(_COUNT.pack(len(numbers)) + struct.pack(f"<{len(numbers)}q", *numbers))

    def hear(self) -> list[int]:
        (count,) = _COUNT.unpack(_read(self._connection, _COUNT.size))
        return list(struct.unpack(f"<{count}q", _read(self._connection, 8 * count)))

    def close(self) -> None:
        self._connection.close()


def open_wire(store: dist.Store, name: str, listens: bool, timeout_seconds: float) -> Wire:
    """Opens one end of a connection. The other process opens the other end with the same name and the opposite of
    `listens`. Raises TimeoutError, or another OSError if the peer cannot be reached."""
    return _listen(store, name, timeout_seconds) if listens else _call(store, name, timeout_seconds)


def _listen(store: dist.Store, name: str, timeout_seconds: float) -> Wire:
    family, address = address_towards(store)
    word = secrets.token_bytes(16)
    deadline = time.monotonic() + timeout_seconds
    with socket.create_server((address, 0), family=family) as server:
        store.set(name, json.dumps([address, server.getsockname()[1], word.hex()]))
        while True:
            server.settimeout(max(0.001, deadline - time.monotonic()))
            connection, _ = server.accept()
            connection.settimeout(_HANDSHAKE_SECONDS)
            try:
                if secrets.compare_digest(_read(connection, len(word)), word):
                    return Wire(connection)
            except OSError:
                pass
            connection.close()  # not the expected peer


def _call(store: dist.Store, name: str, timeout_seconds: float) -> Wire:
    deadline = time.monotonic() + timeout_seconds
    try:
        store.wait([name], timedelta(seconds=timeout_seconds))
        address, port, word = json.loads(store.get(name))
    except RuntimeError as error:  # torch also raises this for a time-out
        raise TimeoutError(str(error)) from error
    connection = socket.create_connection((address, port), timeout=max(0.001, deadline - time.monotonic()))
    connection.sendall(bytes.fromhex(word))
    return Wire(connection)


def address_towards(store: dist.Store) -> tuple[socket.AddressFamily, str]:
    """Returns the address of this host on the network that leads to the store's host. Returns the loopback address for
    a store that has no server."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    host, port = (store.host, store.port) if isinstance(store, dist.TCPStore) else ("127.0.0.1", 1)
    for family, kind, protocol, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # sends nothing
                return family, probe.getsockname()[0]
        except OSError:
            continue
    raise OSError(f"no network leads to {host}")


def _read(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionError("the other end is closed")
        parts += part
    return bytes(parts)
