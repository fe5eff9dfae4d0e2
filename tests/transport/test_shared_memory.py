"""Links in shared memory: in order, whole, bounded, and with a word when the other end is gone or silent."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.transport.link import PeerLost
from slipstream.transport.shared_memory import Assembly, SharedMemoryLink, _Wire, assemble, connect, shared_edges


@contextmanager
def linked(timeout_seconds: float) -> Iterator[tuple[SharedMemoryLink, SharedMemoryLink]]:
    """A sender and a receiver, with three messages under way at most."""
    sockets = socket.socketpair()
    sender = SharedMemoryLink(sockets[0], 0, 1, timeout_seconds, max_under_way=lambda: 3)
    receiver = SharedMemoryLink(sockets[1], 1, 0, timeout_seconds, max_under_way=lambda: 3)
    yield sender, receiver
    sender.close()
    receiver.close()


@pytest.fixture
def ends() -> Iterator[tuple[SharedMemoryLink, SharedMemoryLink]]:
    with linked(timeout_seconds=1.0) as both:
        yield both


def say() -> str:
    return "the test"


def send(link: SharedMemoryLink, *tensors: Tensor, kind: str = "training") -> None:
    link.send(kind, tensors, say)


def take(link: SharedMemoryLink, kind: str = "training") -> tuple[Tensor, ...]:
    link.expect(kind)
    return link.take(say)


def test_tensors_of_every_type_and_shape_arrive_as_they_were(ends):
    sender, receiver = ends
    message = (
        torch.randn(3, 5),
        torch.tensor(2.5, dtype=torch.float64),
        torch.randn(7).bfloat16(),
        torch.arange(4).to(torch.int8),
        torch.tensor([True, False]),
        torch.empty(0, 3),
        torch.randn(4, 6).t(),  # not contiguous
        torch.randn(2, dtype=torch.complex64),
    )
    send(sender, *message)
    for sent, received in zip(message, take(receiver), strict=True):
        assert received.dtype == sent.dtype
        assert received.shape == sent.shape
        assert torch.equal(received, sent)


def test_messages_keep_their_order_through_many_turns_of_the_ring(ends):
    sender, receiver = ends
    taken = []
    for first in range(0, 40, 2):
        send(sender, torch.full((2,), float(first)))
        send(sender, torch.full((2,), float(first + 1)))
        taken += [take(receiver)[0][0].item(), take(receiver)[0][0].item()]
    assert taken == list(map(float, range(40)))


def test_kinds_have_slots_and_shapes_of_their_own(ends):
    sender, receiver = ends
    send(sender, torch.zeros(2))
    send(sender, torch.ones(5), kind="evaluation")
    send(sender, torch.full((2,), 2.0))
    receiver.expect("training")
    receiver.expect("evaluation")
    receiver.expect("training")
    assert [receiver.take(say)[0].tolist() for _ in range(3)] == [[0.0] * 2, [1.0] * 5, [2.0] * 2]


def test_what_was_taken_is_the_receivers_own(ends):
    sender, receiver = ends
    send(sender, torch.zeros(2))
    (first,) = take(receiver)
    first += 7
    for value in range(8):
        send(sender, torch.full((2,), float(value)))
        assert take(receiver)[0].tolist() == [value] * 2
    assert first.tolist() == [7.0, 7.0]


def test_a_sender_waits_for_a_slot_when_all_are_under_way(ends):
    sender, receiver = ends
    for value in range(4):
        send(sender, torch.full((1,), float(value)))
    done = threading.Event()

    def send_another() -> None:
        send(sender, torch.full((1,), 4.0))
        done.set()

    thread = threading.Thread(target=send_another)
    thread.start()
    assert not done.wait(0.1)
    assert [take(receiver)[0].item() for _ in range(2)] == [0, 1]  # asking for the second tells that the first is taken
    assert done.wait(0.9)
    thread.join()
    assert [take(receiver)[0].item() for _ in range(3)] == [2, 3, 4]


def test_another_shape_is_refused_until_a_flush(ends):
    sender, receiver = ends
    send(sender, torch.zeros(2))
    with pytest.raises(ValueError, match=r"training messages between two stages keep one shape: \(3,\) float32 comes"):
        send(sender, torch.zeros(3))
    take(receiver)
    receiver.flush()
    sender.flush()
    send(sender, torch.ones(3))
    assert take(receiver)[0].tolist() == [1.0] * 3


def test_a_flush_waits_until_all_is_taken(ends):
    sender, receiver = ends
    send(sender, torch.zeros(2))
    with pytest.raises(PeerLost, match="stage 1 has been silent for 1 s: stage 0 was waiting for its last messages"):
        sender.flush()
    take(receiver)
    receiver.flush()
    sender.flush()


def test_a_silent_sender_is_named_within_the_time_out(ends):
    _, receiver = ends
    started = time.monotonic()
    with pytest.raises(PeerLost, match="stage 0 has been silent for 1 s: stage 1 was waiting for the test"):
        take(receiver)
    assert 0.9 < time.monotonic() - started < 30


@pytest.mark.parametrize("had_spoken", [False, True])
def test_a_sender_that_is_gone_is_named_at_once(had_spoken):
    with linked(timeout_seconds=60.0) as (sender, receiver):
        if had_spoken:
            send(sender, torch.zeros(2))
            take(receiver)
        sender.close()
        started = time.monotonic()
        with pytest.raises(PeerLost, match="stage 0 is gone: stage 1 was waiting for the test"):
            take(receiver)
        assert time.monotonic() - started < 30


def test_what_a_sender_left_behind_can_still_be_taken(ends):
    sender, receiver = ends
    send(sender, torch.ones(2))
    send(sender, torch.full((2,), 2.0))
    sender.close()
    assert take(receiver)[0].tolist() == [1.0, 1.0]
    assert take(receiver)[0].tolist() == [2.0, 2.0]


def test_a_receiver_that_is_gone_is_no_error_before_someone_waits_for_it(ends):
    sender, receiver = ends
    receiver.close()
    for _ in range(4):
        send(sender, torch.zeros(2))
    with pytest.raises(PeerLost, match="stage 1 is gone: stage 0 was waiting for the test"):
        send(sender, torch.zeros(2))


def on_every_stage(num_stages: int, meet: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=meet, args=(stage,)) for stage in range(num_stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


@pytest.mark.parametrize("num_taken", [0, 2])
def test_a_receiver_that_went_with_messages_untaken_is_gone_too(ends, num_taken):
    sender, receiver = ends
    for _ in range(3):
        send(sender, torch.zeros(2))
    for _ in range(num_taken):
        take(receiver)
    receiver.close()
    with pytest.raises(PeerLost, match="stage 1 is gone: stage 0 was waiting for the test"):
        for _ in range(4):
            send(sender, torch.zeros(2))


def connect_all(num_stages: int) -> list[list[bool]]:
    """Which edges are shared, as every stage sees it."""
    store = dist.HashStore()
    answers: dict[int, list[bool]] = {}

    def meet(stage: int) -> None:
        ends = connect(store, stage, num_stages, timeout_seconds=30)
        answers[stage] = shared_edges(store, num_stages)
        assert set(ends) == {edge for edge in (stage - 1, stage) if 0 <= edge < num_stages - 1 and answers[stage][edge]}
        for pair in ends.values():
            for end in pair:
                end.close()

    on_every_stage(num_stages, meet)
    return [answers[stage] for stage in range(num_stages)]


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_stages_of_one_machine_find_each_other(num_stages):
    assert connect_all(num_stages) == [[True] * (num_stages - 1)] * num_stages


def test_without_shared_memory_every_edge_is_left_to_gloo(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    assert connect_all(3) == [[False, False]] * 3


def test_a_path_too_long_for_a_socket_leaves_the_edge_to_gloo(monkeypatch, tmp_path):
    folder = tmp_path / ("deep" * 40)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert connect_all(2) == [[False]] * 2
    assert list(folder.iterdir()) == []


def test_stages_meet_however_long_the_path_of_the_temporary_folder_is(monkeypatch):
    """Where the socket of an edge fits, so does that of the assembly."""
    with tempfile.TemporaryDirectory() as base:
        for length in range(max(74, len(base) + 2), 86):
            folder = f"{base}/{'x' * (length - len(base) - 1)}"
            os.mkdir(folder)
            monkeypatch.setattr(tempfile, "tempdir", folder)
            if connect_all(2)[0] == [True]:
                assert [len(tensors) for tensors in assembled(2, [torch.zeros(1)] * 2).values()] == [2, 2]


def test_a_peer_that_takes_nothing_is_named_within_the_time_out():
    near, far = socket.socketpair()
    wire = _Wire(near, 0, 1, timeout_seconds=0.2)
    with (
        near,
        far,
        pytest.raises(PeerLost, match=r"stage 1 has been silent for 0\.2 s: stage 0 was waiting for its mes"),
    ):
        while True:
            wire.tell(b"s")


def assembled(
    num_stages: int, tensors: list[Tensor], timeout_seconds: float = 30
) -> dict[int, list[Tensor] | PeerLost]:
    """What every stage gathers, or why not; stages without a tensor do not come."""
    store = dist.HashStore()
    gathered: dict[int, list[Tensor] | PeerLost] = {}

    def meet(stage: int) -> None:
        assembly = Assembly(assemble(store, stage, num_stages, 30), stage, timeout_seconds)
        if stage < len(tensors):
            try:
                gathered[stage] = assembly.gather(tensors[stage], num_stages, say)
            except PeerLost as lost:
                gathered[stage] = lost
        else:
            time.sleep(2 * timeout_seconds)
        assembly.close()

    on_every_stage(num_stages, meet)
    return gathered


@pytest.mark.parametrize("num_stages", [1, 2, 5])
@pytest.mark.parametrize("shape", [(), (3,), (70_001,), (2, 3)], ids=["scalar", "vector", "several packets", "matrix"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8])
def test_every_stage_gathers_what_every_stage_has(num_stages, shape, dtype):
    tensors = [torch.randint(0, 255, shape).to(dtype) for _ in range(num_stages)]
    gathered = assembled(num_stages, tensors)
    assert sorted(gathered) == list(range(num_stages))
    for found in gathered.values():
        assert [tensor.dtype for tensor in found] == [dtype] * num_stages
        assert torch.equal(torch.stack(found), torch.stack(tensors))


def test_a_stage_that_does_not_come_is_named_by_the_first():
    lost = assembled(3, [torch.zeros(2)] * 2, timeout_seconds=1.0)
    assert str(lost[0]) == "stage 2 has been silent for 1 s: stage 0 was waiting for the test"
    assert str(lost[1]).startswith("another stage ")
