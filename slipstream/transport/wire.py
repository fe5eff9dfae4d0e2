"""Short words between two processes, on one machine or on two, over a connection of their own.

The processes find each other through the store they have in common. The one that listens does so at the address from
which it reaches the store's host: that network is there, because everybody came over it. Let the later rank listen: the
first one's host may know itself by an address that leads nowhere elsewhere.

Not over gloo, which passes a word in a third of a millisecond at best, through threads of its own; this takes ten
microseconds.
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
    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)  # a word may be waited for as long as it takes
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection

    def tell(self, *numbers: int) -> None:
        """Returns at once: the system keeps a word until the other side listens."""
        self._connection.sendall(_COUNT.pack(len(numbers)) + struct.pack(f"<{len(numbers)}q", *numbers))

    def hear(self) -> list[int]:
        (count,) = _COUNT.unpack(_read(self._connection, _COUNT.size))
        return list(struct.unpack(f"<{count}q", _read(self._connection, 8 * count)))

    def close(self) -> None:
        self._connection.close()


def open_wire(store: dist.Store, name: str, listens: bool, timeout_seconds: float) -> Wire:
    """One end; the other is opened under the same name, with the opposite of `listens`. Raises TimeoutError, or another
    OSError if the peer cannot be reached."""
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
            connection.close()  # a stranger


def _call(store: dist.Store, name: str, timeout_seconds: float) -> Wire:
    deadline = time.monotonic() + timeout_seconds
    try:
        store.wait([name], timedelta(seconds=timeout_seconds))
        address, port, word = json.loads(store.get(name))
    except RuntimeError as error:  # torch's word for a time-out, too
        raise TimeoutError(str(error)) from error
    connection = socket.create_connection((address, port), timeout=max(0.001, deadline - time.monotonic()))
    connection.sendall(bytes.fromhex(word))
    return Wire(connection)


def address_towards(store: dist.Store) -> tuple[socket.AddressFamily, str]:
    """Of this host, as the store's host sees it. The loopback's, for a store that is no server."""
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
