"""Words between two processes, over a connection they find through the store."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from slipstream.transport.wire import Wire, address_towards, open_wire


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def store(server: dist.TCPStore) -> dist.Store:
    return dist.PrefixStore("outer", dist.PrefixStore("inner", server))


@pytest.fixture
def other_store(server: dist.TCPStore) -> dist.Store:
    """As another process has it: who waits in one keeps it from everybody else."""
    client = dist.TCPStore("127.0.0.1", server.port)
    return dist.PrefixStore("outer", dist.PrefixStore("inner", client))


@pytest.fixture
def ends(store: dist.Store, other_store: dist.Store) -> Iterator[tuple[Wire, Wire]]:
    with ThreadPoolExecutor() as pool:
        far = pool.submit(open_wire, other_store, "wire", True, 10.0)
        near = open_wire(store, "wire", False, 10.0)
        yield near, far.result()
        near.close()
        far.result().close()


def test_words_pass_in_both_directions_and_in_order(ends: tuple[Wire, Wire]) -> None:
    near, far = ends
    near.tell(1, -2, 2**62)
    near.tell()
    near.tell(*range(1000))
    far.tell(7)
    assert far.hear() == [1, -2, 2**62]
    assert far.hear() == []
    assert far.hear() == list(range(1000))
    assert near.hear() == [7]


def test_a_word_is_told_though_nobody_listens_yet(ends: tuple[Wire, Wire]) -> None:
    for number in range(100):
        ends[0].tell(number)
    assert [ends[1].hear() for _ in range(100)] == [[number] for number in range(100)]


def test_who_is_gone_is_noticed_by_whoever_waits(ends: tuple[Wire, Wire]) -> None:
    near, far = ends
    threading.Timer(0.1, near.close).start()
    with pytest.raises(ConnectionError, match="closed"):
        far.hear()


def test_strangers_are_turned_away(store: dist.Store, other_store: dist.Store) -> None:
    with ThreadPoolExecutor() as pool:
        far = pool.submit(open_wire, other_store, "wire", True, 10.0)
        address, port, _ = json.loads(store.get("wire"))
        with socket.create_connection((address, port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n")
            assert stranger.recv(1) == b""
        with socket.create_connection((address, port)):
            pass  # and says nothing
        near = open_wire(store, "wire", False, 10.0)
        near.tell(3)
        assert far.result().hear() == [3]
        near.close()
        far.result().close()


@pytest.mark.parametrize("listens", [True, False])
def test_a_peer_that_does_not_come_is_a_time_out(store: dist.Store, listens: bool) -> None:
    with pytest.raises(TimeoutError):
        open_wire(store, "wire", listens, 0.2)


def test_an_address_is_that_of_the_network_of_the_store(store: dist.Store) -> None:
    assert address_towards(store) == (socket.AF_INET, "127.0.0.1")
    assert address_towards(dist.HashStore()) == (socket.AF_INET, "127.0.0.1")
